// Elementary functions built from IEEE operations only, so that every host computes the same bits
// (a libm differs between systems and would let ranks drift apart).
#pragma once

namespace ds4 {

// Relative error under 2e-7 (float32); Exp(x) is 0 below -87.3 and +inf above 88.7; NaN stays NaN.
float Exp(float x);
// Natural logarithm of x > 0; -inf for 0; NaN below.
float Log(float x);
// 1 / (1 + e^-x)
float Sigmoid(float x);
// ln(1 + e^x); x itself above 20.
float Softplus(float x);

}  // namespace ds4
