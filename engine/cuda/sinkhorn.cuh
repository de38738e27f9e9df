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

// Softmax of each row, + eps. z: lane 2H + H i + j holds C[i][j]. Rows and columns that are not
// there have a one of their own.
__device__ __forceinline__ void StartSinkhorn(float z, int streams, float eps, Balance& m) {
#pragma unroll
  for (int i = 0; i < kMaxDeviceStreams; ++i) {
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      m.c[i][j] = __shfl_sync(kFullMask, z, (streams * (2 + i) + j) % kWarpSize);
      if (j < streams) top = fmaxf(top, m.c[i][j]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      const bool there = i < streams && j < streams;
      m.c[i][j] = there ? expf(m.c[i][j] - top) : i == j ? 1.0f : 0.0f;
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
  float entry = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxDeviceStreams; ++i) {
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      if (i < streams && j < streams && lane == streams * i + j) {
        entry = m.c[i][j] * (m.row.value[i] * m.column.value[j]);
      }
    }
  }
  return entry;
}

// One warp: post and comb of a row. z: the row's mix of this thread's lane.
__device__ __forceinline__ void BalanceRow(const SinkhornJob& job, int row, float z) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int h = job.streams;
  Balance balance;
  StartSinkhorn(z, h, job.eps, balance);
  if (lane >= h && lane < 2 * h)
    job.mix.post[row * h + lane - h] = 2.0f * FastReciprocal(1.0f + expf(-z));
  const float comb = FinishSinkhorn(h, job.iterations, job.eps, balance);
  if (lane < h * h) job.mix.comb[row * h * h + lane] = comb;
}

// Block `block` of those that do the job, to its end: a row for each of its warps.
__device__ __forceinline__ void BalanceRows(const SinkhornJob& job, int block) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int row = block * warps + static_cast<int>(threadIdx.x) / kWarpSize;
  const float* from = job.mixes + row * kMixSlots + threadIdx.x % kWarpSize;
  GridDependencyWait();
  if (row < job.rows) BalanceRow(job, row, *from);
}

// Blocks of `threads` that a job takes.
inline unsigned BalanceBlocks(const SinkhornJob& job, unsigned threads) {
  const unsigned warps = threads / kWarpSize;
  return (static_cast<unsigned>(job.rows) + warps - 1) / warps;
}

}  // namespace ds4::cuda
