// Goal: the elementary functions keep their error bounds, and have one result for a lane, a vector
// and every instruction set. Method: sweeps over all magnitudes against the host's double functions
// (far more exact than the bounds), and bit comparison between the tables.
#include "engine/kernels/math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/kernels/exact_double.h"
#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// Every 4099th float (a prime step): all signs, exponents, NaNs and infinities.
template <class F>
void ForAllMagnitudes(F f) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 4099) {
    f(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
}

TEST(MathTest, ExpIsWithinItsBound) {
  double worst = 0.0;
  for (double x = -87.3; x <= 88.7; x += 0.00037) {
    const float arg = static_cast<float>(x);
    if (arg < -87.3f || arg > 88.7f) continue;
    const double exact = std::exp(static_cast<double>(arg));
    worst = std::max(worst, std::abs(Exp(arg) - exact) / exact);
  }
  EXPECT_LT(worst, 2e-7);
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-87.4f), 0.0f);
  EXPECT_EQ(Exp(-kInf), 0.0f);
  EXPECT_EQ(Exp(88.8f), kInf);
  EXPECT_EQ(Exp(kInf), kInf);
  EXPECT_TRUE(std::isnan(Exp(kNan)));
}

TEST(MathTest, LogIsWithinItsBound) {
  double worst = 0.0;
  ForAllMagnitudes([&](float x) {
    if (!(x > 0.0f) || x == kInf || x == 1.0f) return;
    const double exact = std::log(static_cast<double>(x));
    worst = std::max(worst, std::abs(Log(x) - exact) / std::abs(exact));
  });
  for (float x = 0.5f; x < 2.0f; x += 0x1p-19f) {
    if (x == 1.0f) continue;
    const double exact = std::log(static_cast<double>(x));
    worst = std::max(worst, std::abs(Log(x) - exact) / std::abs(exact));
  }
  EXPECT_LT(worst, 2e-7);
  EXPECT_EQ(Log(1.0f), 0.0f);
  EXPECT_EQ(Log(0.0f), -kInf);
  EXPECT_EQ(Log(kInf), kInf);
  EXPECT_TRUE(std::isnan(Log(-1.0f)));
  EXPECT_TRUE(std::isnan(Log(kNan)));
}

TEST(MathTest, SigmoidAndSoftplusAreWithinTheirBounds) {
  for (double x = -80.0; x <= 80.0; x += 0.0013) {
    const float arg = static_cast<float>(x);
    const double sigmoid = 1.0 / (1.0 + std::exp(-static_cast<double>(arg)));
    EXPECT_NEAR(Sigmoid(arg), sigmoid, 4e-7 * sigmoid);
    const double softplus = std::log1p(std::exp(static_cast<double>(arg)));
    EXPECT_NEAR(Softplus(arg), softplus, 5e-7 * softplus) << arg;
  }
  EXPECT_EQ(Softplus(21.5f), 21.5f);
  EXPECT_EQ(Sigmoid(-200.0f), 0.0f);
  EXPECT_EQ(Sigmoid(200.0f), 1.0f);
  EXPECT_TRUE(std::isnan(Softplus(kNan)));
}

TEST(MathTest, EveryInstructionSetHasTheSameBits) {
  const KernelTable& plain = *GenericKernels();
  for (const KernelTable* table : AvailableKernels()) {
    int64_t differ = 0;
    std::vector<float> row;
    ForAllMagnitudes([&](float x) {
      if (x != x) return;  // what a NaN carries may differ; that it stays NaN is tested above
      row.push_back(x);
      differ += std::bit_cast<uint32_t>(table->exp(x)) != std::bit_cast<uint32_t>(plain.exp(x));
      differ +=
          std::bit_cast<uint32_t>(table->sigmoid(x)) != std::bit_cast<uint32_t>(plain.sigmoid(x));
      differ +=
          std::bit_cast<uint32_t>(table->softplus(x)) != std::bit_cast<uint32_t>(plain.softplus(x));
      if (x >= 0.0f) {
        differ += std::bit_cast<uint32_t>(table->log(x)) != std::bit_cast<uint32_t>(plain.log(x));
      }
    });
    std::vector<float> vector_form = row;
    table->exp_row(vector_form.data(), static_cast<int64_t>(row.size()));
    for (float& x : row) x = plain.exp(x);
    EXPECT_EQ(differ, 0) << table->name;
    EXPECT_TRUE(Bits(vector_form) == Bits(row)) << table->name;
  }
}

TEST(ExactDoubleTest, AgreesWithTheHostToTheLastDigits) {
  for (double x = 1e-3; x < 2e6; x *= 1.0137) {
    EXPECT_NEAR(ExactSinCos(x).sin, std::sin(x), 1e-14) << x;
    EXPECT_NEAR(ExactSinCos(-x).cos, std::cos(x), 1e-14) << x;
    EXPECT_NEAR(ExactLog(x), std::log(x), 2e-15 * std::abs(std::log(x)) + 1e-17) << x;
  }
  for (double x = -50.0; x < 50.0; x += 0.0173) {
    EXPECT_NEAR(ExactExp(x), std::exp(x), 1e-15 * std::exp(x)) << x;
  }
}

}  // namespace
}  // namespace ds4
