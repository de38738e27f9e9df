// Goal: rotary angles are those of spec 2.4, at every position. Method: the check values given
// there, the defining formula in double, and the identities of a rotation.
#include "engine/kernels/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

const YarnParams kYarn = {
    .factor = 16.0, .original_context = 65536, .beta_fast = 32.0, .beta_slow = 1.0};

TEST(RopeTest, PlainFrequenciesFollowTheFormula) {
  const std::vector<double> w = RopeFrequencies(10000.0, 64);
  ASSERT_EQ(w.size(), 32u);
  for (size_t i = 0; i < 32; ++i) {
    const double exact = std::pow(10000.0, -2.0 * static_cast<double>(i) / 64.0);
    EXPECT_NEAR(w[i], exact, 1e-14 * exact);
  }
}

// correction index of 32 turns is 15.453, of one turn 24.708: the ramp goes from pair 15 to
// pair 25.
TEST(RopeTest, YarnHasTheValuesOfTheSpec) {
  const std::vector<double> w = YarnFrequencies(160000.0, 64, kYarn);
  const std::pair<size_t, double> expected[] = {
      {0, 1.0},          {1, 0.687656},     {15, 3.635539e-3}, {16, 2.265625e-3},
      {20, 2.969778e-4}, {25, 5.372313e-6}, {31, 5.680529e-7}};
  for (const auto& [i, value] : expected) EXPECT_NEAR(w[i], value, 1e-6 * value) << "pair " << i;
}

// A rope of two channels has low = high = 0: the ramp must not divide by zero.
TEST(RopeTest, YarnWithAnEmptyRampStaysFinite) {
  for (const double f : YarnFrequencies(10000.0, 2, {.factor = 16.0, .original_context = 4})) {
    EXPECT_TRUE(std::isfinite(f));
    EXPECT_GT(f, 0.0);
  }
}

// Near position 1e6 a float32 product position * frequency is off by 0.03; these are not.
TEST(RopeTest, AnglesAreExactAtLongPositions) {
  const std::vector<double> w = YarnFrequencies(160000.0, 64, kYarn);
  const std::vector<int64_t> positions = {0, 1, 127, 65537, 1048575};
  std::vector<float> cos(5 * 32), sin(5 * 32);
  RopeAngles(positions, w, cos.data(), sin.data());
  for (size_t p = 0; p < 5; ++p) {
    for (size_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(positions[p]) * w[i];
      EXPECT_NEAR(cos[p * 32 + i], std::cos(angle), 6e-8);
      EXPECT_NEAR(sin[p * 32 + i], std::sin(angle), 6e-8);
    }
  }
}

TEST(RopeTest, RotatesOnlyTheTrailingPairsAndBack) {
  Random random(31);
  const int64_t rows = 5, heads = 3, dim = 24, pairs = 4;
  const std::vector<float> x = random.Floats(rows * heads * dim);
  const std::vector<int64_t> positions = {0, 3, 10, 500, 70000};
  std::vector<float> cos(rows * pairs), sin(rows * pairs);
  RopeAngles(positions, RopeFrequencies(10000.0, 2 * pairs), cos.data(), sin.data());
  for (int threads = 1; threads <= 3; ++threads) {
    ThreadPool pool(threads);
    std::vector<float> y = x;
    ApplyRope(y.data(), rows, heads, dim, pairs, cos.data(), sin.data(), false, pool);
    for (size_t v = 0; v < static_cast<size_t>(rows * heads); ++v) {
      for (size_t d = 0; d < 16; ++d) EXPECT_EQ(y[v * 24 + d], x[v * 24 + d]);
      for (size_t i = 0; i < 4; ++i) {
        const double a = x[v * 24 + 16 + 2 * i], b = x[v * 24 + 17 + 2 * i];
        const double c = cos[v / 3 * 4 + i], s = sin[v / 3 * 4 + i];
        EXPECT_NEAR(y[v * 24 + 16 + 2 * i], a * c - b * s, 3e-7);
        EXPECT_NEAR(y[v * 24 + 17 + 2 * i], a * s + b * c, 3e-7);
      }
    }
    ApplyRope(y.data(), rows, heads, dim, pairs, cos.data(), sin.data(), true, pool);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], x[i], 5e-7);
  }
}

}  // namespace
}  // namespace ds4
