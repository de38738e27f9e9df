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

// 1 where a lane has a share of x to give, else 0: multiplications, because the units for logic are
// busy with codes.
struct HalvesMask {
  uint32_t half;     // it lies in the half that the lane's column takes
  uint32_t step[4];  // ..., and belongs to steps 2i, 2i + 1

  __device__ __forceinline__ HalvesMask() {
    const int g = LaneId() / 4;
    half = Kept(g % 2 == LaneId() % 4 / 2 ? 1u : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) step[i] = Kept(g / 2 == i ? half : 0u);
  }
};

// The sums of columns 2t and 2t + 1, an int16 each.
__device__ __forceinline__ int SumHalves(const uint32_t (&columns)[2]) {
  constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  int totals[4] = {};
  MmaS8(totals, kOnes, columns);
  return static_cast<int>(
      __byte_perm(static_cast<uint32_t>(totals[0]), static_cast<uint32_t>(totals[1]), 0x5410));
}

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
          halves[i] = values[i] * mask.half;
        }
        sums[r][u] = SumHalves(halves);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q[r][2 * i + u][0] = values[0] * mask.step[i];
          q[r][2 * i + u][1] = values[1] * mask.step[i];
        }
        scale[r][u] = own.scale[u][r];
      }
    }
  }
};

// What a matrix instruction takes of one step. Codes of row g + 8 stay where they are, 16 times as
// large.
__device__ __forceinline__ void HalvesCodes(uint32_t word, uint32_t (&a)[4]) {
  a[0] = word & 0x03030303u;
  a[1] = word & 0x30303030u;
  a[2] = word >> 2 & 0x03030303u;
  a[3] = word >> 2 & 0x30303030u;
}

// One row's d, dmin; of row g + 8 (kRow == 1) d is made to fit its codes.
template <int kRow>
__device__ __forceinline__ float2 HalvesFactors(const std::byte* chunk) {
  const int g = LaneId() / 4;
  float2 d = Half2ToFloat2(*reinterpret_cast<const uint32_t*>(chunk + 1280 + 32 * kRow + 4 * g));
  if (kRow == 1) d.x *= 0.0625f;
  return d;
}

// A weight row's sum t: even, odd are the products of both halves of steps 2t, 2t + 1 (0, 1: row g,
// 2, 3: row g + 8). bytes: scale and minimum of these halves. sums, scale: of x in these steps.
template <int kRow>
__device__ __forceinline__ float ScaledHalves(const int (&even)[4], const int (&odd)[4],
                                              uint32_t bytes, float2 d, const int* sums,
                                              const float* scale) {
  const uint32_t scales = bytes & 0x0f0f0f0fu;
  const auto minima = static_cast<int>(bytes >> 4 & 0x0f0f0f0fu);
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
    const auto own = [scales](uint32_t i) {
      return static_cast<int>(__byte_perm(scales, 0, 0x4440u + i));
    };
    product[0] = own(0) * even[2] + (own(1) * even[3] + kSumBase);
    product[1] = own(2) * odd[2] + (own(3) * odd[3] + kSumBase);
  }
  const int minimum[2] = {__dp2a_lo(sums[0], minima, kSumBase),
                          __dp2a_hi(sums[1], minima, kSumBase)};
  const float total = fmaf(scale[1], SumToFloat(product[1]), scale[0] * SumToFloat(product[0]));
  const float under = fmaf(scale[1], SumToFloat(minimum[1]), scale[0] * SumToFloat(minimum[0]));
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
        uint32_t a[4];
        HalvesCodes(Word(codes[tile], i), a);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          MmaS8(products[tile][r][i % 2], a, x.q[r][4 * unit + i]);
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const std::byte* chunk = chunks + tile * kApart;
    const auto bytes = [chunk, lane](int k) {
      return *reinterpret_cast<const uint32_t*>(chunk + 1024 + 128 * k + 4 * lane);
    };
    const float2 low = HalvesFactors<0>(chunk), high = HalvesFactors<1>(chunk);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int(&even)[4] = products[tile][r][0];
      const int(&odd)[4] = products[tile][r][1];
      sum[tile][r][0] = ScaledHalves<0>(even, odd, bytes(0), low, x.sums[r], x.scale[r]);
      sum[tile][r][1] = ScaledHalves<1>(even, odd, bytes(1), high, x.sums[r], x.scale[r]);
    }
  }
}

// ---- Three or four rows of x: row j stands in columns 2j (first halves) and 2j + 1 (second ones)
// of all steps, so that lane 4g + t has all four sums of row t.

struct FourRows {
  uint64_t q[8];   // of step s, row g / 2, quarter t
  float scale[8];  // of step s, row t

  // Rows first .. of the view, count of them (the last stands for those that are not there).
  __device__ __forceinline__ void Load(const ActivationView& x, int block, int first, int count) {
    const int tiles = TilesOf(x);
    const int t = LaneId() % 4;
    const int given = first + min(LaneId() / 8, count - 1);
    const int taken = first + min(t, count - 1);
    const uint64_t* from = x.q + (block * tiles * 32 + given * 4 + t);
    const float* from_scale = x.scale + (block * (8 * tiles) + taken);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      q[s] = __ldcg(from);
      scale[s] = __ldcg(from_scale);
      from += 32 * tiles;
      from_scale += 8 * tiles;
    }
  }
};

struct FourHalvesX {
  uint32_t q[8][2];
  int sums[8];  // of x in both halves of step s of row t, an int16 each
  float scale[8];

  __device__ __forceinline__ FourHalvesX(const FourRows& own, const HalvesMask& mask) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      q[s][0] = static_cast<uint32_t>(own.q[s]) * mask.half;
      q[s][1] = static_cast<uint32_t>(own.q[s] >> 32) * mask.half;
      sums[s] = SumHalves(q[s]);
      scale[s] = own.scale[s];
    }
  }
};

// sum[tile]: weight rows g, g + 8, x row t.
template <int kTiles, int kApart>
__device__ __forceinline__ void DotFourHalves(const std::byte* chunks, const FourHalvesX& x,
                                              float (&sum)[kTiles][2]) {
  const int lane = LaneId();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const std::byte* chunk = chunks + tile * kApart;
    const float2 low = HalvesFactors<0>(chunk), high = HalvesFactors<1>(chunk);
    uint4 bytes[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) bytes[k] = Load16(chunk + 1024 + 128 * k + 16 * (lane / 4));
    uint4 codes = {};
    float part[4][2];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (t % 2 == 0) codes = Load16(chunk + 256 * t + 16 * lane);
      int products[2][4] = {};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t a[4];
        HalvesCodes(Word(codes, t % 2 * 2 + u), a);
        MmaS8(products[u], a, x.q[2 * t + u]);
      }
      const int* sums = x.sums + 2 * t;
      const float* scale = x.scale + 2 * t;
      part[t][0] = ScaledHalves<0>(products[0], products[1], Word(bytes[0], t), low, sums, scale);
      part[t][1] = ScaledHalves<1>(products[0], products[1], Word(bytes[1], t), high, sums, scale);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      sum[tile][k] = (part[0][k] + part[1][k]) + (part[2][k] + part[3][k]);
    }
  }
}

}  // namespace ds4::cuda
