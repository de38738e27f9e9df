// Chunks of float weights times few rows of x that come straight from global memory: more of it is
// on its way than DotChunkFloat (dot.cuh) has, in the same order of additions.
#pragma once

#include "engine/cuda/dot.cuh"

namespace ds4::cuda {

// What a lane needs of one x row for a chunk.
template <DType kType>
struct XFloats {
  static constexpr int kCols = kLaneCols<kType>;
  float v[8][kCols];

  __device__ __forceinline__ void Load(const float* x) {
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const float* at = x + 4 * kCols * u + kCols * (LaneId() % 4);
      LoadNeighbours<kCols>(at, v[u]);
    }
  }
  __device__ __forceinline__ void Dot(const std::byte* chunk, float (&part)[1][2]) const {
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      float w[2][kCols];
      DecodeFloats<kType>(Load16(chunk + 512 * u + 16 * LaneId()), w);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int k = 0; k < kCols; ++k) part[0][r] = fmaf(w[r][k], v[u][k], part[0][r]);
      }
    }
  }
};

// What a lane needs of kRows x rows for one unit of a chunk (layout.h).
template <DType kType, int kRows>
struct UnitFloats {
  static constexpr int kCols = kLaneCols<kType>;
  float v[kRows][kCols];

  // at: x column of the lane's first value.
  __device__ __forceinline__ void Load(const ContiguousX<1>& x, int at) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      LoadNeighbours<kCols>(x.Row(j) + at, v[j]);
    }
  }
};

// Several x rows: a unit's are on their way while the one before is multiplied.
template <DType kType, int kRows>
__device__ __forceinline__ void DotChunkRows(const std::byte* chunk, const ContiguousX<1>& x,
                                             int col, float (&part)[kRows][2]) {
  constexpr int kCols = kLaneCols<kType>;
  constexpr int kUnits = 8;
  const int at = col + kCols * (LaneId() % 4);
  UnitFloats<kType, kRows> columns;
  columns.Load(x, at);
#pragma unroll 2
  for (int u = 0; u < kUnits; ++u) {
    UnitFloats<kType, kRows> next;
    next.Load(x, at + 4 * kCols * (u + 1 < kUnits ? u + 1 : u));
    float w[2][kCols];
    DecodeFloats<kType>(Load16(chunk + 512 * u + 16 * LaneId()), w);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int k = 0; k < kCols; ++k) part[j][r] = fmaf(w[r][k], columns.v[j][k], part[j][r]);
      }
    }
    columns = next;
  }
}

}  // namespace ds4::cuda
