#include "engine/kernels/hyper_connection.h"

#include <cmath>
#include <vector>

#include "engine/base/check.h"
#include "engine/kernels/isa.h"
#include "engine/kernels/math.h"
#include "engine/kernels/row_grain.h"

namespace ds4 {
namespace {

// fn times the normalised streams: the product of the plain streams, times 1 / rms of all their
// values. mixes: [num_rows, fn.rows].
void Mix(const float* streams, int64_t num_rows, const HyperConnectionParams& params,
         const MatrixView& fn, std::vector<float>& mixes, ThreadPool& pool) {
  const int64_t flat = params.num_streams * params.hidden_dim;
  CHECK(params.num_streams >= 1 && params.num_streams <= kMaxStreams)
      << params.num_streams << " streams, at most " << kMaxStreams;
  CHECK(fn.dtype != DType::kQ8_0) << "mixing weights must be F32, F16 or BF16";
  mixes.resize(static_cast<size_t>(num_rows * fn.rows));
  MatMul({.w = fn,
          .x = {.num_rows = num_rows, .cols = flat, .f32 = streams, .f32_stride = flat},
          .y = mixes.data(),
          .y_stride = fn.rows},
         pool);
  const KernelTable& kernels = ActiveKernels();
  pool.ParallelFor(num_rows, MinParallelRows(flat), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float mean =
          kernels.sum_of_squares(streams + t * flat, flat) / static_cast<float>(flat);
      const float inverse = 1.0f / std::sqrt(mean + params.norm_eps);
      float* row = mixes.data() + t * fn.rows;
      for (int64_t i = 0; i < fn.rows; ++i) row[i] *= inverse;
    }
  });
}

void DivideColumns(float* c, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += c[i * n + j];
    for (int64_t i = 0; i < n; ++i) c[i * n + j] /= sum + eps;
  }
}

void DivideRows(float* c, int64_t n, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += c[i * n + j];
    for (int64_t j = 0; j < n; ++j) c[i * n + j] /= sum + eps;
  }
}

void SoftmaxRows(float* c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float* row = c + i * n;
    float top = row[0];
    for (int64_t j = 1; j < n; ++j) top = row[j] > top ? row[j] : top;
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
      row[j] = Exp(row[j] - top);
      sum += row[j];
    }
    for (int64_t j = 0; j < n; ++j) row[j] /= sum;
  }
}

// Sinkhorn normalisation in exactly the order of spec 2.2, step 4; it ends with the columns.
void Sinkhorn(float* c, int64_t n, int iterations, float eps) {
  SoftmaxRows(c, n);
  for (int64_t i = 0; i < n * n; ++i) c[i] += eps;
  DivideColumns(c, n, eps);
  for (int i = 1; i < iterations; ++i) {
    DivideRows(c, n, eps);
    DivideColumns(c, n, eps);
  }
}

}  // namespace

void HyperConnectionPre(const float* streams, int64_t num_rows, const HyperConnectionParams& params,
                        const HyperConnectionWeights& weights, float* collapsed, float* post,
                        float* comb, ThreadPool& pool) {
  const int64_t h = params.num_streams, dim = params.hidden_dim;
  CHECK(weights.fn.rows == 2 * h + h * h)
      << weights.fn.rows << " mixing rows for " << h << " streams";
  thread_local std::vector<float> mixes;
  Mix(streams, num_rows, params, weights.fn, mixes, pool);
  const float* const all_mixes =
      mixes.data();  // the lambda runs on threads with mixes of their own
  const KernelTable& kernels = ActiveKernels();
  pool.ParallelFor(num_rows, MinParallelRows(h * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* m = all_mixes + t * weights.fn.rows;
      float pre[kMaxStreams];
      for (int64_t i = 0; i < h; ++i) {
        pre[i] = Sigmoid(m[i] * weights.scale[0] + weights.base[i]) + params.hc_eps;
        post[t * h + i] = 2.0f * Sigmoid(m[h + i] * weights.scale[1] + weights.base[h + i]);
      }
      float* c = comb + t * h * h;
      for (int64_t i = 0; i < h * h; ++i) {
        c[i] = m[2 * h + i] * weights.scale[2] + weights.base[2 * h + i];
      }
      Sinkhorn(c, h, params.sinkhorn_iterations, params.hc_eps);
      kernels.collapse(streams + t * h * dim, pre, h, dim, collapsed + t * dim);
    }
  });
}

void HyperConnectionPost(float* streams, const float* result, const float* post, const float* comb,
                         int64_t num_rows, const HyperConnectionParams& params, ThreadPool& pool) {
  const int64_t h = params.num_streams, dim = params.hidden_dim;
  CHECK(h >= 1 && h <= kMaxStreams) << h << " streams, at most " << kMaxStreams;
  const KernelTable& kernels = ActiveKernels();
  pool.ParallelFor(num_rows, MinParallelRows(2 * h * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels.expand(streams + t * h * dim, result + t * dim, post + t * h, comb + t * h * h, h,
                     dim);
    }
  });
}

void HyperConnectionHead(const float* streams, int64_t num_rows,
                         const HyperConnectionParams& params, const HyperConnectionWeights& weights,
                         float* out, ThreadPool& pool) {
  const int64_t h = params.num_streams, dim = params.hidden_dim;
  CHECK(weights.fn.rows == h) << weights.fn.rows << " mixing rows for " << h << " streams";
  thread_local std::vector<float> mixes;
  Mix(streams, num_rows, params, weights.fn, mixes, pool);
  const float* const all_mixes =
      mixes.data();  // the lambda runs on threads with mixes of their own
  const KernelTable& kernels = ActiveKernels();
  pool.ParallelFor(num_rows, MinParallelRows(h * dim), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float weight[kMaxStreams];
      for (int64_t i = 0; i < h; ++i) {
        weight[i] =
            Sigmoid(all_mixes[t * h + i] * weights.scale[0] + weights.base[i]) + params.hc_eps;
      }
      kernels.collapse(streams + t * h * dim, weight, h, dim, out + t * dim);
    }
  });
}

}  // namespace ds4
