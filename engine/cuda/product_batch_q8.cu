// Products of Q8_0 weights with up to 64 rows of x (product_batch.cuh). An item of a warp is one or
// two row tiles of a segment with all tiles of x or half of them: few words of shared memory for
// each product, as every product needs its own floating-point work besides.
#include <algorithm>
#include <bit>

#include "engine/cuda/product_batch.cuh"

namespace ds4::cuda {
namespace {

constexpr int kChunkSteps = kChunkCols<DType::kQ8_0> / 32;
constexpr int kSliceBytes = kSliceChunks<DType::kQ8_0> * kChunkBytes<DType::kQ8_0>;
constexpr int kMaxParallel = 8;
constexpr int kMaxTileShift = 3;
constexpr int kMaxSteps = 4;           // scales of weights lie together for four steps
constexpr int kMaxXBytes = 36 * 1024;  // of a stage

// Weights of an item in a stage: the steps' values, then the scales of the four steps that they
// belong to.
constexpr int kStepBytes = 512;
constexpr int kScaleBytes = 128;
template <int kSteps>
inline constexpr int kItemBytes = kSteps* kStepBytes + kScaleBytes;
// x of one step for a tile of 8 rows, in a stage: all tiles' values, then all tiles' scales.
constexpr int kXTileBytes = 256;
constexpr int kXScaleBytes = 32;

// How the kernel for kTiles tiles of x cuts them into items. A row tile more saves half of the
// loads of x, half of the x tiles keeps the number of sums; with few tiles the loads are few.
template <int kTiles>
struct Shape {
  static constexpr int kHalves = kTiles > 4 ? 2 : 1;
  static constexpr int kRowTiles = kHalves;
  static constexpr int kXTiles = kTiles / kHalves;
};

// What a warp multiplies in a wave. Where the pass has one row tile only, or the job ends, results
// of a second one mean nothing.
template <int kTiles>
struct Item {
  int x_tile;    // the first
  int tile;      // of the pass, the first
  int tiles;     // that count
  int parallel;  // the segment is the wave's
  BatchSegment segment;

  template <int kSteps>
  __device__ __forceinline__ Item(const BatchParams& params, const BatchCursor<kSteps>& at)
      : x_tile(WarpId() % kHalves * Shape<kTiles>::kXTiles),
        tile((WarpId() / kHalves & ((1 << GroupShift(params)) - 1)) * kRowTiles),
        tiles(min(min(kRowTiles, 1 << params.tile_shift),
                  params.jobs[at.job].tiles - at.FirstTile(params) - tile)),
        parallel(WarpId() / kHalves >> GroupShift(params)),
        segment(params, at, parallel) {
    if (parallel >= 1 << params.parallel_shift || tiles <= 0) segment.steps = 0;
  }

 private:
  static constexpr int kHalves = Shape<kTiles>::kHalves;
  static constexpr int kRowTiles = Shape<kTiles>::kRowTiles;
  // Of the number of items that share a segment and x tiles.
  __device__ __forceinline__ static int GroupShift(const BatchParams& params) {
    return max(params.tile_shift - (kRowTiles - 1), 0);
  }
};

template <int kTiles>
inline constexpr int kXStepBytes = (kXTileBytes + kXScaleBytes) * kTiles;

// Sends for the stages of a block, in order. A warp sends for one row tile of one segment, and for
// some x. What stays the same for a wave is worked out once.
template <int kTiles, int kSteps>
struct Sender {
  // Steps of x of a stage that a warp sends, at most.
  static constexpr int kXSteps = kMaxXBytes / kXStepBytes<kTiles> < 2 * kBatchWarps ? 1 : 2;

  BatchCursor<kSteps> at;
  int tiles;  // of x
  // What this lane copies of the segment's first step; nothing of segments with 0 steps.
  int steps;
  const std::byte* weights;
  int x_steps[kXSteps];
  const std::byte* x[kXSteps];
  const std::byte* x_scales[kXSteps];

  __device__ __forceinline__ explicit Sender(const BatchParams& params)
      : at(params), tiles(TilesOf(params.jobs[0].x)) {
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
  __device__ __forceinline__ void SendWeights(std::byte* own) const {
    if (at.step >= steps) return;
    const std::byte* chunk = weights + at.step / kChunkSteps * kChunkBytes<DType::kQ8_0>;
    const std::byte* from = chunk + at.step % kChunkSteps * kStepBytes;
    std::byte* to = own + 16 * LaneId();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) CopyAsync16(to + i * kStepBytes, from + i * kStepBytes);
    const std::byte* scales =
        chunk + kChunkSteps * kStepBytes + at.step % kChunkSteps / 4 * kScaleBytes;
    CopyAsync16If(LaneId() < kScaleBytes / 16, to + kSteps * kStepBytes, scales);
  }
  // to: the stage's x, [segment][step].
  __device__ __forceinline__ void SendX(std::byte* to) const {
    to += WarpId() * kXStepBytes<kTiles> + 16 * LaneId();
    const int before = at.step * tiles;
#pragma unroll
    for (int i = 0; i < kXSteps; ++i) {
      if (at.step >= x_steps[i]) continue;
      std::byte* own = to + i * (kBatchWarps * kXStepBytes<kTiles>);
      const std::byte* from = x[i] + before * kXTileBytes;
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        CopyAsync16If(16 * n + LaneId() < 16 * tiles, own + n * kXTileBytes,
                      from + n * kXTileBytes);
      }
      CopyAsync16If(LaneId() < 2 * tiles, own + kTiles * kXTileBytes,
                    x_scales[i] + before * kXScaleBytes);
    }
  }

 private:
  __device__ __forceinline__ void StartWave(const BatchParams& params) {
    if (AtEnd(params)) return;
    const BatchJob& job = params.jobs[at.job];
    const int tile = at.FirstTile(params) + (WarpId() & ((1 << params.tile_shift) - 1));
    const int own_parallel = WarpId() >> params.tile_shift;
    const BatchSegment own(params, at, own_parallel);
    const bool idle = own_parallel >= 1 << params.parallel_shift || tile >= job.tiles;
    steps = idle ? 0 : own.steps;
    weights = job.w + tile * job.tile_bytes + own.lane * job.matrix_bytes +
              own.slice * kSliceBytes + 16 * LaneId();
#pragma unroll
    for (int i = 0; i < kXSteps; ++i) {
      const int place = WarpId() + i * kBatchWarps;
      const int parallel = place / kSteps;
      const BatchSegment segment(params, at, parallel);
      const int step =
          job.x_step + segment.lane * job.lane_steps + segment.slice * kSliceSteps + place % kSteps;
      const int64_t before = int64_t{step} * tiles;
      x_steps[i] = parallel < 1 << params.parallel_shift ? segment.steps : 0;
      x[i] = reinterpret_cast<const std::byte*>(job.x.q) + before * kXTileBytes + 16 * LaneId();
      x_scales[i] =
          reinterpret_cast<const std::byte*>(job.x.scale) + before * kXScaleBytes + 16 * LaneId();
    }
  }
};

template <int kTiles>
using Sums = float[Shape<kTiles>::kRowTiles][Shape<kTiles>::kXTiles][4];

// sums += two steps. weights: of the first row tile, the next is kItemBytes on; scales: theirs,
// rows g, g + 8 of each step; x: of the first x tile.
template <int kTiles, int kItemBytes>
__device__ __forceinline__ void DotTwoSteps(const std::byte* weights, const std::byte* scales,
                                            const std::byte* x, const std::byte* x_scales,
                                            Sums<kTiles>& sums) {
  constexpr int kRowTiles = Shape<kTiles>::kRowTiles;
  uint2 both_scales[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    both_scales[m] = *reinterpret_cast<const uint2*>(scales + m * kItemBytes);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint4 w[kRowTiles];
    float2 dw[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      w[m] = Load16(weights + m * kItemBytes + i * kStepBytes);
      dw[m] = Half2ToFloat2(i == 0 ? both_scales[m].x : both_scales[m].y);
    }
#pragma unroll
    for (int n = 0; n < Shape<kTiles>::kXTiles; ++n) {
      const uint2 q =
          *reinterpret_cast<const uint2*>(x + i * kXStepBytes<kTiles> + n * kXTileBytes);
      const float2 dx =
          *reinterpret_cast<const float2*>(x_scales + i * kXStepBytes<kTiles> + n * kXScaleBytes);
      const uint32_t b[2] = {q.x, q.y};
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint32_t a[4] = {w[m].x, w[m].y, w[m].z, w[m].w};
        float(&acc)[4] = sums[m][n];
        int sum[4] = {0, 0, 0, 0};
        MmaS8(sum, a, b);
        acc[0] = fmaf(dw[m].x * dx.x, static_cast<float>(sum[0]), acc[0]);
        acc[1] = fmaf(dw[m].x * dx.y, static_cast<float>(sum[1]), acc[1]);
        acc[2] = fmaf(dw[m].y * dx.x, static_cast<float>(sum[2]), acc[2]);
        acc[3] = fmaf(dw[m].y * dx.y, static_cast<float>(sum[3]), acc[3]);
      }
    }
  }
}

template <int kTiles, int kSteps>
__device__ __forceinline__ void DotStage(const BatchParams& params, const Item<kTiles>& item,
                                         int first_step, const std::byte* stage,
                                         Sums<kTiles>& sums) {
  if (first_step >= item.segment.steps) return;
  const std::byte* weights =
      stage + ((item.parallel << params.tile_shift) + item.tile) * kItemBytes<kSteps>;
  const std::byte* scales =
      weights + kSteps * kStepBytes + 16 * (LaneId() / 4) + 4 * (first_step % 4);
  const std::byte* x =
      stage + kBatchWarps * kItemBytes<kSteps> + item.parallel * (kSteps * kXStepBytes<kTiles>);
  const std::byte* x_scales =
      x + kTiles * kXTileBytes + item.x_tile * kXScaleBytes + 8 * (LaneId() % 4);
  weights += 16 * LaneId();
  x += item.x_tile * kXTileBytes + 8 * LaneId();
  constexpr int kUnroll = kTiles > 2 ? 1 : 2;  // as much code for few tiles as for many
#pragma unroll kUnroll
  for (int step = 0; step < kSteps; step += 2) {
    DotTwoSteps<kTiles, kItemBytes<kSteps>>(weights + step * kStepBytes, scales + 4 * step,
                                            x + step * kXStepBytes<kTiles>,
                                            x_scales + step * kXStepBytes<kTiles>, sums);
  }
}

// kTiles: of x, at least as many as there are. kSteps: of a stage.
template <int kTiles, int kSteps>
__global__ void __launch_bounds__(kBatchThreads, 1)
    QuantisedBatchKernel(const __grid_constant__ BatchParams params) {
  DS4_DYNAMIC_SHARED(memory);
  LaunchDependents();
  const int warp = WarpId();
  constexpr int kAllItemBytes = kBatchWarps * kItemBytes<kSteps>;
  const int ahead = params.num_stages - 1;
  std::byte* const end = memory + params.num_stages * params.stage_bytes;
  float4* totals = reinterpret_cast<float4*>(end);
  Sender<kTiles, kSteps> sender(params);

  {
    Sender<kTiles, kSteps> first = sender;
#pragma unroll 1
    for (int i = 0; i < ahead && !first.AtEnd(params); ++i) {
      first.SendWeights(memory + i * params.stage_bytes + warp * kItemBytes<kSteps>);
      first.Next(params);
    }
  }
  GridDependencyWait();
  std::byte* stage = memory;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (!sender.AtEnd(params)) {
      sender.SendX(stage + kAllItemBytes);
      sender.Next(params);
    }
    CopyAsyncCommit();
    stage += params.stage_bytes;
  }
  std::byte* free = stage;
  stage = memory;

  Sums<kTiles> sums = {};
  BatchCursor<kSteps> at(params);
#pragma unroll 1
  while (!at.AtEnd(params)) {
    const Item<kTiles> item(params, at);
#pragma unroll 1
    while (true) {
      WaitForStage(params);
      __syncthreads();  // all copies are there, and nobody reads the free stage any more
      if (!sender.AtEnd(params)) {
        sender.SendWeights(free + warp * kItemBytes<kSteps>);
        sender.SendX(free + kAllItemBytes);
        sender.Next(params);
      }
      CopyAsyncCommit();
      DotStage<kTiles, kSteps>(params, item, at.step, stage, sums);
      free = stage;
      stage = stage + params.stage_bytes == end ? memory : stage + params.stage_bytes;
      if (at.EndsWave()) break;
      at.Next(params);
    }
    const BatchJob& job = params.jobs[at.job];
    AddInTurn(params, job, item.parallel, item.segment, [&] {
#pragma unroll
      for (int m = 0; m < Shape<kTiles>::kRowTiles; ++m) {
        if (m >= item.tiles) break;
#pragma unroll
        for (int n = 0; n < Shape<kTiles>::kXTiles; ++n) {
          const float(&sum)[4] = sums[m][n];
          AddToTotal(params, item.segment, item.tile + m, item.x_tile + n,
                     make_float4(sum[0], sum[1], sum[2], sum[3]), totals);
        }
      }
    });
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& sum : tile) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
    }
    if (at.IsLastWave(params)) StoreTotals(params, job, at.FirstTile(params), totals);
    at.Next(params);
  }
}

// ---- Host side.

int XBytes(const BatchParams& params, int x_tiles) {  // of a step of all segments
  return x_tiles * (kXTileBytes + kXScaleBytes) << params.parallel_shift;
}
// Of a stage.
int StepsOf(const BatchParams& params, int x_tiles) {
  return XBytes(params, x_tiles) * kMaxSteps <= kMaxXBytes ? kMaxSteps : kMaxSteps / 2;
}

bool Cut(BatchParams& params, int x_tiles, int tile_shift) {
  const int segments = CutPasses(params, tile_shift);
  const int parallel = std::min({segments, kMaxParallel, kBatchWarps >> tile_shift});
  params.parallel_shift = std::bit_width(static_cast<unsigned>(parallel - 1));
  const int steps = StepsOf(params, x_tiles);
  return ChooseStages(
      params, kBatchWarps * (steps * kStepBytes + kScaleBytes) + steps * XBytes(params, x_tiles));
}

// About how many cycles an SM needs for 256 columns of its passes: the x of each comes from L2 at
// some 24 bytes a cycle; a row tile takes its weights at 20 bytes a cycle from memory, or the
// instructions for 8 steps, if these are more.
int64_t CostOf(const BatchParams& params, int x_tiles, int num_sms) {
  const int64_t rounds = (params.passes + num_sms - 1) / num_sms;
  const int x_cycles = kChunkSteps * x_tiles * (kXTileBytes + kXScaleBytes) / 24;
  const int tile_cycles =
      std::max(ChunkBytes(DType::kQ8_0) / 20, kChunkSteps * (8 + 14 * x_tiles) * 10 / 23);
  const int tiles = std::max(1 << params.tile_shift, x_tiles > 4 ? 2 : 1);  // see Shape
  return rounds * (x_cycles + tile_cycles * tiles);
}

}  // namespace

bool LaunchQuantisedBatch(const LaunchContext& launch, BatchParams& params) {
  // Tiles of x as the kernel has them.
  const int x_tiles = (params.x_rows + 15) / 16 * 2;
  params.x_tile_shift = std::bit_width(static_cast<unsigned>(x_tiles - 1));
  BatchParams best = {};
  int64_t best_cost = 0;
  // Pairs of row tiles: blocks that are quantised.
  const bool pairs = std::any_of(params.jobs, params.jobs + params.num_jobs,
                                 [](const BatchJob& job) { return job.out.q != nullptr; });
  for (int tile_shift = pairs ? 1 : 0; tile_shift <= kMaxTileShift; ++tile_shift) {
    if (!Cut(params, x_tiles, tile_shift)) break;
    const int64_t cost = CostOf(params, x_tiles, launch.num_sms);
    if (best.num_jobs != 0 && cost >= best_cost) continue;
    best = params;
    best_cost = cost;
  }
  if (best.num_jobs == 0) return false;
  const dim3 grid(static_cast<unsigned>(std::min(best.passes, launch.num_sms)));
  const auto launch_kernel = [&](auto kernel) {
    Launch(launch, grid, dim3(kBatchThreads), BatchSharedBytes(best), kernel, best);
  };
  const bool short_stages = StepsOf(best, x_tiles) != kMaxSteps;
  static_assert(kMaxParallel * kMaxSteps * kXStepBytes<4> <= kMaxXBytes);
  if (x_tiles == 2) {
    launch_kernel(QuantisedBatchKernel<2, kMaxSteps>);
  } else if (x_tiles == 4) {
    launch_kernel(QuantisedBatchKernel<4, kMaxSteps>);
  } else if (x_tiles == 6) {
    launch_kernel(short_stages ? QuantisedBatchKernel<6, kMaxSteps / 2>
                               : QuantisedBatchKernel<6, kMaxSteps>);
  } else {
    launch_kernel(short_stages ? QuantisedBatchKernel<8, kMaxSteps / 2>
                               : QuantisedBatchKernel<8, kMaxSteps>);
  }
  return true;
}

}  // namespace ds4::cuda
