// Rounds activation rows to int8 blocks of 32 for Q8_0 weights.
//   d = max|x| / 127 (float32); q = round-half-away(x / d), computed as x * (1/d), in [-127, 127].
//   A block whose d is below 2^-126 (its 1/d may be no float) becomes d = 0 and all zeros.
#pragma once

#include <cstdint>

#include "engine/kernels/thread_pool.h"

namespace ds4 {

// x: [num_rows, cols], row stride x_stride values; q: [num_rows, cols]; scale: [num_rows, cols/32].
// cols % 32 == 0. Non-finite input gives unspecified numbers, never a crash.
void QuantizeRows(const float* x, int64_t num_rows, int64_t cols, int64_t x_stride, int8_t* q,
                  float* scale, ThreadPool& pool);

}  // namespace ds4
