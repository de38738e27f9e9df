#include "engine/cuda/simt.h"
#include "tests/unit/cuda_emulator/misuse_kernels.h"

namespace ds4::cuda::testing {
namespace {

__global__ void NoDependencyWait(std::byte*) {
  LaunchDependents();
  if (threadIdx.x != 5) GridDependencyWait();
}

__global__ void LaneMissing(std::byte*) {
  GridDependencyWait();
  if (threadIdx.x % 32 == 7) return;
  WarpSum(1.0f);
}

__global__ void TwoOperationsMeet(std::byte*) {
  GridDependencyWait();
  if (threadIdx.x < 16) {
    __syncwarp();
  } else {
    __shfl_sync(kFullMask, 1, 0);
  }
}

__global__ void TwoBarriersMeet(std::byte*) {
  GridDependencyWait();
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void ThreadMissing(std::byte*) {
  GridDependencyWait();
  if (threadIdx.x == 63) return;
  __syncthreads();
}

__global__ void BarrierOfTooMany(std::byte*) {
  GridDependencyWait();
  SyncThreads(1, 96);
}

__global__ void BarrierOfHalfWarps(std::byte*) {
  GridDependencyWait();
  if (threadIdx.x % 32 < 16) SyncThreads(1, 32);
}

__global__ void Bulk(std::byte* data, uint32_t expected, uint32_t copied) {
  GridDependencyWait();
  __shared__ __align__(128) std::byte to[64];
  __shared__ BulkBarrier barrier;
  if (threadIdx.x == 0) {
    InitBulk(&barrier);
    FenceBulk();
    if (expected != 0) ExpectBulk(&barrier, expected);
    if (copied != 0) CopyBulk(to, data, copied, &barrier);
  }
  __syncthreads();
  WaitBulk(&barrier, 0);
}

__global__ void WarpAndBlockBarrier(std::byte*) {
  GridDependencyWait();
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

__global__ void Nothing(std::byte*) { GridDependencyWait(); }

__global__ void PartOfTheMask(std::byte*) {
  GridDependencyWait();
  __shfl_xor_sync(0xffffu, 1, 1);
}

__global__ void UnalignedCopy(std::byte* data) {
  DS4_DYNAMIC_SHARED(shared);
  GridDependencyWait();
  CopyAsync16(shared, data + 8);
}

__global__ void UnalignedLoad(std::byte* data) {
  GridDependencyWait();
  const uint4 v = LoadStream16(data + 4);
  data[0] = static_cast<std::byte>(v.x);
}

__global__ void UnalignedMatrixRow(std::byte*) {
  DS4_DYNAMIC_SHARED(shared);
  GridDependencyWait();
  uint32_t r[4];
  LoadMatrix4(r, shared + 8 * threadIdx.x);
}

__global__ void LookEarly(const uint32_t* data, uint32_t* out) {
  DS4_DYNAMIC_SHARED(shared);
  const auto* words = reinterpret_cast<const uint32_t*>(shared);
  GridDependencyWait();
  out[threadIdx.x] = words[threadIdx.x];
  if (threadIdx.x < 8) CopyAsync16(shared + 16 * threadIdx.x, data + 4 * threadIdx.x);
  CopyAsyncCommit();
  __syncwarp();
  out[32 + threadIdx.x] = words[threadIdx.x];
  __syncwarp();
  CopyAsyncWait<0>();
  __syncwarp();
  out[64 + threadIdx.x] = words[threadIdx.x];
}

__global__ void ReadAt(const uint32_t* data, int index, bool from_shared, uint32_t* out) {
  DS4_DYNAMIC_SHARED(shared);
  GridDependencyWait();
  const uint32_t* from = from_shared ? reinterpret_cast<const uint32_t*>(shared) : data;
  if (threadIdx.x == 0) *out = from[index];
}

}  // namespace

void LaunchMisuse(const LaunchContext& launch, Misuse misuse, std::byte* data) {
  constexpr size_t kShared = 1024;
  switch (misuse) {
    case Misuse::kNoDependencyWait:
      return Launch(launch, 2, 64, kShared, NoDependencyWait, data);
    case Misuse::kLaneMissing:
      return Launch(launch, 2, 64, kShared, LaneMissing, data);
    case Misuse::kTwoOperationsMeet:
      return Launch(launch, 2, 64, kShared, TwoOperationsMeet, data);
    case Misuse::kTwoBarriersMeet:
      return Launch(launch, 2, 64, kShared, TwoBarriersMeet, data);
    case Misuse::kThreadMissing:
      return Launch(launch, 2, 64, kShared, ThreadMissing, data);
    case Misuse::kWarpAndBlockBarrier:
      return Launch(launch, 2, 64, kShared, WarpAndBlockBarrier, data);
    case Misuse::kBarrierOfTooMany:
      return Launch(launch, 2, 64, kShared, BarrierOfTooMany, data);
    case Misuse::kBarrierOfHalfWarps:
      return Launch(launch, 2, 64, kShared, BarrierOfHalfWarps, data);
    case Misuse::kBulkOfOtherSize:
      return Launch(launch, 2, 64, kShared, Bulk, data, 32u, 48u);
    case Misuse::kBulkOfNobody:
      return Launch(launch, 2, 64, kShared, Bulk, data, 0u, 0u);
    case Misuse::kPartOfAWarp:
      return Launch(launch, 2, 48, kShared, Nothing, data);
    case Misuse::kPartOfTheMask:
      return Launch(launch, 2, 64, kShared, PartOfTheMask, data);
    case Misuse::kUnalignedCopy:
      return Launch(launch, 2, 64, kShared, UnalignedCopy, data);
    case Misuse::kUnalignedLoad:
      return Launch(launch, 2, 64, kShared, UnalignedLoad, data);
    case Misuse::kUnalignedMatrixRow:
      return Launch(launch, 2, 64, kShared, UnalignedMatrixRow, data);
  }
}

void LaunchLookEarly(const LaunchContext& launch, const uint32_t* data, uint32_t* out) {
  Launch(launch, 1, 32, 128, LookEarly, data, out);
}

void LaunchReadAt(const LaunchContext& launch, const uint32_t* data, int index, bool shared,
                  uint32_t* out) {
  Launch(launch, 1, 32, 64, ReadAt, data, index, shared, out);
}

}  // namespace ds4::cuda::testing
