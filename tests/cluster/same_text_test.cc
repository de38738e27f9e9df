// Goal: what comes out does not depend on how many ranks there are, how they talk, or how the work
// is cut into steps. Method: the same request through real processes in every arrangement; outputs
// compared byte for byte.
#include "tests/cluster/cluster_fixture.h"

namespace ds4 {
namespace {

constexpr char kPrompt[] = "Tell me a story about a little dog.";

std::string AnswerOf(std::vector<std::string> how) {
  how.insert(how.end(), {"--prompt", kPrompt, "-n", "40"});
  const RunResult run = RunCoordinator(how);
  EXPECT_EQ(run.code, 0) << run.err;
  return run.out;
}

const std::string& AnswerOfOneRank() {
  static const std::string answer = AnswerOf({"--local", "1"});
  return answer;
}

class SameTextTest : public testing::TestWithParam<std::pair<int, const char*>> {};

TEST_P(SameTextTest, AsOneRank) {
  const auto [ranks, transport] = GetParam();
  ASSERT_GT(AnswerOfOneRank().size(), 20u);
  EXPECT_EQ(AnswerOf({"--local", std::to_string(ranks), "--transport", transport}),
            AnswerOfOneRank());
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, SameTextTest,
    testing::Values(std::pair(2, "tcp"), std::pair(3, "tcp"), std::pair(4, "tcp"),
                    std::pair(5, "tcp"), std::pair(8, "tcp"), std::pair(1, "grpc"),
                    std::pair(2, "grpc"), std::pair(3, "grpc"), std::pair(4, "grpc"),
                    std::pair(5, "grpc"), std::pair(8, "grpc")),
    [](const auto& test) { return test.param.second + std::to_string(test.param.first); });

TEST(ClusterTextTest, InAnyChunkSize) {
  EXPECT_EQ(AnswerOf({"--local", "2", "--chunk", "1"}), AnswerOfOneRank());
  EXPECT_EQ(AnswerOf({"--local", "2", "--chunk", "7"}), AnswerOfOneRank());
  EXPECT_EQ(AnswerOf({"--local", "2", "--chunk", "1000"}), AnswerOfOneRank());
}

TEST(ClusterTextTest, RanksAgreeOnTheirStateAfterEveryStep) {
  EXPECT_EQ(AnswerOf({"--local", "3", "--check-state"}), AnswerOfOneRank());
}

TEST(ClusterTextTest, ASeedGivesTheSameTextOnAnyNumberOfRanks) {
  const std::vector<std::string> draw = {"--temperature", "1", "--top-p", "0.95", "--seed", "11"};
  const auto answer = [&](const char* ranks) {
    std::vector<std::string> how = {"--local", ranks};
    how.insert(how.end(), draw.begin(), draw.end());
    return AnswerOf(how);
  };
  const std::string one = answer("1");
  EXPECT_NE(one, AnswerOfOneRank()) << "drawn text should differ from the greedy one";
  EXPECT_EQ(answer("3"), one);
  EXPECT_EQ(
      AnswerOf({"--local", "1", "--temperature", "1", "--top-p", "0.95", "--seed", "12"}) == one,
      false);
}

// A model without a file: every process makes the same weights for itself.
TEST(ClusterTextTest, SyntheticModelsAreTheSameEverywhere) {
  const auto answer = [](const char* ranks) {
    const RunResult run =
        RunProgram({Binary("ds4-coordinator"), "--synthetic", "tiny", "--quant", "q8", "--layers",
                    "3", "--local", ranks, "--prompt", "anything", "-n", "20", "--ignore-eos"});
    EXPECT_EQ(run.code, 0) << run.err;
    return run.out;
  };
  const std::string one = answer("1");
  EXPECT_GT(one.size(), 20u);
  EXPECT_EQ(answer("2"), one);
}

TEST(ClusterTextTest, AcrossWorkersThatRunAlready) {
  Worker a, b;
  EXPECT_EQ(AnswerOf({"--workers", a.address() + "," + b.address()}), AnswerOfOneRank());
  // The workers wait for the next coordinator; the order of ranks does not matter either.
  EXPECT_EQ(AnswerOf({"--workers", b.address() + "," + a.address()}), AnswerOfOneRank());
}

TEST(ClusterTextTest, PerplexityIsEqualToTheLastDigit) {
  const TempFolder folder;
  const std::string file = folder.Write("text.txt", LongText(700));
  const auto measure = [&](std::vector<std::string> how) {
    how.insert(how.end(), {"--perplexity-file", file, "--ctx", "256", "--no-stats"});
    const RunResult run = RunCoordinator(how);
    EXPECT_EQ(run.code, 0) << run.err;
    return run.out;
  };
  const std::string one = measure({"--local", "1"});
  EXPECT_THAT(one,
              testing::MatchesRegex(
                  "perplexity [0-9.]+, mean NLL [0-9.]+ over [0-9]+ of [0-9]+ tokens in [0-9]+ "
                  "windows of 256\n"));
  EXPECT_EQ(measure({"--local", "2"}), one);
  EXPECT_EQ(measure({"--local", "2", "--chunk", "50"}), one);
}

TEST(ClusterTextTest, MaxTokensIsExact) {
  const RunResult run =
      RunCoordinator({"--local", "2", "--prompt", kPrompt, "-n", "13", "--ignore-eos"});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.err, testing::HasSubstr("stopped after 13 tokens"));
  EXPECT_THAT(run.err, testing::HasSubstr("decode: 12 tokens"));
}

TEST(ClusterTextTest, OnlyTheAnswerGoesToStdout) {
  const RunResult run = RunCoordinator({"--local", "2", "--prompt", kPrompt, "-n", "5"});
  EXPECT_EQ(run.code, 0);
  EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 1) << run.out;
  EXPECT_THAT(run.err,
              testing::AllOf(testing::HasSubstr("rank  lanes"), testing::HasSubstr("2 ranks ready"),
                             testing::HasSubstr("prefill: ")));
  EXPECT_THAT(run.err, testing::Not(testing::HasSubstr("\x1b["))) << "no colour on a pipe";
}

}  // namespace
}  // namespace ds4
