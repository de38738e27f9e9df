#include "engine/kernels/swiglu.h"

#include "engine/kernels/isa.h"
#include "engine/kernels/row_grain.h"

namespace ds4 {

void SwiGlu(const float* gate, const float* up, const float* row_weight, int64_t num_rows,
            int64_t dim, float limit, float* out, ThreadPool& pool) {
  const KernelTable& kernels = ActiveKernels();
  // An exponential and a division cost about four passes over the values.
  pool.ParallelFor(num_rows, MinParallelRows(4 * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float weight = row_weight != nullptr ? row_weight[t] : 1.0f;
      kernels.swiglu_row(gate + t * dim, up + t * dim, weight, dim, limit, out + t * dim);
    }
  });
}

}  // namespace ds4
