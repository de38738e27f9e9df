// Weight matrices in the layout that kernels read: packed once at load, then read-only.
//
// F32, F16, BF16: row-major values. Q8_0: per row first all int8 values (cols bytes), then all f16
// block scales (cols / 32), so that a row streams in order and scales load as vectors. Rows start
// at 64-byte boundaries; memory is aligned and asks for huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/base/status.h"
#include "engine/tensor/dtype.h"

namespace ds4 {

// Rows [0, rows) of a packed matrix; borrowed from a Matrix that outlives it.
struct MatrixView {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  const std::byte* data = nullptr;
  int64_t row_stride = 0;  // bytes

  MatrixView Rows(int64_t begin, int64_t count) const {
    return {dtype, count, cols, data + begin * row_stride, row_stride};
  }
  const std::byte* row(int64_t r) const { return data + r * row_stride; }
};

// True for the types that kernels multiply by: F32, F16, BF16, Q8_0.
bool IsMatrixType(DType dtype);

// Owns one packed matrix. Move-only.
class Matrix {
 public:
  Matrix() = default;
  Matrix(Matrix&&) noexcept;
  Matrix& operator=(Matrix&&) noexcept;
  ~Matrix();

  // Zero-filled. kInvalidArgument: type without kernels, or cols not whole blocks (32 for Q8_0).
  // kResourceExhausted: no memory.
  static Result<Matrix> Create(DType dtype, int64_t rows, int64_t cols);

  // Fills row `row` from `src`, `cols` values in file layout (GGUF blocks) of `src_dtype`. The same
  // type copies bits; F32 may be stored from F16 or BF16 and the reverse by rounding to nearest.
  // kInvalidArgument: no such conversion.
  Status SetRow(int64_t row, DType src_dtype, const std::byte* src);

  MatrixView view() const { return view_; }
  DType dtype() const { return view_.dtype; }
  int64_t rows() const { return view_.rows; }
  int64_t cols() const { return view_.cols; }
  int64_t size_bytes() const { return size_bytes_; }
  // Row `row` as float32 into out[cols]; for embeddings and tests.
  void DequantizeRow(int64_t row, float* out) const;

 private:
  MatrixView view_;
  std::byte* memory_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace ds4
