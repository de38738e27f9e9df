// Sinkhorn's balancing of a row's stream mixes (spec 2.2, step 4): one warp a row.
#pragma once

#include <cmath>

#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

// scale[i] / denominator: factors of rows or columns of a matrix, so that no step needs a division.
struct Factors {
  float scale[kMaxDeviceStreams];
  float denominator;
};

// One normalisation of `matrix[i][j] * own.scale[i] * other.scale[j] / (denominators)` over j: each
// row divided by its sum + eps. With d_i = own_i * sum_j matrix[i][j] other_j + eps * denominators
// that is own_i := own_i * other.denominator / d_i, written over the common denominator d_0 d_1 d_2
// d_3, and brought back to the size of 1 by a power of two. d / denominators lies in [eps, H +
// eps], so nothing leaves the range of float32.
template <typename Entry>
__device__ __forceinline__ void Normalise(int streams, float eps, const Factors& other,
                                          Factors& own, Entry matrix) {
  const float floor = eps * (own.denominator * other.denominator);
  float d[kMaxDeviceStreams];
#pragma unroll
  for (int i = 0; i < kMaxDeviceStreams; ++i) {
    float sum = matrix(i, 0) * other.scale[0];
#pragma unroll
    for (int j = 1; j < kMaxDeviceStreams; ++j) sum = fmaf(matrix(i, j), other.scale[j], sum);
    d[i] = fmaf(own.scale[i], sum, floor);
  }
  if (streams < kMaxDeviceStreams) {
#pragma unroll
    for (int i = 1; i < kMaxDeviceStreams; ++i) d[i] = i < streams ? d[i] : 1.0f;
  }
  const float low = d[0] * d[1], high = d[2] * d[3];
  const float product = low * high;
  const float unit = __uint_as_float(0x7f000000u - (__float_as_uint(product) & 0x7f800000u));
  const float factor = other.denominator * unit;
  // Everything but the factor is ready before the power of two is.
  own.scale[0] = own.scale[0] * (d[1] * high) * factor;
  own.scale[1] = own.scale[1] * (d[0] * high) * factor;
  own.scale[2] = own.scale[2] * (low * d[3]) * factor;
  own.scale[3] = own.scale[3] * (low * d[2]) * factor;
  own.denominator = product * unit;
}

// A matrix that Sinkhorn balances, entry (i, j) times the factors of row i and column j. The
// latency of this chain bounds the job, so all lanes carry the whole matrix: no step has a shuffle.
struct Balance {
  float c[kMaxDeviceStreams][kMaxDeviceStreams];
  Factors row, column;
};

// Softmax of each row, + eps. z: lane 2H + H i + j holds C[i][j].
__device__ __forceinline__ void StartSinkhorn(float z, int streams, float eps, Balance& m) {
  float sums[kMaxDeviceStreams];
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
      m.c[i][j] = i < streams && j < streams ? expf(m.c[i][j] - top) : 0.0f;
      sum += m.c[i][j];
    }
    // e / sum + eps = (e + eps * sum) / sum: the division becomes the row's first factor.
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      if (i < streams && j < streams) m.c[i][j] = fmaf(eps, sum, m.c[i][j]);
    }
    sums[i] = i < streams ? sum : 1.0f;
    m.column.scale[i] = 1.0f;
  }
  const float low = sums[0] * sums[1], high = sums[2] * sums[3];
  m.row.scale[0] = sums[1] * high;
  m.row.scale[1] = sums[0] * high;
  m.row.scale[2] = low * sums[3];
  m.row.scale[3] = low * sums[2];
  m.row.denominator = low * high;
  m.column.denominator = 1.0f;
}

// The rest of spec 2.2, step 4: columns, then rows and columns in turn. Lane H i + j gets
// comb[i][j].
__device__ __forceinline__ float FinishSinkhorn(int streams, int iterations, float eps,
                                                Balance& m) {
  const auto by_row = [&m](int i, int j) { return m.c[i][j]; };
  const auto by_column = [&m](int j, int i) { return m.c[i][j]; };
  Normalise(streams, eps, m.row, m.column, by_column);
#pragma unroll 1
  for (int n = 1; n < iterations; ++n) {
    Normalise(streams, eps, m.column, m.row, by_row);
    Normalise(streams, eps, m.row, m.column, by_column);
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float entry = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxDeviceStreams; ++i) {
#pragma unroll
    for (int j = 0; j < kMaxDeviceStreams; ++j) {
      if (i < streams && j < streams && lane == streams * i + j) {
        entry = m.c[i][j] * (m.row.scale[i] * m.column.scale[j]);
      }
    }
  }
  return entry / (m.row.denominator * m.column.denominator);
}

// One warp: post and comb of a row. z: the row's mix of this thread's lane.
__device__ __forceinline__ void BalanceRow(const SinkhornJob& job, int row, float z) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int h = job.streams;
  Balance balance;
  StartSinkhorn(z, h, job.eps, balance);
  if (lane >= h && lane < 2 * h) job.mix.post[row * h + lane - h] = 2.0f / (1.0f + expf(-z));
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
