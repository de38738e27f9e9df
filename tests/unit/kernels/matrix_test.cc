// Goal: packed rows give back the values of the file; wrong types and sizes are refused. Method:
// values that every type holds exactly, and requests no machine can fulfil.
#include "engine/kernels/matrix.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "engine/base/os_memory.h"
#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

TEST(MatrixTest, PacksQ8BlocksAsValuesThenScales) {
  Matrix matrix = std::move(Matrix::Create(DType::kQ8_0, 2, 64)).value();
  std::vector<std::byte> row;
  for (int b = 0; b < 2; ++b) {
    row.push_back(std::byte{0x00});
    row.push_back(b == 0 ? std::byte{0x3c} : std::byte{0x40});  // 1.0 and 2.0 as f16
    for (int i = 0; i < 32; ++i) row.push_back(static_cast<std::byte>(i - 16));
  }
  ASSERT_TRUE(matrix.SetRow(1, DType::kQ8_0, row.data()).ok());
  const std::byte* packed = matrix.view().row(1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(packed) % 64, 0u);
  EXPECT_EQ(static_cast<int8_t>(packed[0]), -16);
  EXPECT_EQ(static_cast<int8_t>(packed[63]), 15);
  EXPECT_EQ(packed[65], std::byte{0x3c});
  EXPECT_EQ(packed[67], std::byte{0x40});
  std::vector<float> values(64);
  matrix.DequantizeRow(1, values.data());
  for (int k = 0; k < 64; ++k)
    EXPECT_EQ(values[static_cast<size_t>(k)], (k % 32 - 16) * (1 + k / 32));
  matrix.DequantizeRow(0, values.data());
  EXPECT_EQ(values, std::vector<float>(64, 0.0f));
}

TEST(MatrixTest, ConvertsBetweenFloatTypes) {
  const std::vector<float> exact = {0.0f, 1.0f, -2.5f, 0.15625f, 96.0f};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Matrix narrow = std::move(Matrix::Create(dtype, 1, 5)).value();
    ASSERT_TRUE(
        narrow.SetRow(0, DType::kF32, reinterpret_cast<const std::byte*>(exact.data())).ok());
    std::vector<float> back(5);
    narrow.DequantizeRow(0, back.data());
    EXPECT_EQ(back, exact);
    Matrix wide = std::move(Matrix::Create(DType::kF32, 1, 5)).value();
    ASSERT_TRUE(wide.SetRow(0, dtype, narrow.view().row(0)).ok());
    wide.DequantizeRow(0, back.data());
    EXPECT_EQ(back, exact);
  }
}

TEST(MatrixTest, RefusesWhatHasNoConversion) {
  Matrix q8 = std::move(Matrix::Create(DType::kQ8_0, 1, 32)).value();
  Matrix f16 = std::move(Matrix::Create(DType::kF16, 1, 32)).value();
  const std::vector<std::byte> bytes(256);
  EXPECT_EQ(q8.SetRow(0, DType::kF32, bytes.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(f16.SetRow(0, DType::kQ8_0, bytes.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(f16.SetRow(0, DType::kBF16, bytes.data()).code(), StatusCode::kInvalidArgument);
  const Status status = f16.SetRow(0, DType::kQ4_K, bytes.data());
  EXPECT_EQ(status.message(), "cannot store Q4_K values in a F16 matrix");
}

TEST(MatrixTest, RefusesBadShapesAndImpossibleSizes) {
  EXPECT_EQ(Matrix::Create(DType::kQ4_K, 1, 256).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Matrix::Create(DType::kQ8_0, 1, 33).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Matrix::Create(DType::kF32, -1, 4).status().code(), StatusCode::kInvalidArgument);
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const auto& [rows, cols] : {std::pair{kHuge, int64_t{64}},
                                   {int64_t{2}, kHuge},
                                   {kHuge / 256, int64_t{32}},
                                   {int64_t{1} << 52, int64_t{512}}}) {
    EXPECT_EQ(Matrix::Create(DType::kF32, rows, cols).status().code(),
              StatusCode::kResourceExhausted)
        << rows << " x " << cols;
  }
  EXPECT_TRUE(Matrix::Create(DType::kF32, 0, 64).ok());
}

TEST(MatrixTest, MovesItsMemory) {
  Random random(21);
  Matrix a = RandomMatrix(DType::kF32, 3, 20, random);
  const std::byte* data = a.view().data;
  Matrix b = std::move(a);
  EXPECT_EQ(b.view().data, data);
  EXPECT_EQ(a.rows(), 0);
  Matrix c = RandomMatrix(DType::kF16, 3, 20, random);
  c = std::move(b);
  EXPECT_EQ(c.view().data, data);
  EXPECT_EQ(c.size_bytes(), 3 * 128);
}

// Small blocks come from the heap, large ones from the system with huge pages.
TEST(OsMemoryTest, BlocksAreZeroAlignedAndWritable) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{9} << 20}) {
    std::byte* memory = AllocateZeroed(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
    for (size_t i = 0; i < bytes; i += 1001) {
      ASSERT_EQ(memory[i], std::byte{0});
      memory[i] = std::byte{1};
    }
    if (bytes > 0) memory[bytes - 1] = std::byte{2};
    FreeZeroed(memory, bytes);
  }
  EXPECT_EQ(AllocateZeroed(std::numeric_limits<size_t>::max()), nullptr);
  EXPECT_EQ(AllocateZeroed(size_t{1} << 62), nullptr);
}

}  // namespace
}  // namespace ds4
