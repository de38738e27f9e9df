// Seeded inputs and bit comparison for the kernel tests.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/kernels/isa.h"
#include "engine/kernels/matmul.h"
#include "engine/kernels/matrix.h"
#include "engine/kernels/quantize.h"
#include "engine/tensor/quant.h"

namespace ds4 {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  float Uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(engine_() >> 40) * 0x1p-24f;
  }
  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  std::vector<float> Floats(int64_t n, float low = -1.0f, float high = 1.0f) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = Uniform(low, high);
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

// Bits, not values: 0 and -0 differ, a NaN equals itself.
inline std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (float v : values) bits.push_back(std::bit_cast<uint32_t>(v));
  return bits;
}

// A matrix of the given type with values in [-1, 1]; Q8_0 rows hold any int8, -128 too.
inline Matrix RandomMatrix(DType dtype, int64_t rows, int64_t cols, Random& random) {
  Matrix matrix = std::move(Matrix::Create(dtype, rows, cols)).value();
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<std::byte> row;
    if (dtype == DType::kQ8_0) {
      for (int64_t b = 0; b < cols / 32; ++b) {
        const uint16_t scale = F32ToF16(random.Uniform(0.001f, 0.01f));
        row.push_back(static_cast<std::byte>(scale & 255));
        row.push_back(static_cast<std::byte>(scale >> 8));
        for (int i = 0; i < 32; ++i) row.push_back(static_cast<std::byte>(random.Int(-128, 127)));
      }
      EXPECT_TRUE(matrix.SetRow(r, dtype, row.data()).ok());
      continue;
    }
    const std::vector<float> values = random.Floats(cols);
    EXPECT_TRUE(
        matrix.SetRow(r, DType::kF32, reinterpret_cast<const std::byte*>(values.data())).ok());
  }
  return matrix;
}

// Float rows and their quantised form.
struct Activations {
  Activations(int64_t rows, int64_t cols_in, Random& random)
      : num_rows(rows), cols(cols_in), f32(random.Floats(rows * cols_in, -3.0f, 3.0f)) {
    if (cols % 32 != 0) return;
    ThreadPool pool(1);
    q.resize(static_cast<size_t>(rows * cols));
    scale.resize(static_cast<size_t>(rows * cols / 32));
    QuantizeRows(f32.data(), rows, cols, cols, q.data(), scale.data(), pool);
  }
  ActivationView view() const {
    return {num_rows,
            cols,
            f32.data(),
            cols,
            q.empty() ? nullptr : q.data(),
            scale.empty() ? nullptr : scale.data()};
  }

  int64_t num_rows;
  int64_t cols;
  std::vector<float> f32;
  std::vector<int8_t> q;
  std::vector<float> scale;
};

}  // namespace ds4
