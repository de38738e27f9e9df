// The kernel of the push transport: what it works on, and its launch. For push_group.cc only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/launch.h"

namespace ds4::cuda {

inline constexpr int kMaxPushRanks = 16;
inline constexpr int kMaxPushBlocks = 32;
inline constexpr int kPushUnitBytes = 16;     // what one thread stores at once
inline constexpr int kPushFlagWords = 32;     // between two flags: each has a cache line
inline constexpr uint32_t kNumPushSlots = 3;  // receive generations, see push_group.cc

// Why a rank's gathers stopped.
enum class PushFailure : uint32_t { kNone, kTimeout, kAborted, kOutOfStep };

// In mapped host memory: how host and kernels talk while the kernels run.
struct PushControl {
  uint32_t abort = 0;  // set by the host: waits end
  // Set by the device, `failure` last.
  uint32_t failure = 0;   // a PushFailure
  uint32_t peer = 0;      // waited for; out of step: the slot that the device would use
  uint32_t sequence = 0;  // of the gather, from 0
};

// One block's place in the sequence of gathers, in device memory; the same in all blocks.
struct PushPlace {
  uint32_t sequence = 0;
  uint32_t slot = 0;
};

struct PushPeer {
  std::byte* slot = nullptr;        // in that rank's memory: where it wants this rank's bytes
  uint32_t* flags_there = nullptr;  // in that rank's memory: this rank's, [kMaxPushBlocks]
  uint32_t* flags_here = nullptr;   // in this rank's memory: that rank's, [kMaxPushBlocks]
};

struct PushGather {
  PushPeer peers[kMaxPushRanks];  // by rank, own included (its slot only)
  const std::byte* mine = nullptr;
  int64_t units = 0;  // of kPushUnitBytes; 0: ranks only meet
  uint64_t timeout_ns = 0;
  PushPlace* places = nullptr;  // [kMaxPushBlocks], device
  uint32_t* broken = nullptr;   // [1], device: a PushFailure once gathers have stopped
  PushControl* control = nullptr;
  uint32_t slot = 0;       // that `peers` were made for; checked against places
  uint32_t next_slot = 0;  // of the gather after this one
  int rank = 0;
  int world_size = 0;
  bool shares_device = false;  // with another rank
};

void LaunchPushGather(const LaunchContext& launch, const PushGather& gather);

}  // namespace ds4::cuda
