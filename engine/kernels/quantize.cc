#include "engine/kernels/quantize.h"

#include "engine/base/check.h"
#include "engine/kernels/isa.h"
#include "engine/kernels/row_grain.h"

namespace ds4 {

void QuantizeRows(const float* x, int64_t num_rows, int64_t cols, int64_t x_stride, int8_t* q,
                  float* scale, ThreadPool& pool) {
  CHECK(cols % 32 == 0) << cols << " columns are no whole blocks of 32";
  const KernelTable& kernels = ActiveKernels();
  pool.ParallelFor(num_rows, MinParallelRows(cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels.quantize_row(x + t * x_stride, cols, q + t * cols, scale + t * (cols / 32));
    }
  });
}

}  // namespace ds4
