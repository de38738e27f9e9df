// One gather as a kernel, in two ways; both end when all peers' messages are here.
//
// Blocks and flags (large messages): every block copies its part of `mine` into all ranks' slots,
// raises its flag at every peer, and waits for the same block's flags of all peers. The flag must
// not overtake the bytes, so the link is crossed three times: bytes, their acknowledgement, flag. A
// flag's value is the number of the last gather whose part is there (from 1), so nothing is ever
// reset and a replayed graph goes on counting.
//
// Flagged lines (small messages): 8 bytes of the message travel as two words of 8 bytes, each half
// message and half number of the gather. A word arrives whole, so one with the right number needs
// nothing else to be trusted: the link is crossed once, by twice the bytes. The receiver strips the
// numbers and writes the message into its own slot.
//
// After a failure a rank pushes nothing more: a peer that is only late must not find slots
// overwritten.
#include <algorithm>

#include "engine/cuda/push_kernel.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kLineThreads = 256;
constexpr int kUnitsAhead = 4;  // loads in flight of one thread
// Looks at a flag between two looks at the clock and at the host's abort word (over PCIe).
constexpr int kSpins = 1024;

__device__ void Report(const PushGather& gather, PushFailure failure, uint32_t peer,
                       uint32_t sequence) {
  if (atomicCAS(gather.broken, 0u, static_cast<uint32_t>(failure)) != 0) return;
  gather.control->peer = peer;
  gather.control->sequence = sequence;
  StoreReleaseSystem(&gather.control->failure, static_cast<uint32_t>(failure));
}

// Looks again and again, until `arrived` is true or the wait has an end.
template <typename Arrived>
__device__ __forceinline__ bool WaitForPeer(const PushGather& gather, uint32_t peer,
                                            uint32_t sequence, Arrived arrived) {
  uint64_t start = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (arrived()) return true;
    }
    if (LoadAcquireSystem(&gather.control->abort) != 0) {
      Report(gather, PushFailure::kAborted, peer, sequence);
      return false;
    }
    if (LoadAcquireSystem(gather.broken) != 0) return false;  // another thread has given up
    const uint64_t now = GlobalTimerNs();
    if (start == 0) start = now;
    if (now - start > gather.timeout_ns) {
      Report(gather, PushFailure::kTimeout, peer, sequence);
      return false;
    }
  }
}

// True when a flag that counts up has reached `number`; numbers wrap around.
__device__ __forceinline__ bool HasReached(uint32_t flag, uint32_t number) {
  return static_cast<int32_t>(flag - number) >= 0;
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

// Thread 0, at the start: what number this gather has, and whether it may go on.
struct Begun {
  uint32_t sequence;
  uint32_t stopped;
};
__device__ __forceinline__ Begun Begin(const PushGather& gather) {
  const PushPlace place = gather.places[blockIdx.x];
  uint32_t stopped = *static_cast<const volatile uint32_t*>(gather.broken);
  if (stopped == 0 && place.slot != gather.slot) {
    Report(gather, PushFailure::kOutOfStep, place.slot, place.sequence);
    stopped = 1;
  }
  return {place.sequence, stopped};
}
// All threads, at the end. A gather of few blocks counts for the idle ones too, so that all blocks
// always agree.
__device__ __forceinline__ void End(const PushGather& gather, uint32_t sequence) {
  const uint32_t block = blockIdx.x + threadIdx.x * gridDim.x;
  if (block >= kMaxPushBlocks) return;
  gather.places[block].sequence = sequence + 1;
  gather.places[block].slot = gather.next_slot;
}
// The i-th other rank, i = 1 .. world_size - 1: each rank begins with its next one, so that links
// are used evenly.
__device__ __forceinline__ int OtherRank(const PushGather& gather, int i) {
  const int rank = gather.rank + i;
  return rank < gather.world_size ? rank : rank - gather.world_size;
}

__global__ void __launch_bounds__(kMaxThreads) GatherBlocks(const PushGather gather) {
  // Ranks on one device: kernels of this one that wait for the gather could take the room that the
  // peer's kernels need to get to it.
  if (!gather.shares_device) LaunchDependents();
  GridDependencyWait();

  __shared__ Begun begun;
  const int64_t per_block = (gather.units + gridDim.x - 1) / gridDim.x;
  const int64_t end = min(gather.units, (blockIdx.x + 1) * per_block);
  int64_t unit = blockIdx.x * per_block + threadIdx.x;
  Ahead ahead;
  ahead.Load(gather, unit, end);  // meanwhile thread 0 learns where we are
  if (threadIdx.x == 0) begun = Begin(gather);
  __syncthreads();
  if (begun.stopped != 0) return;

  while (unit < end) {
    for (int i = 1; i < gather.world_size; ++i) {
      ahead.Store(gather.peers[OtherRank(gather, i)].slot_there, unit, end);
    }
    ahead.Store(gather.peers[gather.rank].slot_here, unit, end);
    unit += kUnitsAhead * static_cast<int64_t>(blockDim.x);
    ahead.Load(gather, unit, end);
  }
  __syncthreads();

  const uint32_t sequence = begun.sequence;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < gather.world_size && peer != gather.rank) {
    const uint32_t word = blockIdx.x * kPushFlagWords;
    StoreReleaseSystem(gather.peers[peer].flags_there + word, sequence + 1);
    const uint32_t* flag = gather.peers[peer].flags_here + word;
    WaitForPeer(gather, threadIdx.x, sequence,
                [&] { return HasReached(LoadAcquireSystem(flag), sequence + 1); });
  }
  End(gather, sequence);
}

// A word of a flagged line: a quarter unit of the message and the number of its gather.
__device__ __forceinline__ uint64_t Flagged(uint32_t bits, uint32_t number) {
  return static_cast<uint64_t>(number) << 32 | bits;
}
__device__ __forceinline__ bool HasNumber(uint64_t word, uint32_t number) {
  return static_cast<uint32_t>(word >> 32) == number;
}

__global__ void __launch_bounds__(kLineThreads) GatherLines(const PushGather gather) {
  if (!gather.shares_device) LaunchDependents();  // as above
  GridDependencyWait();

  __shared__ Begun begun;
  const int64_t end = gather.units * (kPushUnitBytes / kPushLineBytes);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto* mine = reinterpret_cast<const uint2*>(gather.mine);
  uint2 bits = make_uint2(0, 0);
  if (first < end) bits = mine[first];  // meanwhile thread 0 learns where we are
  if (threadIdx.x == 0) begun = Begin(gather);
  __syncthreads();
  if (begun.stopped != 0) return;

  const uint32_t number = begun.sequence + 1;
  for (int64_t line = first; line < end; line += step) {
    if (line != first) bits = mine[line];
    const WordPair words = {Flagged(bits.x, number), Flagged(bits.y, number)};
    for (int i = 1; i < gather.world_size; ++i) {
      const PushPeer& peer = gather.peers[OtherRank(gather, i)];
      StoreRelaxedSystem(reinterpret_cast<WordPair*>(peer.lines_there) + line, words);
    }
    reinterpret_cast<uint2*>(gather.peers[gather.rank].slot_here)[line] = bits;
  }
  for (int i = 1; i < gather.world_size; ++i) {
    const int rank = OtherRank(gather, i);
    const PushPeer& peer = gather.peers[rank];
    for (int64_t line = first; line < end; line += step) {
      const WordPair* from = reinterpret_cast<const WordPair*>(peer.lines_here) + line;
      WordPair words = {0, 0};
      const bool has_arrived = WaitForPeer(gather, rank, begun.sequence, [&] {
        words = LoadRelaxedSystem(from);
        return HasNumber(words.first, number) && HasNumber(words.second, number);
      });
      if (!has_arrived) return;
      reinterpret_cast<uint2*>(peer.slot_here)[line] =
          make_uint2(static_cast<uint32_t>(words.first), static_cast<uint32_t>(words.second));
    }
  }
  End(gather, begun.sequence);
}

struct Shape {
  int blocks;
  int threads;
};

// Small messages: one unit or two for each thread. Large ones: as many blocks as have flags.
Shape BlocksShape(int64_t units) {
  constexpr int64_t kSmall = 2048;  // 32 KiB
  if (units <= kSmall) return {static_cast<int>(std::clamp<int64_t>(units / 128, 1, 8)), 128};
  return {static_cast<int>(std::clamp<int64_t>(units / 512, 8, kMaxPushBlocks)), kMaxThreads};
}

// One line for each thread, as long as there are blocks.
Shape LinesShape(int64_t units) {
  const int64_t lines = units * (kPushUnitBytes / kPushLineBytes);
  const int64_t blocks = (lines + kLineThreads - 1) / kLineThreads;
  return {static_cast<int>(std::clamp<int64_t>(blocks, 1, kMaxPushBlocks)), kLineThreads};
}

}  // namespace

void LaunchPushGather(const LaunchContext& launch, const PushGather& gather) {
  const Shape shape = gather.is_flagged ? LinesShape(gather.units) : BlocksShape(gather.units);
  Launch(launch, dim3(shape.blocks), dim3(shape.threads), 0,
         gather.is_flagged ? GatherLines : GatherBlocks, gather);
}

}  // namespace ds4::cuda
