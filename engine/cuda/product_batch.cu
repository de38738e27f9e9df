// Products of Q8_0 weights with 9 to 64 rows of x. Here x is as large as the weights that a block
// reads, so a block shares it: it goes over some row tiles (a pass) in stages of `steps` steps of
// 32 columns, for `parallel` segments (slices of 512 columns) side by side. A stage brings the x of
// these columns for all rows, and for each warp the weights of its item, a (row tile, segment); it
// comes by asynchronous copies, some stages ahead. A wave is what brings `parallel` segments to
// their ends. Then their sums are added to the totals of their lanes, in rising order (product.h),
// by one segment of a lane after the other.
#include <algorithm>
#include <bit>

#include "engine/base/check.h"
#include "engine/cuda/dot.cuh"
#include "engine/cuda/product_batch.h"
#include "engine/cuda/product_output.cuh"
#include "engine/cuda/quantize.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSliceSteps = kSliceCols / 32;
constexpr int kChunkSteps = kChunkCols<DType::kQ8_0> / 32;
constexpr int kMaxParallel = 8;
constexpr int kMaxTileShift = 3;
constexpr int kMaxSegments = 180;  // slices of a row tile, over all lanes: see LaneOf
constexpr int kMaxSteps = 4;       // scales of weights lie together for four steps
constexpr int kMaxStages = 4;
constexpr int kMinStages = 2;
constexpr int kMaxXBytes = 36 * 1024;        // of a stage
constexpr int kMaxSharedBytes = 227 * 1024;  // of a block

// Weights of an item in a stage: the steps' values, then the scales of the four steps that they
// belong to.
constexpr int kStepBytes = 512;
constexpr int kScaleBytes = 128;
// x of one step for a tile of 8 rows, in a stage: all tiles' values, then all tiles' scales.
constexpr int kXTileBytes = 256;
constexpr int kXScaleBytes = 32;

struct BatchJob {
  int rows;        // of w
  int tiles;       // of w
  int segments;    // lanes * slices
  int slices;      // of a lane
  int lane_steps;  // of a lane
  int first_pass;
  uint32_t slice_inverse;  // see LaneOf
  int x_step;              // of the first column
  int64_t tile_bytes;
  int64_t matrix_bytes;
  const std::byte* w;
  ActivationView x;
  float* y;
  int64_t y_stride;
  ActivationView out;
  int64_t out_col;
};

struct BatchParams {
  int num_jobs;
  int x_rows;
  int passes;
  int tile_shift;      // 2^tile_shift row tiles in a pass
  int parallel_shift;  // 2^parallel_shift segments side by side
  int step_shift;      // 2^step_shift steps in a stage
  int num_stages;      // of the ring
  int stage_bytes;
  LaneRoots lanes;
  BatchJob jobs[kMaxProductJobs];
};
static_assert(sizeof(BatchParams) <= 4000, "kernel parameters are limited to 4 KB");

// segment / job.slices: exact while segments * slices < 2^16.
__device__ __forceinline__ int LaneOf(const BatchJob& job, int segment) {
  return static_cast<int>(static_cast<uint32_t>(segment) * job.slice_inverse >> 16);
}

// The stages of a block, in order.
struct Cursor {
  int pass;
  int job = 0;
  int first_segment = 0;
  int step = 0;  // of a slice, the stage's first

  __device__ __forceinline__ explicit Cursor(const BatchParams& params)
      : pass(static_cast<int>(blockIdx.x)) {
    FindJob(params);
  }
  __device__ __forceinline__ bool AtEnd(const BatchParams& params) const {
    return pass >= params.passes;
  }
  __device__ __forceinline__ bool EndsWave(const BatchParams& params) const {
    return step + (1 << params.step_shift) == kSliceSteps;
  }
  __device__ __forceinline__ bool IsLastWave(const BatchParams& params) const {
    return first_segment + (1 << params.parallel_shift) >= params.jobs[job].segments;
  }
  __device__ __forceinline__ int FirstTile(const BatchParams& params) const {
    return (pass - params.jobs[job].first_pass) << params.tile_shift;
  }
  __device__ __forceinline__ void Next(const BatchParams& params) {
    const bool wave_ends = EndsWave(params);
    step = wave_ends ? 0 : step + (1 << params.step_shift);
    if (!wave_ends) return;
    const bool pass_ends = IsLastWave(params);
    first_segment = pass_ends ? 0 : first_segment + (1 << params.parallel_shift);
    if (!pass_ends) return;
    pass += static_cast<int>(gridDim.x);
    FindJob(params);
  }

 private:
  __device__ __forceinline__ void FindJob(const BatchParams& params) {
    while (job + 1 < params.num_jobs && pass >= params.jobs[job + 1].first_pass) ++job;
  }
};

// A segment of a wave.
struct Segment {
  int index;
  int lane;
  int slice;
  int steps;  // 0: there is none

  __device__ __forceinline__ Segment(const BatchParams& params, const Cursor& at, int parallel)
      : index(at.first_segment + parallel) {
    const BatchJob& job = params.jobs[at.job];
    lane = LaneOf(job, index);
    slice = index - lane * job.slices;
    steps = index < job.segments ? min(kSliceSteps, job.lane_steps - slice * kSliceSteps) : 0;
  }
};

// What a warp multiplies in a wave: one row tile, one segment.
struct Item {
  int tile;      // of the pass
  int parallel;  // the segment is the wave's
  Segment segment;

  __device__ __forceinline__ Item(const BatchParams& params, const Cursor& at)
      : tile(Warp() & ((1 << params.tile_shift) - 1)),
        parallel(Warp() >> params.tile_shift),
        segment(params, at, parallel) {
    const bool idle = parallel >= 1 << params.parallel_shift ||
                      at.FirstTile(params) + tile >= params.jobs[at.job].tiles;
    if (idle) segment.steps = 0;
  }
  __device__ __forceinline__ static int Warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
};

template <int kTiles>
inline constexpr int kXStepBytes = kTiles*(kXTileBytes + kXScaleBytes);

// Sends for the stages of a block, in order. What stays the same for a wave is worked out once.
template <int kTiles>
struct Sender {
  static constexpr int kXSteps = kMaxParallel * kMaxSteps / kWarps;  // a warp's, of a stage

  Cursor at;
  int steps;                 // of the warp's weights
  const std::byte* weights;  // the segment's, this lane's of the first step
  int x_steps[kXSteps];      // of the segment whose x the warp sends for; 0: of none
  int x_from[kXSteps];       // tiles of x before the wave's first

  __device__ __forceinline__ explicit Sender(const BatchParams& params) : at(params) {
    StartWave(params);
  }
  __device__ __forceinline__ bool AtEnd(const BatchParams& params) const {
    return at.AtEnd(params);
  }
  __device__ __forceinline__ void Next(const BatchParams& params) {
    at.Next(params);
    if (at.step == 0) StartWave(params);
  }

  // own: the warp's part of the stage.
  __device__ __forceinline__ void SendWeights(const BatchParams& params, std::byte* own) const {
    if (at.step >= steps) return;
    const std::byte* chunk = weights + at.step / kChunkSteps * kChunkBytes<DType::kQ8_0>;
    const std::byte* from = chunk + at.step % kChunkSteps * kStepBytes;
    std::byte* to = own + 16 * LaneId();
    CopyAsync16(to, from);
    CopyAsync16(to + kStepBytes, from + kStepBytes);
    if (params.step_shift == 2) {
      CopyAsync16(to + 2 * kStepBytes, from + 2 * kStepBytes);
      CopyAsync16(to + 3 * kStepBytes, from + 3 * kStepBytes);
    }
    const std::byte* scales =
        chunk + kChunkSteps * kStepBytes + at.step % kChunkSteps / 4 * kScaleBytes;
    CopyAsync16If(LaneId() < kScaleBytes / 16, to + (kStepBytes << params.step_shift), scales);
  }
  // x: of the stage; [segment][step].
  __device__ __forceinline__ void SendX(const BatchParams& params, std::byte* x) const {
    const ActivationView& view = params.jobs[at.job].x;
    const int tiles = TilesOf(view);
#pragma unroll
    for (int i = 0; i < kXSteps; ++i) {
      if (at.step >= x_steps[i]) continue;
      const int64_t first = x_from[i] + at.step * tiles;
      const std::byte* q = reinterpret_cast<const std::byte*>(view.q) + first * kXTileBytes;
      const std::byte* scales =
          reinterpret_cast<const std::byte*>(view.scale) + first * kXScaleBytes;
      std::byte* to = x + (Item::Warp() + i * kWarps) * kXStepBytes<kTiles> + 16 * LaneId();
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        CopyAsync16If(16 * n + LaneId() < 16 * tiles, to + kXTileBytes * n,
                      q + kXTileBytes * n + 16 * LaneId());
      }
      CopyAsync16If(LaneId() < 2 * tiles, to + kTiles * kXTileBytes, scales + 16 * LaneId());
    }
  }

 private:
  __device__ __forceinline__ void StartWave(const BatchParams& params) {
    if (AtEnd(params)) return;
    const BatchJob& job = params.jobs[at.job];
    const Item item(params, at);
    steps = item.segment.steps;
    weights =
        job.w + (at.FirstTile(params) + item.tile) * job.tile_bytes +
        item.segment.lane * job.matrix_bytes +
        item.segment.slice * (kSliceChunks<DType::kQ8_0> * kChunkBytes<DType::kQ8_0>)+16 * LaneId();
    const int tiles = TilesOf(job.x);
#pragma unroll
    for (int i = 0; i < kXSteps; ++i) {
      const int place = Item::Warp() + i * kWarps;
      const int parallel = place >> params.step_shift;
      const Segment segment(params, at, parallel);
      x_steps[i] = parallel < 1 << params.parallel_shift ? segment.steps : 0;
      x_from[i] = (job.x_step + segment.lane * job.lane_steps + segment.slice * kSliceSteps +
                   (place & ((1 << params.step_shift) - 1))) *
                  tiles;
    }
  }
};

// acc += two steps. scales: of the weights, rows g, g + 8 of each step.
template <int kTiles>
__device__ __forceinline__ void DotTwoSteps(const std::byte* weights, uint2 scales,
                                            const std::byte* x, float (&acc)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 w = Load16(weights + i * kStepBytes + 16 * LaneId());
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    const float2 dw = Half2ToFloat2(i == 0 ? scales.x : scales.y);
    const std::byte* values = x + i * kXStepBytes<kTiles> + 8 * LaneId();
    const std::byte* x_scales =
        x + i * kXStepBytes<kTiles> + kTiles * kXTileBytes + 8 * (LaneId() % 4);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint2 q = *reinterpret_cast<const uint2*>(values + n * kXTileBytes);
      const float2 dx = *reinterpret_cast<const float2*>(x_scales + n * kXScaleBytes);
      const uint32_t b[2] = {q.x, q.y};
      int sum[4] = {0, 0, 0, 0};
      MmaS8(sum, a, b);
      acc[n][0] = fmaf(dw.x * dx.x, static_cast<float>(sum[0]), acc[n][0]);
      acc[n][1] = fmaf(dw.x * dx.y, static_cast<float>(sum[1]), acc[n][1]);
      acc[n][2] = fmaf(dw.y * dx.x, static_cast<float>(sum[2]), acc[n][2]);
      acc[n][3] = fmaf(dw.y * dx.y, static_cast<float>(sum[3]), acc[n][3]);
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void DotStage(const BatchParams& params, const Item& item,
                                         int first_step, const std::byte* own, const std::byte* x,
                                         float (&acc)[kTiles][4]) {
  if (first_step >= item.segment.steps) return;
  const int steps = 1 << params.step_shift;
  x += (item.parallel << params.step_shift) * kXStepBytes<kTiles>;
  const std::byte* scales =
      own + (kStepBytes << params.step_shift) + 16 * (LaneId() / 4) + 4 * (first_step % 4);
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
    DotTwoSteps<kTiles>(own + step * kStepBytes, *reinterpret_cast<const uint2*>(scales + 4 * step),
                        x + step * kXStepBytes<kTiles>, acc);
  }
}

// ---- Totals: [lane][row tile of the pass][tile of x] as the lanes hold them (dot.cuh).

template <int kTiles>
__device__ __forceinline__ void AddToTotals(const BatchParams& params, const Item& item,
                                            const float (&acc)[kTiles][4], float4* totals) {
  float4* own = totals +
                ((item.segment.lane << params.tile_shift) + item.tile) * (kTiles * kWarpSize) +
                LaneId();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float4 sum = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    if (item.segment.slice != 0) {
      const float4 before = own[n * kWarpSize];
      sum.x = before.x + sum.x;
      sum.y = before.y + sum.y;
      sum.z = before.z + sum.z;
      sum.w = before.w + sum.w;
    }
    own[n * kWarpSize] = sum;
  }
}

// At the end of a wave: one segment of each lane after the other. All threads come.
template <int kTiles>
__device__ __forceinline__ void AddWave(const BatchParams& params, const Cursor& at,
                                        const Item& item, const float (&acc)[kTiles][4],
                                        float4* totals) {
  const int before = min(item.parallel, item.segment.slice);
  const int turns = min(1 << params.parallel_shift, params.jobs[at.job].slices);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (turn == before && item.segment.steps != 0) AddToTotals<kTiles>(params, item, acc, totals);
    __syncthreads();
  }
}

// Values as a lane of a warp holds them: 4 times (row g or g + 8, x row 2t or 2t + 1).
template <int kTiles>
__device__ __forceinline__ void StoreTotals(const BatchParams& params, const Cursor& at,
                                            const float* totals) {
  const BatchJob& job = params.jobs[at.job];
  const int first_row = at.FirstTile(params) * kTileRows;
  const int count = kTiles * 4 * kWarpSize << params.tile_shift;  // of a lane
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int tile = i / (kTiles * 4 * kWarpSize);
    const int x_tile = i / (4 * kWarpSize) % kTiles;
    // The lanes of a warp take eight rows of four x rows.
    const int g = i % 8;
    const int t = i / 8 % 4;
    const int part = i / 32 % 4;
    const int row = first_row + tile * kTileRows + g + part / 2 * 8;
    const int x_row = x_tile * 8 + 2 * t + part % 2;
    if (row >= job.rows || x_row >= params.x_rows) continue;
    const float* from =
        totals + (tile * kTiles + x_tile) * (4 * kWarpSize) + 4 * (4 * g + t) + part;
    if (params.lanes.roots != nullptr) {
      StoreRoots(params.lanes, params.x_rows, job.rows, x_row, row, from, count);
    } else {
      StorePlain(job, x_row, row, *from);
    }
  }
}

// The same where blocks of 32 rows are quantised: a warp for each block and x row.
template <int kTiles>
__device__ __forceinline__ void StoreQuantised(const BatchParams& params, const Cursor& at,
                                               const float* totals) {
  const BatchJob& job = params.jobs[at.job];
  const int first_tile = at.FirstTile(params);
  const int blocks = min(1 << params.tile_shift, job.tiles - first_tile) / 2;
  const int in_tile = LaneId() % kTileRows;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < blocks * params.x_rows; i += kWarps) {
    const int block = i / params.x_rows;
    const int x_row = i - block * params.x_rows;
    const int tile = 2 * block + LaneId() / kTileRows;
    const int lane = in_tile % 8 * 4 + x_row % 8 / 2;
    const float value =
        totals[((tile * kTiles + x_row / 8) * kWarpSize + lane) * 4 + in_tile / 8 * 2 + x_row % 2];
    const int row = (first_tile + 2 * block) * kTileRows;
    if (job.y != nullptr) job.y[x_row * job.y_stride + row + LaneId()] = value;
    StoreActivation32(job.out, x_row, (job.out_col + row) / 32, value);
  }
}

// The copies of the ring's oldest stage are done, for this thread.
__device__ __forceinline__ void WaitForStage(const BatchParams& params) {
  if (params.num_stages == 4) return CopyAsyncWait<2>();
  if (params.num_stages == 3) return CopyAsyncWait<1>();
  CopyAsyncWait<0>();
}

// kTiles: of x, at least as many as there are.
template <int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    BatchKernel(const __grid_constant__ BatchParams params) {
  DS4_DYNAMIC_SHARED(memory);
  LaunchDependents();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int item_bytes = (kStepBytes << params.step_shift) + kScaleBytes;
  const int ahead = params.num_stages - 1;
  std::byte* const end = memory + params.num_stages * params.stage_bytes;
  float4* totals = reinterpret_cast<float4*>(end);
  Sender<kTiles> sender(params);

  {
    Sender<kTiles> first = sender;
#pragma unroll 1
    for (int i = 0; i < ahead && !first.AtEnd(params); ++i) {
      first.SendWeights(params, memory + i * params.stage_bytes + warp * item_bytes);
      first.Next(params);
    }
  }
  GridDependencyWait();
  std::byte* stage = memory;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (!sender.AtEnd(params)) {
      sender.SendX(params, stage + kWarps * item_bytes);
      sender.Next(params);
    }
    CopyAsyncCommit();
    stage += params.stage_bytes;
  }
  std::byte* free = stage;
  stage = memory;

  float acc[kTiles][4] = {};
  Cursor at(params);
#pragma unroll 1
  while (!at.AtEnd(params)) {
    const Item item(params, at);
#pragma unroll 1
    while (true) {
      WaitForStage(params);
      __syncthreads();  // all copies are there, and nobody reads the free stage any more
      if (!sender.AtEnd(params)) {
        sender.SendWeights(params, free + warp * item_bytes);
        sender.SendX(params, free + kWarps * item_bytes);
        sender.Next(params);
      }
      CopyAsyncCommit();
      DotStage<kTiles>(params, item, at.step, stage + warp * item_bytes,
                       stage + kWarps * item_bytes, acc);
      free = stage;
      stage = stage + params.stage_bytes == end ? memory : stage + params.stage_bytes;
      if (at.EndsWave(params)) break;
      at.Next(params);
    }
    AddWave<kTiles>(params, at, item, acc, totals);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
    }
    if (at.IsLastWave(params)) {
      const float* sums = reinterpret_cast<const float*>(totals);
      if (params.jobs[at.job].out.q != nullptr) {
        StoreQuantised<kTiles>(params, at, sums);
      } else {
        StoreTotals<kTiles>(params, at, sums);
      }
    }
    at.Next(params);
  }
}

// ---- Host side.

BatchJob MakeBatchJob(const ProductJob& job, int lanes) {
  BatchJob batch = {};
  batch.rows = static_cast<int>(job.w.rows);
  batch.tiles = static_cast<int>(PaddedRows(job.w.rows) / kTileRows);
  batch.slices = static_cast<int>((job.w.padded_cols() + kSliceCols - 1) / kSliceCols);
  batch.segments = lanes * batch.slices;
  batch.lane_steps = static_cast<int>(job.w.padded_cols() / 32);
  batch.slice_inverse =
      (65536u + static_cast<uint32_t>(batch.slices) - 1) / static_cast<uint32_t>(batch.slices);
  batch.x_step = static_cast<int>(job.x_col / 32);
  batch.tile_bytes = TileBytes(job.w.dtype, job.w.cols);
  batch.matrix_bytes = job.w.matrix_bytes();
  batch.w = job.w.data;
  batch.x = job.x;
  batch.y = job.y;
  batch.y_stride = job.y_stride;
  batch.out = job.out;
  batch.out_col = job.out_col;
  return batch;
}

int TotalsBytes(const BatchParams& params, int x_tiles) {
  return params.lanes.lanes * x_tiles * 4 * kWarpSize * static_cast<int>(sizeof(float))
         << params.tile_shift;
}

// Cuts the jobs into passes of 2^tile_shift row tiles; false where shared memory does not hold
// them.
bool CutPasses(BatchParams& params, int x_tiles, int tile_shift) {
  int segments = 1;
  params.tile_shift = tile_shift;
  params.passes = 0;
  for (int i = 0; i < params.num_jobs; ++i) {
    BatchJob& job = params.jobs[i];
    job.first_pass = params.passes;
    params.passes += (job.tiles + (1 << tile_shift) - 1) >> tile_shift;
    segments = std::max(segments, job.segments);
  }
  const int parallel = std::min({segments, kMaxParallel, kWarps >> tile_shift});
  params.parallel_shift = std::bit_width(static_cast<unsigned>(parallel - 1));
  const int x_bytes = x_tiles * (kXTileBytes + kXScaleBytes) << params.parallel_shift;
  params.step_shift = x_bytes * kMaxSteps <= kMaxXBytes ? 2 : 1;
  params.stage_bytes =
      kWarps * ((kStepBytes << params.step_shift) + kScaleBytes) + (x_bytes << params.step_shift);
  const int room = kMaxSharedBytes - TotalsBytes(params, x_tiles);
  params.num_stages = std::min(room / params.stage_bytes, kMaxStages);
  return params.num_stages >= kMinStages;
}

// About how many cycles an SM needs for 256 columns of its passes: the x of each comes from L2 at
// some 24 bytes a cycle; a row tile takes its weights at 20 bytes a cycle from memory, or the
// instructions for 8 steps, if these are more.
int64_t CostOf(const BatchParams& params, int x_tiles, int num_sms) {
  const int64_t rounds = (params.passes + num_sms - 1) / num_sms;
  const int x_cycles = kChunkSteps * x_tiles * (kXTileBytes + kXScaleBytes) / 24;
  const int tile_cycles =
      std::max(ChunkBytes(DType::kQ8_0) / 20, kChunkSteps * (8 + 14 * x_tiles) * 10 / 23);
  return rounds * (x_cycles + (tile_cycles << params.tile_shift));
}

}  // namespace

bool LaunchBatchProducts(const LaunchContext& launch, std::span<const ProductJob> jobs,
                         const LaneRoots& roots) {
  const int x_rows = jobs[0].x.rows;
  if (x_rows <= 8 || x_rows > kMaxBatchRows) return false;
  BatchParams params = {};
  params.num_jobs = static_cast<int>(jobs.size());
  params.x_rows = x_rows;
  params.lanes = roots;
  bool quantised = false;
  for (int i = 0; i < params.num_jobs; ++i) {
    if (jobs[i].w.dtype != DType::kQ8_0) return false;
    params.jobs[i] = MakeBatchJob(jobs[i], roots.lanes);
    if (params.jobs[i].segments > kMaxSegments) return false;
    quantised = quantised || jobs[i].out.q != nullptr;
  }
  // Tiles of x as the kernel has them.
  const int x_tiles = x_rows <= 16 ? 2 : x_rows <= 32 ? 4 : x_rows <= 48 ? 6 : 8;
  BatchParams best = {};
  int64_t best_cost = 0;
  for (int tile_shift = quantised ? 1 : 0; tile_shift <= kMaxTileShift; ++tile_shift) {
    if (!CutPasses(params, x_tiles, tile_shift)) break;
    const int64_t cost = CostOf(params, x_tiles, launch.num_sms);
    if (best.num_jobs != 0 && cost >= best_cost) continue;
    best = params;
    best_cost = cost;
  }
  if (best.num_jobs == 0) return false;

  const dim3 grid(static_cast<unsigned>(std::min(best.passes, launch.num_sms)));
  const auto shared =
      static_cast<size_t>(best.num_stages * best.stage_bytes + TotalsBytes(best, x_tiles));
  const auto launch_kernel = [&](auto kernel) {
    Launch(launch, grid, dim3(kThreads), shared, kernel, best);
  };
  if (x_tiles == 2) {
    launch_kernel(BatchKernel<2>);
  } else if (x_tiles == 4) {
    launch_kernel(BatchKernel<4>);
  } else if (x_tiles == 6) {
    launch_kernel(BatchKernel<6>);
  } else {
    launch_kernel(BatchKernel<8>);
  }
  return true;
}

}  // namespace ds4::cuda
