// Streams: embedding, mixing, collapse; and the small row operations around them.
//
// A site's end (HcPost) has a block for each part of 32 columns. A warp expands a row's streams
// there, then all warps share the row's dot products: each half warp has three rows of fn in
// registers, fetched before the results are waited for, so a tile of rows reads fn once. A site's
// start (HcPre) has one block a row: every warp works out the same few mixes from the partials,
// then the streams that were loaded meanwhile collapse and are normed. A later kernel balances comb
// (SinkhornJob), which only the site's end needs.
#include <algorithm>
#include <cmath>

#include "engine/base/check.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/row_forms.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kStreams = kMaxDeviceStreams;
constexpr int kMaxMixes = 2 * kStreams + kStreams * kStreams;
constexpr int kPartialSlots = 32;
constexpr int kSquaresSlot = 31;
constexpr int kPartThreads = 128;
constexpr int kPartWarps = kPartThreads / kWarpSize;
constexpr int kPartValues = kStreams * kPartCols;
constexpr int kHalfWarp = kWarpSize / 2;  // lanes that share a dot product
constexpr int kMixesOfHalf = kMaxMixes / (kPartThreads / kHalfWarp);
constexpr int kRowBatch = 8;  // rows between two barriers
constexpr int kRowsOfWarp = kRowBatch / kPartWarps;
static_assert(kPartCols == kWarpSize && kPartValues == 8 * kHalfWarp);
static_assert(kMixesOfHalf * (kPartThreads / kHalfWarp) == kMaxMixes);
constexpr int kPartialWarps = 16;  // that add partials in HcPre
constexpr int kPartialsAhead = 8;  // of each warp, in flight at once

struct HcShape {
  int streams = 0;
  int dim = 0;
  int parts = 0;
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

// A half warp's share of fn: kMixesOfHalf rows, of which each lane has two runs of four columns:
// of stream lane / 8 and of stream 2 + lane / 8, from column 4 (lane % 8) of the part on.
using MixRuns = float[kMixesOfHalf][2][4];

// Fetches the runs as they are in memory, 16-bit types as two words; nothing here waits for what
// the loads bring. Zeros where there is none.
template <bool kFloat32>
__device__ __forceinline__ void FetchRunsOf(const PlainMatrix& fn, const HcShape& shape,
                                            MixRuns& w) {
  const int half = static_cast<int>(threadIdx.x) / kHalfWarp;
  const int lane = static_cast<int>(threadIdx.x) % kHalfWarp;
  const int d = static_cast<int>(blockIdx.x) * kPartCols + 4 * (lane % 8);
#pragma unroll
  for (int m = 0; m < kMixesOfHalf; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = kMixesOfHalf * half + m, j = 2 * r + lane / 8;
      const int64_t at = i * fn.cols + static_cast<int64_t>(j) * shape.dim + d;
      const bool there = i < fn.rows && j < shape.streams && d < shape.dim;
      float4 run = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if constexpr (kFloat32) {
        if (there) run = *reinterpret_cast<const float4*>(fn.data + 4 * at);
      } else if (there) {
        const float2 words = *reinterpret_cast<const float2*>(fn.data + 2 * at);
        run.x = words.x;
        run.y = words.y;
      }
      w[m][r][0] = run.x, w[m][r][1] = run.y, w[m][r][2] = run.z, w[m][r][3] = run.w;
    }
  }
}
__device__ __forceinline__ void FetchRuns(const PlainMatrix& fn, const HcShape& shape, MixRuns& w) {
  if (fn.dtype == DType::kF32) {
    FetchRunsOf<true>(fn, shape, w);
  } else {
    FetchRunsOf<false>(fn, shape, w);
  }
}

// Fetched runs to values, in place.
template <bool kHalfs>
__device__ __forceinline__ void WidenRuns(MixRuns& w) {
#pragma unroll
  for (int m = 0; m < kMixesOfHalf; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float(&run)[4] = w[m][r];
      const uint32_t x = __float_as_uint(run[0]), y = __float_as_uint(run[1]);
      const float2 low = kHalfs ? Half2ToFloat2(x) : Bf162ToFloat2(x);
      const float2 high = kHalfs ? Half2ToFloat2(y) : Bf162ToFloat2(y);
      run[0] = low.x, run[1] = low.y, run[2] = high.x, run[3] = high.y;
    }
  }
}
__device__ __forceinline__ void ConvertRuns(DType dtype, MixRuns& w) {
  if (dtype == DType::kF16) WidenRuns<true>(w);
  if (dtype == DType::kBF16) WidenRuns<false>(w);
}

// This lane's share of its half warp's dot products. x: a row's values of the part, shared, stream
// by stream.
__device__ __forceinline__ void DotShares(const MixRuns& w, const float* x,
                                          float (&v)[kMixesOfHalf]) {
  const int lane = static_cast<int>(threadIdx.x) % kHalfWarp;
  const float4 low = *reinterpret_cast<const float4*>(x + 4 * lane);
  const float4 high = *reinterpret_cast<const float4*>(x + 2 * kPartCols + 4 * lane);
#pragma unroll
  for (int m = 0; m < kMixesOfHalf; ++m) {
    float sum = w[m][0][0] * low.x;
    sum = fmaf(w[m][0][1], low.y, sum);
    sum = fmaf(w[m][0][2], low.z, sum);
    sum = fmaf(w[m][0][3], low.w, sum);
    sum = fmaf(w[m][1][0], high.x, sum);
    sum = fmaf(w[m][1][1], high.y, sum);
    sum = fmaf(w[m][1][2], high.z, sum);
    v[m] = fmaf(w[m][1][3], high.w, sum);
  }
}

// A row's dot products to `to`, [kPartialSlots]: a tree over the lanes of each half warp.
__device__ __forceinline__ void StoreDots(const MixRuns& w, const float* x, float* to) {
  const int half = static_cast<int>(threadIdx.x) / kHalfWarp;
  const int lane = static_cast<int>(threadIdx.x) % kHalfWarp;
  float v[kMixesOfHalf];
  DotShares(w, x, v);
#pragma unroll
  for (int distance = kHalfWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int m = 0; m < kMixesOfHalf; ++m) {
      v[m] += __shfl_xor_sync(kFullMask, v[m], distance);
    }
  }
  const float own = lane == 0 ? v[0] : lane == 1 ? v[1] : v[2];
  if (lane < kMixesOfHalf) to[kMixesOfHalf * half + lane] = own;
}

// One step of StoreDotsOfBatch: lanes whose bit kDistance is set go on with the upper half of the
// rows, the others with the lower half.
template <int kDistance>
__device__ __forceinline__ void FoldRows(int lane, float (&v)[kMixesOfHalf][kRowBatch]) {
  const bool upper = (lane & kDistance) != 0;
#pragma unroll
  for (int m = 0; m < kMixesOfHalf; ++m) {
#pragma unroll
    for (int u = 0; u < kDistance / 2; ++u) {
      const float send = upper ? v[m][u] : v[m][u + kDistance / 2];
      const float keep = upper ? v[m][u + kDistance / 2] : v[m][u];
      v[m][u] = keep + __shfl_xor_sync(kFullMask, send, kDistance);
    }
  }
}

// StoreDots of a full batch of rows, the same additions in fewer shuffles: after three steps a lane
// has one row only. x: [kRowBatch][kPartValues]; to: [kRowBatch][kPartialSlots].
__device__ __forceinline__ void StoreDotsOfBatch(const MixRuns& w, const float* x, float* to) {
  static_assert(kRowBatch == kHalfWarp / 2);
  const int half = static_cast<int>(threadIdx.x) / kHalfWarp;
  const int lane = static_cast<int>(threadIdx.x) % kHalfWarp;
  float v[kMixesOfHalf][kRowBatch];
#pragma unroll
  for (int u = 0; u < kRowBatch; ++u) {
    float row[kMixesOfHalf];
    DotShares(w, x + u * kPartValues, row);
#pragma unroll
    for (int m = 0; m < kMixesOfHalf; ++m) v[m][u] = row[m];
  }
  FoldRows<8>(lane, v);
  FoldRows<4>(lane, v);
  FoldRows<2>(lane, v);
#pragma unroll
  for (int m = 0; m < kMixesOfHalf; ++m) {
    v[m][0] += __shfl_xor_sync(kFullMask, v[m][0], 1);
    if (lane % 2 == 0) to[lane / 2 * kPartialSlots + kMixesOfHalf * half + m] = v[m][0];
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

// The partials of a batch of `count` rows: dot products by all warps, each row's squares by the
// warp that expanded it. x: [kRowBatch][kPartValues], shared; to: [count][kPartialSlots].
__device__ __forceinline__ void StorePartials(const MixRuns& w, const float* x,
                                              const float (&squares)[kRowsOfWarp], int count,
                                              float* to) {
  if (count == kRowBatch) {
    StoreDotsOfBatch(w, x, to);
  } else {
#pragma unroll 1
    for (int u = 0; u < count; ++u) StoreDots(w, x + u * kPartValues, to + u * kPartialSlots);
  }
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int u = static_cast<int>(threadIdx.x) / kWarpSize + r * kPartWarps;
    if (u >= count) break;
    const float sum = WarpSum(squares[r]);
    if (threadIdx.x % kWarpSize == 0) to[u * kPartialSlots + kSquaresSlot] = sum;
  }
}

// Gives each row of a block's tile to one warp, lane by column, then adds the dot products up.
// Source has a struct Row with what a lane holds of a row while it is on its way, Load(row, there,
// Row&) and Finish(u, Row, x): the lane's new stream values, u being the row's place in the batch.
// The next batch is loaded before this one's dot products.
template <typename Source>
__device__ __forceinline__ void PartOfRows(const HcShape& shape, int rows, int tile,
                                           const PlainMatrix& fn, const Source& source,
                                           float* streams, float* partial) {
  __shared__ __align__(16) float values[2][kRowBatch * kPartValues];  // used in turn
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int d = static_cast<int>(blockIdx.x) * kPartCols + lane;
  const int begin = static_cast<int>(blockIdx.y) * tile;
  const int end = min(rows, begin + tile);
  MixRuns w;
  FetchRuns(fn, shape, w);
  GridDependencyWait();
  float squares[kRowsOfWarp];
  for (int first = begin, turn = 0;; first += kRowBatch, turn ^= 1) {
    typename Source::Row rows_here[kRowsOfWarp];
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = first + warp + r * kPartWarps;
      source.Load(row, row < end, rows_here[r]);
    }
    if (first == begin) {
      ConvertRuns(fn.dtype, w);
    } else {
      const int before = first - kRowBatch;
      StorePartials(w, values[turn ^ 1], squares, min(kRowBatch, end - before),
                    partial + (static_cast<int64_t>(blockIdx.x) * rows + before) * kPartialSlots);
    }
    if (first >= end) break;
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int u = warp + r * kPartWarps;
      if (first + u >= end) break;
      float x[kStreams];
      source.Finish(u, rows_here[r], x);
      float* to = streams + static_cast<int64_t>(first + u) * shape.streams * shape.dim + d;
      squares[r] = 0.0f;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (k < shape.streams && d < shape.dim) to[static_cast<int64_t>(k) * shape.dim] = x[k];
        values[turn][u * kPartValues + k * kPartCols + lane] = x[k];
        squares[r] = fmaf(x[k], x[k], squares[r]);
      }
    }
    // One barrier a batch: a warp that is a batch ahead writes the other half of `values`.
    __syncthreads();
  }
}

// ---- A site's end ----

// x'[k] = post[k] s + sum_j comb[j][k] x[j]. mix: post, then comb, [1 + kStreams][kStreams].
__device__ __forceinline__ void Expand(const float4* mix, int streams, float s,
                                       const float (&x)[kStreams], float (&out)[kStreams]) {
  const float4 post = mix[0];
  out[0] = post.x * s, out[1] = post.y * s, out[2] = post.z * s, out[3] = post.w * s;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    // A stream that is not there adds nothing, not even a NaN.
    if (j >= streams) break;
    const float4 comb = mix[1 + j];
    out[0] = fmaf(comb.x, x[j], out[0]), out[1] = fmaf(comb.y, x[j], out[1]);
    out[2] = fmaf(comb.z, x[j], out[2]), out[3] = fmaf(comb.w, x[j], out[3]);
  }
#pragma unroll
  for (int k = 0; k < kStreams; ++k) out[k] = k < streams ? out[k] : 0.0f;
}

struct PostSource {
  struct Row {
    float x[kStreams];
    float s;
    float mix;  // one value of the row's post and comb in each of the first lanes
  };
  const HcShape& shape;
  const RootProgram& roots;
  const HcMix& mix;
  const float* streams;
  float* mixes;  // shared, [kRowBatch][kWarpSize]

  __device__ __forceinline__ void Load(int row, bool there, Row& to) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int d = static_cast<int>(blockIdx.x) * kPartCols + lane;
    const int h = shape.streams;
    const float* from = streams + static_cast<int64_t>(row) * h * shape.dim + d;
    const bool inside = there && d < shape.dim;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      to.x[j] = inside && j < h ? from[static_cast<int64_t>(j) * shape.dim] : 0.0f;
    }
    const int j = lane / kStreams - 1, k = lane % kStreams;
    to.mix = 0.0f;
    if (there && k < h && j < h) {
      to.mix = j < 0 ? mix.post[row * h + k] : mix.comb[(row * h + j) * h + k];
    }
    to.s = 0.0f;
    if (inside) {
      const int64_t at = static_cast<int64_t>(row) * shape.dim + d;
      to.s = roots.count == 1 ? roots.data[0][at] : TreeOfRoots(roots, at);
    }
  }

  __device__ __forceinline__ void Finish(int u, const Row& row, float (&x)[kStreams]) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float* own = mixes + u * kWarpSize;
    own[lane] = row.mix;
    __syncwarp();
    Expand(reinterpret_cast<const float4*>(own), shape.streams, row.s, row.x, x);
  }
};

__global__ void __launch_bounds__(kPartThreads, 5)
    HcPostKernel(HcShape shape, int rows, int tile, RootProgram roots, HcMix mix, PlainMatrix fn,
                 float* streams, float* partial) {
  __shared__ __align__(16) float mixes[kRowBatch * kWarpSize];
  LaunchDependents();
  const PostSource source = {shape, roots, mix, streams, mixes};
  PartOfRows(shape, rows, tile, fn, source, streams, partial);
}

// ---- Embedding ----

// The value at column d of an embedding row.
__device__ __forceinline__ float EmbeddingValue(DType dtype, const std::byte* row, int d) {
  if (dtype == DType::kF32) return PlainValue<DType::kF32>(row, d);
  if (dtype == DType::kF16) return PlainValue<DType::kF16>(row, d);
  if (dtype == DType::kBF16) return PlainValue<DType::kBF16>(row, d);
  const std::byte* block = row + d / 32 * 34;  // Q8_0: f16 scale, 32 int8
  const float scale = HalfToFloat(*reinterpret_cast<const uint16_t*>(block));
  return scale * static_cast<float>(static_cast<int8_t>(block[2 + d % 32]));
}

struct EmbedSource {
  struct Row {
    float value;
  };
  const HcShape& shape;
  const int32_t* token;
  DType dtype;
  const std::byte* embedding;
  int64_t row_bytes;

  __device__ __forceinline__ void Load(int row, bool there, Row& to) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int d = static_cast<int>(blockIdx.x) * kPartCols + lane;
    to.value = 0.0f;
    if (there && d < shape.dim) {
      to.value = EmbeddingValue(dtype, embedding + token[row] * row_bytes, d);
    }
  }
  __device__ __forceinline__ void Finish(int, const Row& row, float (&x)[kStreams]) const {
#pragma unroll
    for (int k = 0; k < kStreams; ++k) x[k] = k < shape.streams ? row.value : 0.0f;
  }
};

// One table's rows of the block's tile.
__device__ void FillRopeTable(const RopeTables::Table& table, int pairs, const int32_t* pos,
                              int first, int end) {
  for (int i = first * pairs + static_cast<int>(threadIdx.x); i < end * pairs; i += kPartThreads) {
    double sin, cos;
    sincos(static_cast<double>(pos[i / pairs]) * table.frequencies[i % pairs], &sin, &cos);
    table.cos[i] = static_cast<float>(cos);
    table.sin[i] = static_cast<float>(sin);
  }
}

// Blocks behind the parts have a rotary table each.
__global__ void __launch_bounds__(kPartThreads)
    EmbedKernel(HcShape shape, int rows, int tile, StepRows step, DType dtype,
                const std::byte* embedding, int64_t row_bytes, PlainMatrix fn, float* streams,
                float* partial, RopeTables rope) {
  LaunchDependents();
  const int table = static_cast<int>(blockIdx.x) - shape.parts;
  if (table >= 0) {
    GridDependencyWait();
    const int first = static_cast<int>(blockIdx.y) * tile;
    // Field by field: one address of either would put the parameters into local memory.
    const RopeTables::Table &a = rope.tables[0], &b = rope.tables[1];
    RopeTables::Table own;
    own.frequencies = table == 0 ? a.frequencies : b.frequencies;
    own.cos = table == 0 ? a.cos : b.cos;
    own.sin = table == 0 ? a.sin : b.sin;
    FillRopeTable(own, rope.pairs, step.pos, first, min(rows, first + tile));
    return;
  }
  const EmbedSource source = {shape, step.token, dtype, embedding, row_bytes};
  PartOfRows(shape, rows, tile, fn, source, streams, partial);
}

// ---- Rows: eight columns a thread ----

__device__ __forceinline__ float Logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// This thread's warp's share of the partials: lane i adds slot i of parts warp, warp + 16, ...; the
// loads of the first eight come back in `ahead`.
__device__ __forceinline__ void LoadPartials(const float* partial, int parts, int rows, int row,
                                             float (&ahead)[kPartialsAhead]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
#pragma unroll
  for (int u = 0; u < kPartialsAhead; ++u) {
    const int part = warp + u * kPartialWarps;
    const int64_t at = (static_cast<int64_t>(part) * rows + row) * kPartialSlots + lane;
    ahead[u] = warp < kPartialWarps && part < parts ? partial[at] : 0.0f;
  }
}

__device__ __forceinline__ float AddPartials(const float* partial, int parts, int rows, int row,
                                             const float (&ahead)[kPartialsAhead]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  float sum = ahead[0];
#pragma unroll
  for (int u = 1; u < kPartialsAhead; ++u) sum += ahead[u];
  if (warp < kPartialWarps) {
    for (int part = warp + kPartialsAhead * kPartialWarps; part < parts; part += kPartialWarps) {
      sum += partial[(static_cast<int64_t>(part) * rows + row) * kPartialSlots + lane];
    }
  }
  return sum;
}

__device__ __forceinline__ float AddWarpShares(
    const float (&shares)[kPartialWarps][kPartialSlots]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float v[kPartialWarps];
#pragma unroll
  for (int i = 0; i < kPartialWarps; ++i) v[i] = shares[i][lane];
#pragma unroll
  for (int i = 0; i < kPartialWarps / 2; ++i) v[i] += v[i + kPartialWarps / 2];
  static_assert(kPartialWarps == 16);
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// kHead: only pre, of the chosen rows. Else the mixes are left for a SinkhornJob.
template <bool kHead>
__global__ void __launch_bounds__(kMaxRowThreads)
    HcPreKernel(HcShape shape, int rows, const int32_t* row_index, const float* streams,
                const float* partial, HcWeights weights, const float* norm_weight, float* mixes,
                ActivationView out) {
  DS4_DYNAMIC_SHARED(memory);  // the norm's weights: registers are for the streams
  __shared__ float shares[kPartialWarps][kPartialSlots];
  __shared__ float squares[kMaxRowThreads / kWarpSize];
  LaunchDependents();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int h = shape.streams;
  const int c = static_cast<int>(threadIdx.x) * kThreadCols;
  const bool has_columns = c < shape.dim;
  float* const own_weights = reinterpret_cast<float*>(memory) + c;
  if (has_columns) {
    CopyAsync16(own_weights, norm_weight + c);
    CopyAsync16(own_weights + 4, norm_weight + c + 4);
  }
  CopyAsyncCommit();
  const float base = lane < weights.fn.rows ? weights.base[lane] : 0.0f;
  const float scale = kHead || lane < h ? weights.scale[0] : weights.scale[lane < 2 * h ? 1 : 2];
  GridDependencyWait();

  const int t = static_cast<int>(blockIdx.x);
  const int row = kHead ? row_index[t] : t;
  float ahead[kPartialsAhead];
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
  if (!kHead && warp == num_warps - 1) mixes[t * kMixSlots + lane] = z;
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
  const float square = WarpSum(SumOfSquares(v));
  if (lane == 0) squares[warp] = square;
  __syncthreads();

  float weight[kThreadCols] = {};
  CopyAsyncWait<0>();
  if (has_columns) LoadColumns(own_weights, 0, kThreadCols, true, weight);
  const float mean_square = SumOfWarps(squares, num_warps) / static_cast<float>(shape.dim);
  ScaleColumns(1.0f / sqrtf(mean_square + shape.norm_eps), weight, v);
  if (c < out.cols) StoreForms(out, t, c, v);
}

__global__ void __launch_bounds__(kMaxRowThreads) RmsNormKernel(RowNorm norm, bool vectors) {
  __shared__ float squares[kMaxRowThreads / kWarpSize];
  LaunchDependents();
  NormRow(norm, static_cast<int>(blockIdx.x), vectors, squares);
}

// ---- Host ----

HcShape ShapeOf(const HcParams& params) {
  CHECK(params.num_streams >= 1 && params.num_streams <= kStreams)
      << params.num_streams << " streams, at most " << kStreams;
  CHECK(params.hidden_dim >= 1 && params.hidden_dim % kThreadCols == 0)
      << "hidden_dim " << params.hidden_dim << " is no multiple of " << kThreadCols;
  CHECK(params.sinkhorn_iterations >= 1) << params.sinkhorn_iterations << " Sinkhorn iterations";
  return {params.num_streams, params.hidden_dim, NumParts(params), params.hc_eps, params.norm_eps};
}

void CheckFn(const HcShape& shape, const PlainMatrix& fn) {
  CHECK(fn.dtype == DType::kF32 || fn.dtype == DType::kF16 || fn.dtype == DType::kBF16)
      << "mixing weights are " << Info(fn.dtype).name << ", must be F32, F16 or BF16";
  CHECK(fn.rows >= 1 && fn.rows <= kMaxMixes && fn.cols == shape.streams * shape.dim)
      << "mixing weights [" << fn.rows << ", " << fn.cols << "] for " << shape.streams
      << " streams of " << shape.dim;
  CHECK(reinterpret_cast<uintptr_t>(fn.data) % 16 == 0) << "mixing weights at an odd address";
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

// Threads of HcPre: enough for the row, and for the warps that add partials.
unsigned HcThreads(const HcShape& shape, const ActivationView& out) {
  CHECK(out.cols >= shape.dim) << out.cols << " columns for a hidden_dim of " << shape.dim;
  return std::max(RowThreads(out.cols), static_cast<unsigned>(kPartialWarps * kWarpSize));
}

void CheckNorm(const float* norm_weight) {
  CHECK(reinterpret_cast<uintptr_t>(norm_weight) % 16 == 0) << "norm weights at an odd address";
}

size_t WeightBytes(const HcShape& shape) { return static_cast<size_t>(shape.dim) * sizeof(float); }

}  // namespace

void LaunchEmbed(const LaunchContext& launch, const HcParams& params, const StepRows& step,
                 int rows, DType dtype, const std::byte* embedding, const PlainMatrix& next_fn,
                 float* streams, float* partial, const RopeTables& rope) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, next_fn);
  CHECK(dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 ||
        dtype == DType::kQ8_0)
      << "embedding is " << Info(dtype).name << ", must be F32, F16, BF16 or Q8_0";
  const int tile = RowTile(launch, shape.parts, rows);
  CHECK(rope.count >= 0 && rope.count <= RopeTables::kMax) << rope.count << " rotary tables";
  Launch(launch, PartGrid(shape.parts + rope.count, rows, tile), kPartThreads, 0, EmbedKernel,
         shape, rows, tile, step, dtype, embedding, BytesFor(dtype, shape.dim), next_fn, streams,
         partial, rope);
}

void LaunchHcPost(const LaunchContext& launch, const HcParams& params, int rows,
                  const RootSet& roots, const HcMix& mix, const PlainMatrix& next_fn,
                  float* streams, float* partial) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, next_fn);
  const int tile = RowTile(launch, shape.parts, rows);
  Launch(launch, PartGrid(shape.parts, rows, tile), kPartThreads, 0, HcPostKernel, shape, rows,
         tile, ProgramOf(roots), mix, next_fn, streams, partial);
}

void LaunchHcPre(const LaunchContext& launch, const HcParams& params, int rows,
                 const float* streams, const float* partial, const HcWeights& weights,
                 const float* norm_weight, float* mixes, const ActivationView& x) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, weights.fn);
  CHECK(weights.fn.rows == shape.streams * (2 + shape.streams))
      << weights.fn.rows << " mixing rows for " << shape.streams << " streams";
  CheckNorm(norm_weight);
  Launch(launch, static_cast<unsigned>(rows), HcThreads(shape, x), WeightBytes(shape),
         HcPreKernel<false>, shape, rows, static_cast<const int32_t*>(nullptr), streams, partial,
         weights, norm_weight, mixes, x);
}

void LaunchHcHead(const LaunchContext& launch, const HcParams& params, int rows,
                  const int32_t* row_index, const float* streams, const float* partial,
                  const HcWeights& weights, const float* norm_weight, const ActivationView& out) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, weights.fn);
  CHECK(weights.fn.rows == shape.streams)
      << weights.fn.rows << " head mixing rows for " << shape.streams << " streams";
  CheckNorm(norm_weight);
  Launch(launch, static_cast<unsigned>(out.rows), HcThreads(shape, out), WeightBytes(shape),
         HcPreKernel<true>, shape, rows, row_index, streams, partial, weights, norm_weight,
         static_cast<float*>(nullptr), out);
}

void LaunchRmsNorm(const LaunchContext& launch, const float* x, int64_t stride, int rows, int cols,
                   const float* weight, float eps, const ActivationView& out) {
  CHECK(cols >= 1 && cols <= out.cols) << cols << " columns into " << out.cols;
  const RowNorm norm = {x, stride, cols, weight, eps, out};
  Launch(launch, static_cast<unsigned>(rows), RowThreads(out.cols), 0, RmsNormKernel, norm,
         VectorsFit(x, stride, cols));
}

}  // namespace ds4::cuda
