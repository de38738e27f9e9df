#include "tests/golden/golden_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "engine/gguf/convert.h"

namespace ds4 {
namespace {

void SetUpRank(const GgufFile& file, std::unique_ptr<Transport> transport, int threads,
               TestRank& rank) {
  Result<ModelConfig> config = ReadModelConfig(file);
  ASSERT_TRUE(config.ok()) << config.status();
  rank.config = *config;
  const LaneLayout lanes = LaneLayout::Even(rank.config.num_lanes, transport->world_size());
  Result<ShardPlan> plan = MakeShardPlan(rank.config, file, lanes);
  ASSERT_TRUE(plan.ok()) << plan.status();
  rank.plan = *plan;
  const RankPlan& own = rank.plan.ranks[transport->rank()];
  Result<Weights> weights = LoadWeights(rank.config, file, own, nullptr);
  ASSERT_TRUE(weights.ok()) << weights.status();
  rank.weights = std::move(weights).value();
  rank.pool = std::make_unique<ThreadPool>(threads);
  rank.comm = MakeExchangeCommunicator(std::move(transport), lanes);
  rank.context = {&rank.config, &own, &rank.weights, rank.comm.get(), rank.pool.get()};
  rank.transformer = std::make_unique<Transformer>(rank.context);
}

}  // namespace

void RunRanks(const std::string& gguf_path, int world_size, int threads,
              const std::function<void(TestRank&)>& body) {
  Result<std::unique_ptr<GgufFile>> file = GgufFile::Open(gguf_path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::unique_ptr<Transport>> transports = MakeLocalTransports(world_size);
  std::vector<std::jthread> ranks;
  for (int r = 0; r < world_size; ++r) {
    ranks.emplace_back([&, r] {
      TestRank rank;
      SetUpRank(**file, std::move(transports[r]), threads, rank);
      if (rank.transformer != nullptr) body(rank);
    });
  }
}

std::vector<float> GatherLogits(TestRank& rank, const float* local, int64_t rows) {
  const int64_t vocab = rank.config.vocab_size;
  const int64_t largest =
      (vocab + rank.config.num_lanes - 1) / rank.config.num_lanes * rank.plan.lanes.num_lanes_of(0);
  const int64_t own = rank.context.plan->vocab.size();
  std::vector<float> mine(rows * largest);
  for (int64_t t = 0; t < rows; ++t) {
    std::copy_n(local + t * own, own, mine.data() + t * largest);
  }
  const int world = rank.comm->world_size();
  std::vector<float> all(world * mine.size());
  const Status status =
      rank.comm->AllGather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  EXPECT_TRUE(status.ok()) << status;
  std::vector<float> logits(rows * vocab);
  for (int r = 0; r < world; ++r) {
    const Range range = rank.plan.ranks[r].vocab;
    for (int64_t t = 0; t < rows; ++t) {
      std::copy_n(all.data() + r * mine.size() + t * largest, range.size(),
                  logits.data() + t * vocab + range.begin);
    }
  }
  return logits;
}

std::string SourceDir() {
  const char* moved = std::getenv("DS4_SOURCE_DIR");
  return moved != nullptr ? moved : DS4_SOURCE_DIR;
}

std::string GoldenData() { return SourceDir() + "/tests/golden/tiny_v4.safetensors"; }

std::string GoldenGguf() {
  static const std::string path = [] {
    const std::string out =
        testing::TempDir() + "/ds4_golden_f32_" + std::to_string(getpid()) + ".gguf";
    ConvertOptions options;
    options.inputs = {GoldenData()};
    options.output = out;
    options.type = DType::kF32;
    const Status status = ConvertSafetensors(options);
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }();
  return path;
}

}  // namespace ds4
