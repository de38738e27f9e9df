// Streams: embedding and the ends of sites. (The starts: hyper_connection_start.cu.)
//
// A block has a part of 32 columns and a tile of rows. A warp expands a row's streams there, then
// all warps share the row's dot products: each half warp has three rows of fn in registers, fetched
// before the results are waited for, so a tile of rows reads fn once. With few rows a block has one
// row, and a kernel of its own with little code: the same sums, but a warp for each new stream.
#include "engine/cuda/hyper_connection.cuh"

namespace ds4::cuda {
namespace {

constexpr int kPartThreads = 128;
constexpr int kPartWarps = kPartThreads / kWarpSize;
constexpr int kPartValues = kStreams * kPartCols;
constexpr int kHalfWarp = kWarpSize / 2;  // lanes that share a dot product
constexpr int kMixesOfHalf = kMaxMixes / (kPartThreads / kHalfWarp);
constexpr int kRowBatch = 8;  // rows between two barriers
constexpr int kRowsOfWarp = kRowBatch / kPartWarps;
constexpr int kTileBlocks = 5;  // of the kernels for tiles of rows, on a multiprocessor
constexpr int kRowBlocks = 8;   // of the one for single rows
static_assert(kPartCols == kWarpSize && kPartValues == 8 * kHalfWarp);
static_assert(kMixesOfHalf * (kPartThreads / kHalfWarp) == kMaxMixes);

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
// the loads bring. Zeros where there is none (kWhole: nowhere).
template <bool kFloat32, bool kWhole>
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
      const bool there = kWhole || (i < fn.rows && j < shape.streams && d < shape.dim);
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
    FetchRunsOf<true, false>(fn, shape, w);
  } else {
    FetchRunsOf<false, false>(fn, shape, w);
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

// Where the sums of a row go, and of the rows behind it.
struct PartSums {
  float* start = nullptr;  // [rows][kStartSlots]
  float* rest = nullptr;   // [rows][kRestSlots]

  // The dot product of row u with row i of fn.
  __device__ __forceinline__ float* Dot(int u, int i, int streams) const {
    return i < streams ? start + u * kStartSlots + i : rest + u * kRestSlots + i - streams;
  }
  // From those of all rows and parts: of this block's part, from `row` on.
  __device__ __forceinline__ PartSums At(int rows, int row) const {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * rows + row;
    return {start + at * kStartSlots, rest + at * kRestSlots};
  }
};

// The dot product that this lane has after FoldSums of its half warp's, or none (negative).
__device__ __forceinline__ int FoldedDot(int half, int lane) {
  const int m = FoldedSum<8>(lane);
  return lane % 4 == 0 && m < kMixesOfHalf ? kMixesOfHalf * half + m : -1;
}

// A row's dot products: a tree over the lanes of each half warp.
__device__ __forceinline__ void StoreDots(const MixRuns& w, const float* x, int u, int mixes,
                                          int streams, const PartSums& to) {
  const int half = static_cast<int>(threadIdx.x) / kHalfWarp;
  const int lane = static_cast<int>(threadIdx.x) % kHalfWarp;
  float v[kMixesOfHalf];
  DotShares(w, x, v);
  const float sum = FoldSums<kHalfWarp / 2, 1>(lane, v);
  const int i = FoldedDot(half, lane);
  if (i >= 0 && i < mixes) *to.Dot(u, i, streams) = sum;
}

// StoreDots of a full batch of rows, the same additions in fewer shuffles. x:
// [kRowBatch][kPartValues].
__device__ __forceinline__ void StoreDotsOfBatch(const MixRuns& w, const float* x, int mixes,
                                                 int streams, const PartSums& to) {
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
  const int own = FoldedSum<kHalfWarp / 2>(lane) % kRowBatch;
#pragma unroll
  for (int m = 0; m < kMixesOfHalf; ++m) {
    const float sum = FoldSums<kHalfWarp / 2, 1>(lane, v[m]);
    const int i = kMixesOfHalf * half + m;
    if (lane % 2 == 0 && i < mixes) *to.Dot(own, i, streams) = sum;
  }
}

// A warp's Gram products of row u, from the streams of the part, a column in each lane.
__device__ __forceinline__ void StoreGram(const float (&x)[kStreams], int u, const PartSums& to) {
  constexpr int kProducts = 10;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float v[kProducts];
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    v[i] = x[i % kStreams] * x[(i % kStreams + i / kStreams) % kStreams];
  }
  const float sum = FoldSums<kWarpSize / 2, 1>(lane, v);
  const int own = FoldedSum<kWarpSize / 2>(lane);
  if (lane % 2 == 0 && own < kProducts) to.start[u * kStartSlots + kGramSlot + own] = sum;
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

// The dot products of a batch of `count` rows, by all warps. x: [kRowBatch][kPartValues], shared.
__device__ __forceinline__ void StoreBatch(const MixRuns& w, const float* x, int count, int mixes,
                                           int streams, const PartSums& to) {
  if (count == kRowBatch) {
    StoreDotsOfBatch(w, x, mixes, streams, to);
  } else {
#pragma unroll 1
    for (int u = 0; u < count; ++u) StoreDots(w, x + u * kPartValues, u, mixes, streams, to);
  }
}

// Gives each row of a block's tile to one warp, lane by column, then adds the dot products up.
// Source has a struct Row with what a lane holds of a row while it is on its way, Load(row, there,
// Row&) and Finish(u, Row, x): the lane's new stream values, u being the row's place in the batch.
// The next batch is loaded before this one's dot products. kPlain: four streams, only whole parts.
template <bool kPlain, typename Source>
__device__ __forceinline__ void PartOfRows(const HcShape& shape, int rows, int tile,
                                           const PlainMatrix& fn, const Source& source,
                                           float* streams, PartSums all) {
  __shared__ __align__(16) float values[2][kRowBatch * kPartValues];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int d = static_cast<int>(blockIdx.x) * kPartCols + lane;
  const int begin = static_cast<int>(blockIdx.y) * tile;
  const int end = min(rows, begin + tile);
  const int h = kPlain ? kStreams : shape.streams;
  const int mixes = static_cast<int>(fn.rows);
  MixRuns w;
  FetchRuns(fn, shape, w);
  GridDependencyWait();
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
      StoreBatch(w, values[turn ^ 1], min(kRowBatch, end - before), mixes, h, all.At(rows, before));
    }
    if (first >= end) break;
    const PartSums sums = all.At(rows, first);
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int u = warp + r * kPartWarps;
      if (first + u >= end) break;
      float x[kStreams];
      source.Finish(u, rows_here[r], x);
      float* to = streams + static_cast<int64_t>(first + u) * h * shape.dim + d;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        if (kPlain || (k < h && d < shape.dim)) to[static_cast<int64_t>(k) * shape.dim] = x[k];
        values[turn][u * kPartValues + k * kPartCols + lane] = x[k];
      }
      StoreGram(x, u, sums);
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

template <bool kPlain>
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
    const int h = kPlain ? kStreams : shape.streams;
    const float* from = streams + static_cast<int64_t>(row) * h * shape.dim + d;
    const bool inside = there && (kPlain || d < shape.dim);
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
      to.s = kPlain || roots.count == 1 ? roots.data[0][at] : TreeOfRoots(roots, at);
    }
  }

  __device__ __forceinline__ void Finish(int u, const Row& row, float (&x)[kStreams]) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float* own = mixes + u * kWarpSize;
    own[lane] = row.mix;
    __syncwarp();
    Expand(reinterpret_cast<const float4*>(own), kPlain ? kStreams : shape.streams, row.s, row.x,
           x);
  }
};

// kPlain: one root too.
template <bool kPlain>
__global__ void __launch_bounds__(kPartThreads, kTileBlocks)
    HcPostKernel(HcShape shape, int rows, int tile, RootProgram roots, HcMix mix, PlainMatrix fn,
                 float* streams, PartSums all) {
  __shared__ __align__(16) float mixes[kRowBatch * kWarpSize];
  LaunchDependents();
  const PostSource<kPlain> source = {shape, roots, mix, streams, mixes};
  PartOfRows<kPlain>(shape, rows, tile, fn, source, streams, all);
}

// A row in each block, four streams, one root, whole parts and all rows of fn. Warp k makes stream
// k, then its part of the sums; Gram products with itself and the two streams behind it.
template <DType kType>
__global__ void __launch_bounds__(kPartThreads, kRowBlocks)
    HcPostRowKernel(HcShape shape, int rows, const float* root, HcMix mix, PlainMatrix fn,
                    float* streams, PartSums all) {
  __shared__ __align__(16) float x[kPartValues];
  LaunchDependents();
  const unsigned thread = threadIdx.x;
  const int warp = static_cast<int>(thread) / kWarpSize,
            lane = static_cast<int>(thread) % kWarpSize;
  const int row = static_cast<int>(blockIdx.y);
  const int d = static_cast<int>(blockIdx.x) * kPartCols + lane;
  MixRuns w;
  FetchRunsOf<kType == DType::kF32, true>(fn, shape, w);
  float* from = streams + static_cast<int64_t>(row) * kStreams * shape.dim + d;
  float* own = from + warp * shape.dim;
  const float* added = root + static_cast<int64_t>(row) * shape.dim + d;
  const float* post = mix.post + row * kStreams + warp;
  const float* comb = mix.comb + row * kStreams * kStreams + warp;
  const PartSums sums = all.At(rows, row);
  const int dot = FoldedDot(thread / kHalfWarp, lane % kHalfWarp);
  float* dot_to = sums.Dot(0, dot, kStreams);
  const int gram = FoldedSum<kWarpSize / 2>(lane);
  float* gram_to = sums.start + kGramSlot + kStreams * gram + warp;
  const float* next = x + (thread + kPartCols) % kPartValues;
  const float* second = x + (thread + 2 * kPartCols) % kPartValues;
  KeepAddress(from);
  KeepAddress(own);
  KeepAddress(added);
  KeepAddress(post);
  KeepAddress(comb);
  KeepAddress(dot_to);
  KeepAddress(gram_to);
  GridDependencyWait();

  float old[kStreams], share[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    old[j] = from[j * shape.dim];
    share[j] = comb[j * kStreams];
  }
  float value = *post * *added;
  if constexpr (kType != DType::kF32) WidenRuns<kType == DType::kF16>(w);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) value = fmaf(share[j], old[j], value);
  x[thread] = value;
  __syncthreads();  // every warp has read the old streams, too
  *own = value;
  float v[kMixesOfHalf];
  DotShares(w, x, v);
  const float products[3] = {value * value, value * *next, value * *second};
  const float dot_sum = FoldSums<kHalfWarp / 2, 1>(lane, v);
  const float gram_sum = FoldSums<kWarpSize / 2, 1>(lane, products);
  if (dot >= 0) *dot_to = dot_sum;
  if (lane % 8 == 0 && gram < 3) *gram_to = gram_sum;
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
                PartSums all, RopeTables rope) {
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
  PartOfRows<false>(shape, rows, tile, fn, source, streams, all);
}

// ---- Host ----

// Rows of a block of the kernels over parts. No result depends on it.
int RowTile(const LaunchContext& launch, int parts, int rows) {
  const int64_t resident = int64_t{kTileBlocks} * launch.num_sms;  // blocks that run at once
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

PartSums SumsIn(float* partial, const HcShape& shape, int rows) {
  return {partial, partial + RestOffset(shape.parts, rows)};
}

template <DType kType>
void LaunchPostRows(const LaunchContext& launch, const HcShape& shape, int rows, const float* root,
                    const HcMix& mix, const PlainMatrix& fn, float* streams, const PartSums& all) {
  Launch(launch, PartGrid(shape.parts, rows, 1), kPartThreads, 0, HcPostRowKernel<kType>, shape,
         rows, root, mix, fn, streams, all);
}

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
         SumsIn(partial, shape, rows), rope);
}

void LaunchHcPost(const LaunchContext& launch, const HcParams& params, int rows,
                  const RootSet& roots, const HcMix& mix, const PlainMatrix& next_fn,
                  float* streams, float* partial) {
  const HcShape shape = ShapeOf(params);
  CheckFn(shape, next_fn);
  const RootProgram program = ProgramOf(roots);
  const PartSums all = SumsIn(partial, shape, rows);
  const bool plain = shape.streams == kStreams && program.count == 1 && shape.dim % kPartCols == 0;
  const int tile = RowTile(launch, shape.parts, rows);
  if (plain && next_fn.rows == kMaxMixes && tile == 1) {
    const auto launch_rows = next_fn.dtype == DType::kF32   ? LaunchPostRows<DType::kF32>
                             : next_fn.dtype == DType::kF16 ? LaunchPostRows<DType::kF16>
                                                            : LaunchPostRows<DType::kBF16>;
    launch_rows(launch, shape, rows, program.data[0], mix, next_fn, streams, all);
    return;
  }
  Launch(launch, PartGrid(shape.parts, rows, tile), kPartThreads, 0,
         plain ? HcPostKernel<true> : HcPostKernel<false>, shape, rows, tile, program, mix, next_fn,
         streams, all);
}

}  // namespace ds4::cuda
