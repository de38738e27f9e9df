// From packed weights in shared memory to bf16 fragments of m16n8k16 in registers, for gemm.cu.
//
// Per format F, for one tile of 16 rows:
//   kChunkBytes        of the packed layout (layout.h)
//   kFetchCols         columns that one fetch brings (two fetches a chunk): kMainBytes at
//                      part * kMainBytes of the chunk, then kHeaderBytes at HeaderAt(part)
//   kTileBytes         of a fetched tile in shared memory: main part, then header
//   kScaleFloats       floats of ready scales that MakeScales leaves for each row of a fetch
//   kForExperts        whether experts come in it: then few x rows are worth code of their own
//   Load               what a lane needs of one step of 32 columns, from shared memory
//   Fragments          that as a[0..3] for columns 8t..8t+3 and a[4..7] for 8t+4..+7 of each lane's
//                      octet (rows g and g + 8), the permutation of K that lets both operands be
//                      read in runs of 16 bytes
// Formats of few values (2 bits) pick them, rounded to bf16 once a scale, by byte permutations.
// Else a weight is computed in float32 (exactly, before the rounding to bf16, for the formats
// without a minimum) and rounded once.
#pragma once

#include "engine/cuda/simt.h"

namespace ds4::cuda::gemm {

inline constexpr int kBlockTiles = 16;  // tiles of 16 weight rows in a block
// Rows of ready scales are this far apart: 8 more than the rows of a block, so that lanes that
// write neighbouring steps meet different banks.
inline constexpr int kScaleStride = 16 * kBlockTiles + 8;

// What the formats find in shared memory beside the weights.
struct Tables {
  // Entry i at i * grid_step: for each of eight magnitudes m[code], the two bytes of a bf16, as
  // selectors of __byte_perm: byte j picks bytes 2 code and 2 code + 1.
  const std::byte* iq2_grid = nullptr;
  uint32_t grid_step = 0;
};

__device__ __forceinline__ uint32_t LoadWord(const std::byte* at) {
  return *reinterpret_cast<const uint32_t*>(at);
}
__device__ __forceinline__ uint2 LoadWords2(const std::byte* at) {
  return *reinterpret_cast<const uint2*>(at);
}
__device__ __forceinline__ uint4 LoadWords4(const std::byte* at) {
  return *reinterpret_cast<const uint4*>(at);
}
__device__ __forceinline__ uint32_t LoadHalfWord(const std::byte* at) {
  return *reinterpret_cast<const uint16_t*>(at);
}

// Byte i of `word`, a value plus 128, as the float 32768 + byte. With ds of at most 15 significant
// bits, 32896 ds is exact, and fmaf(that, ds, -32896 ds) is ds * value, rounded once.
template <int i>
__device__ __forceinline__ float BiasedByte(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7504 | i << 4));
}
template <int i, int j>
__device__ __forceinline__ uint32_t SignedPair(uint32_t word, float ds, float offset) {
  return FloatsToBf162(fmaf(BiasedByte<i>(word), ds, offset),
                       fmaf(BiasedByte<j>(word), ds, offset));
}
__device__ __forceinline__ float SignedOffset(float ds) { return -32896.0f * ds; }

// Byte i of `word`, a code below 128, as the float 128 + code.
template <int i>
__device__ __forceinline__ float CodeByte(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x43000000u, 0x7044 | i << 8));
}
template <int i, int j>
__device__ __forceinline__ uint32_t CodePair(uint32_t word, float2 scale) {
  return FloatsToBf162(fmaf(CodeByte<i>(word), scale.x, scale.y),
                       fmaf(CodeByte<j>(word), scale.x, scale.y));
}
// (ds, offset) so that fmaf(128 + code, ds, offset) = ds * code - dm.
__device__ __forceinline__ float2 CodeScale(float ds, float dm) {
  return make_float2(ds, fmaf(-128.0f, ds, -dm));
}

// Two bf16 of a table of four, picked by the lower half of `selectors`.
__device__ __forceinline__ uint32_t PickPair(uint2 table, uint32_t selectors) {
  return SelectBytes(table.x, table.y, selectors);
}

// Scales of one value a row and step: [step][row]; t says which of a fetch's four steps.
__device__ __forceinline__ void StoreScales(float* scales, int lane, float row_g, float row_g8) {
  float* at = scales + (lane % 4) * kScaleStride + lane / 4;
  at[0] = row_g;
  at[8] = row_g8;
}

struct Q8_0 {
  static constexpr int kChunkBytes = 4352, kFetchCols = 128, kMainBytes = 2048, kHeaderBytes = 128;
  static constexpr bool kForExperts = false;
  static constexpr int kTileBytes = kMainBytes + kHeaderBytes;
  static constexpr int kScaleFloats = 4;
  __device__ static int HeaderAt(int part) { return 4096 + 128 * part; }

  __device__ __forceinline__ static void MakeScales(const std::byte* tile, int, int lane,
                                                    float* scales) {
    const float2 d = Half2ToFloat2(LoadWord(tile + kMainBytes + 4 * lane));
    StoreScales(scales, lane, d.x, d.y);
  }
  struct Raw {
    uint4 w;
    float scale, scale8;  // of rows g and g + 8
  };
  __device__ __forceinline__ static Raw Load(const std::byte* tile, const float* scales, int step,
                                             int lane) {
    const float* scale = scales + step * kScaleStride + lane / 4;
    return {LoadWords4(tile + 512 * step + 16 * lane), scale[0], scale[8]};
  }
  __device__ __forceinline__ static void Fragments(const Raw& raw, const Tables&,
                                                   uint32_t (&a)[8]) {
    const uint4 w = raw.w;
    Octet(w.x ^ 0x80808080u, w.z ^ 0x80808080u, raw.scale, a[0], a[2], a[4], a[6]);
    Octet(w.y ^ 0x80808080u, w.w ^ 0x80808080u, raw.scale8, a[1], a[3], a[5], a[7]);
  }
  // Eight biased bytes of one row.
  __device__ __forceinline__ static void Octet(uint32_t low, uint32_t high, float ds, uint32_t& a0,
                                               uint32_t& a1, uint32_t& a2, uint32_t& a3) {
    const float offset = SignedOffset(ds);
    a0 = SignedPair<0, 1>(low, ds, offset);
    a1 = SignedPair<2, 3>(low, ds, offset);
    a2 = SignedPair<0, 1>(high, ds, offset);
    a3 = SignedPair<2, 3>(high, ds, offset);
  }
};

struct Mxfp4 {
  static constexpr int kChunkBytes = 2176, kFetchCols = 128, kMainBytes = 1024, kHeaderBytes = 128;
  static constexpr bool kForExperts = true;
  static constexpr int kTileBytes = kMainBytes + kHeaderBytes;
  static constexpr int kScaleFloats = 4;
  __device__ static int HeaderAt(int) { return 2048; }

  // 2^(exponent - 128): codes are read as twice their value. Denormal below 2.
  __device__ __forceinline__ static float Scale(uint32_t exponent) {
    return __uint_as_float(exponent >= 2 ? (exponent - 1) << 23 : 0x200000u << exponent);
  }
  __device__ __forceinline__ static void MakeScales(const std::byte* tile, int part, int lane,
                                                    float* scales) {
    const uint32_t both = LoadWord(tile + kMainBytes + 4 * lane) >> (16 * part);
    StoreScales(scales, lane, Scale(both & 255), Scale(both >> 8 & 255));
  }
  struct Raw {
    uint2 w;
    float scale, scale8;  // of rows g and g + 8
  };
  __device__ __forceinline__ static Raw Load(const std::byte* tile, const float* scales, int step,
                                             int lane) {
    const float* scale = scales + step * kScaleStride + lane / 4;
    return {LoadWords2(tile + 512 * (step / 2) + 16 * lane + 8 * (step % 2)), scale[0], scale[8]};
  }
  __device__ __forceinline__ static void Fragments(const Raw& raw, const Tables&,
                                                   uint32_t (&a)[8]) {
    Octet(raw.w.x, raw.scale, a[0], a[2], a[4], a[6]);
    Octet(raw.w.y, raw.scale8, a[1], a[3], a[5], a[7]);
  }
  // Nibbles in the order of columns 0 4 1 5 2 6 3 7 of one row.
  __device__ __forceinline__ static void Octet(uint32_t w, float ds, uint32_t& a0, uint32_t& a1,
                                               uint32_t& a2, uint32_t& a3) {
    const float offset = SignedOffset(ds);
    const uint32_t shifted = w << 4;
    const uint32_t first = Levels(w, __byte_perm(shifted, w, 0x5140));         // 0 4 1 5
    const uint32_t second = Levels(w >> 16, __byte_perm(shifted, w, 0x7362));  // 2 6 3 7
    a0 = SignedPair<0, 2>(first, ds, offset);
    a1 = SignedPair<0, 2>(second, ds, offset);
    a2 = SignedPair<1, 3>(first, ds, offset);
    a3 = SignedPair<1, 3>(second, ds, offset);
  }
  // 128 plus or minus {0, 1, 2, 3, 4, 6, 8, 12} for the low four nibbles; `signs`: bit 7 of byte i
  // is the sign of nibble i.
  __device__ __forceinline__ static uint32_t Levels(uint32_t nibbles, uint32_t signs) {
    const uint32_t pick = nibbles & 0x7777u;
    const uint32_t plus = __byte_perm(0x83828180u, 0x8c888684u, pick);
    const uint32_t minus = __byte_perm(0x7d7e7f80u, 0x74787a7cu, pick);
    const uint32_t sign = signs & 0x80808080u;
    const uint32_t mask = sign | (sign - (sign >> 7));
    return (plus & ~mask) | (minus & mask);
  }
};

struct Q4_K {
  static constexpr int kChunkBytes = 2304, kFetchCols = 128, kMainBytes = 1024, kHeaderBytes = 256;
  static constexpr bool kForExperts = true;
  static constexpr int kTileBytes = kMainBytes + kHeaderBytes;
  static constexpr int kScaleFloats = 8;
  __device__ static int HeaderAt(int) { return 2048; }

  // Row header: f16 d, f16 dmin, twelve bytes with eight 6-bit scales and minimums.
  __device__ __forceinline__ static float2 RowScale(const std::byte* header, int part, int t) {
    const uint4 h = LoadWords4(header);
    const float2 d = Half2ToFloat2(h.x);
    uint32_t scales = h.y & 0x3f3f3f3fu, mins = h.z & 0x3f3f3f3fu;
    if (part != 0) {
      scales = (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u);
      mins = (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u);
    }
    const float scale = static_cast<float>(scales >> (8 * t) & 63);
    const float min = static_cast<float>(mins >> (8 * t) & 63);
    return CodeScale(d.x * scale, d.y * min);
  }
  __device__ __forceinline__ static void MakeScales(const std::byte* tile, int part, int lane,
                                                    float* scales) {
    const int g = lane / 4, t = lane % 4;
    float2* at = reinterpret_cast<float2*>(scales) + t * kScaleStride + g;
    at[0] = RowScale(tile + kMainBytes + 16 * g, part, t);
    at[8] = RowScale(tile + kMainBytes + 16 * (g + 8), part, t);
  }
  struct Raw {
    uint2 w;
    float2 scale, scale8;  // of rows g and g + 8
  };
  __device__ __forceinline__ static Raw Load(const std::byte* tile, const float* scales, int step,
                                             int lane) {
    const float2* scale = reinterpret_cast<const float2*>(scales) + step * kScaleStride + lane / 4;
    return {LoadWords2(tile + 512 * (step / 2) + 16 * lane + 8 * (step % 2)), scale[0], scale[8]};
  }
  __device__ __forceinline__ static void Fragments(const Raw& raw, const Tables&,
                                                   uint32_t (&a)[8]) {
    const uint2 w = raw.w;
    Octet(w.x & 0x0f0f0f0fu, w.x >> 4 & 0x0f0f0f0fu, raw.scale, a[0], a[2], a[4], a[6]);
    Octet(w.y & 0x0f0f0f0fu, w.y >> 4 & 0x0f0f0f0fu, raw.scale8, a[1], a[3], a[5], a[7]);
  }
  // Eight codes of one row.
  __device__ __forceinline__ static void Octet(uint32_t low, uint32_t high, float2 scale,
                                               uint32_t& a0, uint32_t& a1, uint32_t& a2,
                                               uint32_t& a3) {
    a0 = CodePair<0, 1>(low, scale);
    a1 = CodePair<2, 3>(low, scale);
    a2 = CodePair<0, 1>(high, scale);
    a3 = CodePair<2, 3>(high, scale);
  }
};

struct Q2_K {
  static constexpr int kChunkBytes = 1344, kFetchCols = 128, kMainBytes = 512, kHeaderBytes = 320;
  static constexpr bool kForExperts = true;
  static constexpr int kTileBytes = kMainBytes + kHeaderBytes;
  static constexpr int kScaleFloats = 16;  // the four values of eight sub-blocks, as bf16
  __device__ static int HeaderAt(int) { return 1024; }

  // ds * code - dm for codes 0 to 3.
  __device__ __forceinline__ static uint2 Values(float ds, float dm) {
    return make_uint2(FloatsToBf162(-dm, ds - dm),
                      FloatsToBf162(fmaf(2.0f, ds, -dm), fmaf(3.0f, ds, -dm)));
  }
  __device__ __forceinline__ static void RowScales(const std::byte* header, int part, int t,
                                                   int row, uint2* at) {
    const float2 d = Half2ToFloat2(LoadWord(header + 256 + 4 * row));
    const uint32_t both = LoadHalfWord(header + 16 * row + 8 * part + 2 * t);
    at[0] = Values(d.x * static_cast<float>(both & 15), d.y * static_cast<float>(both >> 4 & 15));
    at[kScaleStride] =
        Values(d.x * static_cast<float>(both >> 8 & 15), d.y * static_cast<float>(both >> 12));
  }
  __device__ __forceinline__ static void MakeScales(const std::byte* tile, int part, int lane,
                                                    float* scales) {
    const int g = lane / 4, t = lane % 4;
    uint2* at = reinterpret_cast<uint2*>(scales) + 2 * t * kScaleStride + g;
    RowScales(tile + kMainBytes, part, t, g, at);
    RowScales(tile + kMainBytes, part, t, g + 8, at + 8);
  }
  struct Raw {
    uint32_t w;
    uint2 values, values8;  // of rows g and g + 8
  };
  __device__ __forceinline__ static Raw Load(const std::byte* tile, const float* scales, int step,
                                             int lane) {
    // Columns 8t..8t+7 lie in sub-block t / 2 of the step.
    const uint2* values = reinterpret_cast<const uint2*>(scales) +
                          (2 * step + lane % 4 / 2) * kScaleStride + lane / 4;
    return {LoadWord(tile + 16 * lane + 4 * step), values[0], values[8]};
  }
  __device__ __forceinline__ static void Fragments(const Raw& raw, const Tables&,
                                                   uint32_t (&a)[8]) {
    const uint32_t w = raw.w;
    Quad(w & 0x03030303u, raw.values, a[0], a[2]);
    Quad(w >> 2 & 0x03030303u, raw.values, a[4], a[6]);
    Quad(w >> 4 & 0x03030303u, raw.values8, a[1], a[3]);
    Quad(w >> 6 & 0x03030303u, raw.values8, a[5], a[7]);
  }
  // Four codes of one row; code c picks bytes 2c and 2c + 1.
  __device__ __forceinline__ static void Quad(uint32_t codes, uint2 values, uint32_t& a0,
                                              uint32_t& a1) {
    const uint32_t selectors = codes * 0x22u + 0x10101010u;
    a0 = PickPair(values, selectors);
    a1 = PickPair(values, selectors >> 16);
  }
};

struct Iq2Xxs {
  static constexpr int kChunkBytes = 1120, kFetchCols = 128, kMainBytes = 512, kHeaderBytes = 96;
  static constexpr bool kForExperts = true;
  static constexpr int kTileBytes = kMainBytes + kHeaderBytes;
  static constexpr int kScaleFloats = 8;  // the three magnitudes, as bf16
  __device__ static int HeaderAt(int) { return 1024; }

  __device__ __forceinline__ static float Scale(uint32_t d, uint32_t code) {
    return HalfToFloat(static_cast<uint16_t>(d)) * (0.5f + static_cast<float>(code)) * 0.25f;
  }
  __device__ __forceinline__ static void MakeScales(const std::byte* tile, int part, int lane,
                                                    float* scales) {
    const std::byte* header = tile + kMainBytes;
    const uint32_t codes = LoadHalfWord(header + 2 * lane) >> (8 * part);
    const uint32_t d = LoadWord(header + 64 + 4 * (lane / 4));
    uint2* at = reinterpret_cast<uint2*>(scales) + (lane % 4) * kScaleStride + lane / 4;
    at[0] = Magnitudes(Scale(d & 0xffffu, codes & 15));
    at[8] = Magnitudes(Scale(d >> 16, codes >> 4 & 15));
  }
  __device__ __forceinline__ static uint2 Magnitudes(float ds) {
    return make_uint2(FloatsToBf162(8.0f * ds, 25.0f * ds), FloatsToBf162(43.0f * ds, 0.0f));
  }
  struct Raw {
    uint2 w;                // indices and signs of two steps
    uint32_t octet;         // of row g, among the four there
    uint2 values, values8;  // of rows g and g + 8
  };
  __device__ __forceinline__ static Raw Load(const std::byte* tile, const float* scales, int step,
                                             int lane) {
    const uint2* values = reinterpret_cast<const uint2*>(scales) + step * kScaleStride + lane / 4;
    return {LoadWords2(tile + 16 * lane + 8 * (step / 2)), 2 * static_cast<uint32_t>(step % 2),
            values[0], values[8]};
  }
  __device__ __forceinline__ static void Fragments(const Raw& raw, const Tables& tables,
                                                   uint32_t (&a)[8]) {
    Octet(raw.w, raw.octet, raw.values, tables, a[0], a[2], a[4], a[6]);
    Octet(raw.w, raw.octet + 1, raw.values8, tables, a[1], a[3], a[5], a[7]);
  }
  __device__ __forceinline__ static void Octet(uint2 w, uint32_t octet, uint2 values,
                                               const Tables& tables, uint32_t& a0, uint32_t& a1,
                                               uint32_t& a2, uint32_t& a3) {
    const uint32_t index = w.x >> (8 * octet) & 255;
    const uint2 picks = LoadWords2(tables.iq2_grid + index * tables.grid_step);
    // Signs of columns 2p and 2p + 1 at the top of byte p.
    const uint32_t even = w.y << (7 - octet);
    const uint32_t odd = w.y << (3 - octet);
    a0 = Signed(PickPair(values, picks.x), __byte_perm(even, odd, 0x4400));
    a1 = Signed(PickPair(values, picks.x >> 16), __byte_perm(even, odd, 0x5511));
    a2 = Signed(PickPair(values, picks.y), __byte_perm(even, odd, 0x6622));
    a3 = Signed(PickPair(values, picks.y >> 16), __byte_perm(even, odd, 0x7733));
  }
  __device__ __forceinline__ static uint32_t Signed(uint32_t magnitudes, uint32_t minus) {
    return magnitudes ^ (minus & 0x80008000u);
  }
};

// F16 or BF16. A step takes two units of 16 columns; lane 4g + t's octet is in unit t / 2, in the
// places of lanes 4g + 2t % 4 and the next.
template <bool kHalf>
struct Plain16 {
  static constexpr int kChunkBytes = 4096, kFetchCols = 64, kMainBytes = 2048, kHeaderBytes = 0;
  static constexpr bool kForExperts = false;
  static constexpr int kTileBytes = kMainBytes;
  static constexpr int kScaleFloats = 0;
  __device__ static int HeaderAt(int) { return 0; }
  __device__ __forceinline__ static void MakeScales(const std::byte*, int, int, float*) {}

  __device__ __forceinline__ static uint32_t Pair(uint32_t bits) {
    if constexpr (!kHalf) return bits;
    const float2 both = Half2ToFloat2(bits);
    return FloatsToBf162(both.x, both.y);
  }
  struct Raw {
    uint4 first, second;  // columns 8t..8t+3 and the next four, rows g and g + 8
  };
  __device__ __forceinline__ static Raw Load(const std::byte* tile, const float*, int step,
                                             int lane) {
    const int g = lane / 4, t = lane % 4;
    const std::byte* at = tile + 512 * (2 * step + t / 2) + 16 * (4 * g + 2 * t % 4);
    return {LoadWords4(at), LoadWords4(at + 16)};
  }
  __device__ __forceinline__ static void Fragments(const Raw& raw, const Tables&,
                                                   uint32_t (&a)[8]) {
    a[0] = Pair(raw.first.x);
    a[1] = Pair(raw.first.y);
    a[2] = Pair(raw.first.z);
    a[3] = Pair(raw.first.w);
    a[4] = Pair(raw.second.x);
    a[5] = Pair(raw.second.y);
    a[6] = Pair(raw.second.z);
    a[7] = Pair(raw.second.w);
  }
};

}  // namespace ds4::cuda::gemm
