// Products of F16, BF16 and F32 weights with more rows of x than the few-row kernels take
// (product_batch.cuh). An item of a warp is two row tiles and a segment, with 8 rows of x: each
// lane adds up 4 rows of w times 8 rows of x. Warps with other rows of x share the weights of a
// stage.
#include <algorithm>
#include <bit>

#include "engine/cuda/product_batch.cuh"

namespace ds4::cuda {
namespace {

constexpr int kSteps = 2;  // of a stage
constexpr int kStageCols = 32 * kSteps;
using Cursor = BatchCursor<kSteps>;
constexpr int kTileShift = 1;
constexpr int kTiles = 1 << kTileShift;
constexpr int kXRowBytes = kStageCols * 4;
constexpr int kXTileBytes = 8 * kXRowBytes;
constexpr int kPieceBytes = 512;  // what a warp sends at once

// Weights of a row tile in a stage.
template <DType kType>
inline constexpr int kTileBytes = kChunkBytes<kType>* kStageCols / kChunkCols<kType>;
constexpr int kMaxTileBytes = kTileBytes<DType::kF32>;

// What a warp multiplies in a wave; it also sends what it needs alone, and its share of what the
// warps with the same segment need.
struct Item {
  int x_tile;
  int parallel;  // the segment is the wave's
  BatchSegment segment;

  __device__ __forceinline__ Item(const BatchParams& params, const Cursor& at)
      : x_tile(WarpId() & ((1 << params.x_tile_shift) - 1)),
        parallel(WarpId() >> params.x_tile_shift),
        segment(params, at, parallel) {
    if (parallel >= 1 << params.parallel_shift) segment.steps = 0;
  }
};

// A stage: weights [segment][row tile][kMaxTileBytes], then x [segment][row][kStageCols].
__device__ __forceinline__ void SendWeights(const BatchParams& params, const Cursor& at,
                                            std::byte* stage) {
  const Item item(params, at);
  if (at.step >= item.segment.steps) return;
  const BatchJob& job = params.jobs[at.job];
  const int piece_shift = job.dtype == DType::kF32 ? 3 : 2;  // of the pieces of a tile
  const int first_tile = at.FirstTile(params);
  const int tiles = min(kTiles, job.tiles - first_tile);
  const int stages_before = (item.segment.slice * kSliceSteps + at.step) / kSteps;
  const std::byte* from = job.w + first_tile * job.tile_bytes +
                          item.segment.lane * job.matrix_bytes +
                          (stages_before << piece_shift) * kPieceBytes + 16 * LaneId();
  std::byte* to = stage + item.parallel * (kTiles * kMaxTileBytes) + 16 * LaneId();
#pragma unroll 1
  for (int i = item.x_tile; i < tiles << piece_shift; i += 1 << params.x_tile_shift) {
    const int tile = i >> piece_shift;
    const int piece = i - (tile << piece_shift);
    CopyAsync16(to + tile * kMaxTileBytes + piece * kPieceBytes,
                from + tile * job.tile_bytes + piece * kPieceBytes);
  }
}

// Two rows of x at a time.
__device__ __forceinline__ void SendX(const BatchParams& params, const Cursor& at, std::byte* x) {
  const Item item(params, at);
  if (at.step >= item.segment.steps) return;
  const BatchJob& job = params.jobs[at.job];
  const int row = 8 * item.x_tile + LaneId() / 16;
  const int step =
      job.x_step + item.segment.lane * job.lane_steps + item.segment.slice * kSliceSteps + at.step;
  const float* from = job.x.f32 + row * job.x.cols + step * 32 + LaneId() % 16 * 4;
  x += WarpId() * kXTileBytes + 16 * LaneId();
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    CopyAsync16If(row + i < params.x_rows, x + i * kXRowBytes, from + i * job.x.cols);
  }
}

// part[tile][x row][r] += the lane's columns of a stage.
template <DType kType>
__device__ __forceinline__ void DotStage(const std::byte* weights, const std::byte* x,
                                         float (&part)[kTiles][8][2]) {
  constexpr int kCols = kLaneCols<kType>;
  constexpr int kUnits = kStageCols / (4 * kCols);
  weights += 16 * LaneId();
  x += 4 * kCols * (LaneId() % 4);
#pragma unroll 2
  for (int u = 0; u < kUnits; ++u) {
    float w[kTiles][2][kCols];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      DecodeFloats<kType>(Load16(weights + tile * kMaxTileBytes + 512 * u), w[tile]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float v[kCols];
      const std::byte* at = x + j * kXRowBytes + 16 * kCols * u;
      LoadNeighbours<kCols>(reinterpret_cast<const float*>(at), v);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int k = 0; k < kCols; ++k) {
            part[tile][j][r] = fmaf(w[tile][r][k], v[k], part[tile][j][r]);
          }
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kBatchThreads, 1)
    FloatBatchKernel(const __grid_constant__ BatchParams params) {
  DS4_DYNAMIC_SHARED(memory);
  LaunchDependents();
  const int ahead = params.num_stages - 1;
  const int weight_bytes = kTiles * kMaxTileBytes << params.parallel_shift;
  std::byte* const end = memory + params.num_stages * params.stage_bytes;
  float4* totals = reinterpret_cast<float4*>(end);
  Cursor next(params);  // to be sent for

  Cursor first = next;
#pragma unroll 1
  for (int i = 0; i < ahead && !first.AtEnd(params); ++i) {
    SendWeights(params, first, memory + i * params.stage_bytes);
    first.Next(params);
  }
  GridDependencyWait();
  std::byte* stage = memory;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (!next.AtEnd(params)) {
      SendX(params, next, stage + weight_bytes);
      next.Next(params);
    }
    CopyAsyncCommit();
    stage += params.stage_bytes;
  }
  std::byte* free = stage;
  stage = memory;

  float part[kTiles][8][2] = {};
#pragma unroll 1
  for (Cursor at(params); !at.AtEnd(params); at.Next(params)) {
    WaitForStage(params);
    __syncthreads();  // all copies are there, and nobody reads the free stage any more
    if (!next.AtEnd(params)) {
      SendWeights(params, next, free);
      SendX(params, next, free + weight_bytes);
      next.Next(params);
    }
    CopyAsyncCommit();
    const Item item(params, at);
    if (at.step < item.segment.steps && 8 * item.x_tile < params.x_rows) {
      const std::byte* weights = stage + item.parallel * (kTiles * kMaxTileBytes);
      const std::byte* x = stage + weight_bytes + WarpId() * kXTileBytes;
      switch (params.jobs[at.job].dtype) {
        case DType::kF16:
          DotStage<DType::kF16>(weights, x, part);
          break;
        case DType::kBF16:
          DotStage<DType::kBF16>(weights, x, part);
          break;
        default:
          DotStage<DType::kF32>(weights, x, part);
      }
    }
    free = stage;
    stage = stage + params.stage_bytes == end ? memory : stage + params.stage_bytes;
    if (!at.EndsWave()) continue;
    const BatchJob& job = params.jobs[at.job];
    float sums[kTiles][1][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      AddLaneParts<1, 8>(part[tile], sums[tile]);
#pragma unroll
      for (int j = 0; j < 8; ++j) part[tile][j][0] = part[tile][j][1] = 0.0f;
    }
    AddInTurn(params, job, item.parallel, item.segment, [&] {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float(&sum)[4] = sums[tile][0];
        AddToTotal(params, item.segment, tile, item.x_tile,
                   make_float4(sum[0], sum[1], sum[2], sum[3]), totals);
      }
    });
    if (at.IsLastWave(params)) StoreTotals(params, job, at.FirstTile(params), totals);
  }
}

}  // namespace

bool LaunchFloatBatch(const LaunchContext& launch, BatchParams& params) {
  const int x_tiles = (params.x_rows + 7) / 8;
  params.x_tile_shift = std::bit_width(static_cast<unsigned>(x_tiles - 1));
  const int segments = CutPasses(params, kTileShift);
  const int parallel = std::min(segments, kBatchWarps >> params.x_tile_shift);
  params.parallel_shift = std::bit_width(static_cast<unsigned>(parallel - 1));
  const int x_bytes = kXTileBytes << params.x_tile_shift;
  if (!ChooseStages(params, (kTiles * kMaxTileBytes + x_bytes) << params.parallel_shift)) {
    return false;
  }
  const dim3 grid(static_cast<unsigned>(std::min(params.passes, launch.num_sms)));
  Launch(launch, grid, dim3(kBatchThreads), BatchSharedBytes(params), FloatBatchKernel, params);
  return true;
}

}  // namespace ds4::cuda
