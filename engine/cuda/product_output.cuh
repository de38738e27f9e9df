// Where the kernels behind product.h leave their results. Included by .cu files only.
#pragma once

#include "engine/cuda/product_few.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

// For outputs without quantised forms. Job: has the fields of ProductJob that say where.
template <class Job>
__device__ __forceinline__ void StorePlain(const Job& job, int x_row, int row, float value) {
  if (job.y != nullptr) job.y[x_row * job.y_stride + row] = value;
  const int64_t at = x_row * job.out.cols + job.out_col + row;
  if (job.out.f32 != nullptr) job.out.f32[at] = value;
  if (job.out.bf16 != nullptr) job.out.bf16[at] = FloatToBf16(value);
}

// The tree over at most 8 lanes; -0 for those past `count` changes nothing.
__device__ __forceinline__ float AddEightLanes(const float* sums, int count, int pitch) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = i < count ? sums[i * pitch] : -0.0f;
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// Adds the lanes of every aligned subtree (lane_tree.h) and writes the roots: [root][x_rows][rows].
// sums: of lane 0; the other lanes' follow, `lane_pitch` apart.
__device__ __forceinline__ void StoreRoots(const LaneRoots& lanes, int x_rows, int rows, int x_row,
                                           int row, const float* sums, int lane_pitch) {
  static_assert(kMaxProductLanes == 16);
#pragma unroll 1
  for (int root = 0; root < lanes.num_roots; ++root) {
    const float* first = sums + lanes.begin[root] * lane_pitch;
    const int size = lanes.size[root];
    float total = AddEightLanes(first, size, lane_pitch);
    if (size > 8) total += AddEightLanes(first + 8 * lane_pitch, size - 8, lane_pitch);
    lanes.roots[(int64_t{root} * x_rows + x_row) * rows + row] = total;
  }
}

}  // namespace ds4::cuda
