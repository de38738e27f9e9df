// Products of many rows (prefill) on tensor cores: bf16 activations, weights turned from their
// packed form to bf16 in registers, float32 sums. Faster than product.h from about 64 rows on,
// other bits. F32 weights are refused (use product.h).
#pragma once

#include <span>

#include "engine/cuda/activation.h"
#include "engine/cuda/experts.h"
#include "engine/cuda/layout.h"

namespace ds4::cuda {

// y[t][r] for all jobs, sixteen in a launch. As ProductJob, but x.bf16 is read; y (float32) and/or
// out.bf16 are written. accumulate: y += instead of y = (then without out).
struct GemmJob {
  PackedMatrix w;
  ActivationView x;
  int64_t x_col = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  ActivationView out;
  int64_t out_col = 0;
  bool accumulate = false;
};
void LaunchGemm(const LaunchContext& launch, std::span<const GemmJob> jobs);

// out[t][d] = sum over lanes of w.At(l) x[t][lane l's columns] (one long sum): lane products of
// prefill when lanes need not be kept apart. roots: [1][x.rows][w.rows].
void LaunchLaneGemm(const LaunchContext& launch, const PackedMatrix& w, const ActivationView& x,
                    float* out, bool accumulate);

// Grouped products over routed pairs; routing as LaunchRoute gave it (pairs sorted by expert,
// expert_first). Same meaning as ExpertsUp / ExpertsDown; hidden in bf16. The shared expert runs in
// the same launch; gate and up have one type. Padding columns of hidden rows get zeros.
void LaunchExpertsUpGemm(const LaunchContext& launch, const ExpertsUp& job, const Routing& routing,
                         int used);
// pair_out: scratch [rows * used][D] float32. out[t][d] += sum over k by rising expert id of pair
// outputs (the shared expert's part is a LaunchLaneGemm before).
void LaunchExpertsDownGemm(const LaunchContext& launch, const ExpertsDown& job,
                           const Routing& routing, int used, int rows, float* pair_out, float* out);

}  // namespace ds4::cuda
