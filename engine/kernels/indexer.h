// The lightning indexer's scores and choice (spec 2.8).
#pragma once

#include <cstdint>

#include "engine/kernels/thread_pool.h"

namespace ds4 {

// out[w] = scale * sum_h head_weights[h] * max(0, dot(q[h], keys[w])), heads in rising order.
//   q: [num_heads, dim]; keys: [num_keys, dim] contiguous; out: [num_keys].
void IndexerScores(const float* q, const float* head_weights, int64_t num_heads, int64_t dim,
                   const float* keys, int64_t num_keys, float scale, float* out);

// The k largest of scores[0, n), lower index first on ties; indices written to out in rising order.
// Returns how many: min(k, n).
int64_t TopKIndices(const float* scores, int64_t n, int64_t k, int32_t* out);

}  // namespace ds4
