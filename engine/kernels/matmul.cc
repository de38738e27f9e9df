#include "engine/kernels/matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/base/check.h"
#include "engine/kernels/isa.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

// Below this much work, in bytes of weights times input rows, waking the other threads costs more
// than they save: 2 us on one core, where an empty region costs 0.2 us while the workers spin and
// 20 us once they sleep. The rule "below 512 rows the caller does it alone" was tried and
// lost: 12 jobs of 64 rows by 256 columns take 11.2 us alone and 6.4 us on two threads.
constexpr int64_t kMinParallelBytes = 64 << 10;

void CheckJob(const MatMulJob& job) {
  CHECK(IsMatrixType(job.w.dtype)) << "no kernels for " << Info(job.w.dtype).name;
  CHECK(job.x.cols == job.w.cols) << "input has " << job.x.cols << " columns, weights "
                                  << job.w.cols;
  if (job.x.num_rows == 0 || job.w.rows == 0) return;
  CHECK(job.y != nullptr && (job.x.num_rows == 1 || job.y_stride >= job.w.rows))
      << "output stride " << job.y_stride << " for " << job.w.rows << " rows";
  if (job.w.dtype == DType::kQ8_0) {
    CHECK(job.x.q != nullptr && job.x.scale != nullptr) << "Q8_0 weights need quantised input";
    CHECK(job.w.cols % 32 == 0) << job.w.cols << " columns are no whole blocks";
  } else {
    CHECK(job.x.f32 != nullptr) << "float weights need float input";
  }
}

MatMulTask TaskFor(const MatMulJob& job, int64_t row_begin, int64_t row_end) {
  return {.dtype = job.w.dtype,
          .w = job.w.data,
          .w_stride = job.w.row_stride,
          .row_begin = row_begin,
          .row_end = row_end,
          .cols = job.w.cols,
          .num_x = job.x.num_rows,
          .x = job.x.f32,
          .x_stride = job.x.f32_stride,
          .q = job.x.q,
          .q_scale = job.x.scale,
          .y = job.y,
          .y_stride = job.y_stride,
          .accumulate = job.accumulate};
}

// A single input row that starts within a cache line makes every load of it straddle two: F16
// weights then stream at 20 instead of 26 GB/s. So it is copied to a boundary first, once per
// thread and job.
constexpr size_t kLine = 64;
constexpr int64_t kMinRowsToAlign = 64;  // weight rows from which the copy costs next to nothing

const void* Aligned(const void* data, int64_t bytes) {
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % kLine == 0) return data;
  thread_local std::vector<std::byte> memory;  // keeps its size from call to call
  const size_t size = static_cast<size_t>(bytes);
  if (memory.size() < size + kLine) memory.resize(size + kLine);
  std::byte* start = memory.data() + kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine;
  std::memcpy(start, data, size);
  return start;
}

void AlignInput(MatMulTask& task) {
  if (task.num_x != 1 || task.row_end - task.row_begin < kMinRowsToAlign) return;
  if (task.dtype == DType::kQ8_0) {
    task.q = static_cast<const int8_t*>(Aligned(task.q, task.cols));
  } else {
    task.x = static_cast<const float*>(Aligned(task.x, task.cols * 4));
  }
}

int64_t Work(std::span<const MatMulJob> jobs) {
  int64_t bytes = 0;
  for (const MatMulJob& job : jobs) bytes += job.w.rows * job.w.row_stride * job.x.num_rows;
  return bytes;
}

// The order of additions as matmul.h states it, with nothing clever.
float DotReference(const MatrixView& w, int64_t r, const float* x) {
  constexpr int kPartials = 32;
  float partial[kPartials] = {};
  const int64_t padded = (w.cols + kPartials - 1) / kPartials * kPartials;
  for (int64_t k = 0; k < padded; ++k) {
    float weight = 0.0f;  // past the last column both factors are zero
    if (k < w.cols && w.dtype == DType::kF32) {
      std::memcpy(&weight, w.row(r) + 4 * k, sizeof weight);
    } else if (k < w.cols) {
      uint16_t bits;
      std::memcpy(&bits, w.row(r) + 2 * k, sizeof bits);
      weight = w.dtype == DType::kF16 ? F16ToF32(bits) : BF16ToF32(bits);
    }
    float& sum = partial[k % kPartials];
    sum = std::fma(weight, k < w.cols ? x[k] : 0.0f, sum);
  }
  for (int half = kPartials / 2; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) partial[p] += partial[p + half];
  }
  return partial[0];
}

float DotReferenceQ8(const MatrixView& w, int64_t r, const int8_t* q, const float* scale) {
  constexpr int kPartials = 16;
  float partial[kPartials] = {};
  const auto* values = reinterpret_cast<const int8_t*>(w.row(r));
  for (int64_t b = 0; b < w.cols / 32; ++b) {
    uint16_t bits;
    std::memcpy(&bits, w.row(r) + w.cols + 2 * b, sizeof bits);
    const float d = F16ToF32(bits) * scale[b];
    for (int g = 0; g < 8; ++g) {
      int32_t sum = 0;
      for (int64_t k = 32 * b + 4 * g; k < 32 * b + 4 * g + 4; ++k) sum += values[k] * q[k];
      float& target = partial[8 * (b % 2) + g];
      target = std::fma(d, static_cast<float>(sum), target);
    }
  }
  for (int half = kPartials / 2; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) partial[p] += partial[p + half];
  }
  return partial[0];
}

}  // namespace

// Each thread takes the same share of the rows of every job, in list order. So jobs that share y
// need no other order between threads, and many small jobs balance as well as one large one.
void MatMul(std::span<const MatMulJob> jobs, ThreadPool& pool) {
  for (const MatMulJob& job : jobs) CheckJob(job);
  const KernelTable& kernels = ActiveKernels();
  const int64_t shares = pool.num_threads();
  const int64_t min_shares = Work(jobs) < kMinParallelBytes ? shares + 1 : 1;
  pool.ParallelFor(shares, min_shares, [&](int64_t begin, int64_t end) {
    for (const MatMulJob& job : jobs) {
      if (job.x.num_rows == 0) continue;
      const int64_t share = (job.w.rows + shares - 1) / shares;
      const int64_t row_begin = std::min(job.w.rows, begin * share);
      const int64_t row_end = std::min(job.w.rows, end * share);
      if (row_begin >= row_end) continue;
      MatMulTask task = TaskFor(job, row_begin, row_end);
      AlignInput(task);
      kernels.matmul(task);
    }
  });
}

void MatMul(const MatMulJob& job, ThreadPool& pool) {
  MatMul(std::span<const MatMulJob>(&job, 1), pool);
}

void MatMulReference(const MatMulJob& job) {
  CheckJob(job);
  for (int64_t t = 0; t < job.x.num_rows; ++t) {
    for (int64_t r = 0; r < job.w.rows; ++r) {
      const float product = job.w.dtype == DType::kQ8_0
                                ? DotReferenceQ8(job.w, r, job.x.q + t * job.x.cols,
                                                 job.x.scale + t * (job.x.cols / 32))
                                : DotReference(job.w, r, job.x.f32 + t * job.x.f32_stride);
      float& y = job.y[t * job.y_stride + r];
      y = job.accumulate ? y + product : product;
    }
  }
}

}  // namespace ds4
