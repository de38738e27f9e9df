// Streams: the starts of sites, the head's, and norms of rows.
//
// A site's start has several blocks a row, each with a slice of its columns. All of them add the
// same few partial sums, which tell the mixes and, as products of streams, the square of the
// collapsed row: so a block reads only its slice. A block more leaves the other mixes for the
// kernel that balances them. With many rows a block takes several slices in turn.
#include <algorithm>

#include "engine/cuda/hyper_connection.cuh"
#include "engine/cuda/row_forms.cuh"

namespace ds4::cuda {
namespace {

constexpr int kPreThreads = 128;
constexpr int kPreWarps = kPreThreads / kWarpSize;
constexpr int kPreBlocks = 7;  // on a multiprocessor
constexpr int kCols = 4;       // of a thread in a slice
constexpr int kSliceCols = kCols * kPreThreads;
constexpr int kAheadParts = 128;             // whose sums are in flight at once
constexpr int kDiagonal = kGramSlot;         // slots of the streams' squares
constexpr int kNext = kDiagonal + kStreams;  // of products with the next stream
constexpr int kSecond = kNext + kStreams;    // with the one behind it
// Of the streams' squares: a sum with a smaller one is added up column by column.
constexpr float kCancelled = 1.0f / 64.0f;

struct PreJob {
  HcShape shape;
  int rows = 0;
  const float* base = nullptr;
  const float* scale = nullptr;
  const float* norm_weight = nullptr;
  const float* streams = nullptr;
  const float* start = nullptr;
  const float* rest = nullptr;
  const int32_t* row_index = nullptr;  // head only
  int num_mixes = 0;
  float* mixes = nullptr;
  ActivationView out;
  float inverse_dim = 0.0f;   // 1 / D
  float inverse_size = 0.0f;  // 1 / (H D)
  int rehearsals = 0;         // turns before the one that counts
};

__device__ __forceinline__ float4 AddQuads(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 LoadQuad(const float* at, bool there) {
  return there ? *reinterpret_cast<const float4*>(at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Four slots of a row in parts first, first + kStep, ...: on their way, then their sum. from: of
// part `first`; stride: floats from a part to the next. kWhole: there are as many parts as loads at
// least.
template <int kStep, bool kWhole>
struct PartQuads {
  static constexpr int kAhead = kAheadParts / kStep;  // loads in flight at once
  float4 ahead[kAhead] = {};

  __device__ __forceinline__ void Load(const float* from, int64_t stride, int first, int parts) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const bool there = kWhole || first + u * kStep < parts;
      ahead[u] = LoadQuad(from + u * kStep * stride, there);
    }
  }
  __device__ __forceinline__ float4 Sum(const float* from, int64_t stride, int first,
                                        int parts) const {
    float4 sum = ahead[0];
#pragma unroll
    for (int u = 1; u < kAhead; ++u) sum = AddQuads(sum, ahead[u]);
#pragma unroll 1
    for (int u = kAhead; first + u * kStep < parts; ++u) {
      sum = AddQuads(sum, LoadQuad(from + u * kStep * stride, true));
    }
    return sum;
  }
};

// The sum over the warps of slot `slot`.
__device__ __forceinline__ float SumOfSlot(const float (&sums)[kPreWarps][kWarpSize], int slot) {
  static_assert(kPreWarps == 4);
  return (sums[0][slot] + sums[1][slot]) + (sums[2][slot] + sums[3][slot]);
}

// 1 / rms of all streams, from the square of each.
__device__ __forceinline__ float InverseRms(const PreJob& job, const float (&squares)[kStreams]) {
  const float sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return rsqrtf(fmaf(sum, job.inverse_size, job.shape.norm_eps));
}

// The block that leaves row t's mixes behind pre. sums: shared.
template <bool kWhole>
__device__ __forceinline__ void LeaveMixes(const PreJob& job, int t,
                                           float (&sums)[kPreWarps][kWarpSize]) {
  // Eight lanes a part: five quads of `rest` and the one of the squares.
  constexpr int kQuads = 8, kRest = kRestSlots / 4, kStep = kPreThreads / kQuads;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int quad = lane % kQuads, first = thread / kQuads, parts = job.shape.parts;
  const int h = job.shape.streams, mix = h + lane;
  const bool own = lane < kRestSlots && mix < job.num_mixes;
  const float base = own ? job.base[mix] : 0.0f, scale = job.scale[mix < 2 * h ? 1 : 2];
  const bool of_rest = quad < kRest;  // the last lanes add the squares, too
  const int64_t stride = job.rows * (of_rest ? kRestSlots : kStartSlots);
  const float* from =
      (of_rest ? job.rest + t * kRestSlots + 4 * quad : job.start + t * kStartSlots + kDiagonal) +
      first * stride;
  float* to = job.mixes + t * kMixSlots + mix;
  KeepAddress(from);
  KeepAddress(to);
  GridDependencyWait();
  PartQuads<kStep, kWhole> quads;
  quads.Load(from, stride, first, parts);
  const float4 sum = quads.Sum(from, stride, first, parts);
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
  sums[warp][4 * quad + FoldedSum<16>(lane) % 4] = FoldSums<16, 8>(lane, v);
  __syncthreads();
  if (warp > 0) return;
  const float total = SumOfSlot(sums, lane);
  float squares[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    squares[j] = __shfl_sync(kFullMask, total, kRestSlots + j);
  }
  const float z = fmaf(total * InverseRms(job, squares), scale, base);
  if (own) *to = z;
}

// A row's collapse.
struct Collapse {
  float pre[kStreams];
  float factor;  // of the norm
};

// This thread's columns of all streams, `from` those of the first one.
template <bool kWhole>
__device__ __forceinline__ void LoadStreams(const HcShape& shape, const float* from, bool there,
                                            float4 (&x)[kStreams]) {
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    x[j] = LoadQuad(from + j * shape.dim, kWhole || (there && j < shape.streams));
  }
}
__device__ __forceinline__ void CollapseCols(const float (&pre)[kStreams],
                                             const float4 (&x)[kStreams], float (&v)[kCols]) {
  v[0] = pre[0] * x[0].x, v[1] = pre[0] * x[0].y, v[2] = pre[0] * x[0].z, v[3] = pre[0] * x[0].w;
#pragma unroll
  for (int j = 1; j < kStreams; ++j) {
    v[0] = fmaf(pre[j], x[j].x, v[0]), v[1] = fmaf(pre[j], x[j].y, v[1]);
    v[2] = fmaf(pre[j], x[j].z, v[2]), v[3] = fmaf(pre[j], x[j].w, v[3]);
  }
}

// The square of a collapsed row column by column, by all threads of the block.
__device__ __forceinline__ float SquareOfRow(const HcShape& shape, const float* streams,
                                             const float (&pre)[kStreams],
                                             float (&sums)[kPreWarps][kWarpSize]) {
  const int thread = static_cast<int>(threadIdx.x);
  float sum = 0.0f;
#pragma unroll 1
  for (int c = kCols * thread; c < shape.dim; c += kSliceCols) {
    float4 x[kStreams];
    float v[kCols];
    LoadStreams<false>(shape, streams + c, true, x);
    CollapseCols(pre, x, v);
#pragma unroll
    for (int i = 0; i < kCols; ++i) sum = fmaf(v[i], v[i], sum);
  }
  sum = WarpSum(sum);
  __syncthreads();  // `sums` has been read
  if (thread % kWarpSize == 0) sums[thread / kWarpSize][0] = sum;
  __syncthreads();
  return SumOfSlot(sums, 0);
}

// From a row's sums, slot i in lane i of each warp. streams: the row's.
template <bool kWhole>
__device__ __forceinline__ Collapse CollapseOf(const PreJob& job, const float* streams, float total,
                                               float scale, float base,
                                               float (&sums)[kPreWarps][kWarpSize]) {
  const auto slot = [total](int i) { return __shfl_sync(kFullMask, total, i); };
  const float squares[kStreams] = {slot(kDiagonal), slot(kDiagonal + 1), slot(kDiagonal + 2),
                                   slot(kDiagonal + 3)};
  const float z = fmaf(total * InverseRms(job, squares), scale, base);
  const float gate = FastReciprocal(1.0f + expf(-z));
  Collapse collapse;
  float(&pre)[kStreams] = collapse.pre;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float own = __shfl_sync(kFullMask, gate, j) + job.shape.hc_eps;
    pre[j] = kWhole || j < job.shape.streams ? own : 0.0f;
  }
  // (sum_j pre_j X_j)^2: pre_j (pre_j X_j X_j + 2 sum of the products with streams behind it).
  float alone = 0.0f, across = 0.0f;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    alone = fmaf(pre[j] * pre[j], squares[j], alone);
    across = fmaf(pre[j] * pre[(j + 1) % kStreams], slot(kNext + j), across);
    if (j < 2) across = fmaf(pre[j] * pre[j + 2], slot(kSecond + j), across);
  }
  float square = fmaf(2.0f, across, alone);
  // Where streams cancel each other, too few digits are left. The same for all blocks of the row.
  if (square < kCancelled * alone) square = SquareOfRow(job.shape, streams, pre, sums);
  collapse.factor = rsqrtf(fmaf(square, job.inverse_dim, job.shape.norm_eps));
  return collapse;
}

// kHead: of the chosen rows, and nobody needs other mixes than pre. Else the last blocks of the
// grid's second dimension leave the mixes. kWhole: four streams, slices and rows of `out` are full,
// all parts ahead are there, and a block has one slice.
//
// A kernel that runs once a layer finds its code and parameters in no cache. The blocks of a few
// rows are there while the kernel ahead is still busy: then a first turn does all the work on
// zeros, waits for no load, and stores nothing.
template <bool kHead, bool kWhole>
__global__ void __launch_bounds__(kPreThreads, kPreBlocks) HcPreKernel(const PreJob job) {
  constexpr int kQuads = kStartSlots / 4, kStep = kPreThreads / kQuads;  // four lanes a part
  __shared__ float sums[kPreWarps][kWarpSize];
  LaunchDependents();
  const int t = static_cast<int>(blockIdx.x);
  const int slices = static_cast<int>(gridDim.y) - (kHead ? 0 : 1);
  if (!kHead && static_cast<int>(blockIdx.y) == slices) {
    LeaveMixes<kWhole>(job, t, sums);
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int quad = lane % kQuads, first = thread / kQuads;
  const int h = kWhole ? kStreams : job.shape.streams, dim = job.shape.dim;
  const int cols = static_cast<int>(job.out.cols);
  const float base = lane < h ? job.base[lane] : 0.0f, scale = job.scale[0];
  const int slice = static_cast<int>(blockIdx.y) * kSliceCols;
  int c = slice + kCols * thread;
  if (thread == 0) PrefetchL2(job.norm_weight + slice, 4 * min(kSliceCols, dim - slice));
  float* const share = &sums[warp][4 * quad + FoldedSum<16>(lane) % 4];
  const int64_t stride = job.rows * kStartSlots;
  const float* start = job.start + first * stride + 4 * quad;
  const float* streams = job.streams;
  if (!kHead) {
    start += t * kStartSlots;
    streams += static_cast<int64_t>(t) * h * dim;
  }
  KeepAddress(start);
  KeepAddress(streams);
  PartQuads<kStep, kWhole> quads;
  float4 x[kStreams] = {}, weight = {};
  float used_base = 0.0f, used_scale = 0.0f;
#pragma unroll 1
  for (int turn = kWhole ? job.rehearsals : 0; turn >= 0; --turn) {
    const bool counts = turn == 0;
    if (counts) {
      GridDependencyWait();
      if (kHead) {
        const int row = job.row_index[t];
        start += row * kStartSlots;
        streams += static_cast<int64_t>(row) * h * dim;
      }
      quads.Load(start, stride, first, job.shape.parts);
      LoadStreams<kWhole>(job.shape, streams + c, c < dim, x);
      weight = LoadQuad(job.norm_weight + c, kWhole || c < dim);
      used_base = base, used_scale = scale;
    }
    const float4 sum = quads.Sum(start, stride, first, counts ? job.shape.parts : 0);
    const float slots[4] = {sum.x, sum.y, sum.z, sum.w};
    *share = FoldSums<16, 4>(lane, slots);  // by two lanes each
    __syncthreads();
    const float total = SumOfSlot(sums, lane % kStartSlots);
    const Collapse collapse = CollapseOf<kWhole>(job, streams, total, used_scale, used_base, sums);
    for (;;) {
      float v[kCols];
      CollapseCols(collapse.pre, x, v);
      v[0] *= collapse.factor * weight.x, v[1] *= collapse.factor * weight.y;
      v[2] *= collapse.factor * weight.z, v[3] *= collapse.factor * weight.w;
      // Whole warps: columns come in 256s.
      if (kWhole || c < cols) StoreForms(job.out, t, c, v, counts);
      if (kWhole || c + slices * kSliceCols >= cols) break;
      c += slices * kSliceCols;
      weight = LoadQuad(job.norm_weight + c, c < dim);
      LoadStreams<kWhole>(job.shape, streams + c, c < dim, x);
    }
    if (!counts) __syncthreads();  // all warps have read the sums
  }
}

__global__ void __launch_bounds__(kMaxRowThreads) RmsNormKernel(RowNorm norm, bool vectors) {
  __shared__ float squares[kMaxRowThreads / kWarpSize];
  LaunchDependents();
  NormRow(norm, static_cast<int>(blockIdx.x), vectors, squares);
}

// ---- Host ----

void CheckAligned(const void* data, const char* what) {
  CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0) << what << " at an odd address";
}

PreJob MakeJob(const HcParams& params, int rows, const float* streams, const float* partial,
               const HcWeights& weights, const float* norm_weight, const ActivationView& out) {
  PreJob job;
  job.shape = ShapeOf(params);
  CheckFn(job.shape, weights.fn);
  CHECK(out.cols >= job.shape.dim && out.cols % kColumnGrain == 0)
      << out.cols << " columns for a hidden_dim of " << job.shape.dim;
  CheckAligned(streams, "streams");
  CheckAligned(partial, "partial sums");
  CheckAligned(norm_weight, "norm weights");
  job.rows = rows;
  job.streams = streams;
  job.start = partial;
  job.rest = partial + RestOffset(job.shape.parts, rows);
  job.num_mixes = static_cast<int>(weights.fn.rows);
  job.base = weights.base;
  job.scale = weights.scale;
  job.norm_weight = norm_weight;
  job.out = out;
  job.inverse_dim = 1.0f / static_cast<float>(job.shape.dim);
  job.inverse_size = 1.0f / static_cast<float>(job.shape.streams * job.shape.dim);
  return job;
}

unsigned NumSlices(const ActivationView& out) {
  return static_cast<unsigned>((out.cols + kSliceCols - 1) / kSliceCols);
}

// Blocks that share a row's slices: one each, unless that is more than run at once. No result
// depends on it.
unsigned BlocksOfRow(const LaunchContext& launch, const ActivationView& out) {
  const int64_t blocks = int64_t{out.rows} * (NumSlices(out) + 1);
  return blocks <= int64_t{kPreBlocks} * launch.num_sms ? NumSlices(out) : 1;
}

}  // namespace

void LaunchHcPre(const LaunchContext& launch, const HcParams& params, int rows,
                 const float* streams, const float* partial, const HcWeights& weights,
                 const float* norm_weight, float* mixes, const ActivationView& x) {
  PreJob job = MakeJob(params, rows, streams, partial, weights, norm_weight, x);
  CHECK(job.num_mixes > params.num_streams) << job.num_mixes << " mixing rows";
  job.mixes = mixes;
  const unsigned blocks = BlocksOfRow(launch, x);
  const bool whole = params.num_streams == kStreams && x.cols == params.hidden_dim &&
                     blocks * kSliceCols == x.cols && job.shape.parts >= kAheadParts;
  job.rehearsals = int64_t{rows} * (blocks + 1) <= 2 * launch.num_sms ? 1 : 0;
  Launch(launch, dim3(static_cast<unsigned>(rows), blocks + 1), kPreThreads, 0,
         whole ? HcPreKernel<false, true> : HcPreKernel<false, false>, job);
}

void LaunchHcHead(const LaunchContext& launch, const HcParams& params, int rows,
                  const int32_t* row_index, const float* streams, const float* partial,
                  const HcWeights& weights, const float* norm_weight, const ActivationView& out) {
  PreJob job = MakeJob(params, rows, streams, partial, weights, norm_weight, out);
  job.row_index = row_index;
  Launch(launch, dim3(static_cast<unsigned>(out.rows), BlocksOfRow(launch, out)), kPreThreads, 0,
         HcPreKernel<true, false>, job);
}

void LaunchRmsNorm(const LaunchContext& launch, const float* x, int64_t stride, int rows, int cols,
                   const float* weight, float eps, const ActivationView& out) {
  CHECK(cols >= 1 && cols <= out.cols) << cols << " columns into " << out.cols;
  const RowNorm norm = {x, stride, cols, weight, eps, out};
  Launch(launch, static_cast<unsigned>(rows), RowThreads(out.cols), 0, RmsNormKernel, norm,
         VectorsFit(x, stride, cols));
}

}  // namespace ds4::cuda
