#pragma once

#include <cstdint>
#include <span>

namespace ds4 {

// Pools the rows of one window per channel: out[d] = sum_i softmax_i(scores[i][d]) * values[i][d]
// (spec 2.7). values, scores: num_slots pointers to [dim] vectors, in slot order; a null pointer is
// an empty slot (score -inf). At least one slot is filled. out: [dim].
void PoolWindow(std::span<const float* const> values, std::span<const float* const> scores,
                int64_t dim, float* out);

}  // namespace ds4
