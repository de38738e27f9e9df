// What the ends and the starts of sites share: the shape of a site, and sums over lanes. Included
// by .cu files only.
#pragma once

#include "engine/base/check.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

inline constexpr int kStreams = kMaxDeviceStreams;
inline constexpr int kMaxMixes = 2 * kStreams + kStreams * kStreams;
static_assert(kGramSlot == kStreams && kStartSlots == kGramSlot + 3 * kStreams);
static_assert(kRestSlots == kMaxMixes - kStreams);

struct HcShape {
  int streams = 0;
  int dim = 0;
  int parts = 0;
  float hc_eps = 0;
  float norm_eps = 0;
};

inline HcShape ShapeOf(const HcParams& params) {
  CHECK(params.num_streams >= 1 && params.num_streams <= kStreams)
      << params.num_streams << " streams, at most " << kStreams;
  CHECK(params.hidden_dim >= 1 && params.hidden_dim % 8 == 0)
      << "hidden_dim " << params.hidden_dim << " is no multiple of 8";
  CHECK(params.sinkhorn_iterations >= 1) << params.sinkhorn_iterations << " Sinkhorn iterations";
  return {params.num_streams, params.hidden_dim, NumParts(params), params.hc_eps, params.norm_eps};
}

inline void CheckFn(const HcShape& shape, const PlainMatrix& fn) {
  CHECK(fn.dtype == DType::kF32 || fn.dtype == DType::kF16 || fn.dtype == DType::kBF16)
      << "mixing weights are " << Info(fn.dtype).name << ", must be F32, F16 or BF16";
  CHECK(fn.rows == shape.streams || fn.rows == shape.streams * (2 + shape.streams))
      << fn.rows << " mixing rows for " << shape.streams << " streams";
  CHECK(fn.cols == int64_t{shape.streams} * shape.dim)
      << fn.cols << " mixing columns for " << shape.streams << " streams of " << shape.dim;
  CHECK(reinterpret_cast<uintptr_t>(fn.data) % 16 == 0) << "mixing weights at an odd address";
}

// Sums each v[i] over the lanes that differ in the bits kFirst, kFirst / 2, ..., kLast: the tree of
// WarpSum in that order, but all sums together in fewer shuffles, since at each step a lane goes on
// with half of them. A lane gets the sum of v[FoldedSum<kFirst>(lane)].
template <int kFirst, int kLast, int kCount>
__device__ __forceinline__ float FoldSums(int lane, const float (&v)[kCount]) {
  const bool odd = (lane & kFirst) != 0;
  float sums[(kCount + 1) / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float keep = odd ? v[2 * i + 1] : v[2 * i];
    const float send = odd ? v[2 * i] : v[2 * i + 1];
    sums[i] = keep + __shfl_xor_sync(kFullMask, send, kFirst);
  }
  if constexpr (kCount % 2 != 0) {
    constexpr int kOdd = kCount - 1;
    sums[kOdd / 2] = v[kOdd] + __shfl_xor_sync(kFullMask, v[kOdd], kFirst);
  }
  if constexpr (kFirst > kLast) {
    return FoldSums<kFirst / 2, kLast>(lane, sums);
  } else {
    static_assert(kCount <= 2);
    return sums[0];
  }
}
// Which sum of up to 16 it is: the lane's bits from kFirst down are the number's bits upwards.
// Several lanes can get the same sum, some of them under numbers that none has.
template <int kFirst>
__device__ __forceinline__ int FoldedSum(int lane) {
  int number = 0;
#pragma unroll
  for (int bit = 0; bit < 4 && kFirst >> bit > 0; ++bit) {
    number |= (lane & kFirst >> bit) != 0 ? 1 << bit : 0;
  }
  return number;
}

}  // namespace ds4::cuda
