// Sixteen floats as two AVX registers.
#pragma once

#include <immintrin.h>

#include "engine/kernels/scalar_ops.h"

namespace ds4::DS4_ISA_NAMESPACE {

constexpr int kLanes = 16;

struct Vec {
  __m256 lo, hi;
};

// Tile sizes (weight rows x input rows) that keep partial sums in registers: 16 registers here.
constexpr int kDotW = 4, kDotX = 3;
constexpr int kQ8W = 2, kQ8X = 2;
constexpr int kSumHeads = 2, kSumVecs = 2;

template <>
inline Vec Set1<Vec>(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline Vec Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec Add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec Sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec Mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec Div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec Fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec Max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec Min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec Abs(Vec a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline Vec SelectNan(Vec a, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}
inline __m256 Pow2Half(__m256 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Vec Pow2(Vec n) { return {Pow2Half(n.lo), Pow2Half(n.hi)}; }

inline Vec Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m128i LoadInts(const uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline Vec LoadF16(const uint16_t* p) {
  return {_mm256_cvtph_ps(LoadInts(p)), _mm256_cvtph_ps(LoadInts(p + 8))};
}
inline __m256 WidenBF16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vec LoadBF16(const uint16_t* p) {
  return {WidenBF16(LoadInts(p)), WidenBF16(LoadInts(p + 8))};
}
// The first n < 16 values, then zeros; reads no further.
inline Vec LoadPart(const float* p, int64_t n) {
  float values[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) values[i] = p[i];
  return Load(values);
}
inline Vec LoadPartF16(const uint16_t* p, int64_t n) {
  uint16_t values[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) values[i] = p[i];
  return LoadF16(values);
}
inline Vec LoadPartBF16(const uint16_t* p, int64_t n) {
  uint16_t values[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) values[i] = p[i];
  return LoadBF16(values);
}
// One register holds 8 of a pair's 32 partial sums; 12 of the 16 registers are for sums. See
// matmul_impl.h.
using Reg = __m256;
constexpr int kRegLanes = 8;
constexpr int RegsAtOnce(int pairs) { return pairs <= 3 ? 4 : pairs <= 6 ? 2 : 1; }
inline Reg ZeroReg() { return _mm256_setzero_ps(); }
inline Reg FmaReg(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
inline Reg LoadReg(const float* p) { return _mm256_loadu_ps(p); }
inline Reg LoadRegF16(const uint16_t* p) { return _mm256_cvtph_ps(LoadInts(p)); }
inline Reg LoadRegBF16(const uint16_t* p) { return WidenBF16(LoadInts(p)); }
// Partial p plus partial p + 16.
inline Vec AddHalves(const Reg (&regs)[4]) {
  return {_mm256_add_ps(regs[0], regs[2]), _mm256_add_ps(regs[1], regs[3])};
}

inline void Store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline void StorePart(float* p, Vec v, int64_t n) {
  float values[kLanes];
  Store(values, v);
  for (int64_t i = 0; i < n; ++i) p[i] = values[i];
}

// Balanced trees: p + (p+8), then 4, 2, 1.
inline float HSum(Vec v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// The sums of N vectors, each with the additions of HSum.
template <int N>
inline void HSums(const Vec (&v)[N], float (&sums)[N]) {
  for (int i = 0; i < N; ++i) sums[i] = HSum(v[i]);
}
inline float HMax(Vec v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Nearest integer, halves away from zero; |v| <= 127.
inline __m256i RoundHalf(__m256 v) {
  const __m256i whole = _mm256_cvttps_epi32(v);
  const __m256 rest = _mm256_sub_ps(v, _mm256_cvtepi32_ps(whole));
  const __m256 up = _mm256_cmp_ps(rest, _mm256_set1_ps(0.5f), _CMP_GE_OQ);
  const __m256 down = _mm256_cmp_ps(rest, _mm256_set1_ps(-0.5f), _CMP_LE_OQ);
  return _mm256_add_epi32(_mm256_sub_epi32(whole, _mm256_castps_si256(up)),
                          _mm256_castps_si256(down));
}
inline void StoreRounded(int8_t* p, Vec v) {
  const __m256i a = RoundHalf(v.lo), b = RoundHalf(v.hi);
  const __m128i a16 = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i b16 = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(a16, b16));
}

// Eight exact sums of four products. |w| is unsigned up to 128 and the input's size at most 127, so
// a pair's sum stays below 2^15.
inline __m256i DotGroups(__m256i abs_w, __m256i w, const int8_t* q) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  const __m256i pairs = _mm256_maddubs_epi16(abs_w, _mm256_sign_epi8(x, w));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// One block of 32 for all pairs; even blocks add to partials 0..7, odd ones to 8..15.
template <int WT, int XT>
inline void Q8Block(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT],
                    const float* const (&scale)[XT], int64_t cols, int64_t b,
                    __m256 (&acc)[WT][XT]) {
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    const __m256i wv = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w[i] + 32 * b));
    const __m256i abs_w = _mm256_abs_epi8(wv);
    uint16_t bits;
    __builtin_memcpy(&bits, w[i] + cols + 2 * b, 2);
    const float dw = _cvtsh_ss(bits);
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) {
      const __m256 sums = _mm256_cvtepi32_ps(DotGroups(abs_w, wv, q[j] + 32 * b));
      acc[i][j] = _mm256_fmadd_ps(_mm256_set1_ps(dw * scale[j][b]), sums, acc[i][j]);
    }
  }
}

// See simd_generic.h.
template <int WT, int XT>
inline void Q8Tile(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT],
                   const float* const (&scale)[XT], int64_t cols, float (&sums)[XT][WT]) {
  __m256 even[WT][XT], odd[WT][XT];
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) even[i][j] = odd[i][j] = _mm256_setzero_ps();
  }
  const int64_t blocks = cols / 32;
  int64_t b = 0;
  for (; b + 2 <= blocks; b += 2) {
    Q8Block<WT, XT>(w, q, scale, cols, b, even);
    Q8Block<WT, XT>(w, q, scale, cols, b + 1, odd);
  }
  if (b < blocks) Q8Block<WT, XT>(w, q, scale, cols, b, even);
  DS4_UNROLL
  for (int i = 0; i < WT; ++i) {
    DS4_UNROLL
    for (int j = 0; j < XT; ++j) sums[j][i] = HSum({even[i][j], odd[i][j]});
  }
}

}  // namespace ds4::DS4_ISA_NAMESPACE
