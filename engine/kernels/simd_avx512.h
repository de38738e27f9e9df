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
// One register of partial sums is a whole vector here; see matmul_impl.h.
using Reg = Vec;
constexpr int kRegLanes = 16;
constexpr int RegsAtOnce(int) { return 2; }
inline Reg ZeroReg() { return Zero(); }
inline Reg FmaReg(Reg a, Reg b, Reg c) { return Fma(a, b, c); }
inline Reg LoadReg(const float* p) { return Load(p); }
inline Reg LoadRegF16(const uint16_t* p) { return LoadF16(p); }
inline Reg LoadRegBF16(const uint16_t* p) { return LoadBF16(p); }
// Partial p plus partial p + 16.
inline Vec AddHalves(const Reg (&regs)[2]) { return Add(regs[0], regs[1]); }

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
// The sums of N vectors, each with the additions of HSum. Four share their steps: pairs of halves,
// then of quarters, lie side by side in one register.
template <int N>
inline void HSums(const Vec (&v)[N], float (&sums)[N]) {
  if constexpr (N == 4) {
    const __m512 a = v[0].v, b = v[1].v, c = v[2].v, d = v[3].v;
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 s =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, s)));
  } else {
    for (int i = 0; i < N; ++i) sums[i] = HSum(v[i]);
  }
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

// Two blocks (64 columns from k on) for all pairs of rows. Lanes 0..7 of `index` name the first
// block's scale within `products`, lanes 8..15 the second's. A last block without a partner (whole
// = false) reads no further, and the upper lanes keep their sums.
template <int WT, int XT>
inline void Q8Pair(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT], int64_t k,
                   bool whole, __m512i index, const __m512 (&products)[WT][XT],
                   __m512 (&acc)[WT][XT]) {
  const __mmask64 bytes = whole ? ~__mmask64{0} : __mmask64{0xffffffffu};
  const __mmask16 lanes = whole ? 0xffff : 0x00ff;
  __m512i wv[WT];
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    wv[i] = Shifted(_mm512_maskz_loadu_epi8(bytes, w[i] + k));
    if constexpr (WT > 1) Prefetch(w[i] + k + WT * (w[1] - w[0]));
  }
  DS4_UNROLL
  for (int j = 0; j < XT; ++j) {
    const __m512i x = _mm512_maskz_loadu_epi8(bytes, q[j] + k);
    const __m512i start = MinusOffset(x);
    DS4_UNROLL
    for (int i = 0; i < WT; ++i) {
      const __m512 sums = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, wv[i], x));
      const __m512 scales = _mm512_permutexvar_ps(index, products[i][j]);
      acc[i][j] = _mm512_mask3_fmadd_ps(scales, sums, acc[i][j], lanes);
    }
  }
}

// See simd_generic.h. Scales are multiplied for 16 blocks at once, so that a pair of blocks costs
// one permutation for them and the stream of weights sets the speed of a single row.
template <int WT, int XT>
inline void Q8Tile(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT],
                   const float* const (&scale)[XT], int64_t cols, float (&sums)[XT][WT]) {
  __m512 acc[WT][XT];
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) acc[i][j] = _mm512_setzero_ps();
  }
  const __m512i first = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const int64_t blocks = cols / 32;
  for (int64_t b0 = 0; b0 < blocks; b0 += 16) {
    const int64_t n = blocks - b0 < 16 ? blocks - b0 : 16;
    __m512 products[WT][XT];
    DS4_UNROLL
    for (int i = 0; i < WT; ++i) {
      const __m512 dw = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(First(n), w[i] + cols + 2 * b0));
      DS4_UNROLL
      for (int j = 0; j < XT; ++j) {
        products[i][j] = _mm512_mul_ps(dw, _mm512_maskz_loadu_ps(First(n), scale[j] + b0));
      }
    }
    __m512i index = first;
    int64_t b = 0;
    for (; b + 2 <= n; b += 2) {
      Q8Pair<WT, XT>(w, q, 32 * (b0 + b), true, index, products, acc);
      index = _mm512_add_epi32(index, _mm512_set1_epi32(2));
    }
    if (b < n) Q8Pair<WT, XT>(w, q, 32 * (b0 + b), false, index, products, acc);
  }
  DS4_UNROLL
  for (int j = 0; j < XT; ++j) {
    Vec column[WT];
    DS4_UNROLL
    for (int i = 0; i < WT; ++i) column[i] = {acc[i][j]};
    HSums<WT>(column, sums[j]);
  }
}

}  // namespace ds4::DS4_ISA_NAMESPACE
