// The host side that the kernels for batches share.
#include <algorithm>

#include "engine/cuda/product_batch.cuh"

namespace ds4::cuda {
namespace {

BatchJob MakeBatchJob(const ProductJob& job, int lanes) {
  BatchJob batch = {};
  batch.dtype = job.w.dtype;
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

int TotalsBytes(const BatchParams& params) {
  return params.lanes.lanes * 4 * kWarpSize * static_cast<int>(sizeof(float))
         << (params.tile_shift + params.x_tile_shift);
}

}  // namespace

bool MakeBatchParams(std::span<const ProductJob> jobs, const LaneRoots& roots,
                     BatchParams& params) {
  params.num_jobs = static_cast<int>(jobs.size());
  params.x_rows = jobs[0].x.rows;
  params.lanes = roots;
  if (params.x_rows > kMaxBatchRows) return false;
  for (int i = 0; i < params.num_jobs; ++i) {
    params.jobs[i] = MakeBatchJob(jobs[i], roots.lanes);
    if (params.jobs[i].segments > kMaxBatchSegments) return false;
  }
  return true;
}

int CutPasses(BatchParams& params, int tile_shift) {
  params.tile_shift = tile_shift;
  params.passes = 0;
  int segments = 1;
  for (int i = 0; i < params.num_jobs; ++i) {
    BatchJob& job = params.jobs[i];
    job.first_pass = params.passes;
    params.passes += (job.tiles + (1 << tile_shift) - 1) >> tile_shift;
    segments = std::max(segments, job.segments);
  }
  return segments;
}

bool ChooseStages(BatchParams& params, int stage_bytes) {
  params.stage_bytes = stage_bytes;
  const int room = kMaxBatchBytes - TotalsBytes(params);
  params.num_stages = std::min(room / stage_bytes, kMaxBatchStages);
  return params.num_stages >= kMinBatchStages;
}

size_t BatchSharedBytes(const BatchParams& params) {
  return static_cast<size_t>(params.num_stages * params.stage_bytes + TotalsBytes(params));
}

bool LaunchBatchProducts(const LaunchContext& launch, std::span<const ProductJob> jobs,
                         const LaneRoots& roots) {
  BatchParams params = {};
  if (!MakeBatchParams(jobs, roots, params)) return false;
  if (jobs[0].w.dtype == DType::kQ8_0) return LaunchQuantisedBatch(launch, params);
  return IsFloatType(jobs[0].w.dtype) && LaunchFloatBatch(launch, params);
}

}  // namespace ds4::cuda
