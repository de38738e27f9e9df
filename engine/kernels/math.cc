#include "engine/kernels/math.h"

#include "engine/kernels/isa.h"

namespace ds4 {

float Exp(float x) { return ActiveKernels().exp(x); }
float Log(float x) { return ActiveKernels().log(x); }
float Sigmoid(float x) { return ActiveKernels().sigmoid(x); }
float Softplus(float x) { return ActiveKernels().softplus(x); }

}  // namespace ds4
