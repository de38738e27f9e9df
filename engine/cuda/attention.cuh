// What the attention kernels share: arguments, cache elements, rotation, a row's list of keys, and
// how splits are put together.
#pragma once

#include "engine/cuda/attention.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

// Divides by a number that the host knows: a division of its own is a long chain of instructions.
struct Divider {
  uint32_t factor = 0;
  int shift = 0;

  __host__ __device__ constexpr int Quotient(int n) const {  // n >= 0
    return static_cast<int>(static_cast<uint64_t>(n) * factor >> shift);
  }
};
// divisor >= 1. The factor is 2^shift / divisor rounded up, which is exact for 31 bits when it has
// 32 itself.
constexpr Divider MakeDivider(int divisor) {
  Divider made;
  made.shift = 31;
  while (int64_t{1} << (made.shift - 31) < divisor) ++made.shift;
  const uint64_t power = uint64_t{1} << made.shift;
  made.factor = static_cast<uint32_t>((power + divisor - 1) / divisor);
  return made;
}
static_assert(MakeDivider(1).Quotient(2147483647) == 2147483647);
static_assert(MakeDivider(128).Quotient(2147483647) == 16777215);
static_assert(MakeDivider(704).Quotient(703) == 0 && MakeDivider(704).Quotient(704) == 1);
static_assert(MakeDivider(3).Quotient(2147483645) == 715827881);
static_assert(MakeDivider(3).Quotient(2147483646) == 715827882);
static_assert(MakeDivider(1431655765).Quotient(1431655764) == 0);
static_assert(MakeDivider(2147483647).Quotient(2147483646) == 0);
static_assert(MakeDivider(2147483647).Quotient(2147483647) == 1);

// What the attention kernels take.
struct AttentionArgs {
  AttentionParams params;
  Divider by_ratio;  // unless that is 0
  Divider by_ring;
  StepRows step;
  RopeView rope;
  AttentionJob job;
  LayerCache cache;
  float scale = 0;    // of scores, 1 / sqrt(head_dim)
  int first_row = 0;  // of the launch, where the scratch holds fewer rows than the step
  // One split's results, in the scratch.
  int splits = 0;             // room for each row and head
  float* partial = nullptr;   // [rows][heads][splits][head_dim], weighted sums
  float2* softmax = nullptr;  // [rows][heads][splits], (max, sum)

  __device__ int64_t SplitIndex(int t, int head, int split) const {
    return (static_cast<int64_t>(t - first_row) * params.num_heads + head) * splits + split;
  }
};

// Written with explicit fused operations, so that every kernel that inlines it gives the same bits.
__device__ __forceinline__ float2 RotatePair(float2 x, float cos, float sin) {
  return make_float2(fmaf(x.x, cos, -(x.y * sin)), fmaf(x.x, sin, x.y * cos));
}

__device__ __forceinline__ float LoadKv(const void* data, int64_t index, KvType type) {
  if (type == KvType::kF32) return static_cast<const float*>(data)[index];
  return Bf16ToFloat(static_cast<const uint16_t*>(data)[index]);
}

// Two neighbouring channels; `index` even.
__device__ __forceinline__ void StoreKvPair(void* data, int64_t index, KvType type, float2 x) {
  if (type == KvType::kF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(data) + index) = x;
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(data) + index) = FloatsToBf162(x.x, x.y);
  }
}

// The keys of one row in the order of attention.h: window rows by rising position, then compressed
// rows. A key's id is its row r in cache.window, counted over all slots, or -1 - r for row r of
// cache.compressor.rows: 32 bits, for 2^31 rows fit no device.
struct RowKeys {
  int num_window = 0;
  int total = 0;
  int first_ring_row = 0;
  int ring = 0;
  int window_row = 0;      // of ring row 0
  int compressed_row = 0;  // of compressed row 0
  const int32_t* picks = nullptr;

  // Which compressed row key j is; anything where it is none.
  __device__ __forceinline__ int Compressed(int j) const {
    const int w = j - num_window;
    return picks != nullptr && w >= 0 && j < total ? picks[w] : w;
  }
  // Key j, which is row `compressed` if it is a compressed one. Past the last key it is some key of
  // the row.
  __device__ __forceinline__ int Id(int j, int compressed) const {
    const int row = first_ring_row + min(j, num_window - 1);
    const int id = window_row + (row < ring ? row : row - ring);
    return j < num_window || j >= total ? id : -1 - compressed_row - compressed;
  }
  __device__ __forceinline__ int Id(int j) const { return Id(j, Compressed(j)); }
};

// What a row's keys follow from. The loads stay where they stand.
struct RowPlace {
  int slot = 0;  // of a row that only fills up the batch: 0; nobody uses what it computes
  int pos = 0;
  int picked = 0;
};
__device__ __forceinline__ RowPlace LoadPlace(const AttentionArgs& args, int t) {
  RowPlace place;
  place.slot = max(static_cast<int>(LoadEarly4(args.step.slot + t)), 0);
  place.pos = static_cast<int>(LoadEarly4(args.step.pos + t));
  if (args.job.pick_count != nullptr) {
    place.picked = static_cast<int>(LoadEarly4(args.job.pick_count + t));
  }
  return place;
}

__device__ __forceinline__ RowKeys KeysOfRow(const AttentionArgs& args, int t, RowPlace place) {
  const AttentionJob& job = args.job;
  RowKeys keys;
  keys.num_window = min(place.pos + 1, args.params.sliding_window);
  keys.ring = args.cache.ring;
  const int first_pos = place.pos + 1 - keys.num_window;
  keys.first_ring_row = first_pos - args.by_ring.Quotient(first_pos) * keys.ring;
  keys.window_row = place.slot * keys.ring;
  keys.total = keys.num_window;
  if (args.params.ratio > 0) {
    keys.compressed_row = place.slot * args.cache.compressor.max_rows;
    keys.total += job.picks != nullptr ? place.picked : args.by_ratio.Quotient(place.pos + 1);
    if (job.picks != nullptr) {
      keys.picks = job.picks + static_cast<int64_t>(t) * args.params.index_top_k;
    }
  }
  return keys;
}
__device__ __forceinline__ RowKeys KeysOfRow(const AttentionArgs& args, int t) {
  return KeysOfRow(args, t, LoadPlace(args, t));
}

// The address of key `id` in caches of elements T.
template <typename T>
__device__ __forceinline__ const T* KeyAddress(const LayerCache& cache, int head_dim, int id) {
  if (id >= 0) return static_cast<const T*>(cache.window) + static_cast<int64_t>(id) * head_dim;
  return static_cast<const T*>(cache.compressor.rows) + static_cast<int64_t>(-1 - id) * head_dim;
}

// Running softmax: the state after some splits takes in one more.
struct FoldFactors {
  float old_part = 0;  // for what was summed so far
  float new_part = 0;  // for the split
};
__device__ __forceinline__ FoldFactors FoldSplit(float split_max, float split_sum,
                                                 float& max_so_far, float& sum_so_far) {
  const float top = fmaxf(max_so_far, split_max);
  const FoldFactors factors{expf(max_so_far - top), expf(split_max - top)};
  sum_so_far = fmaf(split_sum, factors.new_part, sum_so_far * factors.old_part);
  max_so_far = top;
  return factors;
}
__device__ __forceinline__ float FoldValue(float sum, float split_sum, FoldFactors factors) {
  return fmaf(split_sum, factors.new_part, sum * factors.old_part);
}

// What turns the sum over all splits into the head's output: the sink joins the denominator.
__device__ __forceinline__ float FinalFactor(float max, float sum, float sink) {
  const float top = fmaxf(max, sink);
  const float part = expf(max - top);
  return part / fmaf(sum, part, expf(sink - top));
}

}  // namespace ds4::cuda
