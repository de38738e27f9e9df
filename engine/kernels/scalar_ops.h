// One-lane forms of the vector operations in simd_*.h, with the same results bit for bit. The
// generic vector is sixteen of them; scalar code in the per-instruction-set files calls them
// directly.
//
// Every file that includes this defines DS4_ISA_NAMESPACE first. All code of one instruction set
// stays in its own namespace: an inline function shared between files built with different flags
// would be kept once by the linker, perhaps in a form this CPU cannot run.
#pragma once

#include <cstdint>

#ifndef DS4_ISA_NAMESPACE
#error "define DS4_ISA_NAMESPACE before this include"
#endif

#if defined(__clang__)
#define DS4_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DS4_UNROLL _Pragma("GCC unroll 16")
#endif

// For functions whose arrays must end up in the caller's registers.
#define DS4_INLINE inline __attribute__((always_inline))

namespace ds4::DS4_ISA_NAMESPACE {

inline float Add(float a, float b) { return a + b; }
inline float Sub(float a, float b) { return a - b; }
inline float Mul(float a, float b) { return a * b; }
inline float Div(float a, float b) { return a / b; }
inline float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// The second operand when either is NaN, as x86 has it.
inline float Max(float a, float b) { return a > b ? a : b; }
inline float Min(float a, float b) { return a < b ? a : b; }
// a < b ? yes : no; NaN compares false.
inline float SelectLess(float a, float b, float yes, float no) { return a < b ? yes : no; }
inline float SelectNan(float a, float yes, float no) { return a != a ? yes : no; }

inline float FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t ToBits(float x) { return __builtin_bit_cast(uint32_t, x); }

// 2^n for an integral n in [-126, 127].
inline float Pow2(float n) {
  return FromBits(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

inline float BF16Value(uint16_t bits) { return FromBits(static_cast<uint32_t>(bits) << 16); }

// IEEE half to float; a NaN comes out quiet, as the hardware conversion has it.
inline float F16Value(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 31;
  const uint32_t mantissa = bits & 1023;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
    return FromBits(ToBits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  }
  if (exponent == 31) {
    return FromBits(sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
  }
  return FromBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Brings a line into the L2 cache; any address will do. Tiles of several weight rows ask for the
// next tile while they work on theirs: so many streams side by side are too many for the CPU to
// foresee. Always inlined: g++ 12 takes a function that only prefetches for one without effect and
// drops calls.
DS4_INLINE void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// V(x) with every lane x, for V = float or Vec.
template <class V>
V Set1(float x);
template <>
inline float Set1<float>(float x) {
  return x;
}

}  // namespace ds4::DS4_ISA_NAMESPACE
