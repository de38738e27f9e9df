// Exp, Log and their kin from IEEE operations, for one lane or a vector; see math.h for the
// promises.
#pragma once

#include "engine/kernels/scalar_ops.h"

namespace ds4::DS4_ISA_NAMESPACE {

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= 0.347: r exactly enough through ln 2 in two parts,
// e^r by its Taylor polynomial up to r^7 (truncation below 6e-9 relative). 2^n is applied as two
// factors, for n = 128 alone is no float.
template <class V>
inline V ExpOf(V x) {
  const V lowest = Set1<V>(-87.3f), highest = Set1<V>(88.7f);
  const V clamped = Min(Max(x, lowest), highest);  // NaN becomes `lowest`; put back at the end
  const V magic = Set1<V>(12582912.0f);            // 1.5 * 2^23: adding it rounds to an integer
  const V n = Sub(Fma(clamped, Set1<V>(1.44269504f), magic), magic);
  V r = Fma(n, Set1<V>(-0.693145751953125f), clamped);
  r = Fma(n, Set1<V>(-1.42860677e-6f), r);
  V p = Set1<V>(1.0f / 5040.0f);
  p = Fma(p, r, Set1<V>(1.0f / 720.0f));
  p = Fma(p, r, Set1<V>(1.0f / 120.0f));
  p = Fma(p, r, Set1<V>(1.0f / 24.0f));
  p = Fma(p, r, Set1<V>(1.0f / 6.0f));
  p = Fma(p, r, Set1<V>(0.5f));
  p = Fma(p, r, Set1<V>(1.0f));
  p = Fma(p, r, Set1<V>(1.0f));
  const V half = Sub(Fma(n, Set1<V>(0.5f), magic), magic);
  V y = Mul(Mul(p, Pow2(half)), Pow2(Sub(n, half)));
  y = SelectLess(x, lowest, Set1<V>(0.0f), y);
  y = SelectLess(highest, x, Set1<V>(__builtin_inff()), y);
  return SelectNan(x, x, y);
}

template <class V>
inline V SigmoidOf(V x) {
  const V one = Set1<V>(1.0f);
  return Div(one, Add(one, ExpOf(Sub(Set1<V>(0.0f), x))));
}

// ln x = k ln 2 + ln(1+f) with 1+f in [sqrt(1/2), sqrt 2); ln(1+f) = 2 atanh(s), s = f / (2+f),
// summed so that the leading f is added last and exactly (the arrangement of FreeBSD's logf).
inline float LogOf(float x) {
  if (x != x) return x;
  if (x < 0.0f) return __builtin_nanf("");
  if (x == 0.0f) return -__builtin_inff();
  if (x == __builtin_inff()) return x;
  float k = 0.0f;
  if (x < 0x1p-126f) {
    x = x * 0x1p23f;
    k = -23.0f;
  }
  // Bits above those of sqrt(1/2) count the powers of two.
  const int32_t shifted = static_cast<int32_t>(ToBits(x)) - 0x3f3504f3;
  const int32_t exponent = shifted >> 23;
  k = k + static_cast<float>(exponent);
  const float f = FromBits(ToBits(x) - (static_cast<uint32_t>(exponent) << 23)) - 1.0f;
  const float s = f / (2.0f + f);
  const float z = s * s;
  float r = Fma(z, 2.0f / 11.0f, 2.0f / 9.0f);
  r = Fma(r, z, 2.0f / 7.0f);
  r = Fma(r, z, 2.0f / 5.0f);
  r = Fma(r, z, 2.0f / 3.0f);
  r = r * z;
  const float half_square = 0.5f * f * f;
  const float low = Fma(k, 1.42860677e-6f, s * (half_square + r));
  return Fma(k, 0.693145751953125f, f - (half_square - low));
}

// ln(1 + y) keeps its relative precision for small y through the rounding error of 1 + y.
inline float SoftplusOf(float x) {
  if (x > 20.0f) return x;
  const float y = ExpOf(x);
  const float u = 1.0f + y;
  return LogOf(u) + (y - (u - 1.0f)) / u;
}

}  // namespace ds4::DS4_ISA_NAMESPACE
