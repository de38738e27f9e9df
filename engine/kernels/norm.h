#pragma once

#include <cstdint>

#include "engine/kernels/thread_pool.h"

namespace ds4 {

// y = x / sqrt(mean(x^2) + eps) * weight, row by row (RMSNorm, Zhang and Sennrich 2019; spec R_g).
//   x, y: [num_rows, dim] contiguous, may be the same; weight: [dim] or null for none.
// The sum of squares is added like an F32 dot product (matmul.h).
void RmsNorm(const float* x, const float* weight, int64_t num_rows, int64_t dim, float eps,
             float* y, ThreadPool& pool);

}  // namespace ds4
