// What every launch function takes. Launch functions return nothing: a bad launch shows in
// LaunchStatus() or at the stream's next Synchronize.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/runtime.h"

namespace ds4::cuda {

// Weights that a kernel further on will read. Kernels that leave the memory idle ask for them, so
// that L2 has them in time. A hint: nothing depends on it.
struct WeightSpan {
  const std::byte* data = nullptr;  // 16-byte aligned
  int64_t bytes = 0;                // a multiple of 16
};
struct WeightSpans {
  static constexpr int kMax = 8;
  int count = 0;
  WeightSpan spans[kMax];

  // Left out when there is no room.
  void Add(const std::byte* data, int64_t bytes) {
    if (count < kMax && data != nullptr) spans[count++] = {data, bytes};
  }
};

struct LaunchContext {
  Stream* stream = nullptr;
  int num_sms = 1;
  // Blocks of the next kernel that need much room on an SM: a product of few rows leaves it to
  // them.
  int spare_blocks = 0;
  // Programmatic dependent launch: a kernel may start while the one before it ends, and waits
  // (GridDependencyWait) before it reads what that one wrote. Every kernel must call
  // LaunchDependents() early and GridDependencyWait() before its first read of, or write to,
  // anything but weights, on every path, whether or not this is set.
  bool overlap = true;
};

}  // namespace ds4::cuda
