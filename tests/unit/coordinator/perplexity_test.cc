// Goal: the windows, the seed and the sum are what the definition says.
// Method: a scripted runner whose score for target t is t / 1000, so that every mean can be worked
// out.
#include "coordinator/perplexity.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numeric>

namespace ds4 {
namespace {

class ScoringRunner final : public StepRunner {
 public:
  Result<StepResult> RunStep(StepPlan plan, const TokenCallback&) override {
    plans.push_back(plan);
    StepResult result;
    std::vector<float>& nll = result.nll.emplace_back();
    for (int32_t target : plan.parts.at(0).score_targets) {
      nll.push_back(target < 0 ? 0.0f : static_cast<float>(target) / 1000.0f);
    }
    if (bad) nll.pop_back();
    return result;
  }
  std::vector<StepPlan> plans;
  bool bad = false;
};

std::vector<int32_t> Iota(int count) {
  std::vector<int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

TEST(PerplexityTest, ScoresEachWindowAfterItsSeed) {
  ScoringRunner runner;
  // 90 tokens in windows of 40: 0-39, 40-79, and 80-89, which is no longer than the seed.
  const auto result = MeasurePerplexity(&runner, 1, Iota(90), 40, 16, {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->num_windows, 2);
  EXPECT_EQ(result->num_scored, 16);
  // Targets 32-39 and 72-79, whose means are 35.5 and 75.5.
  EXPECT_NEAR(result->mean_nll, 0.0555, 1e-7);
  EXPECT_NEAR(result->perplexity, std::exp(0.0555), 1e-6);
  // Each window starts at position 0 and runs 39 rows in chunks of 16, 16, 7.
  ASSERT_EQ(runner.plans.size(), 6u);
  EXPECT_EQ(runner.plans[3].parts[0].pos, 0);
  EXPECT_EQ(runner.plans[3].parts[0].tokens.front(), 40);
  EXPECT_EQ(runner.plans[5].parts[0].tokens.size(), 7u);
  EXPECT_EQ(runner.plans[5].parts[0].score_targets.back(), 79);
}

TEST(PerplexityTest, TheChunkSizeDoesNotMatter) {
  ScoringRunner runner;
  const auto whole = MeasurePerplexity(&runner, 1, Iota(500), 128, 4096, {});
  const auto pieces = MeasurePerplexity(&runner, 1, Iota(500), 128, 7, {});
  ASSERT_TRUE(whole.ok() && pieces.ok());
  EXPECT_EQ(whole->mean_nll, pieces->mean_nll);
  EXPECT_EQ(whole->num_scored, pieces->num_scored);
}

TEST(PerplexityTest, ProgressEndsAtTheTotal) {
  ScoringRunner runner;
  int64_t last = 0, last_total = 0;
  PerplexityCallbacks callbacks;
  callbacks.on_progress = [&](int64_t done, int64_t total) {
    EXPECT_GT(done, last);
    last = done;
    last_total = total;
  };
  ASSERT_TRUE(MeasurePerplexity(&runner, 1, Iota(300), 100, 64, callbacks).ok());
  EXPECT_EQ(last, 3 * 99);
  EXPECT_EQ(last_total, 3 * 99);
}

TEST(PerplexityTest, RefusesATextThatIsAllSeed) {
  ScoringRunner runner;
  const auto result = MeasurePerplexity(&runner, 1, Iota(32), 100, 64, {});
  EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(result.status().message(), testing::HasSubstr("32 tokens"));
  EXPECT_TRUE(runner.plans.empty());
}

TEST(PerplexityTest, RefusesScoresThatDoNotFitThePlan) {
  ScoringRunner runner;
  runner.bad = true;
  EXPECT_EQ(MeasurePerplexity(&runner, 1, Iota(50), 50, 64, {}).status().code(),
            StatusCode::kInternal);
}

TEST(PerplexityTest, CanBeInterrupted) {
  ScoringRunner runner;
  PerplexityCallbacks callbacks;
  callbacks.interrupted = [&] { return !runner.plans.empty(); };
  EXPECT_EQ(MeasurePerplexity(&runner, 1, Iota(500), 100, 64, callbacks).status().code(),
            StatusCode::kCancelled);
  EXPECT_EQ(runner.plans.size(), 1u);
}

}  // namespace
}  // namespace ds4
