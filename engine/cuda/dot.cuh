// The core of all products with few rows of x: one warp multiplies one slice (at most kSliceCols
// columns) of one row tile (16 rows of packed weights, layout.h) with kTiles tiles of 8 x rows.
//
// Use, in every warp of a kernel:
//   WeightStream<type, stages, Source> stream{ring, source};
//   stream.Start();            // weights do not depend on earlier kernels
//   GridDependencyWait();
//   for each slice, in the order of the source:
//     float acc[kTiles][4];
//     DotSlice<type, kTiles, kFloatRows>(stream, x, first column of x, chunks, grid, acc);
// acc is laid out as a matrix instruction leaves it: lane 4g + t holds, of x tile n,
//   acc[n][0], acc[n][1]: weight row g,     x rows 8n + 2t, 8n + 2t + 1
//   acc[n][2], acc[n][3]: weight row g + 8, the same x rows.
//
// Order of additions for one (weight row, x row), whatever kTiles and kFloatRows are:
//   quantised types: steps of 32 columns in rising order, each an exact int32 sum, then
//     acc = fma(dw * dx, sum, acc); Q4_K and Q2_K then take off the minimum,
//     acc = fma(-(dmin * dx), sum of min * q, acc), that sum exact as well. dw: Q8_0 d; MXFP4
//     2^(e - 128) (codes count halves); Q4_K d * sc; Q2_K d (the sub-blocks' 4-bit scales are in
//     the exact sum); IQ2_XXS (d / 4) * (0.5 + nibble).
//   float types: lane t = 0..3 adds its columns (F16, BF16: c mod 16 in 4t..4t+3; F32: c mod 8 in
//     2t, 2t+1) in rising order, one fma each; then (p0 + p1) + (p2 + p3).
#pragma once

#include "engine/cuda/activation.h"
#include "engine/cuda/layout.h"
#include "engine/cuda/product.h"
#include "engine/cuda/quantize.cuh"
#include "engine/cuda/simt.h"
#include "engine/tensor/iq2_xxs_grid.h"

namespace ds4::cuda {

constexpr bool IsFloatType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}
template <DType kType>
inline constexpr bool kIsFloat = IsFloatType(kType);
// Chunks of a whole slice.
template <DType kType>
inline constexpr int kSliceChunks = kSliceCols / ChunkCols(kType);
// As many stages as fit into `ring_bytes`, at least 2, at most 8.
constexpr int ClampStages(int stages) { return stages < 2 ? 2 : stages > 8 ? 8 : stages; }
template <DType kType, int kRingBytes>
inline constexpr int kStagesFor = ClampStages(kRingBytes / ChunkBytes(kType));

__device__ __forceinline__ int LaneId() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ uint4 Load16(const std::byte* at) {
  return *reinterpret_cast<const uint4*>(at);
}
__device__ __forceinline__ uint32_t Word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// ---- Weights: from global memory through a ring of chunks in shared memory, private to a warp.

// Source: `const std::byte* Next()` gives the warp's chunks in order, nullptr when there is none
// left. Every lane gets the same answer.
template <DType kType, int kStages, class Source>
struct WeightStream {
  std::byte* ring;  // kStages * kChunkBytes<kType> of shared memory, 16-byte aligned
  Source source;
  int stage = 0;

  __device__ __forceinline__ void Start() {
#pragma unroll
    for (int i = 0; i < kStages; ++i) Put(i);
  }
  // The oldest chunk, in shared memory.
  __device__ __forceinline__ const std::byte* Wait() {
    CopyAsyncWait<kStages - 1>();
    __syncwarp();
    return ring + stage * kChunkBytes<kType>;
  }
  // The warp is done with it: the next one takes its place.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    Put(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

 private:
  __device__ __forceinline__ void Put(int place) {
    constexpr int kPieces = kChunkBytes<kType> / 16;
    const std::byte* chunk = source.Next();
    if (chunk != nullptr) {
      std::byte* to = ring + place * kChunkBytes<kType>;
#pragma unroll
      for (int i = 0; i < (kPieces + 31) / 32; ++i) {
        const int piece = 32 * i + LaneId();
        if (piece < kPieces) CopyAsync16(to + 16 * piece, chunk + 16 * piece);
      }
    }
    CopyAsyncCommit();  // also when empty: Wait counts groups
  }
};

// ---- x: where the lane reads its rows. Blocks are 32 columns.

// Rows first_row, first_row + 1, ... of a view. Rows past the last one repeat it, tiles past the
// last one too: their results mean nothing, and nothing is read that is not needed.
template <int kTiles>
struct ContiguousX {
  const uint64_t* q[kTiles];
  const float* scale[kTiles];
  int tiles;
  const float* f32;
  uint32_t cols;
  int first_row;
  int last_row;

  __device__ __forceinline__ ContiguousX(const ActivationView& x, int first)
      : tiles(TilesOf(x)),
        f32(x.f32),
        cols(static_cast<uint32_t>(x.cols)),
        first_row(first),
        last_row(x.rows - 1) {
    const int lane = LaneId();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = min(first + 8 * n + lane / 4, last_row);
      const int tile = min(first / 8 + n, last_row / 8);
      q[n] = x.q + (row / 8 * 32 + row % 8 * 4 + lane % 4);
      scale[n] = x.scale + (tile * 8 + lane % 4 * 2);
    }
  }
  // 8 values of row g of tile n: columns 8t..8t+7 of the block.
  __device__ __forceinline__ uint64_t Q(int block, int n) const {
    return q[n][block * (32 * tiles)];
  }
  // Scales of rows 2t, 2t + 1 of tile n.
  __device__ __forceinline__ float2 Scales(int block, int n) const {
    return *reinterpret_cast<const float2*>(scale[n] + block * (8 * tiles));
  }
  // Columns 0, 1, ... of row j (of all tiles). In 32 bits (activations have fewer than 2^32
  // values): 64-bit row addresses, kept for all rows at once, take more registers than there are.
  __device__ __forceinline__ const float* Row(int j) const {
    return f32 + static_cast<uint32_t>(min(first_row + j, last_row)) * cols;
  }
};

// ---- Decoding one chunk of a quantised type: for step s the A words of MmaS8, the scales of rows
// g and g + 8, and where kHasMin the A words of the minimum (for row g, row g + 8). Steps are asked
// for in rising order, 0..7, in code that is unrolled: what a step keeps for the next stays in
// registers.

struct StepWeights {
  uint32_t a[4];
  float scale[2];
  uint32_t min[2];
  float min_scale[2];
};

template <DType kType>
struct ChunkDecoder;

// Small unsigned integers to float without the slow conversion: 2^23 + n is exact in the low bits.
inline constexpr uint32_t kTwo23Bits = 0x4b000000u;
__device__ __forceinline__ float ByteToFloat(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word, kTwo23Bits, 0x7650u + static_cast<uint32_t>(byte))) -
         8388608.0f;
}
__device__ __forceinline__ uint32_t RepeatByte(uint32_t word, int byte) {
  return __byte_perm(word, 0, 0x1111u * static_cast<uint32_t>(byte));
}

template <>
struct ChunkDecoder<DType::kQ8_0> {
  static constexpr bool kHasMin = false;
  const std::byte* chunk;
  int lane;
  uint4 scales = {};

  __device__ __forceinline__ ChunkDecoder(const std::byte* at, const uint32_t*)
      : chunk(at), lane(LaneId()) {}
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 4 == 0) scales = Load16(chunk + 4096 + 128 * (s / 4) + 16 * (lane / 4));
    const uint4 v = Load16(chunk + 512 * s + 16 * lane);
    w.a[0] = v.x;
    w.a[1] = v.y;
    w.a[2] = v.z;
    w.a[3] = v.w;
    const float2 d = Half2ToFloat2(Word(scales, s % 4));
    w.scale[0] = d.x;
    w.scale[1] = d.y;
  }
};

template <>
struct ChunkDecoder<DType::kMXFP4> {
  static constexpr bool kHasMin = false;
  const std::byte* chunk;
  int lane;
  uint4 scales;
  uint4 unit = {};

  __device__ __forceinline__ ChunkDecoder(const std::byte* at, const uint32_t*)
      : chunk(at), lane(LaneId()), scales(Load16(at + 2048 + 16 * (lane / 4))) {}
  // Twice the value of every code, as int8. Nibbles look up magnitudes of both signs, then choose.
  __device__ __forceinline__ static void Codes(uint32_t word, uint32_t& low, uint32_t& high) {
    const uint32_t magnitude = word & 0x77777777u;
    const uint32_t sign = (word >> 1 & 0x44444444u) | 0x32103210u;
    const uint32_t even = __byte_perm(__byte_perm(0x03020100u, 0x0c080604u, magnitude),
                                      __byte_perm(0xfdfeff00u, 0xf4f8fafcu, magnitude), sign);
    const uint32_t odd =
        __byte_perm(__byte_perm(0x03020100u, 0x0c080604u, magnitude >> 16),
                    __byte_perm(0xfdfeff00u, 0xf4f8fafcu, magnitude >> 16), sign >> 16);
    low = __byte_perm(even, odd, 0x6420);
    high = __byte_perm(even, odd, 0x7531);
  }
  // 2^(e - 128), also below the normal range.
  __device__ __forceinline__ static float Scale(uint32_t e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 2 == 0) unit = Load16(chunk + 256 * s + 16 * lane);
    Codes(s % 2 == 0 ? unit.x : unit.z, w.a[0], w.a[2]);
    Codes(s % 2 == 0 ? unit.y : unit.w, w.a[1], w.a[3]);
    const uint32_t word = Word(scales, s % 4) >> (s < 4 ? 0 : 16);
    w.scale[0] = Scale(word & 255);
    w.scale[1] = Scale(word >> 8 & 255);
  }
};

template <>
struct ChunkDecoder<DType::kQ4_K> {
  static constexpr bool kHasMin = true;
  const std::byte* chunk;
  int lane;
  uint4 unit = {};
  float2 d[2];           // d, dmin of rows g, g + 8
  uint32_t scale[2][2];  // [row][steps 0-3, 4-7], a byte each
  uint32_t min[2][2];

  __device__ __forceinline__ ChunkDecoder(const std::byte* at, const uint32_t*)
      : chunk(at), lane(LaneId()) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 head = Load16(at + 2048 + 16 * (lane / 4) + 128 * r);
      d[r] = Half2ToFloat2(head.x);
      scale[r][0] = head.y & 0x3f3f3f3fu;
      min[r][0] = head.z & 0x3f3f3f3fu;
      scale[r][1] = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
      min[r][1] = (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
    }
  }
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 2 == 0) unit = Load16(chunk + 256 * s + 16 * lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = Word(unit, s % 2 * 2 + r);
      w.a[r] = word & 0x0f0f0f0fu;
      w.a[2 + r] = word >> 4 & 0x0f0f0f0fu;
      w.scale[r] = d[r].x * ByteToFloat(scale[r][s / 4], s % 4);
      w.min[r] = RepeatByte(min[r][s / 4], s % 4);
      w.min_scale[r] = d[r].y;
    }
  }
};

template <>
struct ChunkDecoder<DType::kQ2_K> {
  static constexpr bool kHasMin = true;
  const std::byte* chunk;
  int lane;
  uint4 unit = {};
  uint4 scales[2];  // rows g, g + 8: a byte for each 16 columns
  float2 d[2];

  __device__ __forceinline__ ChunkDecoder(const std::byte* at, const uint32_t*)
      : chunk(at), lane(LaneId()) {
    const int g = lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = Load16(at + 1024 + 16 * (g + 8 * r));
      d[r] = Half2ToFloat2(*reinterpret_cast<const uint32_t*>(at + 1280 + 4 * (g + 8 * r)));
    }
  }
  // The lane's columns lie in one sub-block of 16: its scale goes into the codes, at most 3 * 15.
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 4 == 0) unit = Load16(chunk + 128 * s + 16 * lane);
    const uint32_t word = Word(unit, s % 4);
    const uint32_t byte = static_cast<uint32_t>(s % 2 * 2 + lane % 4 / 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t four = Word(scales[r], s / 2);
      const uint32_t scale = __byte_perm(four & 0x0f0f0f0fu, 0, 0x4440u + byte);
      w.a[r] = (word >> (4 * r) & 0x03030303u) * scale;
      w.a[2 + r] = (word >> (4 * r + 2) & 0x03030303u) * scale;
      w.scale[r] = d[r].x;
      w.min[r] = __byte_perm(four >> 4 & 0x0f0f0f0fu, 0, 0x1111u * byte);
      w.min_scale[r] = d[r].y;
    }
  }
};

template <>
struct ChunkDecoder<DType::kIQ2_XXS> {
  static constexpr bool kHasMin = false;
  const std::byte* chunk;
  const uint32_t* grid;  // in shared memory, see LoadIq2Grid
  int lane;
  uint4 unit = {};
  uint2 scales;  // of rows g, g + 8: four nibbles for each of four steps
  float d[2];

  __device__ __forceinline__ ChunkDecoder(const std::byte* at, const uint32_t* shared_grid)
      : chunk(at), grid(shared_grid), lane(LaneId()) {
    const int g = lane / 4;
    scales = *reinterpret_cast<const uint2*>(at + 1024 + 8 * g);
    const float2 both = Half2ToFloat2(*reinterpret_cast<const uint32_t*>(at + 1088 + 4 * g));
    d[0] = both.x * 0.25f;
    d[1] = both.y * 0.25f;
  }
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 4 == 0) unit = Load16(chunk + 128 * s + 16 * lane);
    const uint32_t indices = Word(unit, s % 4 / 2 * 2);
    const uint32_t signs = Word(unit, s % 4 / 2 * 2 + 1);
    const uint32_t codes = (s % 4 < 2 ? scales.x : scales.y) >> (16 * (s % 2) + 8 * (s / 4));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int octet = 2 * (s % 2) + r;
      // A nibble a column: which of the magnitudes 8, 25, 43, and 4 where it is negative.
      const uint32_t selector = grid[indices >> (8 * octet) & 255u] | (signs >> octet & 0x11111111u)
                                                                          << 2;
      w.a[r] = SelectBytes(0x002b1908u, 0x00d5e7f8u, selector);
      w.a[2 + r] = SelectBytes(0x002b1908u, 0x00d5e7f8u, selector >> 16);
      // 2^23 + n - (2^23 - 0.5): exact.
      w.scale[r] = d[r] * (__uint_as_float((codes >> (4 * r) & 15u) | kTwo23Bits) - 8388607.5f);
    }
  }
};

// The grid of IQ2_XXS for shared memory: a nibble (which of the magnitudes 8, 25, 43) a column, so
// that a byte permutation turns an entry into values. 256 words. All threads of the block call it,
// and meet at a barrier before they use it.
inline constexpr int kIq2GridBytes = 1024;
struct Iq2Grid {
  uint16_t codes[256];
};
constexpr Iq2Grid MakeIq2Grid() {
  Iq2Grid grid{};
  for (int i = 0; i < 256; ++i) grid.codes[i] = kIq2XxsCodes[static_cast<size_t>(i)];
  return grid;
}
inline constexpr Iq2Grid kIq2GridCodes = MakeIq2Grid();
__device__ __forceinline__ void LoadIq2Grid(uint32_t* shared_grid) {
  static constexpr Iq2Grid kGrid = kIq2GridCodes;
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += static_cast<int>(blockDim.x)) {
    uint32_t selector = 0;
    for (int j = 0; j < 8; ++j) {
      selector |= (static_cast<uint32_t>(kGrid.codes[i]) >> (2 * j) & 3u) << (4 * j);
    }
    shared_grid[i] = selector;
  }
}

// ---- Products of one chunk.

// int32 sums start at the bits of 1.5 * 2^23, so that reading them as float is the conversion (all
// sums here are below 2^22).
inline constexpr int kSumBase = 0x4b400000;
__device__ __forceinline__ float SumToFloat(int sum) { return __int_as_float(sum) - 12582912.0f; }

__device__ __forceinline__ void AddProducts(const uint32_t (&a)[4], uint64_t q, float scale0,
                                            float scale1, float2 dx, float (&acc)[4]) {
  const uint32_t b[2] = {static_cast<uint32_t>(q), static_cast<uint32_t>(q >> 32)};
  int sum[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
  MmaS8(sum, a, b);
  acc[0] = fmaf(scale0 * dx.x, SumToFloat(sum[0]), acc[0]);
  acc[1] = fmaf(scale0 * dx.y, SumToFloat(sum[1]), acc[1]);
  acc[2] = fmaf(scale1 * dx.x, SumToFloat(sum[2]), acc[2]);
  acc[3] = fmaf(scale1 * dx.y, SumToFloat(sum[3]), acc[3]);
}

// chunk: in shared memory; block: x block of its first column.
template <DType kType, int kTiles, class X>
__device__ __forceinline__ void DotChunkQ8(const std::byte* chunk, const X& x, int block,
                                           const uint32_t* grid, float (&acc)[kTiles][4]) {
  constexpr int kSteps = kChunkCols<kType> / 32;
  constexpr int kAhead = kTiles == 1 ? 4 : kTiles == 2 ? 2 : 1;  // steps whose x is read together
  ChunkDecoder<kType> decoder(chunk, grid);
#pragma unroll
  for (int first = 0; first < kSteps; first += kAhead) {
    uint64_t q[kAhead][kTiles];
    float2 dx[kAhead][kTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        q[i][n] = x.Q(block + first + i, n);
        dx[i][n] = x.Scales(block + first + i, n);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      StepWeights w;
      decoder.Step(first + i, w);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        AddProducts(w.a, q[i][n], w.scale[0], w.scale[1], dx[i][n], acc[n]);
        if constexpr (ChunkDecoder<kType>::kHasMin) {
          const uint32_t a[4] = {w.min[0], w.min[1], w.min[0], w.min[1]};
          AddProducts(a, q[i][n], -w.min_scale[0], -w.min_scale[1], dx[i][n], acc[n]);
        }
      }
    }
  }
}

template <DType kType>
inline constexpr int kLaneCols = kType == DType::kF32 ? 2 : 4;

// kCols (2 or 4) neighbouring values, aligned to all of them.
template <int kCols>
__device__ __forceinline__ void LoadNeighbours(const float* at, float (&v)[kCols]) {
  static_assert(kCols == 2 || kCols == 4);
  if constexpr (kCols == 4) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    v[0] = four.x;
    v[1] = four.y;
    v[2] = four.z;
    v[3] = four.w;
  } else {
    const float2 two = *reinterpret_cast<const float2*>(at);
    v[0] = two.x;
    v[1] = two.y;
  }
}

// Weight columns of a lane's 16 bytes: w[r][k] is row g + 8r.
template <DType kType>
__device__ __forceinline__ void DecodeFloats(const uint4& v, float (&w)[2][kLaneCols<kType>]) {
  if constexpr (kType == DType::kF32) {
    w[0][0] = __uint_as_float(v.x);
    w[1][0] = __uint_as_float(v.y);
    w[0][1] = __uint_as_float(v.z);
    w[1][1] = __uint_as_float(v.w);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = Word(v, i);
      const float2 pair = kType == DType::kF16 ? Half2ToFloat2(word) : Bf162ToFloat2(word);
      w[i % 2][i / 2 * 2] = pair.x;
      w[i % 2][i / 2 * 2 + 1] = pair.y;
    }
  }
}

// part[j][r]: the lane's own columns only. col: x column of the chunk's first one.
template <DType kType, int kRows, class X>
__device__ __forceinline__ void DotChunkFloat(const std::byte* chunk, const X& x, int64_t col,
                                              float (&part)[kRows][2]) {
  constexpr int kCols = kLaneCols<kType>;
  [[maybe_unused]] constexpr int kUnroll = kRows >= 8 ? 1 : kRows >= 4 ? 2 : 8;
  const int lane = LaneId();
#pragma unroll kUnroll
  for (int u = 0; u < 8; ++u) {
    float w[2][kCols];
    DecodeFloats<kType>(Load16(chunk + 512 * u + 16 * lane), w);
    const int64_t at = col + 4 * kCols * u + kCols * (lane % 4);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      float v[kCols];
      LoadNeighbours<kCols>(x.Row(j) + at, v);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int k = 0; k < kCols; ++k) part[j][r] = fmaf(w[r][k], v[k], part[j][r]);
      }
    }
  }
}

// Adds the parts of the four lanes of a row, (p0 + p1) + (p2 + p3), and leaves them in the form of
// DotSlice: each exchange halves what a lane still holds.
template <int kTiles, int kRows>
__device__ __forceinline__ void AddLaneParts(const float (&part)[kRows][2],
                                             float (&acc)[kTiles][4]) {
  const bool odd = LaneId() % 2 != 0;
  const bool upper = LaneId() % 4 >= 2;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float pair[4];  // even lanes: x rows 0, 1, 4, 5; odd lanes: 2, 3, 6, 7
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 8 * n + i + i / 2 * 2;
        const float even_part = j < kRows ? part[j < kRows ? j : 0][r] : 0.0f;
        const float odd_part = j + 2 < kRows ? part[j + 2 < kRows ? j + 2 : 0][r] : 0.0f;
        const float other = __shfl_xor_sync(kFullMask, odd ? even_part : odd_part, 1);
        pair[i] = (odd ? odd_part : even_part) + other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(kFullMask, upper ? pair[i] : pair[i + 2], 2);
        acc[n][2 * r + i] = (upper ? pair[i + 2] : pair[i]) + other;
      }
    }
  }
}

// The next `chunks` chunks of the stream (one slice of one row tile) times kTiles tiles of x, whose
// column `col` is the slice's first. grid: only for IQ2_XXS. kFloatRows: how many x rows float
// types compute, at most 8 * kTiles (the others come out as 0 or nonsense): 1, 4, 8 or all.
template <DType kType, int kTiles, int kFloatRows, class Stream, class X>
__device__ __forceinline__ void DotSlice(Stream& stream, const X& x, int64_t col, int chunks,
                                         const uint32_t* grid, float (&acc)[kTiles][4]) {
  if constexpr (kIsFloat<kType>) {
    static_assert(kFloatRows <= 8 * kTiles);
    float part[kFloatRows][2] = {};
    for (int c = 0; c < chunks; ++c) {
      DotChunkFloat<kType, kFloatRows>(stream.Wait(), x, col + c * kChunkCols<kType>, part);
      stream.Release();
    }
    AddLaneParts<kTiles, kFloatRows>(part, acc);
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
    }
    const int block = static_cast<int>(col / 32);
    for (int c = 0; c < chunks; ++c) {
      DotChunkQ8<kType, kTiles>(stream.Wait(), x, block + c * (kChunkCols<kType> / 32), grid, acc);
      stream.Release();
    }
  }
}

}  // namespace ds4::cuda
