// Streams: embedding, mixing, collapse; and the small row operations around them.
//
// A site's end (HcPost) has one thread a column of a part; it keeps fn's values of its column for
// all streams in registers, so a tile of rows reads fn once. A site's start (HcPre) has one block a
// row: every warp works out the same few mixes from the partials, then the streams that were loaded
// meanwhile collapse and are normed, while one warp more balances comb (Sinkhorn), which only the
// site's end needs.
#include <algorithm>
#include <cmath>

#include "engine/base/check.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/quantize.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kStreams = kMaxDeviceStreams;
constexpr int kMaxMixes = 2 * kStreams + kStreams * kStreams;
constexpr int kPartialSlots = 32;
constexpr int kSquaresSlot = 31;
constexpr int kRowBatch = 4;      // rows whose streams are loaded together
constexpr int kPartialWarps = 8;  // that add partials in HcPre
constexpr int kThreadCols = 8;    // columns of a thread in row operations
constexpr int kMaxRowThreads = 1024;
constexpr int kMaxRowCols = kThreadCols * kMaxRowThreads;

struct HcShape {
  int streams = 0;
  int dim = 0;
  int parts = 0;
  int iterations = 0;
  float hc_eps = 0;
  float norm_eps = 0;
};

// The tree of AddRoots for the device: after root i, merges[i] times the two topmost sums of a
// stack become one.
struct RootProgram {
  int count = 0;
  const float* data[RootSet::kMax] = {};
  int merges[RootSet::kMax] = {};
};
constexpr int kRootStack = 5;  // 16 roots at most: at most 5 sums wait
static_assert(RootSet::kMax == 1 << (kRootStack - 1));

// ---- Parts: columns of all streams ----

template <DType kType>
__device__ __forceinline__ float PlainValue(const std::byte* data, int64_t i) {
  if constexpr (kType == DType::kF32) {
    return reinterpret_cast<const float*>(data)[i];
  } else if constexpr (kType == DType::kF16) {
    return HalfToFloat(reinterpret_cast<const uint16_t*>(data)[i]);
  } else {
    return Bf16ToFloat(reinterpret_cast<const uint16_t*>(data)[i]);
  }
}

using MixColumn = float[kMaxMixes][kStreams];

template <DType kType>
__device__ __forceinline__ void LoadMixColumnOf(const PlainMatrix& fn, const HcShape& shape, int d,
                                                MixColumn& w) {
#pragma unroll
  for (int i = 0; i < kMaxMixes; ++i) {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const bool there = i < fn.rows && j < shape.streams && d < shape.dim;
      const int64_t at =
          static_cast<int64_t>(i) * fn.cols + static_cast<int64_t>(j) * shape.dim + d;
      w[i][j] = there ? PlainValue<kType>(fn.data, at) : 0.0f;
    }
  }
}

// fn[i][j * D + d] of all i and j; zeros where there is none.
__device__ __forceinline__ void LoadMixColumn(const PlainMatrix& fn, const HcShape& shape, int d,
                                              MixColumn& w) {
  if (fn.dtype == DType::kF32) {
    LoadMixColumnOf<DType::kF32>(fn, shape, d, w);
  } else if (fn.dtype == DType::kF16) {
    LoadMixColumnOf<DType::kF16>(fn, shape, d, w);
  } else {
    LoadMixColumnOf<DType::kBF16>(fn, shape, d, w);
  }
}

// One step of WarpSumEach: lanes whose bit kHalf is set go on with the upper half of the values,
// the others with the lower half.
template <int kHalf>
__device__ __forceinline__ void FoldValues(int lane, float (&v)[kPartialSlots]) {
  const bool upper = (lane & kHalf) != 0;
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const float send = upper ? v[k] : v[k + kHalf];
    const float keep = upper ? v[k + kHalf] : v[k];
    v[k] = keep + __shfl_xor_sync(kFullMask, send, kHalf);
  }
}

// Sums each of 32 values over the warp; lane i gets the sum of value i. 31 shuffles, not 160.
__device__ __forceinline__ float WarpSumEach(float (&v)[kPartialSlots]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  FoldValues<16>(lane, v);
  FoldValues<8>(lane, v);
  FoldValues<4>(lane, v);
  FoldValues<2>(lane, v);
  FoldValues<1>(lane, v);
  return v[0];
}

// This warp's share of a row's partials: lane i gets slot i.
__device__ __forceinline__ float PartialOfWarp(const float (&x)[kStreams], const MixColumn& w) {
  float v[kPartialSlots];
#pragma unroll
  for (int i = 0; i < kPartialSlots; ++i) v[i] = 0.0f;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
#pragma unroll
    for (int i = 0; i < kMaxMixes; ++i) v[i] = fmaf(w[i][j], x[j], v[i]);
    v[kSquaresSlot] = fmaf(x[j], x[j], v[kSquaresSlot]);
  }
  return WarpSumEach(v);
}

// The two warps' shares of a batch of rows become the block's partials.
using WarpPartials = float[kRowBatch][2][kPartialSlots];
__device__ __forceinline__ void StorePartials(const WarpPartials& shares, int first, int count,
                                              int rows, float* partial) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int u = static_cast<int>(threadIdx.x) / kWarpSize; u < count; u += 2) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows + first + u;
    partial[row * kPartialSlots + lane] = shares[u][0][lane] + shares[u][1][lane];
  }
}

__device__ __forceinline__ float TreeOfRoots(const RootProgram& roots, int64_t at) {
  float stack[kRootStack] = {};  // [0] is the top; moved as a whole, so that it stays in registers
#pragma unroll 1
  for (int begin = 0; begin < roots.count; begin += 8) {
    float x[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) x[u] = begin + u < roots.count ? roots.data[begin + u][at] : 0.0f;
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      if (begin + u >= roots.count) break;
#pragma unroll
      for (int i = kRootStack - 1; i > 0; --i) stack[i] = stack[i - 1];
      stack[0] = x[u];
      for (int m = roots.merges[begin + u]; m > 0; --m) {
        stack[0] = stack[1] + stack[0];
#pragma unroll
        for (int i = 1; i + 1 < kRootStack; ++i) stack[i] = stack[i + 1];
      }
    }
  }
  return stack[0];
}

// The sub-layer's results at (first + u, d) for a batch of rows.
__device__ __forceinline__ void LoadResults(const RootProgram& roots, int first, int count, int dim,
                                            int d, float (&s)[kRowBatch]) {
#pragma unroll
  for (int u = 0; u < kRowBatch; ++u) {
    const int64_t at = static_cast<int64_t>(first + u) * dim + d;
    const bool there = u < count && d < dim;
    if (roots.count == 1) {
      s[u] = there ? roots.data[0][at] : 0.0f;
    } else if (roots.count == 2) {
      s[u] = there ? roots.data[0][at] + roots.data[1][at] : 0.0f;
    } else {
      s[u] = there ? TreeOfRoots(roots, at) : 0.0f;
    }
  }
}

// One row's mix, zeros for streams that are not there.
struct alignas(16) MixOfRow {
  float post[kStreams];
  float comb[kStreams][kStreams];
};
__device__ __forceinline__ void LoadMixes(const HcMix& mix, int streams, int first, int count,
                                          MixOfRow (&mixes)[kRowBatch]) {
  constexpr int kValues = kStreams + kStreams * kStreams;
  for (int n = static_cast<int>(threadIdx.x); n < count * kValues; n += kPartCols) {
    const int u = n / kValues, i = n % kValues;
    const int64_t row = first + u;
    if (i < kStreams) {
      mixes[u].post[i] = i < streams ? mix.post[row * streams + i] : 0.0f;
    } else {
      const int j = i / kStreams - 1, k = i % kStreams;
      const bool there = j < streams && k < streams;
      mixes[u].comb[j][k] = there ? mix.comb[(row * streams + j) * streams + k] : 0.0f;
    }
  }
}

// x'[k] = post[k] s + sum_j comb[j][k] x[j].
__device__ __forceinline__ void Expand(const MixOfRow& mix, int streams, float s,
                                       float (&x)[kStreams]) {
  float out[kStreams];
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    out[k] = mix.post[k] * s;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      // A stream that is not there adds nothing, not even a NaN.
      if (j < streams) out[k] = fmaf(mix.comb[j][k], x[j], out[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kStreams; ++k) x[k] = k < streams ? out[k] : 0.0f;
}

__global__ void __launch_bounds__(kPartCols)
    HcPostKernel(HcShape shape, int rows, int tile, RootProgram roots, HcMix mix, PlainMatrix fn,
                 float* streams, float* partial) {
  __shared__ WarpPartials shares[2];  // used in turn: one barrier a batch is enough
  __shared__ MixOfRow mixes[2][kRowBatch];
  LaunchDependents();
  const int d = static_cast<int>(blockIdx.x) * kPartCols + static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  MixColumn w;
  LoadMixColumn(fn, shape, d, w);
  GridDependencyWait();
  const int end = min(rows, (static_cast<int>(blockIdx.y) + 1) * tile);
  int turn = 0;
  for (int first = static_cast<int>(blockIdx.y) * tile; first < end;
       first += kRowBatch, turn ^= 1) {
    const int count = min(kRowBatch, end - first);
    float* at = streams + static_cast<int64_t>(first) * shape.streams * shape.dim + d;
    float x[kRowBatch][kStreams], s[kRowBatch];
#pragma unroll
    for (int u = 0; u < kRowBatch; ++u) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const bool there = u < count && j < shape.streams && d < shape.dim;
        x[u][j] = there ? at[(static_cast<int64_t>(u) * shape.streams + j) * shape.dim] : 0.0f;
      }
    }
    LoadResults(roots, first, count, shape.dim, d, s);
    LoadMixes(mix, shape.streams, first, count, mixes[turn]);
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kRowBatch; ++u) {
      if (u >= count) break;
      Expand(mixes[turn][u], shape.streams, s[u], x[u]);
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (k < shape.streams && d < shape.dim) {
          at[(static_cast<int64_t>(u) * shape.streams + k) * shape.dim] = x[u][k];
        }
      }
      shares[turn][u][warp][lane] = PartialOfWarp(x[u], w);
    }
    __syncthreads();
    StorePartials(shares[turn], first, count, rows, partial);
  }
}

// The value at column d of an embedding row.
__device__ __forceinline__ float EmbeddingValue(DType dtype, const std::byte* row, int d) {
  if (dtype == DType::kF32) return PlainValue<DType::kF32>(row, d);
  if (dtype == DType::kF16) return PlainValue<DType::kF16>(row, d);
  if (dtype == DType::kBF16) return PlainValue<DType::kBF16>(row, d);
  const std::byte* block = row + d / 32 * 34;  // Q8_0: f16 scale, 32 int8
  const float scale = HalfToFloat(*reinterpret_cast<const uint16_t*>(block));
  return scale * static_cast<float>(static_cast<int8_t>(block[2 + d % 32]));
}

__global__ void __launch_bounds__(kPartCols)
    EmbedKernel(HcShape shape, int rows, int tile, const int32_t* token, DType dtype,
                const std::byte* embedding, int64_t row_bytes, PlainMatrix fn, float* streams,
                float* partial) {
  __shared__ WarpPartials shares[2];
  LaunchDependents();
  const int d = static_cast<int>(blockIdx.x) * kPartCols + static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  MixColumn w;
  LoadMixColumn(fn, shape, d, w);
  GridDependencyWait();
  const int end = min(rows, (static_cast<int>(blockIdx.y) + 1) * tile);
  int turn = 0;
  for (int first = static_cast<int>(blockIdx.y) * tile; first < end;
       first += kRowBatch, turn ^= 1) {
    const int count = min(kRowBatch, end - first);
#pragma unroll
    for (int u = 0; u < kRowBatch; ++u) {
      if (u >= count) break;
      float value = 0.0f;
      if (d < shape.dim) {
        value = EmbeddingValue(dtype, embedding + token[first + u] * row_bytes, d);
      }
      float x[kStreams];
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        x[k] = k < shape.streams ? value : 0.0f;
        if (k < shape.streams && d < shape.dim) {
          streams[(static_cast<int64_t>(first + u) * shape.streams + k) * shape.dim + d] = value;
        }
      }
      shares[turn][u][warp][lane] = PartialOfWarp(x, w);
    }
    __syncthreads();
    StorePartials(shares[turn], first, count, rows, partial);
  }
}

// ---- Rows: eight columns a thread ----

__device__ __forceinline__ uint32_t MagnitudeBits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// The int8 form of columns c..c+7 of row t: QuantizeBlock32's rule with four lanes a block.
__device__ __forceinline__ void StoreQuantized(const ActivationView& out, int t, int c,
                                               const float (&v)[kThreadCols]) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) magnitude = max(magnitude, MagnitudeBits(v[i]));
  magnitude = max(magnitude, __shfl_xor_sync(kFullMask, magnitude, 1));
  magnitude = max(magnitude, __shfl_xor_sync(kFullMask, magnitude, 2));
  const float amax = __uint_as_float(magnitude);
  const bool zeros = amax < kTinyAmax;
  const float scale = zeros ? 0.0f : amax / 127.0f, inverse = 127.0f / amax;
  uint32_t words[2] = {0, 0};
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) {
    const float rounded = zeros ? 0.0f : rintf(v[i] * inverse);
    const int q = static_cast<int>(fminf(fmaxf(rounded, -127.0f), 127.0f));
    sum += q;
    words[i / 4] |= static_cast<uint32_t>(q & 0xff) << (8 * (i % 4));
  }
  sum += __shfl_xor_sync(kFullMask, sum, 1);
  const int64_t tiles = TilesOf(out), block = c / 32;
  const int part = c / kThreadCols % 4;
  *reinterpret_cast<uint2*>(out.q + (block * tiles + t / 8) * 32 + 4 * (t % 8) + part) =
      make_uint2(words[0], words[1]);
  if (part == 0) out.scale[block * tiles * 8 + t] = scale;
  if (out.sums != nullptr && part % 2 == 0) {
    out.sums[c / 16 * tiles * 8 + t] = scale * static_cast<float>(sum);
  }
}

// Columns c..c+7 (c: a multiple of 8) of row t in all forms that `out` has. Whole warps, lanes in
// the order of columns: four lanes share a block of 32.
__device__ __forceinline__ void StoreForms(const ActivationView& out, int t, int c,
                                           const float (&v)[kThreadCols]) {
  const int64_t at = static_cast<int64_t>(t) * out.cols + c;
  if (out.f32 != nullptr) {
    float4* to = reinterpret_cast<float4*>(out.f32 + at);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
  if (out.bf16 != nullptr) {
    *reinterpret_cast<uint4*>(out.bf16 + at) =
        make_uint4(FloatsToBf162(v[0], v[1]), FloatsToBf162(v[2], v[3]), FloatsToBf162(v[4], v[5]),
                   FloatsToBf162(v[6], v[7]));
  }
  if (out.q != nullptr) StoreQuantized(out, t, c, v);
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

__device__ __forceinline__ float Logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// scale[i] / denominator: factors of rows or columns of a matrix, so that no step needs a division.
struct Factors {
  float scale[kStreams];
  float denominator;
};

// One normalisation of `matrix[i][j] * own.scale[i] * other.scale[j] / (denominators)` over j: each
// row divided by its sum + eps. With d_i = own_i * sum_j matrix[i][j] other_j + eps * denominators
// that is own_i := own_i * other.denominator / d_i, written over the common denominator d_0 d_1 d_2
// d_3, and brought back to the size of 1 by a power of two. d / denominators lies in [eps, H +
// eps], so nothing leaves the range of float32.
template <typename Entry>
__device__ __forceinline__ void Normalise(int streams, float eps, const Factors& other,
                                          Factors& own, Entry matrix) {
  const float floor = eps * (own.denominator * other.denominator);
  float d[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float sum = matrix(i, 0) * other.scale[0];
#pragma unroll
    for (int j = 1; j < kStreams; ++j) sum = fmaf(matrix(i, j), other.scale[j], sum);
    d[i] = i < streams ? fmaf(own.scale[i], sum, floor) : 1.0f;
  }
  const float low = d[0] * d[1], high = d[2] * d[3];
  const float product = low * high;
  const uint32_t exponent = __float_as_uint(product) >> 23 & 0xff;
  const float unit = __uint_as_float((254u - exponent) << 23);
  const float factor = other.denominator * unit;
  own.scale[0] = own.scale[0] * factor * (d[1] * high);
  own.scale[1] = own.scale[1] * factor * (d[0] * high);
  own.scale[2] = own.scale[2] * factor * (low * d[3]);
  own.scale[3] = own.scale[3] * factor * (low * d[2]);
  own.denominator = product * unit;
}

// A matrix that Sinkhorn balances, entry (i, j) times the factors of row i and column j. The
// latency of this chain bounds HcPre, so all lanes carry the whole matrix: no step has a shuffle.
struct Balance {
  float c[kStreams][kStreams];
  Factors row, column;
};

// Softmax of each row, + eps. z: lane 2H + H i + j holds C[i][j].
__device__ __forceinline__ void StartSinkhorn(float z, int streams, float eps, Balance& m) {
  float sums[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      m.c[i][j] = __shfl_sync(kFullMask, z, (streams * (2 + i) + j) % kWarpSize);
      if (j < streams) top = fmaxf(top, m.c[i][j]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      m.c[i][j] = i < streams && j < streams ? expf(m.c[i][j] - top) : 0.0f;
      sum += m.c[i][j];
    }
    // e / sum + eps = (e + eps * sum) / sum: the division becomes the row's first factor.
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      if (i < streams && j < streams) m.c[i][j] = fmaf(eps, sum, m.c[i][j]);
    }
    sums[i] = i < streams ? sum : 1.0f;
    m.column.scale[i] = 1.0f;
  }
  const float low = sums[0] * sums[1], high = sums[2] * sums[3];
  m.row.scale[0] = sums[1] * high;
  m.row.scale[1] = sums[0] * high;
  m.row.scale[2] = low * sums[3];
  m.row.scale[3] = low * sums[2];
  m.row.denominator = low * high;
  m.column.denominator = 1.0f;
}

// The rest of spec 2.2, step 4: columns, then rows and columns in turn. Lane H i + j gets
// comb[i][j].
__device__ __forceinline__ float FinishSinkhorn(int streams, int iterations, float eps,
                                                Balance& m) {
  const auto by_row = [&m](int i, int j) { return m.c[i][j]; };
  const auto by_column = [&m](int j, int i) { return m.c[i][j]; };
  Normalise(streams, eps, m.row, m.column, by_column);
#pragma unroll 1
  for (int n = 1; n < iterations; ++n) {
    Normalise(streams, eps, m.column, m.row, by_row);
    Normalise(streams, eps, m.row, m.column, by_column);
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float entry = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      if (i < streams && j < streams && lane == streams * i + j) {
        entry = m.c[i][j] * (m.row.scale[i] * m.column.scale[j]);
      }
    }
  }
  return entry / (m.row.denominator * m.column.denominator);
}

// This thread's warp's share of the partials: lane i adds slot i of parts warp, warp + 8, ...; the
// loads of the first eight come back in `ahead`.
__device__ __forceinline__ void LoadPartials(const float* partial, int parts, int rows, int row,
                                             float (&ahead)[kPartialWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll
  for (int u = 0; u < kPartialWarps; ++u) {
    const int part = warp + u * kPartialWarps;
    const int64_t at = (static_cast<int64_t>(part) * rows + row) * kPartialSlots + lane;
    ahead[u] = warp < kPartialWarps && part < parts ? partial[at] : 0.0f;
  }
}

__device__ __forceinline__ float AddPartials(const float* partial, int parts, int rows, int row,
                                             const float (&ahead)[kPartialWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  float sum = ahead[0];
#pragma unroll
  for (int u = 1; u < kPartialWarps; ++u) sum += ahead[u];
  if (warp < kPartialWarps) {
    for (int part = warp + kPartialWarps * kPartialWarps; part < parts; part += kPartialWarps) {
      sum += partial[(static_cast<int64_t>(part) * rows + row) * kPartialSlots + lane];
    }
  }
  return sum;
}

__device__ __forceinline__ float AddWarpShares(
    const float (&shares)[kPartialWarps][kPartialSlots]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const float a = shares[0][lane] + shares[1][lane], b = shares[2][lane] + shares[3][lane];
  const float c = shares[4][lane] + shares[5][lane], d = shares[6][lane] + shares[7][lane];
  return (a + b) + (c + d);
}

// kHead: only pre, of the chosen rows. Else the last warp of the block has no columns: it finds
// post and comb.
template <bool kHead>
__global__ void __launch_bounds__(kMaxRowThreads)
    HcPreKernel(HcShape shape, int rows, const int32_t* row_index, const float* streams,
                const float* partial, HcWeights weights, const float* norm_weight, HcMix mix,
                ActivationView out) {
  __shared__ float shares[kPartialWarps][kPartialSlots];
  __shared__ float squares[kMaxRowThreads / kWarpSize];
  LaunchDependents();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_workers = static_cast<int>(blockDim.x) / kWarpSize - (kHead ? 0 : 1);
  const bool worker = warp < num_workers;
  const int h = shape.streams;
  const int c = static_cast<int>(threadIdx.x) * kThreadCols;
  const bool has_columns = worker && c < shape.dim;
  const float base = lane < weights.fn.rows ? weights.base[lane] : 0.0f;
  const float scale = kHead || lane < h ? weights.scale[0] : weights.scale[lane < 2 * h ? 1 : 2];
  GridDependencyWait();

  const int t = static_cast<int>(blockIdx.x);
  const int row = kHead ? row_index[t] : t;
  float ahead[kPartialWarps];
  LoadPartials(partial, shape.parts, rows, row, ahead);
  float4 x[kStreams][2];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float* from = streams + (static_cast<int64_t>(row) * h + j) * shape.dim + c;
    const bool there = has_columns && j < h;
    x[j][0] = there ? reinterpret_cast<const float4*>(from)[0] : make_float4(0, 0, 0, 0);
    x[j][1] = there ? reinterpret_cast<const float4*>(from)[1] : make_float4(0, 0, 0, 0);
  }
  const float share = AddPartials(partial, shape.parts, rows, row, ahead);
  if (warp < kPartialWarps) shares[warp][lane] = share;
  __syncthreads();

  const float total = AddWarpShares(shares);
  const float mean =
      __shfl_sync(kFullMask, total, kSquaresSlot) / static_cast<float>(h * shape.dim);
  const float z = fmaf(total * (1.0f / sqrtf(mean + shape.norm_eps)), scale, base);
  const float gate = Logistic(z);
  float v[kThreadCols] = {};
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float pre = __shfl_sync(kFullMask, gate, j) + shape.hc_eps;
    if (j < h) {
      v[0] = fmaf(pre, x[j][0].x, v[0]), v[1] = fmaf(pre, x[j][0].y, v[1]);
      v[2] = fmaf(pre, x[j][0].z, v[2]), v[3] = fmaf(pre, x[j][0].w, v[3]);
      v[4] = fmaf(pre, x[j][1].x, v[4]), v[5] = fmaf(pre, x[j][1].y, v[5]);
      v[6] = fmaf(pre, x[j][1].z, v[6]), v[7] = fmaf(pre, x[j][1].w, v[7]);
    }
  }
  float weight[kThreadCols] = {};
  if (has_columns) LoadColumns(norm_weight, c, shape.dim, true, weight);
  const float square = WarpSum(SumOfSquares(v));
  if (worker && lane == 0) squares[warp] = square;
  Balance balance;
  if constexpr (!kHead) {
    if (!worker) StartSinkhorn(z, h, shape.hc_eps, balance);
  }
  __syncthreads();

  if (worker) {
    const float mean_square = SumOfWarps(squares, num_workers) / static_cast<float>(shape.dim);
    ScaleColumns(1.0f / sqrtf(mean_square + shape.norm_eps), weight, v);
    if (c < out.cols) StoreForms(out, t, c, v);
  } else if constexpr (!kHead) {
    if (lane >= h && lane < 2 * h) mix.post[t * h + lane - h] = 2.0f * gate;
    const float comb = FinishSinkhorn(h, shape.iterations, shape.hc_eps, balance);
    if (lane < h * h) mix.comb[t * h * h + lane] = comb;
  }
}

__global__ void __launch_bounds__(kMaxRowThreads)
    RmsNormKernel(const float* x, int64_t stride, int cols, bool vectors, const float* weight,
                  float eps, ActivationView out) {
  __shared__ float squares[kMaxRowThreads / kWarpSize];
  LaunchDependents();
  const int t = static_cast<int>(blockIdx.x);
  const int c = static_cast<int>(threadIdx.x) * kThreadCols;
  float w[kThreadCols], v[kThreadCols];
#pragma unroll
  for (int i = 0; i < kThreadCols; ++i) w[i] = 1.0f;
  if (weight != nullptr) LoadColumns(weight, c, cols, false, w);
  GridDependencyWait();
  LoadColumns(x + t * stride, c, cols, vectors, v);
  const float square = WarpSum(SumOfSquares(v));
  if (threadIdx.x % kWarpSize == 0) squares[threadIdx.x / kWarpSize] = square;
  __syncthreads();
  const float sum = SumOfWarps(squares, static_cast<int>(blockDim.x) / kWarpSize);
  ScaleColumns(1.0f / sqrtf(sum / static_cast<float>(cols) + eps), w, v);
  StoreForms(out, t, c, v);
}

constexpr int kFormThreads = 256;
__global__ void __launch_bounds__(kFormThreads)
    FormActivationKernel(const float* x, int64_t stride, int segment_cols, int padded_cols,
                         bool vectors, ActivationView out) {
  LaunchDependents();
  GridDependencyWait();
  const int t = static_cast<int>(blockIdx.x);
  const int c =
      (static_cast<int>(blockIdx.y) * kFormThreads + static_cast<int>(threadIdx.x)) * kThreadCols;
  if (c >= out.cols) return;  // whole warps: columns come in 256s
  const int segment = c / padded_cols;
  const float* from = x + t * stride + static_cast<int64_t>(segment) * segment_cols;
  float v[kThreadCols];
  LoadColumns(from, c - segment * padded_cols, segment_cols, vectors, v);
  StoreForms(out, t, c, v);
}

constexpr int kRopeThreads = 64;
__global__ void __launch_bounds__(kRopeThreads)
    RopeTableKernel(const int32_t* pos, int rows, const double* frequencies, int pairs, float* cos,
                    float* sin) {
  LaunchDependents();
  const int i = static_cast<int>(blockIdx.x) * kRopeThreads + static_cast<int>(threadIdx.x);
  const bool there = i < rows * pairs;
  const double frequency = there ? frequencies[i % pairs] : 0.0;
  GridDependencyWait();
  if (!there) return;
  double s, c;
  sincos(static_cast<double>(pos[i / pairs]) * frequency, &s, &c);
  cos[i] = static_cast<float>(c);
  sin[i] = static_cast<float>(s);
}

// ---- Host ----

HcShape ShapeOf(const HcParams& params) {
  CHECK(params.num_streams >= 1 && params.num_streams <= kStreams)
      << params.num_streams << " streams, at most " << kStreams;
  CHECK(params.hidden_dim >= 1 && params.hidden_dim % kThreadCols == 0)
      << "hidden_dim " << params.hidden_dim << " is no multiple of " << kThreadCols;
  CHECK(params.sinkhorn_iterations >= 1) << params.sinkhorn_iterations << " Sinkhorn iterations";
  return {params.num_streams,         params.hidden_dim, NumParts(params),
          params.sinkhorn_iterations, params.hc_eps,     params.norm_eps};
}

void CheckFn(const HcShape& shape, const PlainMatrix& fn) {
  CHECK(fn.dtype == DType::kF32 || fn.dtype == DType::kF16 || fn.dtype == DType::kBF16)
      << "mixing weights are " << Info(fn.dtype).name << ", must be F32, F16 or BF16";
  CHECK(fn.rows >= 1 && fn.rows <= kMaxMixes && fn.cols == shape.streams * shape.dim)
      << "mixing weights [" << fn.rows << ", " << fn.cols << "] for " << shape.streams
      << " streams of " << shape.dim;
}

// Rows of a block of the kernels over parts. No result depends on it.
int RowTile(const LaunchContext& launch, int parts, int rows) {
  const int64_t resident = int64_t{5} * launch.num_sms;  // blocks that run at once
  const int64_t tile = (static_cast<int64_t>(rows) * parts + resident - 1) / resident;
  return static_cast<int>(tile < kRowBatch ? tile : (tile + kRowBatch - 1) / kRowBatch * kRowBatch);
}

dim3 PartGrid(int parts, int rows, int tile) {
  return dim3(static_cast<unsigned>(parts), static_cast<unsigned>((rows + tile - 1) / tile));
}

// Follows the walk of engine/comm/lane_tree.cc's SumRoots: a node's sum is its left half's plus its
// right half's, and a root ends the descent.
void PlanRoots(const RootSet& roots, int begin, int size, RootProgram& program) {
  const int next = program.count;
  CHECK(next < roots.count) << "lanes [" << begin << ", " << begin + size << ") have no root";
  if (roots.begin[next] == begin && roots.size[next] == size) {
    program.data[program.count++] = roots.data[next];
    return;
  }
  CHECK(size > 1) << "root " << next << " is of lanes [" << roots.begin[next] << ", "
                  << roots.begin[next] + roots.size[next] << "), which do not start at " << begin;
  PlanRoots(roots, begin, size / 2, program);
  PlanRoots(roots, begin + size / 2, size / 2, program);
  ++program.merges[program.count - 1];
}

RootProgram ProgramOf(const RootSet& roots) {
  CHECK(roots.count >= 1 && roots.count <= RootSet::kMax)
      << roots.count << " roots, at most " << RootSet::kMax;
  CHECK(roots.num_lanes >= 1 && (roots.num_lanes & (roots.num_lanes - 1)) == 0)
      << roots.num_lanes << " lanes are no power of two";
  RootProgram program;
  PlanRoots(roots, 0, roots.num_lanes, program);
  CHECK(program.count == roots.count) << roots.count << " roots, but " << program.count
                                      << " cover the " << roots.num_lanes << " lanes";
  return program;
}

// Threads of a row kernel over `cols` columns, eight a thread.
unsigned RowThreads(int64_t cols) {
  CHECK(cols % kColumnGrain == 0 && cols <= kMaxRowCols)
      << cols << " columns, must be a multiple of " << kColumnGrain << " up to " << kMaxRowCols;
  return static_cast<unsigned>(cols / kThreadCols);
}

// Threads with columns in HcPre: enough for the row, and for the warps that add partials.
unsigned HcWorkers(const HcShape& shape, const ActivationView& out) {
  CHECK(out.cols >= shape.dim) << out.cols << " columns for a hidden_dim of " << shape.dim;
  return std::max(RowThreads(out.cols), static_cast<unsigned>(kPartialWarps * kWarpSize));
}

bool VectorsFit(const float* x, int64_t stride, int cols) {
  return reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 4 == 0 && cols % 4 == 0;
}

}  // namespace

void LaunchEmbed(const LaunchContext& launch, const HcParams& params, const StepRows& step,
                 int rows, DType dtype, const std::byte* embedding, const PlainMatrix& next_fn,
                 float* streams, float* partial) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, next_fn);
  CHECK(dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 ||
        dtype == DType::kQ8_0)
      << "embedding is " << Info(dtype).name << ", must be F32, F16, BF16 or Q8_0";
  const int tile = RowTile(launch, shape.parts, rows);
  Launch(launch, PartGrid(shape.parts, rows, tile), kPartCols, 0, EmbedKernel, shape, rows, tile,
         step.token, dtype, embedding, BytesFor(dtype, shape.dim), next_fn, streams, partial);
}

void LaunchHcPost(const LaunchContext& launch, const HcParams& params, int rows,
                  const RootSet& roots, const HcMix& mix, const PlainMatrix& next_fn,
                  float* streams, float* partial) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, next_fn);
  const int tile = RowTile(launch, shape.parts, rows);
  Launch(launch, PartGrid(shape.parts, rows, tile), kPartCols, 0, HcPostKernel, shape, rows, tile,
         ProgramOf(roots), mix, next_fn, streams, partial);
}

void LaunchHcPre(const LaunchContext& launch, const HcParams& params, int rows,
                 const float* streams, const float* partial, const HcWeights& weights,
                 const float* norm_weight, const HcMix& mix, const ActivationView& x) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, weights.fn);
  CHECK(weights.fn.rows == shape.streams * (2 + shape.streams))
      << weights.fn.rows << " mixing rows for " << shape.streams << " streams";
  const unsigned threads = HcWorkers(shape, x) + kWarpSize;
  CHECK(threads <= kMaxRowThreads)
      << "hidden_dim " << shape.dim << " needs " << threads << " threads";
  Launch(launch, static_cast<unsigned>(rows), threads, 0, HcPreKernel<false>, shape, rows,
         static_cast<const int32_t*>(nullptr), streams, partial, weights, norm_weight, mix, x);
}

void LaunchHcHead(const LaunchContext& launch, const HcParams& params, int rows,
                  const int32_t* row_index, const float* streams, const float* partial,
                  const HcWeights& weights, const float* norm_weight, const ActivationView& out) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, weights.fn);
  CHECK(weights.fn.rows == shape.streams)
      << weights.fn.rows << " head mixing rows for " << shape.streams << " streams";
  Launch(launch, static_cast<unsigned>(out.rows), HcWorkers(shape, out), 0, HcPreKernel<true>,
         shape, rows, row_index, streams, partial, weights, norm_weight, HcMix{}, out);
}

void LaunchRmsNorm(const LaunchContext& launch, const float* x, int64_t stride, int rows, int cols,
                   const float* weight, float eps, const ActivationView& out) {
  CHECK(cols >= 1 && cols <= out.cols) << cols << " columns into " << out.cols;
  Launch(launch, static_cast<unsigned>(rows), RowThreads(out.cols), 0, RmsNormKernel, x, stride,
         cols, VectorsFit(x, stride, cols), weight, eps, out);
}

void LaunchFormActivation(const LaunchContext& launch, const float* x, int64_t stride, int rows,
                          int segments, int segment_cols, const ActivationView& out) {
  const int padded = static_cast<int>(PaddedCols(segment_cols));
  CHECK(out.cols == static_cast<int64_t>(segments) * padded)
      << segments << " segments of " << padded << " columns into " << out.cols;
  const unsigned blocks =
      static_cast<unsigned>((out.cols / kThreadCols + kFormThreads - 1) / kFormThreads);
  Launch(launch, dim3(static_cast<unsigned>(rows), blocks), kFormThreads, 0, FormActivationKernel,
         x, stride, segment_cols, padded, VectorsFit(x, stride, segment_cols), out);
}

void LaunchRopeTable(const LaunchContext& launch, const int32_t* pos, int rows,
                     const double* frequencies, int pairs, float* cos, float* sin) {
  const unsigned blocks = static_cast<unsigned>((rows * pairs + kRopeThreads - 1) / kRopeThreads);
  Launch(launch, blocks, kRopeThreads, 0, RopeTableKernel, pos, rows, frequencies, pairs, cos, sin);
}

}  // namespace ds4::cuda
