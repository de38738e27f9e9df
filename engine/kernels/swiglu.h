#pragma once

#include <cstdint>

#include "engine/kernels/thread_pool.h"

namespace ds4 {

// out = silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight[t] (spec 2.9; the gate is
// clamped above only). gate, up, out: [num_rows, dim], `out` may be `gate`; row_weight: [num_rows]
// or null for 1.
void SwiGlu(const float* gate, const float* up, const float* row_weight, int64_t num_rows,
            int64_t dim, float limit, float* out, ThreadPool& pool);

}  // namespace ds4
