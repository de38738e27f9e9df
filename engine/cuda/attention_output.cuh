// From summed values of one head to the forms of an activation row: the end of every attention
// kernel.
#pragma once

#include "engine/cuda/attention.cuh"
#include "engine/cuda/layout.h"
#include "engine/cuda/quantize.cuh"

namespace ds4::cuda {

// Where a head's columns stand in the output row.
struct HeadPlace {
  int first_col = 0;    // of the head
  int padding_end = 0;  // the head also zeroes [first_col + head_dim, padding_end)
};
__device__ __forceinline__ HeadPlace PlaceOfHead(int head, int num_heads, int heads_per_group,
                                                 int head_dim) {
  const int group_cols =
      (heads_per_group * head_dim + kColumnGrain - 1) / kColumnGrain * kColumnGrain;
  const int group = head / heads_per_group, in_group = head - group * heads_per_group;
  const int group_first = group * group_cols, first = group_first + in_group * head_dim;
  const bool last = in_group == heads_per_group - 1 || head == num_heads - 1;
  return {first, last ? group_first + group_cols : first + head_dim};
}

// Angles of the kPairs pairs among the lane's channels, which start at channel `channel` of the
// head (a multiple of their number); not turned where there are none. cos, sin: the row's,
// [rope_dim / 2].
template <int kPairs>
struct ChannelAngles {
  float cos[kPairs];
  float sin[kPairs];
};
template <int kPairs>
__device__ __forceinline__ ChannelAngles<kPairs> LoadAngles(int channel, int head_dim, int rope_dim,
                                                            const float* cos, const float* sin) {
  ChannelAngles<kPairs> angles;
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int from = channel + 2 * k - (head_dim - rope_dim);
    const bool turned = from >= 0 && from < rope_dim;
    angles.cos[k] = turned ? cos[from / 2] : 1.0f;
    angles.sin[k] = turned ? sin[from / 2] : 0.0f;
  }
  return angles;
}

// Turns the lane's channels back.
template <int kPairs>
__device__ __forceinline__ void TurnBack(float (&v)[2 * kPairs], int channel, int head_dim,
                                         int rope_dim, const ChannelAngles<kPairs>& angles) {
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int from = channel + 2 * k - (head_dim - rope_dim);
    if (from < 0 || from >= rope_dim) continue;
    const float2 x = RotatePair(make_float2(v[2 * k], v[2 * k + 1]), angles.cos[k], -angles.sin[k]);
    v[2 * k] = x.x;
    v[2 * k + 1] = x.y;
  }
}

// StoreActivation32's rule for kCols (4 or 8) columns in a lane: neighbouring lanes hold a block of
// 32. The whole warp calls it; lanes with `active` false write nothing.
template <int kCols>
__device__ __forceinline__ void StoreQuantized(const ActivationView& out, int row, int col,
                                               const float (&v)[kCols], bool active) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int k = 0; k < kCols; ++k) magnitude = max(magnitude, __float_as_uint(v[k]) & 0x7fffffffu);
#pragma unroll
  for (int lane = 1; lane < 32 / kCols; lane *= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(kFullMask, magnitude, lane));
  }
  const float amax = __uint_as_float(magnitude);
  const bool zeros = amax < kTinyAmax;
  const float inverse = 127.0f / amax;
  int sum = 0;
  uint32_t words[kCols / 4] = {};
#pragma unroll
  for (int k = 0; k < kCols; ++k) {
    const float rounded = fminf(fmaxf(rintf(v[k] * inverse), -127.0f), 127.0f);
    const int value = zeros ? 0 : static_cast<int>(rounded);
    sum += value;
    words[k / 4] |= static_cast<uint32_t>(value & 0xff) << (k % 4 * 8);
  }
#pragma unroll
  for (int lane = 1; lane < 16 / kCols; lane *= 2) {
    sum += __shfl_xor_sync(kFullMask, sum, lane);
  }
  if (!active) return;
  const float scale = zeros ? 0.0f : amax / 127.0f;
  const int64_t tiles = TilesOf(out);
  const int64_t block = col / 32;
  const int in_block = col % 32;
  uint32_t* to = reinterpret_cast<uint32_t*>(out.q + (block * tiles + row / 8) * 32 + row % 8 * 4 +
                                             in_block / 8) +
                 in_block / 4 % 2;
#pragma unroll
  for (int k = 0; k < kCols / 4; ++k) to[k] = words[k];
  if (in_block == 0) out.scale[block * tiles * 8 + row] = scale;
  if (out.sums != nullptr && in_block % 16 == 0) {
    out.sums[static_cast<int64_t>(col / 16) * tiles * 8 + row] = scale * static_cast<float>(sum);
  }
}

// kCols (4 or 8) neighbouring columns of one row in a lane, in every form of `out`. The whole warp
// calls it.
template <int kCols>
__device__ __forceinline__ void StoreColumns(const ActivationView& out, int row, int col,
                                             const float (&v)[kCols], bool active) {
#pragma unroll
  for (int k = 0; k < kCols; k += 4) {
    const int64_t at = row * out.cols + col + k;
    if (active && out.f32 != nullptr) {
      *reinterpret_cast<float4*>(out.f32 + at) = make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
    }
    if (active && out.bf16 != nullptr) {
      *reinterpret_cast<uint2*>(out.bf16 + at) =
          make_uint2(FloatsToBf162(v[k], v[k + 1]), FloatsToBf162(v[k + 2], v[k + 3]));
    }
  }
  if (out.q != nullptr) StoreQuantized(out, row, col, v, active);
}

// Zeroes the group's padding behind its last head. The whole warp calls it with its own share:
// lanes `lane`, `lane + lanes`, ... of kCols columns each.
template <int kCols>
__device__ __forceinline__ void StorePadding(const ActivationView& out, int row, int begin, int end,
                                             int lane, int lanes) {
  const float zeros[kCols] = {};
  // Rounded up to whole warps, for the quantised form is written by warps.
#pragma unroll 1
  for (int first = begin; first < end; first += kCols * lanes) {
    const int col = first + kCols * lane;
    StoreColumns(out, row, col, zeros, col < end);
  }
}

}  // namespace ds4::cuda
