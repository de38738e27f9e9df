// Sixteen floats as a plain array: what the vector operations mean, for any CPU.
#pragma once

#include "engine/kernels/scalar_ops.h"

namespace ds4::DS4_ISA_NAMESPACE {

constexpr int kLanes = 16;

struct Vec {
  float lanes[kLanes];
};

// Tile sizes (weight rows x input rows) that keep partial sums in registers.
constexpr int kDotW = 1, kDotX = 1;
constexpr int kQ8W = 1, kQ8X = 1;
constexpr int kSumHeads = 1, kSumVecs = 1;

template <class F>
inline Vec Map(F f) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.lanes[i] = f(i);
  return r;
}

template <>
inline Vec Set1<Vec>(float x) {
  return Map([&](int) { return x; });
}
inline Vec Zero() { return Set1<Vec>(0.0f); }
inline Vec Add(Vec a, Vec b) {
  return Map([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
inline Vec Sub(Vec a, Vec b) {
  return Map([&](int i) { return a.lanes[i] - b.lanes[i]; });
}
inline Vec Mul(Vec a, Vec b) {
  return Map([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
inline Vec Div(Vec a, Vec b) {
  return Map([&](int i) { return a.lanes[i] / b.lanes[i]; });
}
inline Vec Fma(Vec a, Vec b, Vec c) {
  return Map([&](int i) { return Fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
}
inline Vec Max(Vec a, Vec b) {
  return Map([&](int i) { return Max(a.lanes[i], b.lanes[i]); });
}
inline Vec Min(Vec a, Vec b) {
  return Map([&](int i) { return Min(a.lanes[i], b.lanes[i]); });
}
inline Vec Abs(Vec a) {
  return Map([&](int i) { return FromBits(ToBits(a.lanes[i]) & 0x7fffffffu); });
}
inline Vec SelectLess(Vec a, Vec b, Vec yes, Vec no) {
  return Map([&](int i) { return SelectLess(a.lanes[i], b.lanes[i], yes.lanes[i], no.lanes[i]); });
}
inline Vec SelectNan(Vec a, Vec yes, Vec no) {
  return Map([&](int i) { return SelectNan(a.lanes[i], yes.lanes[i], no.lanes[i]); });
}
inline Vec Pow2(Vec n) {
  return Map([&](int i) { return Pow2(n.lanes[i]); });
}

inline Vec Load(const float* p) {
  return Map([&](int i) { return p[i]; });
}
inline Vec LoadF16(const uint16_t* p) {
  return Map([&](int i) { return F16Value(p[i]); });
}
inline Vec LoadBF16(const uint16_t* p) {
  return Map([&](int i) { return BF16Value(p[i]); });
}
// The first n < 16 values, then zeros; reads no further.
inline Vec LoadPart(const float* p, int64_t n) {
  return Map([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline Vec LoadPartF16(const uint16_t* p, int64_t n) {
  return Map([&](int i) { return i < n ? F16Value(p[i]) : 0.0f; });
}
inline Vec LoadPartBF16(const uint16_t* p, int64_t n) {
  return Map([&](int i) { return i < n ? BF16Value(p[i]) : 0.0f; });
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

inline void Store(float* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = v.lanes[i];
}
inline void StorePart(float* p, Vec v, int64_t n) {
  for (int i = 0; i < n; ++i) p[i] = v.lanes[i];
}

// The sixteen values as a balanced tree: p + (p+8), then 4, 2, 1.
inline float HSum(Vec v) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v.lanes[i] = v.lanes[i] + v.lanes[i + half];
  }
  return v.lanes[0];
}
// The sums of N vectors, each with the additions of HSum.
template <int N>
inline void HSums(const Vec (&v)[N], float (&sums)[N]) {
  for (int i = 0; i < N; ++i) sums[i] = HSum(v[i]);
}
inline float HMax(Vec v) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v.lanes[i] = Max(v.lanes[i], v.lanes[i + half]);
  }
  return v.lanes[0];
}
// Rounds to the nearest integer, halves away from zero, for |v| <= 127; then stores as int8.
inline void StoreRounded(int8_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) {
    const int32_t whole = static_cast<int32_t>(v.lanes[i]);
    const float rest = v.lanes[i] - static_cast<float>(whole);
    p[i] = static_cast<int8_t>(whole + (rest >= 0.5f ? 1 : 0) - (rest <= -0.5f ? 1 : 0));
  }
}

// Products of WT weight rows (int8 values, then f16 block scales) with XT quantised rows; the order
// of additions is that of matmul.h.
template <int WT, int XT>
inline void Q8Tile(const uint8_t* const (&w)[WT], const int8_t* const (&q)[XT],
                   const float* const (&scale)[XT], int64_t cols, float (&sums)[XT][WT]) {
  for (int i = 0; i < WT; ++i) {
    const auto* values = reinterpret_cast<const int8_t*>(w[i]);
    const auto* scales = reinterpret_cast<const uint16_t*>(w[i] + cols);
    for (int j = 0; j < XT; ++j) {
      Vec acc = Zero();
      for (int64_t b = 0; b < cols / 32; ++b) {
        const float d = F16Value(scales[b]) * scale[j][b];
        for (int g = 0; g < 8; ++g) {
          const int8_t* a = values + 32 * b + 4 * g;
          const int8_t* x = q[j] + 32 * b + 4 * g;
          const int32_t sum = a[0] * x[0] + a[1] * x[1] + a[2] * x[2] + a[3] * x[3];
          float& partial = acc.lanes[8 * (b % 2) + g];
          partial = Fma(d, static_cast<float>(sum), partial);
        }
      }
      sums[j][i] = HSum(acc);
    }
  }
}

}  // namespace ds4::DS4_ISA_NAMESPACE
