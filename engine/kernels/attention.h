// Attention of many heads over one shared key-value vector per position, with sinks (spec 2.6).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/kernels/thread_pool.h"

namespace ds4 {

// Keys of one query row, in the order in which they are added: pointers to [head_dim] vectors.
using KeyList = std::vector<const float*>;

// For each query row t and head a: s_j = scale * dot(q[t,a], key_j); softmax over the s_j with
// sink[a] as one more score that adds to the denominator only; out[t,a] = sum_j p_j key_j.
//   q, out: [num_rows, num_heads, head_dim]; sinks: [num_heads]; keys: one list per row.
// dot is added like an F32 dot product (matmul.h); the exponentials and the weighted sum are added
// in list order, so a row's result depends on its own list alone.
void Attend(const float* q, const float* sinks, std::span<const KeyList> keys, int64_t num_rows,
            int64_t num_heads, int64_t head_dim, float scale, float* out, ThreadPool& pool);

}  // namespace ds4
