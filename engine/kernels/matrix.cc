#include "engine/kernels/matrix.h"

#include <cstring>
#include <limits>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/os_memory.h"
#include "engine/base/strings.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

constexpr int64_t kRowAlignment = 64;
constexpr int64_t kBlock = 32;       // values in one Q8_0 block
constexpr int64_t kBlockBytes = 34;  // in a file: f16 scale, then 32 int8

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

uint16_t Load16(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}
void Store16(std::byte* p, uint16_t bits) { std::memcpy(p, &bits, sizeof bits); }

float LoadFloat(DType dtype, const std::byte* p, int64_t i) {
  if (dtype == DType::kF16) return F16ToF32(Load16(p + 2 * i));
  if (dtype == DType::kBF16) return BF16ToF32(Load16(p + 2 * i));
  float value;
  std::memcpy(&value, p + 4 * i, sizeof value);
  return value;
}

void StoreFloat(DType dtype, float value, std::byte* p, int64_t i) {
  if (dtype == DType::kF16) return Store16(p + 2 * i, F32ToF16(value));
  if (dtype == DType::kBF16) return Store16(p + 2 * i, F32ToBF16(value));
  std::memcpy(p + 4 * i, &value, sizeof value);
}

// File blocks (scale, values; scale, values; ...) to one run of values and one of scales.
void PackQ8(const std::byte* src, int64_t cols, std::byte* row) {
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    std::memcpy(row + b * kBlock, src + b * kBlockBytes + 2, kBlock);
    std::memcpy(row + cols + 2 * b, src + b * kBlockBytes, 2);
  }
}

// Bytes of one packed row, or nothing when they or all `rows` of them do not fit an int64_t.
bool PackedSize(DType dtype, int64_t rows, int64_t cols, int64_t* stride, int64_t* total) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  if (cols > kMax / 8) return false;  // no type takes more than 4 bytes a value, plus alignment
  const int64_t row_bytes = dtype == DType::kQ8_0  ? cols + cols / kBlock * 2
                            : dtype == DType::kF32 ? cols * 4
                                                   : cols * 2;
  *stride = (row_bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  if (*stride > 0 && rows > kMax / *stride) return false;
  *total = rows * *stride;
  return true;
}

}  // namespace

bool IsMatrixType(DType dtype) { return IsFloat(dtype) || dtype == DType::kQ8_0; }

Matrix::Matrix(Matrix&& other) noexcept { *this = std::move(other); }

Matrix& Matrix::operator=(Matrix&& other) noexcept {
  if (this != &other) {
    FreeZeroed(memory_, static_cast<size_t>(size_bytes_));
    view_ = std::exchange(other.view_, MatrixView());
    memory_ = std::exchange(other.memory_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

Matrix::~Matrix() { FreeZeroed(memory_, static_cast<size_t>(size_bytes_)); }

Result<Matrix> Matrix::Create(DType dtype, int64_t rows, int64_t cols) {
  if (!IsMatrixType(dtype)) {
    return InvalidArgumentError(StrCat("no kernels multiply by ", Info(dtype).name,
                                       " weights; use F32, F16, BF16 or Q8_0"));
  }
  if (rows < 0 || cols < 0) {
    return InvalidArgumentError(StrCat("matrix of ", rows, " x ", cols));
  }
  if (dtype == DType::kQ8_0 && cols % kBlock != 0) {
    return InvalidArgumentError(
        StrCat("Q8_0 matrix with ", cols, " columns: must be whole blocks of ", kBlock));
  }
  Matrix matrix;
  int64_t stride = 0, total = 0;
  if (!PackedSize(dtype, rows, cols, &stride, &total)) {
    return ResourceExhaustedError(
        StrCat(Info(dtype).name, " matrix of ", rows, " x ", cols, " is beyond any memory"));
  }
  matrix.memory_ = AllocateZeroed(static_cast<size_t>(total));
  if (matrix.memory_ == nullptr) {
    return ResourceExhaustedError(StrCat("no memory for a ", Info(dtype).name, " matrix of ", rows,
                                         " x ", cols, " (", HumanBytes(total), ")"));
  }
  matrix.size_bytes_ = total;
  matrix.view_ = {dtype, rows, cols, matrix.memory_, stride};
  return matrix;
}

Status Matrix::SetRow(int64_t row, DType src_dtype, const std::byte* src) {
  CHECK(row >= 0 && row < view_.rows) << "row " << row << " of " << view_.rows;
  std::byte* dst = memory_ + row * view_.row_stride;
  if (src_dtype == view_.dtype) {
    if (src_dtype == DType::kQ8_0) {
      PackQ8(src, view_.cols, dst);
    } else if (view_.cols > 0) {
      std::memcpy(dst, src, static_cast<size_t>(BytesFor(src_dtype, view_.cols)));
    }
    return OkStatus();
  }
  const bool one_is_f32 = src_dtype == DType::kF32 || view_.dtype == DType::kF32;
  if (!one_is_f32 || !IsFloat(src_dtype) || !IsFloat(view_.dtype)) {
    return InvalidArgumentError(StrCat("cannot store ", Info(src_dtype).name, " values in a ",
                                       Info(view_.dtype).name, " matrix"));
  }
  for (int64_t i = 0; i < view_.cols; ++i) {
    StoreFloat(view_.dtype, LoadFloat(src_dtype, src, i), dst, i);
  }
  return OkStatus();
}

void Matrix::DequantizeRow(int64_t row, float* out) const {
  CHECK(row >= 0 && row < view_.rows) << "row " << row << " of " << view_.rows;
  const std::byte* src = view_.row(row);
  if (view_.dtype != DType::kQ8_0) {
    for (int64_t i = 0; i < view_.cols; ++i) out[i] = LoadFloat(view_.dtype, src, i);
    return;
  }
  for (int64_t b = 0; b < view_.cols / kBlock; ++b) {
    const float scale = F16ToF32(Load16(src + view_.cols + 2 * b));
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      out[i] = scale * static_cast<float>(static_cast<int8_t>(src[i]));
    }
  }
}

}  // namespace ds4
