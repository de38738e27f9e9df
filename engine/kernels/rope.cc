#include "engine/kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "engine/base/check.h"
#include "engine/kernels/exact_double.h"
#include "engine/kernels/row_grain.h"

namespace ds4 {
namespace {

constexpr double kPi = 3.14159265358979323846;

// The pair index at which a channel turns `rotations` times within the original context.
double CorrectionIndex(double rotations, double log_base, int64_t rope_dim, int64_t context) {
  return static_cast<double>(rope_dim) *
         ExactLog(static_cast<double>(context) / (2.0 * kPi * rotations)) / (2.0 * log_base);
}

// Elementary products with a rounding each, no fused ones: the same on every instruction set.
void RotatePairs(float* x, int64_t num_pairs, const float* cos, const float* sin, float sign) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1], c = cos[i], s = sign * sin[i];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

}  // namespace

std::vector<double> RopeFrequencies(double base, int64_t rope_dim) {
  CHECK(base > 0.0 && rope_dim >= 0 && rope_dim % 2 == 0)
      << "rope base " << base << ", " << rope_dim << " channels";
  const double log_base = ExactLog(base);
  std::vector<double> frequencies(static_cast<size_t>(rope_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] =
        ExactExp(-2.0 * static_cast<double>(i) / static_cast<double>(rope_dim) * log_base);
  }
  return frequencies;
}

std::vector<double> YarnFrequencies(double base, int64_t rope_dim, const YarnParams& yarn) {
  CHECK(base > 1.0 && yarn.factor > 0.0 && yarn.original_context > 0)
      << "YaRN with base " << base << ", factor " << yarn.factor << ", context "
      << yarn.original_context;
  const double log_base = ExactLog(base);
  const double fast = CorrectionIndex(yarn.beta_fast, log_base, rope_dim, yarn.original_context);
  const double slow = CorrectionIndex(yarn.beta_slow, log_base, rope_dim, yarn.original_context);
  const double low = std::max(std::floor(fast), 0.0);
  double high = std::min(std::ceil(slow), static_cast<double>(rope_dim - 1));
  if (low == high) high += 0.001;
  std::vector<double> frequencies = RopeFrequencies(base, rope_dim);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    const double f = frequencies[i];
    frequencies[i] = f / yarn.factor * ramp + f * (1.0 - ramp);
  }
  return frequencies;
}

void RopeAngles(std::span<const int64_t> positions, std::span<const double> frequencies, float* cos,
                float* sin) {
  for (const int64_t position : positions) {
    for (const double frequency : frequencies) {
      const SinCos angle = ExactSinCos(static_cast<double>(position) * frequency);
      *cos++ = static_cast<float>(angle.cos);
      *sin++ = static_cast<float>(angle.sin);
    }
  }
}

void ApplyRope(float* x, int64_t num_rows, int64_t vectors_per_row, int64_t dim, int64_t num_pairs,
               const float* cos, const float* sin, bool inverse, ThreadPool& pool) {
  CHECK(2 * num_pairs <= dim) << num_pairs << " pairs in " << dim << " channels";
  const float sign = inverse ? -1.0f : 1.0f;
  const int64_t values = vectors_per_row * num_pairs * 4;
  pool.ParallelFor(num_rows, MinParallelRows(values), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t v = 0; v < vectors_per_row; ++v) {
        float* tail = x + (t * vectors_per_row + v + 1) * dim - 2 * num_pairs;
        RotatePairs(tail, num_pairs, cos + t * num_pairs, sin + t * num_pairs, sign);
      }
    }
  });
}

}  // namespace ds4
