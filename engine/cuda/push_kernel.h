// The kernel of the push transport: what it works on, and its launch. For push_group.cc only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/launch.h"

namespace ds4::cuda {

inline constexpr int kMaxPushRanks = 16;
inline constexpr int kMaxPushBlocks = 32;
inline constexpr int kPushUnitBytes = 16;     // what one thread stores at once
inline constexpr int kPushLineBytes = 8;      // of a message, in one flagged line of 16 bytes
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

// Where bytes between this rank and one other go.
struct PushPeer {
  std::byte* slot_there = nullptr;   // in that rank's memory: this rank's message
  std::byte* slot_here = nullptr;    // in this rank's memory: that rank's message
  std::byte* lines_there = nullptr;  // the same, as flagged lines
  std::byte* lines_here = nullptr;
  uint32_t* flags_there = nullptr;  // [kMaxPushBlocks] in that rank's memory: this rank's
  uint32_t* flags_here = nullptr;   // [kMaxPushBlocks] in this rank's memory: that rank's
};

struct PushGather {
  PushPeer peers[kMaxPushRanks];  // by rank, own included (its slots only)
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
  bool is_flagged = false;     // the message goes as flagged lines
};

void LaunchPushGather(const LaunchContext& launch, const PushGather& gather);

}  // namespace ds4::cuda
