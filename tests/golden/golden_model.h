// The golden model as one or several ranks in this process, for tests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/local_transport.h"
#include "engine/comm/transport.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/layers/transformer.h"
#include "engine/model/model_config.h"
#include "engine/shard/shard_plan.h"
#include "engine/weights/weight_loader.h"

namespace ds4 {

// One rank: everything that a Transformer needs, owned.
struct TestRank {
  ModelConfig config;
  ShardPlan plan;
  Weights weights;
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<ThreadPool> pool;
  RankContext context;
  std::unique_ptr<Transformer> transformer;
};

// Runs `body` on `world_size` ranks, one thread each, and waits for all.
void RunRanks(const std::string& gguf_path, int world_size, int threads,
              const std::function<void(TestRank&)>& body);

// Rank-local logits of all ranks put together: [rows, vocab], on every rank.
std::vector<float> GatherLogits(TestRank& rank, const float* local, int64_t rows);

// The source tree: the environment variable DS4_SOURCE_DIR on machines that only got the binaries
// and the data, else where this was built.
std::string SourceDir();
std::string GoldenData();  // tests/golden/tiny_v4.safetensors

// tests/golden/tiny_v4.safetensors as GGUF with F32 weights, made once per process.
std::string GoldenGguf();

}  // namespace ds4
