// What the kernels for batches (product_batch.h) have in common: how their blocks go over weights,
// and where sums meet. Included by .cu files only.
//
// Here x is as large as the weights that a block reads, so a block shares it: it goes over some row
// tiles (a pass) in stages of a few steps of 32 columns, for some segments (slices of 512 columns)
// side by side. A stage brings the x of these columns for all rows and the weights; it comes by
// asynchronous copies, some stages ahead. A wave is what brings the segments to their ends. Then
// their sums are added to the totals of their lanes, in rising order (product.h), by one segment of
// a lane after the other.
#pragma once

#include <cstdint>
#include <span>

#include "engine/cuda/dot.cuh"
#include "engine/cuda/product_batch.h"
#include "engine/cuda/product_output.cuh"
#include "engine/cuda/quantize.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

inline constexpr int kBatchWarps = 16;
inline constexpr int kBatchThreads = 32 * kBatchWarps;
inline constexpr int kSliceSteps = kSliceCols / 32;
inline constexpr int kMaxBatchSegments = 180;  // slices of a row tile, over all lanes: see LaneOf
inline constexpr int kMaxBatchStages = 4;
inline constexpr int kMinBatchStages = 2;
inline constexpr int kMaxBatchBytes = 227 * 1024;  // shared memory of a block

struct BatchJob {
  DType dtype;
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
  int x_tile_shift;    // 2^x_tile_shift tiles of x are what totals have room for
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

// The stages of a block, in order; kSteps: of a stage.
template <int kSteps>
struct BatchCursor {
  int pass;
  int job = 0;
  int first_segment = 0;
  int step = 0;  // of a slice, the stage's first

  __device__ __forceinline__ explicit BatchCursor(const BatchParams& params)
      : pass(static_cast<int>(blockIdx.x)) {
    FindJob(params);
  }
  __device__ __forceinline__ bool AtEnd(const BatchParams& params) const {
    return pass >= params.passes;
  }
  __device__ __forceinline__ bool EndsWave() const { return step + kSteps == kSliceSteps; }
  __device__ __forceinline__ bool IsLastWave(const BatchParams& params) const {
    return first_segment + (1 << params.parallel_shift) >= params.jobs[job].segments;
  }
  __device__ __forceinline__ int FirstTile(const BatchParams& params) const {
    return (pass - params.jobs[job].first_pass) << params.tile_shift;
  }
  __device__ __forceinline__ void Next(const BatchParams& params) {
    const bool wave_ends = EndsWave();
    step = wave_ends ? 0 : step + kSteps;
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
struct BatchSegment {
  int index;
  int lane;
  int slice;
  int steps;  // 0: there is none

  template <int kSteps>
  __device__ __forceinline__ BatchSegment(const BatchParams& params, const BatchCursor<kSteps>& at,
                                          int parallel)
      : index(at.first_segment + parallel) {
    const BatchJob& job = params.jobs[at.job];
    lane = LaneOf(job, index);
    slice = index - lane * job.slices;
    steps = index < job.segments ? min(kSliceSteps, job.lane_steps - slice * kSliceSteps) : 0;
  }
};

__device__ __forceinline__ int WarpId() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// ---- Totals: [lane][row tile of the pass][tile of x], as the lanes of a warp hold the sums of a
// tile (dot.cuh).

// sum: a lane's share of one tile.
__device__ __forceinline__ void AddToTotal(const BatchParams& params, const BatchSegment& segment,
                                           int tile, int x_tile, float4 sum, float4* totals) {
  const int place = (((segment.lane << params.tile_shift) + tile) << params.x_tile_shift) + x_tile;
  float4* own = totals + place * kWarpSize + LaneId();
  if (segment.slice != 0) {
    const float4 before = *own;
    sum.x = before.x + sum.x;
    sum.y = before.y + sum.y;
    sum.z = before.z + sum.z;
    sum.w = before.w + sum.w;
  }
  *own = sum;
}

// At the end of a wave: `add` is called for one segment of each lane after the other. parallel: how
// many segments of the wave are before the warp's. All threads come, and meet at the end.
template <class Add>
__device__ __forceinline__ void AddInTurn(const BatchParams& params, const BatchJob& job,
                                          int parallel, const BatchSegment& segment, Add add) {
  const int before = min(parallel, segment.slice);
  const int turns = min(1 << params.parallel_shift, job.slices);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (turn == before && segment.steps != 0) add();
    __syncthreads();
  }
}

// Values as a lane of a warp holds them: 4 times (row g or g + 8, x row 2t or 2t + 1).
__device__ __forceinline__ void StorePlainTotals(const BatchParams& params, const BatchJob& job,
                                                 int first_tile, const float* totals) {
  const int first_row = first_tile * kTileRows;
  const int count = 4 * kWarpSize << (params.x_tile_shift + params.tile_shift);  // of a lane
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kBatchThreads) {
    const int both = i / (4 * kWarpSize);
    const int tile = both >> params.x_tile_shift;
    const int x_tile = both - (tile << params.x_tile_shift);
    // The lanes of a warp take eight rows of four x rows.
    const int g = i % 8;
    const int t = i / 8 % 4;
    const int part = i / 32 % 4;
    const int row = first_row + tile * kTileRows + g + part / 2 * 8;
    const int x_row = x_tile * 8 + 2 * t + part % 2;
    if (row >= job.rows || x_row >= params.x_rows) continue;
    const float* from = totals + both * (4 * kWarpSize) + 4 * (4 * g + t) + part;
    if (params.lanes.roots != nullptr) {
      StoreRoots(params.lanes, params.x_rows, job.rows, x_row, row, from, count);
    } else {
      StorePlain(job, x_row, row, *from);
    }
  }
}

// The same where blocks of 32 rows are quantised: a warp for each block and x row.
__device__ __forceinline__ void StoreQuantisedTotals(const BatchParams& params, const BatchJob& job,
                                                     int first_tile, const float* totals) {
  const int blocks = min(1 << params.tile_shift, job.tiles - first_tile) / 2;
  const int in_tile = LaneId() % kTileRows;
#pragma unroll 1
  for (int i = WarpId(); i < blocks * params.x_rows; i += kBatchWarps) {
    const int block = i / params.x_rows;
    const int x_row = i - block * params.x_rows;
    const int tile = 2 * block + LaneId() / kTileRows;
    const int place = (tile << params.x_tile_shift) + x_row / 8;
    const int lane = in_tile % 8 * 4 + x_row % 8 / 2;
    const float value = totals[(place * kWarpSize + lane) * 4 + in_tile / 8 * 2 + x_row % 2];
    const int row = (first_tile + 2 * block) * kTileRows;
    if (job.y != nullptr) job.y[x_row * job.y_stride + row + LaneId()] = value;
    StoreActivation32(job.out, x_row, (job.out_col + row) / 32, value);
  }
}

__device__ __forceinline__ void StoreTotals(const BatchParams& params, const BatchJob& job,
                                            int first_tile, const float4* totals) {
  const float* values = reinterpret_cast<const float*>(totals);
  if (job.out.q != nullptr) {
    StoreQuantisedTotals(params, job, first_tile, values);
  } else {
    StorePlainTotals(params, job, first_tile, values);
  }
}

// The copies of the ring's oldest stage are done, for this thread.
__device__ __forceinline__ void WaitForStage(const BatchParams& params) {
  if (params.num_stages == kMaxBatchStages) return CopyAsyncWait<2>();
  if (params.num_stages == 3) return CopyAsyncWait<1>();
  CopyAsyncWait<0>();
}

// ---- Host side.

// Everything but how passes are cut; false where the kernels cannot take the jobs.
bool MakeBatchParams(std::span<const ProductJob> jobs, const LaneRoots& roots, BatchParams& params);
// Numbers the passes of 2^tile_shift row tiles; returns the most segments that a job has.
int CutPasses(BatchParams& params, int tile_shift);
// As many stages as shared memory has room for beside the totals; false where these are too few.
bool ChooseStages(BatchParams& params, int stage_bytes);
size_t BatchSharedBytes(const BatchParams& params);

// The two kernels' launches: weights of Q8_0; F16, BF16 and F32.
bool LaunchQuantisedBatch(const LaunchContext& launch, BatchParams& params);
bool LaunchFloatBatch(const LaunchContext& launch, BatchParams& params);

}  // namespace ds4::cuda
