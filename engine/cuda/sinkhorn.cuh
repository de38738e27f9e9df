// Sinkhorn's balancing of a row's stream mixes (spec 2.2, step 4): one warp a row.
#pragma once

#include <cmath>

#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

// A matrix that Sinkhorn balances: entry (i, j) is c[i][j] times a factor for its row and one for
// its column. The latency of this chain bounds the job, so all lanes carry the whole matrix: no
// step has a shuffle.
struct Factors {
  float inverse[kMaxDeviceStreams];
  float value[kMaxDeviceStreams];  // 1 / inverse
};
struct Balance {
  float c[kMaxDeviceStreams][kMaxDeviceStreams];
  float own;  // c of the lane's entry
  Factors row, column;
};

// One normalisation: each row (or column) i divided by its sum + eps. The sum is own_i * s_i with
// s_i = sum_j matrix(i, j) * other_j, so the new factor is own_i / (own_i * s_i + eps), whose
// inverse is s_i + eps / own_i.
template <typename Entry>
__device__ __forceinline__ void Normalise(float eps, const Factors& other, Factors& own,
                                          Entry matrix) {
#pragma unroll
  for (int i = 0; i < kMaxDeviceStreams; ++i) {
    float sum = eps * own.inverse[i];
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) sum = fmaf(matrix(i, j), other.value[j], sum);
    own.inverse[i] = sum;
    own.value[i] = FastReciprocal(sum);
  }
}

// Row of entry H i + j; any number is good.
__device__ __forceinline__ int RowOfEntry(int entry, int streams) {
  int row = 0;
#pragma unroll
  for (int i = 1; i < kMaxDeviceStreams; ++i) row += entry >= i * streams ? 1 : 0;
  return row;
}
__device__ __forceinline__ float PickOne(const float (&values)[kMaxDeviceStreams], int which) {
  float value = values[0];
#pragma unroll
  for (int i = 1; i < kMaxDeviceStreams; ++i) value = which == i ? values[i] : value;
  return value;
}

// Softmax of each row, + eps. z: lane 2H + H i + j holds C[i][j]. Each lane has the exponential of
// its own entry: small code, which comes from far away. Rows and columns that are not there have a
// one of their own.
__device__ __forceinline__ void StartSinkhorn(float z, int streams, float eps, Balance& m) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = RowOfEntry(lane - 2 * streams, streams);
  const int first = streams * (2 + row);
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < kMaxDeviceStreams; ++j) {
    top = fmaxf(top, __shfl_sync(kFullMask, z, first + min(j, streams - 1)));
  }
  const float e = expf(z - top);
#pragma unroll
  for (int i = 0; i < kMaxDeviceStreams; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      const float entry = __shfl_sync(kFullMask, e, (streams * (2 + i) + j) % kWarpSize);
      m.c[i][j] = i < streams && j < streams ? entry : i == j ? 1.0f : 0.0f;
      sum += m.c[i][j];
    }
    // e / sum + eps = (e + eps * sum) / sum: the division becomes the row's first factor.
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      if (i < streams && j < streams) m.c[i][j] = fmaf(eps, sum, m.c[i][j]);
    }
    m.row.inverse[i] = sum;
    m.row.value[i] = FastReciprocal(sum);
    m.column.inverse[i] = 1.0f;
    m.column.value[i] = 1.0f;
  }
  m.own = fmaf(eps, PickOne(m.row.inverse, row), e);
}

// The rest of spec 2.2, step 4: columns, then rows and columns in turn. Lane H i + j gets
// comb[i][j].
__device__ __forceinline__ float FinishSinkhorn(int streams, int iterations, float eps,
                                                Balance& m) {
  const auto by_row = [&m](int i, int j) { return m.c[i][j]; };
  const auto by_column = [&m](int j, int i) { return m.c[i][j]; };
  Normalise(eps, m.row, m.column, by_column);
#pragma unroll 1
  for (int n = 1; n < iterations; ++n) {
    Normalise(eps, m.column, m.row, by_row);
    Normalise(eps, m.row, m.column, by_column);
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int i = RowOfEntry(lane, streams), j = lane - i * streams;
  const float entry = __shfl_sync(kFullMask, m.own, (lane + 2 * streams) % kWarpSize);
  return entry * (PickOne(m.row.value, i) * PickOne(m.column.value, j));
}

// One warp: post and comb of a row. z: the row's mix of this thread's lane. Not real: the same
// code, few iterations, and nothing goes to memory.
__device__ __forceinline__ void BalanceRow(const SinkhornJob& job, int row, float z,
                                           bool real = true) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int h = job.streams;
  Balance balance;
  StartSinkhorn(z, h, job.eps, balance);
  const float post = 2.0f * FastReciprocal(1.0f + expf(-z));
  if (real && lane >= h && lane < 2 * h) job.mix.post[row * h + lane - h] = post;
  const float comb = FinishSinkhorn(h, real ? job.iterations : 2, job.eps, balance);
  if (real && lane < h * h) job.mix.comb[row * h * h + lane] = comb;
}

// Block `block` of those that do the job, to its end: a row for each of its warps. Before the mixes
// are there it fetches its code, which nobody has run for long, by a first turn that counts
// nothing.
__device__ __forceinline__ void BalanceRows(const SinkhornJob& job, int block) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int row = block * warps + static_cast<int>(threadIdx.x) / kWarpSize;
  const float* from = job.mixes + row * kMixSlots + threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int rehearsals = min(job.rows, 1);; --rehearsals) {  // 1, but the compiler must not know it
    const bool real = rehearsals == 0;
    if (real) GridDependencyWait();
    if (row < job.rows) BalanceRow(job, row, real ? *from : 0.0f, real);
    if (real) return;
  }
}

// Blocks of `threads` that a job takes.
inline unsigned BalanceBlocks(const SinkhornJob& job, unsigned threads) {
  const unsigned warps = threads / kWarpSize;
  return (static_cast<unsigned>(job.rows) + warps - 1) / warps;
}

}  // namespace ds4::cuda
