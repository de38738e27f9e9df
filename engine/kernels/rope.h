// Rotary position embedding on interleaved pairs of the trailing channels (spec 2.4).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/kernels/thread_pool.h"

namespace ds4 {

struct YarnParams {
  double factor = 1.0;
  int64_t original_context = 0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
};

// Angular frequency of each pair, [rope_dim / 2], plain: base^(-2i / rope_dim).
std::vector<double> RopeFrequencies(double base, int64_t rope_dim);
// The same with YaRN (Peng et al. 2023) as V4 applies it: at every length, no magnitude factor.
std::vector<double> YarnFrequencies(double base, int64_t rope_dim, const YarnParams& yarn);

// cos and sin of position * frequency for each position: out [positions, pairs] each. Angles are
// reduced in double: a float32 product is off by 0.03 rad near position 1e6.
void RopeAngles(std::span<const int64_t> positions, std::span<const double> frequencies, float* cos,
                float* sin);

// Rotates the last 2 * num_pairs channels of each vector in place; `inverse` turns back.
//   x: [num_rows, vectors_per_row, dim] contiguous; cos, sin: [num_rows, num_pairs].
void ApplyRope(float* x, int64_t num_rows, int64_t vectors_per_row, int64_t dim, int64_t num_pairs,
               const float* cos, const float* sin, bool inverse, ThreadPool& pool);

}  // namespace ds4
