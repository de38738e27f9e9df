// Goal: ds4-bench measures what was asked for and sets it beside the right number of bytes. Method:
// the plan's arithmetic by hand; a small synthetic model through every mode, on one and two ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/base/strings.h"
#include "engine/model/synthetic.h"
#include "engine/tools/bench_options.h"
#include "engine/tools/bench_report.h"
#include "engine/tools/bench_run.h"

namespace ds4 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

RankPlan FlashPlan(ModelConfig& config) {
  const auto file = MakeSyntheticFile("flash", "q2", 0).value();
  config = ReadModelConfig(*file).value();
  return MakeShardPlan(config, *file, LaneLayout::Even(8, 1)).value().ranks[0];
}

int64_t ExpertBytes(const RankPlan& plan) {
  int64_t bytes = 0;
  for (const TensorSlice& slice : plan.slices) {
    if (slice.spec.read == ReadPattern::kExperts) bytes += slice.held_bytes;
  }
  return bytes;
}

TEST(BenchReportTest, BytesOfAStepCountDistinctExperts) {
  ModelConfig config;
  const RankPlan plan = FlashPlan(config);
  // One session: the plan's own figure.
  EXPECT_EQ(BytesPerStep(config, plan, 1), plan.read_bytes_per_token);
  // Two: 6 + 6 experts of 256, of which 6 * 6 / 256 are expected to be the same.
  const double distinct = 12.0 - 36.0 / 256.0;
  const double expected = static_cast<double>(plan.read_bytes_per_token) +
                          static_cast<double>(ExpertBytes(plan)) * (distinct - 6.0) / 256.0;
  // The second embedding and hash-table rows are a few KB.
  EXPECT_NEAR(static_cast<double>(BytesPerStep(config, plan, 2)), expected, 1e5);
  // Very many: all that is held, once.
  EXPECT_NEAR(static_cast<double>(BytesPerStep(config, plan, 1000000)),
              static_cast<double>(plan.held_bytes), 1e3);
}

TEST(BenchReportTest, CsvHasOneFieldForEachColumn) {
  BenchHeader header;
  header.model = "synthetic flash q2, 43 layers";
  header.backend = "cuda, \"NVIDIA\"";
  header.bandwidth_gbps = 4640;
  DecodeRow row{2048, 16, 512, 8000.0, 0.01, 0.0, 15.5, 23'200'000'000};
  const std::string csv = DecodeCsv(header, {row});
  EXPECT_THAT(csv, StartsWith("mode,model,backend,kernels,ranks,threads,context,batch,"));
  EXPECT_THAT(csv,
              HasSubstr("\ndecode,\"synthetic flash q2, 43 layers\",\"cuda, \"\"NVIDIA\"\"\","));
  EXPECT_THAT(csv, HasSubstr(",2048,16,512,8000.00,1600.00,10.0000,23200000000,2320.00,4640.0,"));
  // Half of the bandwidth: 23.2 GB in 10 ms.
  EXPECT_THAT(DecodeTable(header, {row}), HasSubstr("50.0 %"));
}

TEST(BenchReportTest, StepsAreFoundByTheirRepeatingKernels) {
  // Three steps of five kernels behind one that has more, or fewer, of them.
  for (const size_t first : {4u, 5u, 7u}) {
    std::vector<std::string> kernels(first, "prompt");
    for (int step = 0; step < 3; ++step) {
      for (const char* name : {"embed", "up", "down", "up", "down"}) kernels.emplace_back(name);
    }
    kernels.pop_back();  // the last one has no time
    const auto launches = LaunchesPerStep(kernels, 3);
    ASSERT_TRUE(launches.ok()) << launches.status();
    EXPECT_EQ(*launches, 5u) << first;
  }
  EXPECT_FALSE(LaunchesPerStep({"a", "b", "c", "d", "e", "f"}, 2).ok());
}

TEST(BenchReportTest, KernelsOfOneNameAreAddedUp) {
  EXPECT_EQ(KernelName("_ZN3ds44cuda12_GLOBAL__N_16KernelILi3ELb1EEEvPf"), "Kernel<3, true>");
  EXPECT_EQ(KernelName("plain"), "plain");
  const std::vector<KernelRow> rows = {
      {2048, 1, 0, "Up", 20.0}, {2048, 1, 1, "Down", 10.0}, {2048, 1, 2, "Up", 30.0}};
  const std::string table = KernelTable(rows);
  EXPECT_THAT(table, HasSubstr("25.00  50.0   83.3 %      Up\n"));
  EXPECT_LT(table.find("Up"), table.find("Down"));
  EXPECT_THAT(KernelCsv(rows), HasSubstr("2048,1,2,Up,30.000\n"));
}

BenchOptions TinyOptions() {
  BenchOptions options;
  options.engine.synthetic = "tiny";
  options.engine.quant = "q8";
  options.engine.synthetic_layers = 3;
  options.contexts = {5, 20};
  options.batches = {1, 3};
  options.tokens = 6;
  options.steps = 4;
  options.prompts = {9, 30};
  options.chunks = {8, 16};
  return options;
}

void Ignore(const std::string&) {}

TEST(BenchRunTest, DecodeCoversEveryPairOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2}) {
    BenchOptions options = TinyOptions();
    options.ranks = ranks;
    const auto results = RunBench(options, Ignore);
    ASSERT_TRUE(results.ok()) << results.status();
    std::vector<std::pair<int64_t, int64_t>> pairs;
    for (const DecodeRow& row : results->decode) {
      pairs.emplace_back(row.context, row.batch);
      EXPECT_GT(row.step_seconds, 0.0);
      EXPECT_GT(row.fill_tps, 0.0);
      EXPECT_GE(row.distinct, 1.0);
      EXPECT_LE(row.distinct, static_cast<double>(row.batch));
      EXPECT_GT(row.step_bytes, 0);
    }
    EXPECT_THAT(pairs,
                ElementsAre(std::pair(5, 1), std::pair(5, 3), std::pair(20, 1), std::pair(20, 3)));
    EXPECT_EQ(results->header.backend, "cpu");
    EXPECT_EQ(results->header.model, "synthetic tiny q8, 3 layers");
  }
}

TEST(BenchRunTest, PrefillCoversEveryPair) {
  BenchOptions options = TinyOptions();
  options.mode = BenchOptions::Mode::kPrefill;
  const auto results = RunBench(options, Ignore);
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_EQ(results->prefill.size(), 4u);
  EXPECT_EQ(results->prefill[3].prompt, 30);
  EXPECT_EQ(results->prefill[3].chunk, 16);
  EXPECT_GT(results->prefill[3].seconds, 0.0);
}

// A rank that cannot load must not leave the others waiting, and is the one that is named.
TEST(BenchRunTest, ErrorsNameTheRankAndTheValues) {
  BenchOptions options = TinyOptions();
  options.contexts = {1 << 20};
  EXPECT_THAT(RunBench(options, Ignore).status().message(),
              HasSubstr("context 1048576 plus 10 decoded tokens must be from 1 to"));
  options = TinyOptions();
  options.ranks = 2;
  options.engine.quant = "q2";
  EXPECT_THAT(RunBench(options, Ignore).status().message(), HasSubstr("rank 0: "));
}

Result<std::variant<BenchCommand, BenchHelp>> Parse(std::vector<const char*> args) {
  args.insert(args.begin(), "ds4-bench");
  return ParseBenchOptions(static_cast<int>(args.size()), args.data());
}

TEST(BenchOptionsTest, EveryOptionArrivesBeforeAndAfterTheCommand) {
  const auto parsed =
      Parse({"--synthetic=flash", "prefill", "--quant=q4", "--layers=4", "--prompts=4096,65536",
             "--chunks=2048", "--backend=cuda", "--device=1", "--kv-type=f32", "--deterministic",
             "--expert-memory=host", "--replicated-weights=file", "--device-transport=push",
             "--ranks=2", "--bandwidth=3000", "--csv-file=x.csv"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const BenchCommand& command = std::get<BenchCommand>(*parsed);
  EXPECT_EQ(command.run.mode, BenchOptions::Mode::kPrefill);
  EXPECT_EQ(command.run.engine.synthetic, "flash");
  EXPECT_EQ(command.run.engine.quant, "q4");
  EXPECT_EQ(command.run.engine.synthetic_layers, 4);
  EXPECT_THAT(command.run.prompts, ElementsAre(4096, 65536));
  EXPECT_THAT(command.run.chunks, ElementsAre(2048));
  EXPECT_EQ(command.backend, "cuda");
  EXPECT_EQ(command.run.engine.device, 1);
  EXPECT_TRUE(command.run.engine.kv_f32);
  EXPECT_TRUE(command.run.engine.deterministic);
  EXPECT_EQ(command.run.engine.expert_memory, ExpertMemory::kHost);
  EXPECT_EQ(command.run.engine.replicated_weights, ReplicatedWeights::kFile);
  EXPECT_EQ(command.run.engine.device_transport, "push");
  EXPECT_EQ(command.run.ranks, 2);
  EXPECT_EQ(command.bandwidth_gbps, 3000.0);
  EXPECT_EQ(command.csv_file, "x.csv");
}

TEST(BenchOptionsTest, BadUsageIsRefusedWithAReason) {
  const auto error = [](std::vector<const char*> args) {
    const Status status = Parse(std::move(args)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(error({}), HasSubstr("exactly one of --model and --synthetic; got 0"));
  EXPECT_THAT(error({"--model=m", "--synthetic=tiny"}), HasSubstr("got 2"));
  EXPECT_THAT(error({"--model=m", "--quant=q2"}), HasSubstr("--quant and --layers"));
  EXPECT_THAT(error({"--synthetic=pro"}), HasSubstr("--synthetic"));
  EXPECT_THAT(error({"--model=m", "--batches=0"}), HasSubstr("--batches"));
  EXPECT_THAT(error({"--model=m", "--backend=cpu", "--kv-type=bf16"}), HasSubstr("f32 only"));
  const auto help = Parse({"--help"});
  ASSERT_TRUE(help.ok());
  EXPECT_THAT(std::get<BenchHelp>(*help).text, HasSubstr("Examples"));
}

}  // namespace
}  // namespace ds4
