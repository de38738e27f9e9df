#include "engine/kernels/indexer.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "engine/kernels/isa.h"

namespace ds4 {
namespace {

// Rises with the order of choice: a larger score first, then the lower index. -0 equals +0, and NaN
// comes last.
uint64_t ChoiceKey(float score, int64_t index) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t rising = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  const uint32_t falling = score != score ? ~0u : ~rising;
  return static_cast<uint64_t>(falling) << 32 | static_cast<uint32_t>(index);
}

}  // namespace

void IndexerScores(const float* q, const float* head_weights, int64_t num_heads, int64_t dim,
                   const float* keys, int64_t num_keys, float scale, float* out) {
  ActiveKernels().indexer_scores(q, head_weights, num_heads, dim, keys, num_keys, scale, out);
}

int64_t TopKIndices(const float* scores, int64_t n, int64_t k, int32_t* out) {
  const int64_t count = std::max<int64_t>(0, std::min(k, n));
  thread_local std::vector<uint64_t> order;  // keeps its memory from call to call
  order.clear();
  for (int64_t i = 0; i < n; ++i) order.push_back(ChoiceKey(scores[i], i));
  if (count < n) std::nth_element(order.begin(), order.begin() + count, order.end());
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<int32_t>(order[static_cast<size_t>(i)] & 0xffffffffu);
  }
  std::sort(out, out + count);
  return count;
}

}  // namespace ds4
