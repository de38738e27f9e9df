#include "engine/kernels/exact_double.h"

#include <bit>
#include <cmath>
#include <cstdint>

namespace ds4 {
namespace {

// pi/2 and ln 2 in a part with trailing zero bits, so that small multiples are exact, and the rest.
constexpr double kHalfPiHigh = 1.57079632673412561417;        // 33 bits
constexpr double kHalfPiMiddle = 6.07710050630396597660e-11;  // the next 33
constexpr double kHalfPiLow = 2.02226624879595063154e-21;
constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;

// Taylor series on [-pi/4, pi/4]: the first term left out is below 1e-17.
double SinSmall(double r) {
  const double z = r * r;
  double p = 0.0;
  for (int n = 19; n >= 3; n -= 2) p = std::fma(p, z, 1.0) * (-1.0 / (n * (n - 1)));
  return std::fma(r * z, p, r);
}
double CosSmall(double r) {
  const double z = r * r;
  double p = 0.0;
  for (int n = 20; n >= 2; n -= 2) p = std::fma(p, z, 1.0) * (-1.0 / (n * (n - 1)));
  return std::fma(z, p, 1.0);
}

}  // namespace

SinCos ExactSinCos(double x) {
  const double turns = std::nearbyint(x * 0.63661977236758134308);
  double r = std::fma(turns, -kHalfPiHigh, x);
  r = std::fma(turns, -kHalfPiMiddle, r);
  r = std::fma(turns, -kHalfPiLow, r);
  const double s = SinSmall(r), c = CosSmall(r);
  switch (static_cast<int64_t>(turns) & 3) {
    case 0:
      return {s, c};
    case 1:
      return {c, -s};
    case 2:
      return {-s, -c};
    default:
      return {-c, s};
  }
}

double ExactLog(double x) {
  // x = 2^k m with m in [sqrt(1/2), sqrt 2); ln m = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.172.
  const int64_t shifted = std::bit_cast<int64_t>(x) - 0x3fe6a09e667f3bcd;
  const int64_t k = shifted >> 52;
  const double m = std::bit_cast<double>(std::bit_cast<int64_t>(x) - (k << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double p = 0.0;
  for (int n = 23; n >= 3; n -= 2) p = std::fma(p, z, 1.0 / n);
  const double log_m = std::fma(2.0 * s * z, p, 2.0 * s);
  const double count = static_cast<double>(k);
  return std::fma(count, kLn2High, std::fma(count, kLn2Low, log_m));
}

double ExactExp(double x) {
  const double n = std::nearbyint(x * 1.44269504088896340736);
  double r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  double p = 1.0;
  for (int i = 14; i >= 1; --i) p = std::fma(p, r / i, 1.0);
  return p * std::bit_cast<double>((static_cast<int64_t>(n) + 1023) << 52);
}

}  // namespace ds4
