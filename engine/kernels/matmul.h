// y[t, r] = sum_k w[r, k] * x[t, k], for one row or thousands, always with the same additions.
//
// Order of additions (docs/adr/0004): the result for one (t, r) depends on w[r] and x[t] only,
// never on the number of rows, the threads or the instruction set.
//  F32/F16/BF16: 32 partial sums; partial p takes k = p, p+32, p+64, ... in rising order, each step
//    one fused multiply-add in float32; columns past the end, up to a multiple of 32, count as
//    zeros. Then a balanced tree: 16 = p + (p+16), 8, 4, 2, 1.
//  Q8_0: x is rounded to int8 blocks of 32 with a float32 scale (quantize.h). 16 partial sums;
//  block
//    b, group g (k = 32b+4g .. +3, g < 8) adds to partial p = 8*(b%2)+g:
//    acc[p] = Fma(dw * dx, float(exact int32 sum of 4 products), acc[p]), blocks in rising order.
//    Then the tree: 8 = p + (p+8), 4, 2, 1.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "engine/kernels/matrix.h"
#include "engine/kernels/thread_pool.h"

namespace ds4 {

// Input rows in both forms; `q`/`scale` may be null when no Q8_0 matrix reads them. Borrowed.
//   f32: [num_rows, cols], row stride f32_stride values; q: [num_rows, cols] int8 contiguous, never
//   -128 (QuantizeRows gives none);
//   scale: [num_rows, cols / 32] float32 contiguous.
struct ActivationView {
  int64_t num_rows = 0;
  int64_t cols = 0;
  const float* f32 = nullptr;
  int64_t f32_stride = 0;
  const int8_t* q = nullptr;
  const float* scale = nullptr;

  ActivationView Rows(int64_t begin, int64_t count) const {
    return {count,
            cols,
            f32 ? f32 + begin * f32_stride : nullptr,
            f32_stride,
            q ? q + begin * cols : nullptr,
            scale ? scale + begin * (cols / 32) : nullptr};
  }
};

// One product of a batch. y: [x.num_rows, w.rows], row stride y_stride values; `accumulate` adds to
// y (y = y + product, one rounding) instead of overwriting it.
struct MatMulJob {
  MatrixView w;
  ActivationView x;
  float* y = nullptr;
  int64_t y_stride = 0;
  bool accumulate = false;
};

// Runs the jobs in one parallel region. Jobs that share y run in list order and have equal w.rows.
// Shapes are checked with CHECK: x.cols == w.cols, quantised form present for Q8_0.
void MatMul(std::span<const MatMulJob> jobs, ThreadPool& pool);
void MatMul(const MatMulJob& job, ThreadPool& pool);

// The plain form of one job, for tests: same bits.
void MatMulReference(const MatMulJob& job);

// The kernels in use: "generic", "avx2" or "avx512vnni"; the best this CPU has, unless the
// environment variable DS4_ISA names a lesser one. All give the same bits.
std::string_view KernelIsa();

}  // namespace ds4
