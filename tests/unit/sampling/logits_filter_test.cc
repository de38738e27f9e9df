// Goal: the filters keep what their definition says. Method: worked examples with probabilities
// that can be checked by hand; the logits are their logarithms.
#include "engine/sampling/logits_filter.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/sampling/test_ranks.h"

namespace ds4 {
namespace {

// p = 0.4, 0.3, 0.15, 0.1, 0.05 for ids 3, 1, 0, 4, 2.
const std::vector<float> kLogits = {std::log(0.15f), std::log(0.3f), std::log(0.05f),
                                    std::log(0.4f), std::log(0.1f)};

// Probabilities of the kept tokens, best first, from `count` candidates.
std::vector<double> Kept(SamplingParams params, int32_t count = 5) {
  const KeptSet kept =
      FilterCandidates(params, GatherFrom(kLogits, 1, count, params.temperature), 5);
  EXPECT_TRUE(kept.is_closed);
  std::vector<double> p;
  for (const double mass : kept.masses) p.push_back(mass / kept.kept_mass);
  return p;
}

void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-6) << i;
}

TEST(LogitsFilterTest, TopK) {
  ExpectNear(Kept({.temperature = 1, .top_k = 1}), {1.0});
  // 0.4 and 0.3 of 0.7
  ExpectNear(Kept({.temperature = 1, .top_k = 2}), {4.0 / 7, 3.0 / 7});
  ExpectNear(Kept({.temperature = 1, .top_k = 100}), {0.4, 0.3, 0.15, 0.1, 0.05});
}

TEST(LogitsFilterTest, TopP) {
  // 0.4 + 0.3 = 0.7 reaches 0.65, and the token that reaches it stays.
  ExpectNear(Kept({.temperature = 1, .top_p = 0.65f}), {4.0 / 7, 3.0 / 7});
  ExpectNear(Kept({.temperature = 1, .top_p = 0.75f}), {0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85});
  ExpectNear(Kept({.temperature = 1, .top_p = 1e-6f}), {1.0});  // never empty
}

// Top-p counts in what top-k left: 0.4 of 0.85 is 0.47, 0.7 of 0.85 is 0.82.
TEST(LogitsFilterTest, TopPAfterTopK) {
  ExpectNear(Kept({.temperature = 1, .top_k = 3, .top_p = 0.75f}), {4.0 / 7, 3.0 / 7});
  ExpectNear(Kept({.temperature = 1, .top_k = 3, .top_p = 0.45f}), {1.0});
}

TEST(LogitsFilterTest, MinP) {
  // 0.3 / 0.4 = 0.75 stays, 0.15 / 0.4 = 0.375 does not.
  ExpectNear(Kept({.temperature = 1, .min_p = 0.5f}), {4.0 / 7, 3.0 / 7});
  ExpectNear(Kept({.temperature = 1, .min_p = 1.0f}), {1.0});
  ExpectNear(Kept({.temperature = 1, .min_p = 0.01f}), {0.4, 0.3, 0.15, 0.1, 0.05});
}

// At temperature 1/2 probabilities are squared: 16, 9, 2.25, 1, 0.25 of 28.5.
TEST(LogitsFilterTest, TemperatureComesFirst) {
  ExpectNear(Kept({.temperature = 0.5f, .top_k = 2}), {16.0 / 25, 9.0 / 25});
  // 16 / 28.5 = 0.56 alone reaches 0.5; at temperature 1 the best has only 0.4.
  ExpectNear(Kept({.temperature = 0.5f, .top_p = 0.5f}), {1.0});
  // 9 / 16 = 0.5625 < 0.6; at temperature 1 it is 0.75.
  ExpectNear(Kept({.temperature = 0.5f, .min_p = 0.6f}), {1.0});
}

// Fewer candidates than the vocabulary: the set is closed only where nothing behind them could
// belong.
TEST(LogitsFilterTest, ClosedOnlyWhenComplete) {
  const auto is_closed = [](const SamplingParams& params, int32_t count) {
    return FilterCandidates(params, GatherFrom(kLogits, 1, count, params.temperature), 5).is_closed;
  };
  EXPECT_FALSE(is_closed({.temperature = 1, .top_k = 3}, 2));
  EXPECT_TRUE(is_closed({.temperature = 1, .top_k = 3}, 3));
  EXPECT_TRUE(is_closed({.temperature = 1, .top_p = 0.65f}, 2));
  EXPECT_FALSE(is_closed({.temperature = 1, .top_p = 0.75f}, 2));
  EXPECT_FALSE(is_closed({.temperature = 1, .min_p = 0.5f}, 2));  // the third could be big enough
  EXPECT_TRUE(is_closed({.temperature = 1, .min_p = 0.5f}, 3));
}

}  // namespace
}  // namespace ds4
