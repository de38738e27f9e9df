// Rows of activations, several columns a thread: loads, the norm over a row, and the forms of
// activation.h. Included by .cu files only.
#pragma once

#include "engine/base/check.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/quantize.cuh"

namespace ds4::cuda {

inline constexpr int kThreadCols = 8;
inline constexpr int kMaxRowThreads = 1024;
inline constexpr int kMaxRowCols = kThreadCols * kMaxRowThreads;

__device__ __forceinline__ uint32_t MagnitudeBits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// The int8 form of this lane's columns from c on of row t: QuantizeBlock32's rule with 32 / kCols
// lanes a block.
template <int kCols>
__device__ __forceinline__ void StoreQuantized(const ActivationView& out, int t, int c,
                                               const float (&v)[kCols], bool wanted) {
  static_assert(kCols == 4 || kCols == 8);
  constexpr int kLanes = 32 / kCols;
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kCols; ++i) magnitude = max(magnitude, MagnitudeBits(v[i]));
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(kFullMask, magnitude, lane));
  }
  const float amax = __uint_as_float(magnitude);
  // Small code, no branches: zeros have a numerator of zero, and amax / 127 is a product and its
  // correction, which is the quotient's rounding for every amax that counts.
  constexpr float kShare = 1.0f / 127.0f;
  const bool zeros = amax < kTinyAmax;
  const float inverse = (zeros ? 0.0f : 127.0f) / fmaxf(amax, kTinyAmax);
  const float product = amax * kShare;
  const float scale = zeros ? 0.0f : fmaf(fmaf(-product, 127.0f, amax), kShare, product);
  uint32_t words[kCols / 4] = {};
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    const int q = static_cast<int>(fminf(fmaxf(rintf(v[i] * inverse), -127.0f), 127.0f));
    sum += q;
    words[i / 4] |= static_cast<uint32_t>(q & 0xff) << (8 * (i % 4));
  }
#pragma unroll
  for (int lane = 1; lane < kLanes / 2; lane *= 2) sum += __shfl_xor_sync(kFullMask, sum, lane);
  // Rows of a tile stand side by side, and so do tiles: a block of a row is eight words.
  const int padded = 8 * TilesOf(out), at = c / 32 * padded + t;
  uint32_t* const to = reinterpret_cast<uint32_t*>(out.q) + 8 * at + c % 32 / 4;
  if constexpr (kCols == 4) {
    if (wanted) *to = words[0];
  } else {
    if (wanted) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
  if (wanted && c % 32 == 0) out.scale[at] = scale;
  if (wanted && out.sums != nullptr && c % 16 == 0) {
    out.sums[c / 16 * padded + t] = scale * static_cast<float>(sum);
  }
}

// This lane's columns from c (a multiple of kCols) on of row t in all forms that `out` has. Whole
// warps, lanes in the order of columns: 32 / kCols lanes share a block of 32. Not `wanted`: all of
// the work, but no store.
template <int kCols>
__device__ __forceinline__ void StoreForms(const ActivationView& out, int t, int c,
                                           const float (&v)[kCols], bool wanted = true) {
  const int64_t at = static_cast<int64_t>(t) * out.cols + c;
  if (out.f32 != nullptr) {
    float4* to = reinterpret_cast<float4*>(out.f32 + at);
#pragma unroll
    for (int i = 0; i < kCols; i += 4) {
      if (wanted) to[i / 4] = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
  }
  if (out.bf16 != nullptr) {
    uint32_t words[kCols / 2];
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) words[i] = FloatsToBf162(v[2 * i], v[2 * i + 1]);
    if constexpr (kCols == 4) {
      if (wanted) *reinterpret_cast<uint2*>(out.bf16 + at) = make_uint2(words[0], words[1]);
    } else {
      if (wanted)
        *reinterpret_cast<uint4*>(out.bf16 + at) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  if (out.q != nullptr) StoreQuantized(out, t, c, v, wanted);
}

// Columns [c, c + 8) of a row of `cols`, zeros past its end; `vectors`: 16-byte loads fit.
__device__ __forceinline__ void LoadColumns(const float* row, int c, int cols, bool vectors,
                                            float (&v)[kThreadCols]) {
  if (vectors && c + kThreadCols <= cols) {
    const float4 lo = *reinterpret_cast<const float4*>(row + c);
    const float4 hi = *reinterpret_cast<const float4*>(row + c + 4);
    v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
    v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) v[i] = c + i < cols ? row[c + i] : 0.0f;
}

__device__ __forceinline__ float SumOfSquares(const float (&v)[kThreadCols]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) sum = fmaf(v[i], v[i], sum);
  return sum;
}

// The sum of one value of each of the block's first `num_warps` warps; every thread gets it.
__device__ __forceinline__ float SumOfWarps(const float* of_warp, int num_warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  return WarpSum(lane < num_warps ? of_warp[lane] : 0.0f);
}

__device__ __forceinline__ void ScaleColumns(float factor, const float (&weight)[kThreadCols],
                                             float (&v)[kThreadCols]) {
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) v[i] = v[i] * factor * weight[i];
}

// Row t of a norm by one block, of at least norm.out.cols / kThreadCols threads, to its end. Comes
// before the block's GridDependencyWait. squares: shared, a word for each warp.
__device__ __forceinline__ void NormRow(const RowNorm& norm, int t, bool vectors, float* squares) {
  const int c = static_cast<int>(threadIdx.x) * kThreadCols;
  float weight[kThreadCols], v[kThreadCols];
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) weight[i] = 1.0f;
  if (norm.weight != nullptr) LoadColumns(norm.weight, c, norm.cols, false, weight);
  GridDependencyWait();
  LoadColumns(norm.x + t * norm.stride, c, norm.cols, vectors, v);
  const float square = WarpSum(SumOfSquares(v));
  if (threadIdx.x % kWarpSize == 0) squares[threadIdx.x / kWarpSize] = square;
  __syncthreads();
  const float sum = SumOfWarps(squares, static_cast<int>(blockDim.x) / kWarpSize);
  ScaleColumns(1.0f / sqrtf(sum / static_cast<float>(norm.cols) + norm.eps), weight, v);
  if (c < norm.out.cols) StoreForms(norm.out, t, c, v);  // whole warps: columns come in 256s
}

// Threads of a row kernel over `cols` columns, eight a thread.
inline unsigned RowThreads(int64_t cols) {
  CHECK(cols % kColumnGrain == 0 && cols <= kMaxRowCols)
      << cols << " columns, must be a multiple of " << kColumnGrain << " up to " << kMaxRowCols;
  return static_cast<unsigned>(cols / kThreadCols);
}

inline bool VectorsFit(const float* x, int64_t stride, int cols) {
  return reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 4 == 0 && cols % 4 == 0;
}

}  // namespace ds4::cuda
