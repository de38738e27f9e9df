#include "engine/kernels/attention.h"

#include <algorithm>

#include "engine/base/check.h"
#include "engine/kernels/isa.h"

namespace ds4 {
namespace {

// Heads that share one pass over the keys.
constexpr int64_t kHeadBlock = 16;
// Multiply-adds below which the caller does everything alone.
constexpr int64_t kMinParallelWork = 64 << 10;

// Blocks of fewer heads when there would be less than one block for each thread.
int64_t HeadBlock(int64_t num_rows, int64_t num_heads, int64_t threads) {
  const int64_t per_thread = (num_rows * num_heads + threads - 1) / threads;
  return std::clamp<int64_t>(per_thread, 1, std::min(kHeadBlock, num_heads));
}

int64_t Work(std::span<const KeyList> keys, int64_t num_heads, int64_t head_dim) {
  int64_t num_keys = 0;
  for (const KeyList& list : keys) num_keys += static_cast<int64_t>(list.size());
  return 2 * num_keys * num_heads * head_dim;
}

}  // namespace

void Attend(const float* q, const float* sinks, std::span<const KeyList> keys, int64_t num_rows,
            int64_t num_heads, int64_t head_dim, float scale, float* out, ThreadPool& pool) {
  CHECK(static_cast<int64_t>(keys.size()) == num_rows)
      << keys.size() << " key lists for " << num_rows << " rows";
  if (num_rows == 0 || num_heads == 0) return;
  const KernelTable& kernels = ActiveKernels();
  const int64_t head_block = HeadBlock(num_rows, num_heads, pool.num_threads());
  const int64_t blocks = (num_heads + head_block - 1) / head_block;
  const int64_t items = num_rows * blocks;
  const int64_t min_items = Work(keys, num_heads, head_dim) < kMinParallelWork ? items + 1 : 1;
  pool.ParallelFor(items, min_items, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scores;  // keeps its memory from call to call
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / blocks;
      const int64_t a = item % blocks * head_block;
      const int64_t count = std::min(head_block, num_heads - a);
      const KeyList& list = keys[static_cast<size_t>(t)];
      if (scores.size() < list.size() * static_cast<size_t>(count)) {
        scores.resize(list.size() * static_cast<size_t>(count));
      }
      const int64_t offset = (t * num_heads + a) * head_dim;
      kernels.attend({.q = q + offset,
                      .sinks = sinks + a,
                      .keys = list.data(),
                      .num_keys = static_cast<int64_t>(list.size()),
                      .num_heads = count,
                      .head_dim = head_dim,
                      .scale = scale,
                      .scores = scores.data(),
                      .out = out + offset});
    }
  });
}

}  // namespace ds4
