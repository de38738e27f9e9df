// The one rule that turns float32 activations into the forms of activation.h, for the end of every
// kernel that writes activations. Included by .cu files only.
#pragma once

#include "engine/cuda/activation.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

// A block whose largest magnitude is below this counts as zeros: 127 / amax must stay a float.
inline constexpr float kTinyAmax = 0x1p-100f;

// ActivationView::tiles, on the device.
__device__ __forceinline__ int TilesOf(const ActivationView& x) { return (x.rows + 7) / 8; }

struct Quantized32 {
  int q = 0;        // this lane's value, -127..127
  float scale = 0;  // of the block, in every lane
  int sum16 = 0;    // of the lane's half (lanes 0-15, 16-31)
};

// One block of 32 columns, lane i holds column i. All 32 lanes call it. A NaN or an infinity in the
// block makes the scale one, so that no product hides it.
__device__ __forceinline__ Quantized32 QuantizeBlock32(float value) {
  // Magnitudes order like their bits, and a NaN is above all of them.
  uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullMask, magnitude, lane);
    magnitude = magnitude > other ? magnitude : other;
  }
  const float amax = __uint_as_float(magnitude);
  Quantized32 block;
  if (!(amax < kTinyAmax)) {
    const float rounded = rintf(value * (127.0f / amax));
    block.q = static_cast<int>(fminf(fmaxf(rounded, -127.0f), 127.0f));
    block.scale = amax / 127.0f;
  }
  block.sum16 = block.q;
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) {
    block.sum16 += __shfl_xor_sync(kFullMask, block.sum16, lane);
  }
  return block;
}

// Writes columns 32 * block .. + 31 of row `row`, lane i's value being column i, in every form that
// `out` has. All 32 lanes call it.
__device__ __forceinline__ void StoreActivation32(const ActivationView& out, int row, int64_t block,
                                                  float value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t at = row * out.cols + 32 * block + lane;
  if (out.f32 != nullptr) out.f32[at] = value;
  if (out.bf16 != nullptr) out.bf16[at] = FloatToBf16(value);
  if (out.q == nullptr) return;
  const Quantized32 quantized = QuantizeBlock32(value);
  const int64_t tiles = TilesOf(out);
  const int64_t fragment = (block * tiles + row / 8) * 32 + 4 * (row % 8) + lane / 8;
  reinterpret_cast<int8_t*>(out.q)[8 * fragment + lane % 8] = static_cast<int8_t>(quantized.q);
  if (lane == 0) out.scale[block * tiles * 8 + row] = quantized.scale;
  if (out.sums != nullptr && lane % 16 == 0) {
    out.sums[(2 * block + lane / 16) * tiles * 8 + row] =
        quantized.scale * static_cast<float>(quantized.sum16);
  }
}

}  // namespace ds4::cuda
