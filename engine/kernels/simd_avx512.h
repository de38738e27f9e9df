// Sixteen floats as one AVX-512 register.
#pragma once

#include <immintrin.h>

#include "engine/kernels/scalar_ops.h"

namespace ds4::DS4_ISA_NAMESPACE {

constexpr int kLanes = 16;

struct Vec {
  __m512 v;
};

// Tile sizes (weight rows x input rows) that keep partial sums in registers: 32 registers here.
constexpr int kDotW = 4, kDotX = 3;
constexpr int kQ8W = 4, kQ8X = 4;
constexpr int kSumHeads = 4, kSumVecs = 4;

template <>
inline Vec Set1<Vec>(float x) {
  return {_mm512_set1_ps(x)};
}
inline Vec Zero() { return {_mm512_setzero_ps()}; }
inline Vec Add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec Sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec Mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec Div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec Fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec Max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec Min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec Abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), yes.v)};
}
inline Vec SelectNan(Vec a, Vec yes, Vec no) {
  return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), yes.v)};
}
inline Vec Pow2(Vec n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvttps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}

inline __mmask16 First(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline __m512 WidenBF16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline __m256i LoadInts(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Vec Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec LoadF16(const uint16_t* p) { return {_mm512_cvtph_ps(LoadInts(p))}; }
inline Vec LoadBF16(const uint16_t* p) { return {WidenBF16(LoadInts(p))}; }
// The first n < 16 values, then zeros; reads no further.
inline Vec LoadPart(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(First(n), p)}; }
inline Vec LoadPartF16(const uint16_t* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(First(n), p))};
}
inline Vec LoadPartBF16(const uint16_t* p, int64_t n) {
  return {WidenBF16(_mm256_maskz_loadu_epi16(First(n), p))};
}
inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v.v); }
inline void StorePart(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, First(n), v.v); }

inline __m256 LowHalf(__m512 v) { return _mm512_castps512_ps256(v); }
inline __m256 HighHalf(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }

// Balanced trees: p + (p+8), then 4, 2, 1.
inline float HSum(Vec v) {
  const __m256 eight = _mm256_add_ps(LowHalf(v.v), HighHalf(v.v));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float HMax(Vec v) {
  const __m256 eight = _mm256_max_ps(LowHalf(v.v), HighHalf(v.v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Nearest integer, halves away from zero; |v| <= 127.
inline void StoreRounded(int8_t* p, Vec v) {
  const __m512i one = _mm512_set1_epi32(1);
  __m512i whole = _mm512_cvttps_epi32(v.v);
  const __m512 rest = _mm512_sub_ps(v.v, _mm512_cvtepi32_ps(whole));
  const __mmask16 up = _mm512_cmp_ps_mask(rest, _mm512_set1_ps(0.5f), _CMP_GE_OQ);
  const __mmask16 down = _mm512_cmp_ps_mask(rest, _mm512_set1_ps(-0.5f), _CMP_LE_OQ);
  whole = _mm512_mask_add_epi32(whole, up, whole, one);
  whole = _mm512_mask_sub_epi32(whole, down, whole, one);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
}

// vpdpbusd multiplies unsigned by signed bytes: weights go in as w + 128, and 128 * (sum of the
// inputs) is taken off again, all in exact integers.
inline __m512i MinusOffset(__m512i q) {
  const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), q);
  return _mm512_sub_epi32(_mm512_setzero_si512(), sum);
}
inline __m512i Shifted(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }

// Lanes 0..7 take value 2p, lanes 8..15 value 2p+1: the scales of a pair of blocks.
inline __m512i PairIndex(int p) {
  const __m512i half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_add_epi32(half, _mm512_set1_epi32(2 * p));
}

// One weight row: 16 block scales are multiplied at once, so the stream of weights sets the speed.
template <int XT>
inline void Q8Row(const uint8_t* w, const int8_t* const (&q)[XT], const float* const (&scale)[XT],
                  int64_t cols, __m512 (&acc)[XT]) {
  const int64_t blocks = cols / 32;
  for (int64_t b0 = 0; b0 < blocks; b0 += 16) {
    const int64_t n = blocks - b0 < 16 ? blocks - b0 : 16;
    const __mmask16 some = First(n);
    const __m512 dw = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, w + cols + 2 * b0));
    __m512 d[XT];
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) {
      d[j] = _mm512_mul_ps(dw, _mm512_maskz_loadu_ps(some, scale[j] + b0));
    }
    for (int p = 0; 2 * p < n; ++p) {
      const int64_t k = 32 * (b0 + 2 * p);
      // A last block without a partner: its upper lanes read nothing and keep their sums.
      const bool whole = 2 * p + 1 < n;
      const __mmask64 bytes = whole ? ~__mmask64{0} : __mmask64{0xffffffffu};
      const __mmask16 lanes = whole ? 0xffff : 0x00ff;
      const __m512i wv = Shifted(_mm512_maskz_loadu_epi8(bytes, w + k));
      const __m512i index = PairIndex(p);
      DS4_UNROLL
      for (int j = 0; j < XT; ++j) {
        const __m512i x = _mm512_maskz_loadu_epi8(bytes, q[j] + k);
        const __m512 sums = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(MinusOffset(x), wv, x));
        acc[j] = _mm512_mask3_fmadd_ps(_mm512_permutexvar_ps(index, d[j]), sums, acc[j], lanes);
      }
    }
  }
}

// Two scales, each over eight lanes.
inline __m512 SpreadPair(__m128 two) {
  return _mm512_permutexvar_ps(PairIndex(0), _mm512_castps128_ps512(two));
}

// A pair of blocks for all pairs of rows.
template <int WT, int XT>
inline void Q8Pair(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT],
                   const float* const (&scale)[XT], int64_t cols, int64_t b, bool whole,
                   __m512 (&acc)[WT][XT]) {
  const __mmask64 bytes = whole ? ~__mmask64{0} : __mmask64{0xffffffffu};
  const __mmask16 lanes = whole ? 0xffff : 0x00ff;
  const __mmask8 scales = whole ? 3 : 1;
  __m512i wv[WT];
  __m512 dw[WT];
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    wv[i] = Shifted(_mm512_maskz_loadu_epi8(bytes, w[i] + 32 * b));
    dw[i] = SpreadPair(_mm_cvtph_ps(_mm_maskz_loadu_epi16(scales, w[i] + cols + 2 * b)));
  }
  DS4_UNROLL
  for (int j = 0; j < XT; ++j) {
    const __m512i x = _mm512_maskz_loadu_epi8(bytes, q[j] + 32 * b);
    const __m512i start = MinusOffset(x);
    const __m512 dx = SpreadPair(_mm_maskz_loadu_ps(scales, scale[j] + b));
    DS4_UNROLL
    for (int i = 0; i < WT; ++i) {
      const __m512 sums = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, wv[i], x));
      acc[i][j] = _mm512_mask3_fmadd_ps(_mm512_mul_ps(dw[i], dx), sums, acc[i][j], lanes);
    }
  }
}

// See simd_generic.h.
template <int WT, int XT>
inline void Q8Tile(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT],
                   const float* const (&scale)[XT], int64_t cols, float (&sums)[WT][XT]) {
  __m512 acc[WT][XT];
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) acc[i][j] = _mm512_setzero_ps();
  }
  if constexpr (WT == 1) {
    Q8Row<XT>(w[0], q, scale, cols, acc[0]);
  } else {
    const int64_t blocks = cols / 32;
    int64_t b = 0;
    for (; b + 2 <= blocks; b += 2) Q8Pair<WT, XT>(w, q, scale, cols, b, true, acc);
    if (b < blocks) Q8Pair<WT, XT>(w, q, scale, cols, b, false, acc);
  }
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) sums[i][j] = HSum({acc[i][j]});
  }
}

}  // namespace ds4::DS4_ISA_NAMESPACE
