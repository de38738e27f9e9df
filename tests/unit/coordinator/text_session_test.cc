// Goal: chunks, bursts, limits, stops and reuse of the prefix are exact.
// Method: a scripted runner that counts up (the token after x is x + 1) and keeps every plan it is
// sent.
#include "coordinator/text_session.h"

#include <gmock/gmock.h>

#include <numeric>

namespace ds4 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class CountingRunner final : public StepRunner {
 public:
  Result<StepResult> RunStep(StepPlan plan, const TokenCallback& on_token) override {
    plans.push_back(plan);
    if (fail_at == static_cast<int>(plans.size())) return UnavailableError("rank 1 is gone");
    const StepPart& part = plan.parts.at(0);
    StepResult result;
    if (!part.sample) return result;
    int64_t pos = part.pos + std::ssize(part.tokens);
    int32_t token = part.tokens.back();
    for (int i = 0; i <= plan.decode_steps; ++i) {
      TokenOutput out;
      out.pos = pos++ + skew;
      out.token = ++token;
      out.is_stop = std::count(part.stop_ids.begin(), part.stop_ids.end(), token) > 0;
      on_token(out);
      result.tokens.push_back(out);
      if (out.is_stop) break;
    }
    return result;
  }

  std::vector<StepPlan> plans;
  int fail_at = 0;   // the how manieth step fails; 0: none
  int64_t skew = 0;  // wrong positions
};

std::vector<int32_t> TokensFrom(int count, int32_t first = 100) {
  std::vector<int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

GenerateOptions Tokens(int64_t max_tokens) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.chunk = 4;
  options.burst = 3;
  return options;
}

TEST(TextSessionTest, PrefillsInChunksAndDecodesInBursts) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  std::vector<int32_t> seen;
  std::vector<int64_t> progress;
  GenerateCallbacks callbacks;
  callbacks.on_token = [&](int32_t token) { seen.push_back(token); };
  callbacks.on_prefill = [&](int64_t done, int64_t) { progress.push_back(done); };
  const Result<Answer> answer = session.Generate(TokensFrom(10), Tokens(6), callbacks);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(answer->tokens, ElementsAre(110, 111, 112, 113, 114, 115));
  EXPECT_EQ(answer->reason, StopReason::kMaxTokens);
  EXPECT_EQ(seen, answer->tokens);
  EXPECT_THAT(progress, ElementsAre(4, 8, 10));
  // Rows 0-3, 4-7, 8-9 (which samples), then bursts of 3 and the 2 that are left.
  ASSERT_EQ(runner.plans.size(), 5u);
  EXPECT_FALSE(runner.plans[1].parts[0].sample);
  EXPECT_TRUE(runner.plans[2].parts[0].sample);
  EXPECT_THAT(runner.plans[2].parts[0].tokens, ElementsAre(108, 109));
  EXPECT_EQ(runner.plans[3].parts[0].pos, 10);
  EXPECT_THAT(runner.plans[3].parts[0].tokens, ElementsAre(110));
  EXPECT_EQ(runner.plans[3].decode_steps, 2);
  EXPECT_EQ(runner.plans[4].decode_steps, 1);
  // The last token never ran.
  EXPECT_EQ(session.held(), TokensFrom(15));
}

TEST(TextSessionTest, StopsAtTheStopTokenAndDoesNotShowIt) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  GenerateOptions options = Tokens(50);
  options.stop_ids = {104};
  std::vector<int32_t> seen;
  GenerateCallbacks callbacks;
  callbacks.on_token = [&](int32_t token) { seen.push_back(token); };
  const Result<Answer> answer = session.Generate(TokensFrom(2), options, callbacks);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_THAT(answer->tokens, ElementsAre(102, 103, 104));
  EXPECT_THAT(seen, ElementsAre(102, 103));
  EXPECT_EQ(answer->reason, StopReason::kStopToken);
}

TEST(TextSessionTest, RefusesWhatDoesNotFitBeforeAnythingRuns) {
  CountingRunner runner;
  TextSession session(&runner, 1, 12);
  const Result<Answer> answer = session.Generate(TokensFrom(10), Tokens(3), {});
  EXPECT_EQ(answer.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(answer.status().message(),
              testing::AllOf(HasSubstr("10 tokens"), HasSubstr("13"), HasSubstr("holds 12"),
                             HasSubstr("at most 2")));
  EXPECT_TRUE(runner.plans.empty());
  EXPECT_TRUE(session.Generate(TokensFrom(10), Tokens(2), {}).ok());
}

TEST(TextSessionTest, RunsOnlyWhatIsNewInTheNextPrompt) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  ASSERT_TRUE(session.Generate(TokensFrom(3), Tokens(3), {}).ok());  // holds 100..104
  runner.plans.clear();
  std::vector<int32_t> longer = TokensFrom(5);
  longer.insert(longer.end(), {7, 8});
  const Result<Answer> answer = session.Generate(longer, Tokens(1), {});
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->stats.reused_tokens, 5);
  ASSERT_EQ(runner.plans.size(), 1u);
  EXPECT_EQ(runner.plans[0].parts[0].pos, 5);
  EXPECT_THAT(runner.plans[0].parts[0].tokens, ElementsAre(7, 8));
}

TEST(TextSessionTest, GoesBackToWhereThePromptsDiffer) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  ASSERT_TRUE(session.Generate(TokensFrom(6), Tokens(1), {}).ok());
  runner.plans.clear();
  ASSERT_TRUE(session.Generate({100, 101, 9, 103, 104, 105}, Tokens(1), {}).ok());
  EXPECT_EQ(runner.plans[0].parts[0].pos, 2);
  // The very same prompt again: its last row must run once more to give a token.
  runner.plans.clear();
  ASSERT_TRUE(session.Generate({100, 101, 9, 103, 104, 105}, Tokens(1), {}).ok());
  EXPECT_EQ(runner.plans[0].parts[0].pos, 5);
  EXPECT_EQ(session.held().size(), 6u);
}

// Ranks go back by a batch and a draft at most (here 4 + 16); further back they start anew, and the
// first positions are theirs again.
TEST(TextSessionTest, StartsAnewWhereTheRanksCannotGoBackTo) {
  CountingRunner runner;
  TextSession session(&runner, 1, 200);
  ASSERT_TRUE(session.Generate(TokensFrom(60), Tokens(1), {}).ok());
  const auto differing_at = [](int at) {
    std::vector<int32_t> prompt = TokensFrom(60);
    prompt[at] = 9;
    return prompt;
  };
  const auto first_pos = [&](const std::vector<int32_t>& prompt) {
    runner.plans.clear();
    EXPECT_TRUE(session.Generate(prompt, Tokens(1), {}).ok());
    return runner.plans[0].parts[0].pos;
  };
  EXPECT_EQ(first_pos(differing_at(40)), 40);
  // 60 positions have been written by now, whatever is held of them.
  EXPECT_EQ(first_pos(differing_at(39)), 0);
  EXPECT_EQ(first_pos(TokensFrom(30)), 0);
  EXPECT_EQ(first_pos(differing_at(29)), 29) << "30 were written since";
  EXPECT_EQ(session.held().size(), 60u);
}

TEST(TextSessionTest, AnErrorForgetsWhatTheRanksHeld) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  runner.fail_at = 2;
  const Result<Answer> answer = session.Generate(TokensFrom(6), Tokens(4), {});
  EXPECT_EQ(answer.status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(session.held().empty());
}

TEST(TextSessionTest, RefusesTokensAtWrongPositions) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  runner.skew = 1;
  const Result<Answer> answer = session.Generate(TokensFrom(3), Tokens(4), {});
  EXPECT_EQ(answer.status().code(), StatusCode::kInternal);
  EXPECT_THAT(answer.status().message(), HasSubstr("position 4, expected 3"));
}

TEST(TextSessionTest, AnInterruptEndsBetweenSteps) {
  CountingRunner runner;
  TextSession session(&runner, 1, 100);
  int asked = 0;
  GenerateCallbacks callbacks;
  callbacks.interrupted = [&] { return ++asked > 2; };
  const Result<Answer> answer = session.Generate(TokensFrom(4), Tokens(50), callbacks);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->reason, StopReason::kInterrupted);
  EXPECT_THAT(answer->tokens, ElementsAre(104, 105, 106, 107));
}

}  // namespace
}  // namespace ds4
