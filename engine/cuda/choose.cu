// The best token of a row and the sums that its probability needs; the hand-over of a decode step.
//
// A lane is cut into kChunks chunks by its length only, so its numbers do not depend on which rank
// has it or what else runs. One block a chunk finds maximum, best id and sum; then one block a row
// puts chunks together, in order.
#include <cmath>

#include "engine/base/check.h"
#include "engine/cuda/choose.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kChunks = 16;  // of a lane
constexpr int kChunkThreads = 256;
constexpr int kChunkWarps = kChunkThreads / kWarpSize;
constexpr int kMaxAdvanceRows = 64;
constexpr int kNoId = 0x7fffffff;

// What a chunk leaves: its best value and id, and the sum of e^(value - best).
struct Chunk {
  double sum = 0;
  float best = 0;
  int32_t id = kNoId;  // within the rank's logits; kNoId: no finite value
  int32_t finite = 1;  // 0: some value is infinite or no number
  int32_t pad = 0;
};

// The best of two: the larger value, the lower id on ties.
struct Best {
  float value;
  int id;
};
__device__ __forceinline__ Best Better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
__device__ __forceinline__ Best WarpBest(Best own) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    own = Better(own, {__shfl_xor_sync(kFullMask, own.value, lane),
                       __shfl_xor_sync(kFullMask, own.id, lane)});
  }
  return own;
}

__device__ __forceinline__ bool IsFinite(float value) {
  return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

__global__ void __launch_bounds__(kChunkThreads)
    ChunkKernel(const float* logits, int64_t stride, const int32_t* lane_begin, Chunk* chunks) {
  __shared__ Best best_of[kChunkWarps];
  __shared__ int bad_of[kChunkWarps];
  __shared__ double sums[kChunkThreads];
  LaunchDependents();
  GridDependencyWait();
  const int self = static_cast<int>(threadIdx.x);
  const int warp = self / kWarpSize, lane = self % kWarpSize;
  const int vocab_lane = static_cast<int>(blockIdx.x) / kChunks;
  const int chunk = static_cast<int>(blockIdx.x) % kChunks;
  const int lane_first = lane_begin[vocab_lane], lane_end = lane_begin[vocab_lane + 1];
  const int size = (lane_end - lane_first + kChunks - 1) / kChunks;
  const int begin = min(lane_end, lane_first + chunk * size), end = min(lane_end, begin + size);
  const float* row = logits + blockIdx.y * stride;

  Best best = {-INFINITY, kNoId};
  bool bad = false;
#pragma unroll 4
  for (int i = begin + self; i < end; i += kChunkThreads) {
    const float value = row[i];
    bad = bad || !IsFinite(value);
    best = Better(best, {value, i});  // a NaN is never better
  }
  best = WarpBest(best);
  const bool warp_bad = __ballot_sync(kFullMask, bad) != 0;
  if (lane == 0) {
    best_of[warp] = best;
    bad_of[warp] = warp_bad;
  }
  __syncthreads();
  bad = false;
  for (int w = 0; w < kChunkWarps; ++w) {
    best = Better(best, best_of[w]);
    bad = bad || bad_of[w] != 0;
  }

  double sum = 0;
  if (!bad) {
#pragma unroll 4
    for (int i = begin + self; i < end; i += kChunkThreads) sum += expf(row[i] - best.value);
  }
  sums[self] = sum;
  for (int half = kChunkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (self < half) sums[self] += sums[self + half];
  }
  if (self == 0) {
    Chunk out;
    out.sum = sums[0];
    out.best = best.value;
    out.id = best.id;
    out.finite = bad ? 0 : 1;
    chunks[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = out;
  }
}

// One warp a lane, then the first warp over the lanes.
__global__ void __launch_bounds__(kMaxVocabLanes* kWarpSize)
    RowKernel(const Chunk* chunks, int num_lanes, int32_t first_id, GreedyChoice* choice,
              float* lane_max, double* lane_sum) {
  __shared__ Best best_of[kMaxVocabLanes];
  __shared__ int bad_of[kMaxVocabLanes];
  __shared__ double terms[kMaxVocabLanes][kChunks];
  LaunchDependents();
  GridDependencyWait();
  const int vocab_lane = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t row_lane = static_cast<int64_t>(blockIdx.x) * num_lanes + vocab_lane;
  Chunk chunk;
  chunk.best = -INFINITY;
  if (lane < kChunks) chunk = chunks[row_lane * kChunks + lane];
  const Best best = WarpBest({chunk.best, chunk.id});
  const bool bad = __ballot_sync(kFullMask, chunk.finite == 0) != 0;
  if (lane < kChunks) {
    const double shift = static_cast<double>(chunk.best) - static_cast<double>(best.value);
    terms[vocab_lane][lane] = chunk.sum > 0 ? chunk.sum * exp(shift) : 0.0;
  }
  __syncwarp();
  if (lane == 0) {
    double sum = 0;
    for (int i = 0; i < kChunks; ++i) sum += terms[vocab_lane][i];
    lane_max[row_lane] = bad ? NAN : best.value;
    lane_sum[row_lane] = bad ? 0.0 : sum;
    best_of[vocab_lane] = best;
    bad_of[vocab_lane] = bad;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Best top = {-INFINITY, kNoId};
  bool any_bad = false;
  for (int i = 0; i < num_lanes; ++i) {
    top = Better(top, best_of[i]);
    any_bad = any_bad || bad_of[i] != 0;
  }
  GreedyChoice out;
  out.token = first_id + (top.id == kNoId ? 0 : top.id);
  out.logit = any_bad ? NAN : top.value;
  out.max_logit = out.logit;
  choice[blockIdx.x] = out;
}

// ln of the sum of all lanes' e^logit, in lane order; NaN when a lane has one.
__device__ __forceinline__ float LogSumExp(const float* lane_max, const double* lane_sum,
                                           int num_lanes) {
  float top = -INFINITY;
  bool bad = false;
  for (int i = 0; i < num_lanes; ++i) {
    bad = bad || lane_max[i] != lane_max[i];
    top = fmaxf(top, lane_max[i]);
  }
  if (bad) return NAN;
  double sum = 0;
  for (int i = 0; i < num_lanes; ++i) {
    const double shift = static_cast<double>(lane_max[i]) - static_cast<double>(top);
    if (lane_sum[i] > 0) sum += lane_sum[i] * exp(shift);
  }
  return static_cast<float>(log(sum) + static_cast<double>(top));
}

__global__ void __launch_bounds__(kMaxAdvanceRows)
    AdvanceKernel(int rows, const GreedyChoice* choice, const float* lane_max,
                  const double* lane_sum, int num_lanes, DecodeQueue queue) {
  LaunchDependents();
  GridDependencyWait();
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t step = *queue.step_counter;
  const int place = static_cast<int>(step % static_cast<uint32_t>(queue.ring_steps));
  if (t < rows) {
    const int32_t pos = queue.pos[t];
    TokenRecord record;
    record.token = choice[t].token;
    record.pos = pos + 1;
    record.logit = choice[t].logit;
    record.log_sum_exp = LogSumExp(lane_max + t * num_lanes, lane_sum + t * num_lanes, num_lanes);
    queue.record[static_cast<int64_t>(place) * rows + t] = record;
    // A row at the last position stays as it is: running it again changes nothing.
    if (queue.slot[t] >= 0 && pos < queue.last_pos) {
      queue.token[t] = record.token;
      queue.pos[t] = pos + 1;
    }
    __threadfence_system();
  }
  __syncthreads();  // all records are out, and all threads have read the counter
  if (t == 0) {
    StoreReleaseSystem(queue.record_flags + place, step + 1);
    *queue.step_counter = step + 1;
  }
}

}  // namespace

int64_t GreedyScratchBytes(int rows) {
  return static_cast<int64_t>(rows) * kMaxVocabLanes * kChunks *
         static_cast<int64_t>(sizeof(Chunk));
}

void LaunchGreedy(const LaunchContext& launch, const float* logits, int64_t stride, int rows,
                  int32_t first_id, const int32_t* lane_begin, int num_lanes, GreedyChoice* choice,
                  float* lane_max, double* lane_sum, std::byte* scratch) {
  CHECK(num_lanes >= 1 && num_lanes <= kMaxVocabLanes)
      << num_lanes << " vocabulary lanes, at most " << kMaxVocabLanes;
  Chunk* chunks = reinterpret_cast<Chunk*>(scratch);
  Launch(launch, dim3(static_cast<unsigned>(num_lanes * kChunks), static_cast<unsigned>(rows)),
         kChunkThreads, 0, ChunkKernel, logits, stride, lane_begin, chunks);
  Launch(launch, static_cast<unsigned>(rows), static_cast<unsigned>(num_lanes * kWarpSize), 0,
         RowKernel, static_cast<const Chunk*>(chunks), num_lanes, first_id, choice, lane_max,
         lane_sum);
}

void LaunchAdvance(const LaunchContext& launch, int rows, const GreedyChoice* choice,
                   const float* lane_max, const double* lane_sum, int num_lanes,
                   const DecodeQueue& queue) {
  CHECK(rows >= 1 && rows <= kMaxAdvanceRows)
      << rows << " rows in a decode queue, at most " << kMaxAdvanceRows;
  CHECK(queue.ring_steps >= 1) << "a decode queue of " << queue.ring_steps << " steps";
  Launch(launch, 1, kMaxAdvanceRows, 0, AdvanceKernel, rows, choice, lane_max, lane_sum, num_lanes,
         queue);
}

}  // namespace ds4::cuda
