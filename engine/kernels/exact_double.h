// Double-precision sine, cosine, logarithm and power from IEEE operations, for rotary angles: a
// libm may differ in the last bit between hosts, and then so would every rank's cosines.
#pragma once

namespace ds4 {

struct SinCos {
  double sin;
  double cos;
};

// For |x| up to 2^26, absolute error below 1e-14.
SinCos ExactSinCos(double x);
// Natural logarithm of a positive normal x; relative error below 1e-15 away from x = 1.
double ExactLog(double x);
// e^x for |x| <= 700; relative error below 1e-15.
double ExactExp(double x);

}  // namespace ds4
