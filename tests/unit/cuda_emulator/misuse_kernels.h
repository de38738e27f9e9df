// Kernels with one mistake each, for emulator_test.cc.
#pragma once

#include <cstdint>
#include <string>

#include "engine/cuda/launch.h"

namespace ds4::cuda::testing {

// See the kernel of the same name in misuse_kernels.cu. data: 4,096 bytes.
enum class Misuse {
  kNoDependencyWait,
  kLaneMissing,
  kTwoOperationsMeet,
  kTwoBarriersMeet,
  kThreadMissing,
  kWarpAndBlockBarrier,
  kBarrierOfTooMany,
  kBarrierOfHalfWarps,
  kBulkOfOtherSize,
  kBulkOfNobody,
  kPartOfAWarp,
  kPartOfTheMask,
  kUnalignedCopy,
  kUnalignedLoad,
  kUnalignedMatrixRow,
};
void LaunchMisuse(const LaunchContext& launch, Misuse misuse, std::byte* data);

// out[0..31]: what is in fresh dynamic shared memory; out[32..63]: what a copy has put there before
// it was waited for; out[64..95]: after. data: 32 words.
void LaunchLookEarly(const LaunchContext& launch, const uint32_t* data, uint32_t* out);
// Reads one word at data[index] or, when shared, of a block of 64 bytes of shared memory.
void LaunchReadAt(const LaunchContext& launch, const uint32_t* data, int index, bool shared,
                  uint32_t* out);

}  // namespace ds4::cuda::testing
