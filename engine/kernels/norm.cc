#include "engine/kernels/norm.h"

#include <cmath>

#include "engine/kernels/isa.h"
#include "engine/kernels/row_grain.h"

namespace ds4 {

void RmsNorm(const float* x, const float* weight, int64_t num_rows, int64_t dim, float eps,
             float* y, ThreadPool& pool) {
  const KernelTable& kernels = ActiveKernels();
  pool.ParallelFor(num_rows, MinParallelRows(dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float mean = kernels.sum_of_squares(x + t * dim, dim) / static_cast<float>(dim);
      kernels.scale_row(x + t * dim, weight, 1.0f / std::sqrt(mean + eps), dim, y + t * dim);
    }
  });
}

}  // namespace ds4
