// Products of Q2_K weights with few rows of x, for lanes of one chunk (256 columns).
//
// Order of additions for one (weight row, x row): four sums; sum t takes the steps of 32 columns 2t
// and 2t + 1,
//   products = fma(dx of 2t + 1, product of 2t + 1, dx of 2t * product of 2t)
//   minima   = the same of the steps' minima
//   sum      = fma(-dmin, minima, d * products),
// where a step's product is the exact int32 sum of scale * code * q and its minimum that of
// min * q, over both halves of the step; then (sum 0 + sum 1) + (sum 2 + sum 3).
//
// Steps are dealt to sums so that all scales of a lane's sum are one word of the chunk, and d and
// dmin come last because a product with each step's dx would cost more.
#pragma once

#include "engine/cuda/experts_ring.cuh"

namespace ds4::cuda {

// ---- One or two rows of x.

// Where a lane has a share of x to give: all ones or none.
struct HalvesMask {
  uint32_t half;     // it lies in the half that the lane's column takes
  uint32_t step[4];  // ..., and belongs to steps 2i, 2i + 1

  __device__ __forceinline__ HalvesMask() {
    const int g = LaneId() / 4;
    half = Kept(g % 2 == LaneId() % 4 / 2 ? 0xffffffffu : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) step[i] = Kept(g / 2 == i ? half : 0u);
  }
};

// One to two rows of x for one chunk of Q2_K. A scale and a minimum belong to 16 columns, half a
// step. Rows of x stand in columns 2i (first halves of steps 2i, 2i + 1) and 2i + 1 (second
// halves), so that lane 4g + t is left with the sums of both halves of its steps before they are
// scaled: codes need no multiplication one by one. Minima only meet the sums of x.
template <int kRows>
struct HalvesX {
  uint32_t q[kRows][8][2];  // of step s, in the lanes that give columns 2 (s / 2), + 1; else 0
  int sums[kRows][2];       // of x in both halves of step 2t + u, an int16 each
  float scale[kRows][2];    // of step 2t + u

  // own: of step 2 (g / 2) + u, the row's quarter t; scales of step 2t + u.
  __device__ __forceinline__ HalvesX(const OwnRows<kRows, 2>& own, const HalvesMask& mask) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t values[2] = {static_cast<uint32_t>(own.q[u]),
                              static_cast<uint32_t>(own.q[u] >> 32)};
        uint32_t halves[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kRows == 2) {
            // The neighbour 4 lanes away has the other row.
            const uint32_t other = __shfl_xor_sync(kFullMask, values[i], 4);
            if (LaneId() / 4 % 2 != r) values[i] = other;
          }
          halves[i] = values[i] & mask.half;
        }
        constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        int totals[4] = {};
        MmaS8(totals, kOnes, halves);
        sums[r][u] = static_cast<int>(__byte_perm(static_cast<uint32_t>(totals[0]),
                                                  static_cast<uint32_t>(totals[1]), 0x5410));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q[r][2 * i + u][0] = values[0] & mask.step[i];
          q[r][2 * i + u][1] = values[1] & mask.step[i];
        }
        scale[r][u] = own.scale[u][r];
      }
    }
  }
};

// products[r]: of both halves of step 2t (0, 1: weight row g; 2, 3: row g + 8, 16 times as large)
// and of step 2t + 1. scales, minima: of these halves, a byte each.
template <int kRow, int kRows>
__device__ __forceinline__ float ScaledHalves(const int (&even)[4], const int (&odd)[4],
                                              uint32_t scales, uint32_t minima, float2 d,
                                              const HalvesX<kRows>& x, int r) {
  int product[2];
  if constexpr (kRow == 0) {
    // At most 16 * 3 * 127, two to a word.
    const auto pair = [](const int(&halves)[4]) {
      return static_cast<int>(
          __byte_perm(static_cast<uint32_t>(halves[0]), static_cast<uint32_t>(halves[1]), 0x5410));
    };
    product[0] = __dp2a_lo(pair(even), static_cast<int>(scales), kSumBase);
    product[1] = __dp2a_hi(pair(odd), static_cast<int>(scales), kSumBase);
  } else {
    const auto scale = [scales](uint32_t i) {
      return static_cast<int>(__byte_perm(scales, 0, 0x4440u + i));
    };
    product[0] = scale(0) * even[2] + (scale(1) * even[3] + kSumBase);
    product[1] = scale(2) * odd[2] + (scale(3) * odd[3] + kSumBase);
  }
  const int minimum[2] = {__dp2a_lo(x.sums[r][0], static_cast<int>(minima), kSumBase),
                          __dp2a_hi(x.sums[r][1], static_cast<int>(minima), kSumBase)};
  const float first = x.scale[r][0], second = x.scale[r][1];
  const float total = fmaf(second, SumToFloat(product[1]), first * SumToFloat(product[0]));
  const float under = fmaf(second, SumToFloat(minimum[1]), first * SumToFloat(minimum[0]));
  return fmaf(-d.y, under, d.x * total);
}

// sum[tile][r] of lane 4g + t: sum t of weight rows g, g + 8 of the chunk at `chunks` + tile *
// kApart.
template <int kTiles, int kApart, int kRows>
__device__ __forceinline__ void DotHalves(const std::byte* chunks, const HalvesX<kRows>& x,
                                          float (&sum)[kTiles][kRows][2]) {
  const int lane = LaneId();
  int products[kTiles][kRows][2][4] = {};
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
    uint4 codes[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      codes[tile] = Load16(chunks + tile * kApart + 512 * unit + 16 * lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        // Codes of row g + 8 stay where they are, 16 times as large.
        const uint32_t word = Word(codes[tile], i);
        const uint32_t next = word >> 2;
        const uint32_t a[4] = {word & 0x03030303u, word & 0x30303030u, next & 0x03030303u,
                               next & 0x30303030u};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          MmaS8(products[tile][r][i % 2], a, x.q[r][4 * unit + i]);
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const std::byte* scales = chunks + tile * kApart + 1024 + 4 * lane;
    const std::byte* factors = chunks + tile * kApart + 1280 + 4 * (lane / 4);
    const auto word = [](const std::byte* at) { return *reinterpret_cast<const uint32_t*>(at); };
    const uint32_t own[2] = {word(scales), word(scales + 128)};
    const float2 low = Half2ToFloat2(word(factors));
    float2 high = Half2ToFloat2(word(factors + 32));
    high.x *= 0.0625f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int(&even)[4] = products[tile][r][0];
      const int(&odd)[4] = products[tile][r][1];
      sum[tile][r][0] =
          ScaledHalves<0>(even, odd, own[0] & 0x0f0f0f0fu, own[0] >> 4 & 0x0f0f0f0fu, low, x, r);
      sum[tile][r][1] =
          ScaledHalves<1>(even, odd, own[1] & 0x0f0f0f0fu, own[1] >> 4 & 0x0f0f0f0fu, high, x, r);
    }
  }
}

// ---- A group of up to 8 rows of x, a column for each; total is laid out as in dot.cuh.

__device__ __forceinline__ void DotHalvesGroup(const std::byte* chunk, const BlockX<2>& x,
                                               float (&total)[4]) {
  const int lane = LaneId();
  uint4 codes[2], scales[2];
  float2 d[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    codes[i] = Load16(chunk + 512 * i + 16 * lane);
    scales[i] = Load16(chunk + 1024 + 128 * i + 16 * (lane / 4));
    d[i] =
        Half2ToFloat2(*reinterpret_cast<const uint32_t*>(chunk + 1280 + 32 * i + 4 * (lane / 4)));
  }
  float sum[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float products[4], minima[4];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int s = 2 * t + u;
      // The lane's columns lie in one half of the step: its scale goes into the codes, at most
      // 3 * 15.
      const uint32_t half = static_cast<uint32_t>(2 * u + lane % 4 / 2);
      const uint32_t word = Word(codes[s / 4], s % 4);
      uint32_t a[4], low[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t four = Word(scales[k], t);
        const uint32_t scale = __byte_perm(four & 0x0f0f0f0fu, 0, 0x4440u + half);
        a[k] = (word >> (4 * k) & 0x03030303u) * scale;
        a[2 + k] = (word >> (4 * k + 2) & 0x03030303u) * scale;
        low[k] = __byte_perm(four >> 4 & 0x0f0f0f0fu, 0, 0x1111u * half);
      }
      const uint32_t b[2] = {static_cast<uint32_t>(x.q[s]), static_cast<uint32_t>(x.q[s] >> 32)};
      int product[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
      MmaS8(product, a, b);
      int minimum[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
      MmaS8(minimum, {low[0], low[1], low[0], low[1]}, b);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float dx = x.scale[s][j % 2];
        const float value = SumToFloat(product[j]), least = SumToFloat(minimum[j]);
        products[j] = u == 0 ? dx * value : fmaf(dx, value, products[j]);
        minima[j] = u == 0 ? dx * least : fmaf(dx, least, minima[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[t][j] = fmaf(-d[j / 2].y, minima[j], d[j / 2].x * products[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) total[j] = (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
}

}  // namespace ds4::cuda
