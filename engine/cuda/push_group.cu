// One gather as a kernel: every block copies its part of `mine` into all ranks' slots, raises its
// flag at every peer, and waits for the same block's flags of all peers.
//
// A flag's value is the number of the last gather whose part is there (from 1), so nothing is ever
// reset and a replayed graph goes on counting. After a failure a rank pushes nothing more: a peer
// that is only late must not find slots overwritten.
#include <algorithm>

#include "engine/cuda/push_kernel.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kUnitsAhead = 4;  // loads in flight of one thread
// Looks at a flag between two looks at the clock and at the host's abort word (over PCIe).
constexpr int kSpins = 256;

__device__ void Report(const PushGather& gather, PushFailure failure, uint32_t peer,
                       uint32_t sequence) {
  if (atomicCAS(gather.broken, 0u, static_cast<uint32_t>(failure)) != 0) return;
  gather.control->peer = peer;
  gather.control->sequence = sequence;
  StoreReleaseSystem(&gather.control->failure, static_cast<uint32_t>(failure));
}

// True when a flag that counts up has reached `number`; numbers wrap around.
__device__ __forceinline__ bool HasReached(uint32_t flag, uint32_t number) {
  return static_cast<int32_t>(flag - number) >= 0;
}

__device__ void WaitForPeer(const PushGather& gather, const uint32_t* flag, uint32_t peer,
                            uint32_t sequence) {
  uint64_t start = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (HasReached(LoadAcquireSystem(flag), sequence + 1)) return;
    }
    if (LoadAcquireSystem(&gather.control->abort) != 0) {
      return Report(gather, PushFailure::kAborted, peer, sequence);
    }
    if (LoadAcquireSystem(gather.broken) != 0) return;  // another block has given up
    const uint64_t now = GlobalTimerNs();
    if (start == 0) start = now;
    if (now - start > gather.timeout_ns) {
      return Report(gather, PushFailure::kTimeout, peer, sequence);
    }
  }
}

// The next kUnitsAhead units of this thread, from `unit` on.
struct Ahead {
  uint4 units[kUnitsAhead];

  __device__ __forceinline__ void Load(const PushGather& gather, int64_t unit, int64_t end) {
#pragma unroll
    for (int i = 0; i < kUnitsAhead; ++i) {
      const int64_t at = unit + i * static_cast<int64_t>(blockDim.x);
      if (at < end) units[i] = reinterpret_cast<const uint4*>(gather.mine)[at];
    }
  }
  __device__ __forceinline__ void Store(std::byte* slot, int64_t unit, int64_t end) const {
#pragma unroll
    for (int i = 0; i < kUnitsAhead; ++i) {
      const int64_t at = unit + i * static_cast<int64_t>(blockDim.x);
      if (at < end) reinterpret_cast<uint4*>(slot)[at] = units[i];
    }
  }
};

__global__ void __launch_bounds__(kMaxThreads) Gather(const PushGather gather) {
  // Ranks on one device: kernels of this one that wait for the gather could take the room that the
  // peer's kernels need to get to it.
  if (!gather.shares_device) LaunchDependents();
  GridDependencyWait();

  __shared__ uint32_t number;  // of gathers before this one
  __shared__ uint32_t stopped;
  const int64_t per_block = (gather.units + gridDim.x - 1) / gridDim.x;
  const int64_t end = min(gather.units, (blockIdx.x + 1) * per_block);
  int64_t unit = blockIdx.x * per_block + threadIdx.x;
  Ahead ahead;
  ahead.Load(gather, unit, end);  // meanwhile thread 0 learns where we are
  if (threadIdx.x == 0) {
    const PushPlace now = gather.places[blockIdx.x];
    stopped = *static_cast<const volatile uint32_t*>(gather.broken);
    if (stopped == 0 && now.slot != gather.slot) {
      Report(gather, PushFailure::kOutOfStep, now.slot, now.sequence);
      stopped = 1;
    }
    number = now.sequence;
  }
  __syncthreads();
  if (stopped != 0) return;

  const int rank = gather.rank;
  const int world_size = gather.world_size;
  while (unit < end) {
    for (int i = 1; i <= world_size; ++i) {  // the next rank first, so that links are used evenly
      const int to = rank + i < world_size ? rank + i : rank + i - world_size;
      ahead.Store(gather.peers[to].slot, unit, end);
    }
    unit += kUnitsAhead * static_cast<int64_t>(blockDim.x);
    ahead.Load(gather, unit, end);
  }
  __syncthreads();

  const uint32_t sequence = number;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < world_size && peer != rank) {
    const uint32_t word = blockIdx.x * kPushFlagWords;
    StoreReleaseSystem(gather.peers[peer].flags_there + word, sequence + 1);
    WaitForPeer(gather, gather.peers[peer].flags_here + word, threadIdx.x, sequence);
  }
  // A gather of few blocks counts for the idle ones too, so that all always agree.
  const uint32_t idle = blockIdx.x + threadIdx.x * gridDim.x;
  if (idle < kMaxPushBlocks) {
    gather.places[idle].sequence = sequence + 1;
    gather.places[idle].slot = gather.next_slot;
  }
}

struct Shape {
  int blocks;
  int threads;
};

// Small messages: one unit or two for each thread. Large ones: as many blocks as have flags.
Shape ShapeFor(int64_t units) {
  constexpr int64_t kSmall = 2048;  // 32 KiB
  if (units <= kSmall) return {static_cast<int>(std::clamp<int64_t>(units / 128, 1, 8)), 128};
  return {static_cast<int>(std::clamp<int64_t>(units / 512, 8, kMaxPushBlocks)), kMaxThreads};
}

}  // namespace

void LaunchPushGather(const LaunchContext& launch, const PushGather& gather) {
  const Shape shape = ShapeFor(gather.units);
  Launch(launch, dim3(shape.blocks), dim3(shape.threads), 0, Gather, gather);
}

}  // namespace ds4::cuda
