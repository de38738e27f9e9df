// y = w x for few rows: decode, verification, small batches. Every weight byte is read once for up
// to 64 rows of x (Q8_0, F16, BF16, F32), or 32 (other types).
//
// The additions for one (x row, w row) are the same whatever else runs beside them, for any number
// of rows: columns in slices of 512 (kSliceCols; the last may be shorter); inside a slice, steps of
// 32 columns (quantised types: one exact int32 sum a step or sub-block, then one float32
// fused multiply-add each) in rising order; slices added in rising order.
#pragma once

#include <span>

#include "engine/cuda/activation.h"
#include "engine/cuda/layout.h"

namespace ds4::cuda {

inline constexpr int kSliceCols = 512;
inline constexpr int kMaxProductJobs = 16;

// One product of a launch. Reads x columns [x_col, x_col + w.padded_cols()) (x_col: a multiple of
// 256). Writes y[t * y_stride + r] for t < x.rows, r < w.rows when y is not null, and the forms
// that `out` has, at columns out_col + r (out_col: a multiple of 32; w.rows a multiple of 32 when
// quantised forms are asked for).
struct ProductJob {
  PackedMatrix w;
  ActivationView x;
  int64_t x_col = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  ActivationView out;
  int64_t out_col = 0;
};

// All jobs in one launch (at most kMaxProductJobs; any mix of types; the same x.rows in all).
void LaunchProducts(const LaunchContext& launch, std::span<const ProductJob> jobs);

// One product cut into lanes: w holds w.count lane matrices [rows, lane_cols]; lane l reads x
// columns [l * PaddedCols(lane_cols), ...). Lane sums (slices of a lane added as above) are added
// to the roots of the aligned subtrees of lanes [lane_begin, lane_begin + w.count) in the order of
// engine/comm/lane_tree.h. roots: [SubtreesOf(...)][x.rows][w.rows].
void LaunchLaneProduct(const LaunchContext& launch, const PackedMatrix& w, const ActivationView& x,
                       int lane_begin, float* roots);

// Same results, one thread a value, straight from the packed layout: for tests.
void LaunchProductPlain(const LaunchContext& launch, const ProductJob& job);

}  // namespace ds4::cuda
