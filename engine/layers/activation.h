// Rows as matmul reads them: float32, and int8 blocks when a Q8_0 matrix needs them.
#pragma once

#include <cstdint>

#include "engine/kernels/matmul.h"
#include "engine/kernels/quantize.h"
#include "engine/layers/rank_context.h"

namespace ds4 {

// Owns the quantised form of one set of rows; reused from step to step.
class Activation {
 public:
  // View of x: [num_rows, cols], row stride `stride`. `quantized` asks for the int8 form too.
  ActivationView Make(const float* x, int64_t num_rows, int64_t cols, int64_t stride,
                      bool quantized, ThreadPool& pool) {
    ActivationView view{num_rows, cols, x, stride, nullptr, nullptr};
    if (quantized) {
      int8_t* q = q_.Get(num_rows * cols);
      float* scale = scale_.Get(num_rows * cols / 32);
      QuantizeRows(x, num_rows, cols, stride, q, scale, pool);
      view.q = q;
      view.scale = scale;
    }
    return view;
  }

 private:
  Scratch<int8_t> q_;
  Scratch<float> scale_;
};

inline bool NeedsQuantized(const Matrix& matrix) { return matrix.dtype() == DType::kQ8_0; }

}  // namespace ds4
