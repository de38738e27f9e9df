// What every layer of one rank works with; borrowed by all of them, owned by the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/kernels/thread_pool.h"
#include "engine/kv/kv_state.h"
#include "engine/model/model_config.h"
#include "engine/shard/shard_plan.h"
#include "engine/weights/weights.h"

namespace ds4 {

struct RankContext {
  const ModelConfig* config = nullptr;
  const RankPlan* plan = nullptr;
  const Weights* weights = nullptr;
  Communicator* comm = nullptr;
  ThreadPool* pool = nullptr;

  // Subtree roots of this rank's lanes: vectors that it sends for each shared sum.
  int64_t num_roots() const {
    return static_cast<int64_t>(
        SubtreesOf(static_cast<int>(plan->lanes.begin), static_cast<int>(plan->lanes.end)).size());
  }
};

// One row of a forward pass: a token of some session at its position. Rows of one session stand in
// rising, consecutive positions that start at the session's n.
struct BatchRow {
  int32_t token = 0;
  int64_t pos = 0;
  KvState* state = nullptr;
};
using Batch = std::vector<BatchRow>;

// Memory that grows to the largest size asked for and stays: steps allocate nothing once warm.
template <typename T>
class Scratch {
 public:
  T* Get(int64_t count) {
    if (static_cast<int64_t>(data_.size()) < count) data_.resize(count);
    return data_.data();
  }

 private:
  std::vector<T> data_;
};

}  // namespace ds4
