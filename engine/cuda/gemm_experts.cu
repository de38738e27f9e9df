// Routed experts of many rows: both products as tiles of gemm.cu over each expert's pairs, and the
// sum of the pairs of a row.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/gemm.cuh"
#include "engine/cuda/gemm.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

gemm::Job SwiGluJob(const PackedMatrix& gate, const PackedMatrix& up, const ActivationView& x,
                    int64_t lane_cols, float limit, const ActivationView& out) {
  CHECK(gate.dtype == up.dtype && gate.rows == up.rows && gate.cols == up.cols)
      << "gate is " << Info(gate.dtype).name << " [" << gate.rows << ", " << gate.cols
      << "], up is " << Info(up.dtype).name << " [" << up.rows << ", " << up.cols << "]";
  CHECK(lane_cols > 0 && gate.rows % lane_cols == 0)
      << gate.rows << " rows in lanes of " << lane_cols;
  CHECK(out.bf16 != nullptr && gate.rows / lane_cols * PaddedCols(lane_cols) <= out.cols)
      << gate.rows / lane_cols << " lanes of " << lane_cols << " in " << out.cols << " columns";
  gemm::Job job = gemm::MakeJob(gate, 1, x, 0);
  job.up = up.data;
  job.out = out.bf16;
  job.out_stride = out.cols;
  job.out_lane_cols = static_cast<int>(lane_cols);
  job.out_lane_stride = static_cast<int>(PaddedCols(lane_cols));
  job.limit = limit;
  return job;
}

void AddRoutedJob(const gemm::Job& job, const Routing& routing, int num_experts, int used,
                  gemm::Args& args) {
  CHECK(used > 0 && used <= kMaxExpertsUsed) << used << " experts a row";
  CHECK(num_experts < 65536) << num_experts << " experts: their tiles are counted in 16 bits";
  args.jobs[args.num_jobs] = job;
  args.num_experts = num_experts;
  args.used = used;
  args.expert_first = routing.expert_first;
  args.pairs = routing.pairs;
  args.pair_weight = routing.weights;
}

constexpr int kPadThreads = 128;

// Zeros behind each lane segment. One block a row.
__global__ void PadLanesKernel(uint16_t* out, int64_t cols, int lanes, int lane_cols, int stride) {
  LaunchDependents();
  GridDependencyWait();
  uint16_t* row = out + blockIdx.x * cols;
  for (int lane = 0; lane < lanes; ++lane) {
    for (int c = lane_cols + static_cast<int>(threadIdx.x); c < stride; c += kPadThreads) {
      row[lane * stride + c] = 0;
    }
  }
}

void PadLanes(const LaunchContext& launch, const ActivationView& out, int64_t rows,
              int64_t lane_cols) {
  const int64_t stride = PaddedCols(lane_cols);
  if (stride == lane_cols || rows == 0) return;
  Launch(launch, dim3(static_cast<unsigned>(rows)), dim3(kPadThreads), 0, PadLanesKernel, out.bf16,
         out.cols, static_cast<int>(out.cols / stride), static_cast<int>(lane_cols),
         static_cast<int>(stride));
}

constexpr int kCombineThreads = 256;
constexpr int kCombineCols = 4 * kCombineThreads;

// Four columns of a row, several of its pairs on their way at once.
__device__ __forceinline__ void AddPairs(const float* pair_out, const int* places, int used,
                                         int64_t dim, float4* to) {
  constexpr int kBatch = 6;
  float4 sum = *to;
  for (int first = 0; first < used; first += kBatch) {
    float4 pairs[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int place = places[min(first + i, used - 1)];
      pairs[i] = *reinterpret_cast<const float4*>(pair_out + place * dim);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= used) continue;
      sum.x += pairs[i].x, sum.y += pairs[i].y, sum.z += pairs[i].z, sum.w += pairs[i].w;
    }
  }
  *to = sum;
}

// out[t][d] += pair_out of the row's experts, by rising id. Block (row, run of columns). wide: four
// columns are 16 aligned bytes everywhere.
__global__ void CombinePairsKernel(const int32_t* ids, const int32_t* pair_place,
                                   const float* pair_out, int used, int dim, bool wide,
                                   float* out) {
  LaunchDependents();
  GridDependencyWait();
  __shared__ int places[kMaxExpertsUsed];
  const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (thread < used) {
    const int32_t* row_ids = ids + row * used;
    int rank = 0;  // a table may name an expert twice: then in the table's order
    for (int k = 0; k < used; ++k) {
      if (row_ids[k] < row_ids[thread] || (row_ids[k] == row_ids[thread] && k < thread)) ++rank;
    }
    places[rank] = pair_place[row * used + thread];
  }
  __syncthreads();
  const int first = static_cast<int>(blockIdx.y) * kCombineCols;
  float* to = out + static_cast<int64_t>(row) * dim;
  if (wide) {
    const int d = first + 4 * thread;
    if (d < dim) AddPairs(pair_out + d, places, used, dim, reinterpret_cast<float4*>(to + d));
    return;
  }
  for (int d = first + thread; d < min(first + kCombineCols, dim); d += kCombineThreads) {
    float sum = to[d];
    for (int k = 0; k < used; ++k) sum += pair_out[static_cast<int64_t>(places[k]) * dim + d];
    to[d] = sum;
  }
}

}  // namespace

void LaunchExpertsUpGemm(const LaunchContext& launch, const ExpertsUp& job, const Routing& routing,
                         int used) {
  gemm::Args args;
  if (job.shared_gate.data != nullptr) {
    args.jobs[args.num_jobs++] = SwiGluJob(job.shared_gate, job.shared_up, job.x, job.lane_cols,
                                           job.shared_limit, job.shared_out);
    PadLanes(launch, job.shared_out, job.x.rows, job.lane_cols);
    // On its own: beside its wide fetches, shared memory has no room for copies of tables.
    gemm::LaunchTiles(launch, args);
    args = gemm::Args();
  }
  AddRoutedJob(SwiGluJob(job.gate, job.up, job.x, job.lane_cols, job.limit, job.out), routing,
               static_cast<int>(job.gate.count), used, args);
  args.gather = true;
  PadLanes(launch, job.out, static_cast<int64_t>(job.x.rows) * used, job.lane_cols);
  gemm::LaunchTiles(launch, args);
}

void LaunchExpertsDownGemm(const LaunchContext& launch, const ExpertsDown& job,
                           const Routing& routing, int used, int rows, float* pair_out,
                           float* out) {
  gemm::Args args;
  gemm::Job down = gemm::MakeJob(job.down, job.lanes, job.hidden, 0);
  down.y = pair_out;
  down.y_stride = job.down.rows;
  AddRoutedJob(down, routing, static_cast<int>(job.down.count / job.lanes), used, args);
  gemm::LaunchTiles(launch, args);
  const int dim = static_cast<int>(job.down.rows);
  const bool wide =
      dim % 4 == 0 &&
      (reinterpret_cast<uintptr_t>(pair_out) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
  Launch(launch,
         dim3(static_cast<unsigned>(rows),
              static_cast<unsigned>((dim + kCombineCols - 1) / kCombineCols)),
         dim3(kCombineThreads), 0, CombinePairsKernel, routing.ids, routing.pair_place, pair_out,
         used, dim, wide, out);
}

}  // namespace ds4::cuda
