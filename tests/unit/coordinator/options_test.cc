// Goal: every setting has its default, and bad usage is refused with exit code 2 and a reason.
// Method: command lines in, parsed values or the message out.
#include "coordinator/options.h"

#include <gmock/gmock.h>

#include <vector>

namespace ds4 {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

ParsedOptions Parse(std::vector<const char*> args) {
  args.insert(args.begin(), "ds4-coordinator");
  return ParseOptions(static_cast<int>(args.size()), args.data());
}

std::string UsageError(std::vector<const char*> args) {
  const ParsedOptions parsed = Parse(std::move(args));
  EXPECT_FALSE(parsed.run);
  EXPECT_EQ(parsed.exit_code, 2);
  return parsed.text;
}

TEST(OptionsTest, DefaultsAreGreedyAndInteractive) {
  const ParsedOptions parsed = Parse({"--model", "m.gguf", "--local", "2"});
  ASSERT_TRUE(parsed.run) << parsed.text;
  const Options& o = parsed.options;
  EXPECT_TRUE(o.interactive());
  EXPECT_EQ(o.num_ranks(), 2);
  EXPECT_EQ(o.sampling, SamplingParams());
  EXPECT_EQ(o.sampling.temperature, 0.0f);
  EXPECT_EQ(o.max_tokens, 256);
  EXPECT_FALSE(o.max_tokens_given);
  EXPECT_EQ(o.timeout, std::chrono::seconds(10));
  EXPECT_EQ(o.join_timeout, std::chrono::seconds(10));
  EXPECT_TRUE(o.stats);
}

TEST(OptionsTest, EverySettingArrives) {
  const ParsedOptions parsed = Parse({"--model",
                                      "m.gguf",
                                      "--workers",
                                      "a:1,b:2,[::1]:3",
                                      "--prompt",
                                      "Hi",
                                      "--system",
                                      "Be brief.",
                                      "--think",
                                      "-n",
                                      "7",
                                      "--temperature",
                                      "0.5",
                                      "--top-k",
                                      "9",
                                      "--top-p",
                                      "0.9",
                                      "--min-p",
                                      "0.1",
                                      "--seed",
                                      "18446744073709551615",
                                      "--ctx",
                                      "99",
                                      "--chunk",
                                      "3",
                                      "--transport",
                                      "grpc",
                                      "--timeout-ms",
                                      "1500",
                                      "--join-timeout-ms",
                                      "2500",
                                      "--ignore-eos",
                                      "--no-stats",
                                      "--verbose"});
  ASSERT_TRUE(parsed.run) << parsed.text;
  const Options& o = parsed.options;
  EXPECT_FALSE(o.interactive());
  EXPECT_THAT(o.workers, testing::ElementsAre("a:1", "b:2", "[::1]:3"));
  EXPECT_EQ(o.num_ranks(), 3);
  EXPECT_EQ(o.prompt, "Hi");
  EXPECT_EQ(o.system, "Be brief.");
  EXPECT_TRUE(o.think && o.ignore_eos && o.verbose && o.max_tokens_given);
  EXPECT_FALSE(o.stats);
  EXPECT_EQ(o.max_tokens, 7);
  EXPECT_EQ(o.sampling, (SamplingParams{0.5f, 9, 0.9f, 0.1f, UINT64_MAX}));
  EXPECT_EQ(o.context, 99);
  EXPECT_EQ(o.chunk, 3);
  EXPECT_EQ(o.transport, "grpc");
  EXPECT_EQ(o.timeout, milliseconds(1500));
  EXPECT_EQ(o.join_timeout, milliseconds(2500));
}

TEST(OptionsTest, HelpAndVersionEndWithZero) {
  for (const char* flag : {"--help", "--version"}) {
    const ParsedOptions parsed = Parse({flag});
    EXPECT_FALSE(parsed.run);
    EXPECT_EQ(parsed.exit_code, 0);
    EXPECT_THAT(parsed.text, HasSubstr("ds4-coordinator"));
  }
  EXPECT_THAT(Parse({"--help"}).text, HasSubstr("0: greedy"));
}

TEST(OptionsTest, ExactlyOneSourceOfWorkers) {
  EXPECT_THAT(UsageError({"--model", "m"}), HasSubstr("exactly one of --workers and --local"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "1", "--workers", "a:1"}), HasSubstr("got 2"));
  EXPECT_THAT(UsageError({"--model", "m", "--ranks", "2"}), HasSubstr("--dry-run only"));
  EXPECT_TRUE(Parse({"--model", "m", "--ranks", "2", "--dry-run"}).run);
}

TEST(OptionsTest, RefusesWhatMakesNoSense) {
  EXPECT_THAT(UsageError({"--local", "2"}), HasSubstr("--model"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "0"}), HasSubstr("--local"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "65"}), HasSubstr("--local"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--frobnicate"}),
              HasSubstr("frobnicate"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--top-p", "1.5"}), HasSubstr("--top-p"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--min-p", "nan"}), HasSubstr("finite"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "-n", "0"}), HasSubstr("--max-tokens"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--transport", "smoke"}),
              HasSubstr("--transport"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--prompt", "a", "--prompt-file", "b"}),
              HasSubstr("at most one"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--prompt", ""}), HasSubstr("empty"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--prompt", "a", "--raw", "--think"}),
              HasSubstr("--raw"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "2", "--raw"}), HasSubstr("--raw needs"));
}

TEST(OptionsTest, LocalTakesANumberOrGpus) {
  const Options number = Parse({"--model", "m", "--local", "12"}).options;
  EXPECT_EQ(number.local, 12);
  EXPECT_FALSE(number.local_gpus);
  const Options gpus =
      Parse({"--model", "m", "--local", "gpus", "--deterministic", "--replicated-weights", "file"})
          .options;
  EXPECT_TRUE(gpus.local_gpus && gpus.deterministic);
  EXPECT_EQ(gpus.replicated_weights, "file");
  EXPECT_THAT(UsageError({"--model", "m", "--local", "gpu"}),
              HasSubstr("--local is \"gpu\", must be from 1 to 64, or gpus"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "gpus", "--workers", "a:1"}),
              HasSubstr("got 2"));
  EXPECT_THAT(UsageError({"--model", "m", "--local", "gpus", "--backend", "cpu"}),
              HasSubstr("contradict"));
  EXPECT_THAT(UsageError({"--model", "m", "--workers", "a:1", "--kv-type", "f32"}),
              HasSubstr("for the workers that --local starts"));
}

TEST(OptionsTest, ASyntheticModelStandsInForAFile) {
  const Options o =
      Parse({"--synthetic", "flash", "--quant", "q4", "--layers", "3", "--local", "1"}).options;
  EXPECT_EQ(o.synthetic, "flash");
  EXPECT_EQ(o.quant, "q4");
  EXPECT_EQ(o.synthetic_layers, 3);
  EXPECT_THAT(UsageError({"--model", "m", "--synthetic", "flash", "--local", "1"}),
              HasSubstr("exactly one of --model and --synthetic; got 2"));
  EXPECT_THAT(UsageError({"--model", "m", "--layers", "3", "--local", "1"}),
              HasSubstr("are for --synthetic"));
}

TEST(OptionsTest, RefusesAddressesThatAreNone) {
  for (const char* bad : {"host", "host:", ":1", "host:0", "host:65536", "host:12x", "a:1,a:1"}) {
    EXPECT_THAT(UsageError({"--model", "m", "--workers", bad}), HasSubstr("--workers")) << bad;
  }
}

}  // namespace
}  // namespace ds4
