// Goal: tokens are drawn with the right probabilities, and the same token comes out for any number
// of ranks. Method: 100,000 draws against the exact distribution, worked out here in double by
// sorting the whole vocabulary; thousands of random cases split over 1 to 8 ranks; bad input.
#include "engine/sampling/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "engine/kernels/math.h"
#include "tests/unit/sampling/test_ranks.h"

namespace ds4 {
namespace {

using ::testing::HasSubstr;

std::vector<float> RandomLogits(size_t size, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(size);
  std::generate(logits.begin(), logits.end(), [&] { return normal(random); });
  return logits;
}

// The definition of spec and header, over the whole vocabulary at once.
std::vector<double> ExactDistribution(const std::vector<float>& logits,
                                      const SamplingParams& params) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (params.top_k > 0)
    order.resize(std::min<size_t>(order.size(), static_cast<size_t>(params.top_k)));
  std::vector<double> p(logits.size(), 0.0);
  double total = 0.0;
  for (const size_t id : order) total += p[id] = std::exp(double{logits[id]} / params.temperature);
  double sum = 0.0;
  size_t kept = 0;
  while (kept < order.size() && (kept == 0 || sum < params.top_p * total) &&
         p[order[kept]] >= params.min_p * p[order[0]]) {
    sum += p[order[kept++]];
  }
  for (size_t i = kept; i < order.size(); ++i) p[order[i]] = 0.0;
  for (double& value : p) value /= sum;
  return p;
}

// The standard error of a frequency from 100,000 draws is at most 0.0016; 0.006 is nearly four.
TEST(SamplerTest, DrawsFollowTheDistribution) {
  constexpr int kDraws = 100'000;
  const std::vector<float> logits = RandomLogits(40, 1.5f, 7);
  const SamplingParams settings[] = {
      {.temperature = 1.0f},
      {.temperature = 0.6f},
      {.temperature = 1.7f, .top_k = 10},
      {.temperature = 1.0f, .top_p = 0.8f},
      {.temperature = 1.0f, .min_p = 0.1f},
      {.temperature = 0.8f, .top_k = 20, .top_p = 0.9f, .min_p = 0.02f},
  };
  for (SamplingParams params : settings) {
    params.seed = 99;
    const std::vector<double> exact = ExactDistribution(logits, params);
    std::vector<int> counts(logits.size(), 0);
    for (int pos = 0; pos < kDraws; ++pos) {
      const int32_t token = SampleWith(logits, params, pos, 3).value().token;
      ASSERT_GE(token, 0);
      ++counts[static_cast<size_t>(token)];
    }
    for (size_t id = 0; id < logits.size(); ++id) {
      EXPECT_NEAR(counts[id] / double{kDraws}, exact[id], 0.006) << id;
      if (exact[id] == 0.0) {
        EXPECT_EQ(counts[id], 0) << "a token that the filters drop: " << id;
      }
    }
  }
}

TEST(SamplerTest, SameTokenForAnyNumberOfRanks) {
  std::mt19937 random(5);
  int num_walks = 0;
  for (uint32_t round = 0; round < 3000; ++round) {
    const size_t size = 8 + random() % 600;
    std::vector<float> logits =
        RandomLogits(size, 0.2f + 0.01f * static_cast<float>(random() % 300), round);
    if (round % 4 == 0) {  // many ties
      for (float& logit : logits) logit = std::round(logit);
    }
    SamplingParams params;
    params.temperature = 0.1f * static_cast<float>(random() % 20);
    params.top_k = random() % 3 == 0 ? static_cast<int32_t>(random() % (2 * size)) : 0;
    params.top_p = random() % 3 == 0 ? 0.05f + 0.01f * static_cast<float>(random() % 90) : 1.0f;
    params.min_p = random() % 3 == 0 ? 0.01f * static_cast<float>(random() % 100) : 0.0f;
    params.seed = random();
    const int64_t pos = random() % 1000;
    const int32_t expected = SampleWith(logits, params, pos, 1).value().token;
    num_walks +=
        params.temperature > 0 && params.top_k == 0 && params.top_p == 1.0f && params.min_p == 0.0f;
    for (const int num_ranks : {2, 3, 4, 5, 8}) {
      ASSERT_EQ(SampleWith(logits, params, pos, num_ranks).value().token, expected) << round;
    }
    // How many candidates were asked for first does not matter either.
    ASSERT_EQ(
        SampleWith(logits, params, pos, 2, static_cast<int32_t>(1 + random() % size)).value().token,
        expected)
        << round;
  }
  EXPECT_GT(num_walks, 300);
}

TEST(SamplerTest, GreedyTakesTheLowestIdOnTies) {
  const std::vector<float> logits = {1, 5, 2, 5, 5, 0, -1, 3, 5};
  for (const int num_ranks : {1, 2, 8}) {
    EXPECT_EQ(SampleWith(logits, {.temperature = 0}, 0, num_ranks).value().token, 1);
    EXPECT_EQ(SampleWith(logits, {.temperature = 1, .top_k = 1}, 0, num_ranks).value().token, 1);
    EXPECT_EQ(SampleWith(logits, {.temperature = 1e-30f}, 5, num_ranks).value().num_rounds, 1);
  }
}

// A flat vocabulary needs nearly all its tokens for top-p: 256, then 2048, then 5000 candidates.
TEST(SamplerTest, AsksForMoreUntilClosed) {
  const std::vector<float> flat = RandomLogits(5000, 0.01f, 1);
  EXPECT_EQ(SampleWith(flat, {.temperature = 1, .top_p = 0.9f}, 0, 4).value().num_rounds, 3);
  EXPECT_EQ(SampleWith(flat, {.temperature = 1, .min_p = 0.1f}, 0, 4).value().num_rounds, 3);
  EXPECT_EQ(SampleWith(flat, {.temperature = 1, .top_k = 5000}, 0, 4).value().num_rounds, 1);
  EXPECT_EQ(SampleWith(flat, {.temperature = 1, .top_k = 1'000'000'000}, 0, 4).value().num_rounds,
            1);
  // A peaked one is decided at once.
  const std::vector<float> peaked = RandomLogits(5000, 5.0f, 1);
  EXPECT_EQ(SampleWith(peaked, {.temperature = 1, .top_p = 0.9f}, 0, 4).value().num_rounds, 1);
  const Decision more =
      Decide({.temperature = 1, .top_k = 7}, 0, GatherFrom(flat, 1, 3, 1.0f), 5000).value();
  EXPECT_EQ(more.kind, Decision::Kind::kNeedMore);
  EXPECT_EQ(more.count, 7);
}

TEST(SamplerTest, LogitsThatAreNoNumbersAreAnError) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const float temperature : {0.0f, 1.0f}) {
      std::vector<float> logits = RandomLogits(64, 1.0f, 3);
      logits[41] = bad;  // lane 5
      const Status status = SampleWith(logits, {.temperature = temperature}, 17, 4).status();
      EXPECT_EQ(status.code(), StatusCode::kInternal);
      EXPECT_THAT(status.message(), HasSubstr("position 17: a logit in vocabulary lane 5"));
    }
  }
}

TEST(SamplerTest, ParametersOutOfRange) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::pair<SamplingParams, const char*> cases[] = {
      {{.temperature = nan}, "temperature is nan"},
      {{.temperature = -0.5f}, "temperature is -0.5, must be from 0"},
      {{.temperature = std::numeric_limits<float>::infinity()}, "temperature is inf"},
      {{.top_k = -1}, "top_k is -1"},
      {{.top_p = nan}, "top_p is nan"},
      {{.top_p = 0.0f}, "top_p is 0, must be above 0"},
      {{.top_p = 1.5f}, "top_p is 1.5"},
      {{.min_p = nan}, "min_p is nan"},
      {{.min_p = -0.1f}, "min_p is -0.1"},
      {{.min_p = 1.1f}, "min_p is 1.1, must be from 0 to 1"},
  };
  for (const auto& [params, expected] : cases) {
    EXPECT_EQ(ValidateSampling(params).code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(ValidateSampling(params).message(), HasSubstr(expected));
  }
  EXPECT_TRUE(ValidateSampling({.temperature = 1, .top_k = 7, .top_p = 1, .min_p = 1}).ok());
  EXPECT_TRUE(ValidateSampling({}).ok());
}

TEST(CandidatesTest, LaneSumsHaveTheBitsOfTheSimpleLoop) {
  const std::vector<float> logits = RandomLogits(5001, 3.0f, 9);
  for (const float temperature : {1.0f, 0.7f}) {
    const Candidates merged = GatherFrom(logits, 1, 0, temperature);
    ASSERT_EQ(merged.lanes.size(), static_cast<size_t>(kNumLanes));
    for (int lane = 0; lane < kNumLanes; ++lane) {
      const auto begin = logits.begin() + LaneBegin(5001, lane);
      const auto end = logits.begin() + LaneBegin(5001, lane + 1);
      const float max = *std::max_element(begin, end);
      double sum = 0.0;
      double sum_temp = 0.0;
      for (auto it = begin; it != end; ++it) {
        sum += Exp(*it - max);
        sum_temp += Exp((*it - max) / temperature);
      }
      const LaneStats& stats = merged.lanes[static_cast<size_t>(lane)];
      EXPECT_EQ(stats.max_logit, max);
      EXPECT_EQ(stats.sum_exp, sum);
      EXPECT_EQ(stats.sum_exp_temp, sum_temp);
    }
  }
}

TEST(CandidatesTest, LogSumExpOfTheWholeVocabulary) {
  const std::vector<float> logits = RandomLogits(1000, 4.0f, 10);
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(double{logit});
  for (const int num_ranks : {1, 3, 8}) {
    EXPECT_NEAR(LogSumExp(GatherFrom(logits, num_ranks, 0, 0.0f).lanes), std::log(sum), 1e-6);
  }
}

TEST(CandidatesTest, BestFirstLowerIdOnTies) {
  std::vector<float> logits = RandomLogits(300, 1.0f, 11);
  for (float& logit : logits) logit = std::round(2 * logit);
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  for (const int num_ranks : {1, 5}) {
    for (const int32_t count : {0, 1, 37, 300, 1000}) {
      const Candidates merged = GatherFrom(logits, num_ranks, count, 1.0f);
      ASSERT_EQ(merged.top.size(), std::min<size_t>(static_cast<size_t>(count), 300));
      for (size_t i = 0; i < merged.top.size(); ++i) {
        EXPECT_EQ(merged.top[i].id, ids[i]);
        EXPECT_EQ(merged.top[i].logit, logits[static_cast<size_t>(ids[i])]);
      }
    }
  }
}

}  // namespace
}  // namespace ds4
