// Goal: a product's bits depend on its weight row and its input row alone. Method: odd sizes for
// every type; the kernels of every instruction set, any number of rows and threads against the
// plain reference, bit by bit; the reference against double-precision sums within a reasoned bound.
#include "engine/kernels/matmul.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};

std::vector<float> Reference(const Matrix& w, const ActivationView& x) {
  std::vector<float> y(static_cast<size_t>(x.num_rows * w.rows()));
  MatMulReference({.w = w.view(), .x = x, .y = y.data(), .y_stride = w.rows()});
  return y;
}

std::vector<float> WithTable(const KernelTable& table, const Matrix& w, const ActivationView& x) {
  std::vector<float> y(static_cast<size_t>(x.num_rows * w.rows()));
  table.matmul({.dtype = w.dtype(),
                .w = w.view().data,
                .w_stride = w.view().row_stride,
                .row_begin = 0,
                .row_end = w.rows(),
                .cols = w.cols(),
                .num_x = x.num_rows,
                .x = x.f32,
                .x_stride = x.f32_stride,
                .q = x.q,
                .q_scale = x.scale,
                .y = y.data(),
                .y_stride = w.rows()});
  return y;
}

TEST(MatMulTest, EveryInstructionSetGivesTheBitsOfTheReference) {
  Random random(1);
  for (const DType dtype : kTypes) {
    const std::vector<int64_t> widths =
        dtype == DType::kQ8_0 ? std::vector<int64_t>{32, 64, 96, 480, 512, 544, 1056, 2048}
                              : std::vector<int64_t>{1, 5, 16, 17, 31, 32, 33, 63, 100, 257, 1024};
    for (const int64_t cols : widths) {
      const Matrix w = RandomMatrix(dtype, 11, cols, random);
      for (int64_t rows = 1; rows <= 14; ++rows) {
        const Activations x(rows, cols, random);
        const std::vector<float> expected = Reference(w, x.view());
        for (const KernelTable* table : AvailableKernels()) {
          ASSERT_EQ(Bits(WithTable(*table, w, x.view())), Bits(expected))
              << table->name << " " << Info(dtype).name << " cols " << cols << " rows " << rows;
        }
      }
    }
  }
}

// Blocks of input rows are cut to the cache: sizes on both sides of a cut.
TEST(MatMulTest, BlocksOfManyInputRowsChangeNoBit) {
  Random random(2);
  for (const DType dtype : kTypes) {
    const Matrix w = RandomMatrix(dtype, 9, 4096, random);
    for (const int64_t rows : {29, 64, 131}) {
      const Activations x(rows, 4096, random);
      const std::vector<float> expected = Reference(w, x.view());
      for (const KernelTable* table : AvailableKernels()) {
        if (table == GenericKernels()) continue;  // slow, and it has no blocks
        ASSERT_EQ(Bits(WithTable(*table, w, x.view())), Bits(expected))
            << table->name << " " << Info(dtype).name << " rows " << rows;
      }
    }
  }
}

TEST(MatMulTest, ARowDoesNotSeeItsNeighboursOrTheThreads) {
  Random random(3);
  for (const DType dtype : kTypes) {
    const Matrix w = RandomMatrix(dtype, 301, 512, random);
    const Activations x(9, 512, random);
    const std::vector<float> expected = Reference(w, x.view());
    for (int threads = 1; threads <= 4; ++threads) {
      ThreadPool pool(threads);
      for (int64_t begin = 0; begin < 9; ++begin) {
        for (int64_t count = 1; begin + count <= 9; ++count) {
          std::vector<float> y(static_cast<size_t>(count * 301));
          MatMul({.w = w.view(), .x = x.view().Rows(begin, count), .y = y.data(), .y_stride = 301},
                 pool);
          const std::vector<float> part(expected.begin() + begin * 301,
                                        expected.begin() + (begin + count) * 301);
          ASSERT_EQ(Bits(y), Bits(part)) << threads << " threads, rows " << begin << "+" << count;
        }
      }
    }
  }
}

// Each partial sum rounds once per term: an error of at most (cols/32 + 5) * 2^-24 of the sum of
// the products' sizes; Q8_0 (after exact integer sums) has cols/64 terms and one more rounding
// each.
TEST(MatMulTest, StaysNearTheExactSum) {
  Random random(4);
  for (const DType dtype : kTypes) {
    const int64_t cols = 2048;
    const Matrix w = RandomMatrix(dtype, 7, cols, random);
    const Activations x(2, cols, random);
    const std::vector<float> y = Reference(w, x.view());
    for (int64_t t = 0; t < 2; ++t) {
      for (int64_t r = 0; r < 7; ++r) {
        std::vector<float> row(static_cast<size_t>(cols));
        w.DequantizeRow(r, row.data());
        double sum = 0.0, size = 0.0;
        for (int64_t k = 0; k < cols; ++k) {
          const size_t i = static_cast<size_t>(t * cols + k);
          const double input =
              dtype == DType::kQ8_0 ? static_cast<double>(x.q[i]) * x.scale[i / 32] : x.f32[i];
          sum += row[static_cast<size_t>(k)] * input;
          size += std::abs(row[static_cast<size_t>(k)] * input);
        }
        EXPECT_NEAR(y[static_cast<size_t>(t * 7 + r)], sum, (cols / 32 + 8) * 0x1p-24 * size);
      }
    }
  }
}

// Experts' down projections: several jobs add to the same y. The order is the list's on every
// thread.
TEST(MatMulTest, JobsThatShareTheirOutputAddInListOrder) {
  Random random(5);
  const int64_t rows = 203, cols = 256;
  std::vector<Matrix> experts;
  for (int i = 0; i < 6; ++i) experts.push_back(RandomMatrix(DType::kQ8_0, rows, cols, random));
  const Activations x(6, cols, random);
  std::vector<float> expected(static_cast<size_t>(rows));
  for (int64_t i = 0; i < 6; ++i) {
    MatMulReference({.w = experts[static_cast<size_t>(i)].view(),
                     .x = x.view().Rows(i, 1),
                     .y = expected.data(),
                     .y_stride = rows,
                     .accumulate = i > 0});
  }
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    std::vector<float> y(static_cast<size_t>(rows), 77.0f);
    std::vector<MatMulJob> jobs;
    for (int64_t i = 0; i < 6; ++i) {
      jobs.push_back({.w = experts[static_cast<size_t>(i)].view(),
                      .x = x.view().Rows(i, 1),
                      .y = y.data(),
                      .y_stride = rows,
                      .accumulate = i > 0});
    }
    MatMul(jobs, pool);
    EXPECT_EQ(Bits(y), Bits(expected)) << threads << " threads";
  }
}

TEST(MatMulTest, WritesOnlyItsOwnColumns) {
  Random random(6);
  const Matrix w = RandomMatrix(DType::kF16, 5, 64, random);
  const Activations x(8, 64, random);
  const std::vector<float> expected = Reference(w, x.view());
  ThreadPool pool(2);
  std::vector<float> y(8 * 7, -1.0f);
  MatMul({.w = w.view(), .x = x.view(), .y = y.data(), .y_stride = 7}, pool);
  for (size_t t = 0; t < 8; ++t) {
    for (size_t r = 0; r < 7; ++r) EXPECT_EQ(y[t * 7 + r], r < 5 ? expected[t * 5 + r] : -1.0f);
  }
}

// A lane of a row-parallel product reads a slice of wider rows.
TEST(MatMulTest, ReadsASliceOfWiderRows) {
  Random random(8);
  const Matrix w = RandomMatrix(DType::kBF16, 6, 40, random);
  const std::vector<float> wide = random.Floats(5 * 100);
  std::vector<float> narrow;
  for (size_t t = 0; t < 5; ++t) {
    narrow.insert(narrow.end(), wide.begin() + static_cast<int64_t>(t) * 100 + 33,
                  wide.begin() + static_cast<int64_t>(t) * 100 + 73);
  }
  const ActivationView packed = {.num_rows = 5, .cols = 40, .f32 = narrow.data(), .f32_stride = 40};
  const ActivationView slice = {
      .num_rows = 5, .cols = 40, .f32 = wide.data() + 33, .f32_stride = 100};
  EXPECT_EQ(Bits(Reference(w, slice)), Bits(Reference(w, packed)));
  for (const KernelTable* table : AvailableKernels()) {
    EXPECT_EQ(Bits(WithTable(*table, w, slice)), Bits(Reference(w, packed))) << table->name;
  }
}

// A single row is copied to a cache line boundary where it does not start at one.
TEST(MatMulTest, InputRowsMayStartAnywhere) {
  Random random(9);
  ThreadPool pool(2);
  for (const DType dtype : kTypes) {
    const Matrix w = RandomMatrix(dtype, 300, 96, random);
    const Activations x(1, 96, random);
    const std::vector<float> expected = Reference(w, x.view());
    for (size_t shift = 0; shift < 20; ++shift) {
      std::vector<float> f32(shift), y(300);
      std::vector<int8_t> q(shift);
      f32.insert(f32.end(), x.f32.begin(), x.f32.end());
      q.insert(q.end(), x.q.begin(), x.q.end());
      ActivationView view = x.view();
      view.f32 = f32.data() + shift;
      view.q = q.data() + shift;
      MatMul({.w = w.view(), .x = view, .y = y.data(), .y_stride = 300}, pool);
      ASSERT_EQ(Bits(y), Bits(expected)) << Info(dtype).name << " shift " << shift;
    }
  }
}

TEST(MatMulTest, EmptyShapesAreFine) {
  const Matrix no_columns = std::move(Matrix::Create(DType::kF32, 3, 0)).value();
  const Matrix no_rows = std::move(Matrix::Create(DType::kQ8_0, 0, 32)).value();
  const std::vector<float> x(1);
  const std::vector<int8_t> q(32);
  std::vector<float> y = {7.0f, 7.0f, 7.0f};
  ThreadPool pool(2);
  const MatMulJob jobs[] = {
      {.w = no_rows.view(), .x = {.num_rows = 1, .cols = 32, .q = q.data(), .scale = x.data()}},
      {.w = no_rows.view(), .x = {.num_rows = 0, .cols = 32}}};
  MatMul(jobs, pool);
  EXPECT_EQ(y, std::vector<float>(3, 7.0f));
  MatMul({.w = no_columns.view(),
          .x = {.num_rows = 1, .cols = 0, .f32 = x.data(), .f32_stride = 0},
          .y = y.data(),
          .y_stride = 3},
         pool);
  EXPECT_EQ(y, std::vector<float>(3, 0.0f));
}

TEST(MatMulDeathTest, RefusesShapesThatDisagree) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Random random(7);
  const Matrix w = RandomMatrix(DType::kQ8_0, 4, 64, random);
  const Activations narrow(1, 32, random);
  ThreadPool pool(1);
  std::vector<float> y(4);
  EXPECT_DEATH(MatMul({.w = w.view(), .x = narrow.view(), .y = y.data(), .y_stride = 4}, pool),
               "input has 32 columns, weights 64");
  const std::vector<float> plain(64);
  EXPECT_DEATH(MatMul({.w = w.view(),
                       .x = {.num_rows = 1, .cols = 64, .f32 = plain.data(), .f32_stride = 64},
                       .y = y.data(),
                       .y_stride = 4},
                      pool),
               "need quantised input");
}

// The environment variable picks a lesser set; one this CPU has not is an error, not another
// choice.
TEST(KernelIsaDeathTest, EnvironmentChooses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const KernelTable* table : AvailableKernels()) {
    EXPECT_EXIT(
        {
          setenv("DS4_ISA", table->name, 1);
          std::exit(KernelIsa() == table->name ? 0 : 1);
        },
        testing::ExitedWithCode(0), "");
  }
  EXPECT_EXIT(
      {
        setenv("DS4_ISA", "avx9000", 1);
        (void)KernelIsa();
      },
      testing::ExitedWithCode(2), "DS4_ISA=avx9000.*choose one of generic");
}

}  // namespace
}  // namespace ds4
