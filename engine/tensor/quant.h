// Block formats: plain conversion between file bytes and float32 (spec 4.5). Not fast; kernels read
// their own layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/base/status.h"
#include "engine/tensor/dtype.h"

namespace ds4 {

float F16ToF32(uint16_t bits);
uint16_t F32ToF16(float value);  // nearest, ties to even
float BF16ToF32(uint16_t bits);
uint16_t F32ToBF16(float value);  // nearest, ties to even; NaN stays NaN

// out.size() values from src.size() bytes. kInvalidArgument: sizes do not fit; kUnimplemented: the
// type has no conversion here.
Status Dequantize(DType dtype, std::span<const std::byte> src, std::span<float> out);
// The reverse, for F32, F16, BF16 and Q8_0 (ggml's reference rounding: d = amax / 127 as f16).
Status Quantize(DType dtype, std::span<const float> src, std::span<std::byte> out);

}  // namespace ds4
