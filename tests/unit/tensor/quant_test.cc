// Goal: block formats decode and encode bit for bit like ggml, whose files we read.
// Method: its own vectors (tests/data/quant): blocks it made of normal values, and random blocks
// with a subnormal scale first. F16 is checked on all its 65536 values.
#include "engine/tensor/quant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "engine/tensor/iq2_xxs_grid.h"

namespace ds4 {
namespace {

std::vector<std::byte> ReadVector(const std::string& name) {
  std::ifstream in(std::string(DS4_SOURCE_DIR) + "/tests/data/quant/" + name, std::ios::binary);
  EXPECT_TRUE(in.good()) << name;
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(chars));
  return {bytes.begin(), bytes.end()};
}

std::vector<float> ReadFloats(const std::string& name) {
  const auto bytes = ReadVector(name);
  std::vector<float> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), values.size() * 4);
  return values;
}

void ExpectSameBits(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
        << "value " << i << " is " << got[i] << ", ggml has " << want[i];
  }
}

class DequantizeTest : public testing::TestWithParam<const char*> {};

TEST_P(DequantizeTest, AgreesWithGgmlBitForBit) {
  const std::string type = GetParam();
  const DType dtype = *DTypeFromName(type);
  for (const std::string kind : {"", ".rand"}) {
    if (kind == ".rand" && (dtype == DType::kF16 || dtype == DType::kBF16)) continue;
    const auto blocks = ReadVector(type + kind + ".q");
    const auto want = ReadFloats(type + kind + ".f32");
    std::vector<float> got(want.size(), std::nanf(""));
    ASSERT_TRUE(Dequantize(dtype, blocks, got).ok());
    ExpectSameBits(got, want);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, DequantizeTest,
                         testing::Values("f16", "bf16", "q4_0", "q5_0", "q8_0", "q2_k", "q3_k",
                                         "q4_k", "q5_k", "q6_k", "q8_k", "iq2_xxs", "iq4_nl",
                                         "iq4_xs", "mxfp4", "nvfp4"),
                         [](const auto& param) { return std::string(param.param); });

// Q4_1 and Q5_1 have no vectors: x = d * code + m, by hand with d = 2 (0x4000) and m = -1 (0xbc00).
TEST(QuantTest, DecodesFormatsWithAMinimum) {
  std::vector<std::byte> q4_1(20);
  q4_1[1] = std::byte{0x40};
  q4_1[3] = std::byte{0xbc};
  q4_1[4] = std::byte{0xf3};  // value 0 has code 3, value 16 code 15
  std::vector<float> x(32);
  ASSERT_TRUE(Dequantize(DType::kQ4_1, q4_1, x).ok());
  EXPECT_EQ(x[0], 5.0f);
  EXPECT_EQ(x[16], 29.0f);
  EXPECT_EQ(x[1], -1.0f);
  std::vector<std::byte> q5_1(24);
  q5_1[1] = std::byte{0x40};
  q5_1[3] = std::byte{0xbc};
  q5_1[6] = std::byte{0x01};  // fifth bit of value 16
  q5_1[8] = std::byte{0xf3};
  ASSERT_TRUE(Dequantize(DType::kQ5_1, q5_1, x).ok());
  EXPECT_EQ(x[0], 5.0f);
  EXPECT_EQ(x[16], 61.0f);  // code 31
}

TEST(QuantTest, EncodesLikeGgml) {
  const auto x = ReadFloats("x.f32");
  for (const std::string type : {"f16", "bf16", "q8_0"}) {
    const auto want = ReadVector(type + ".q");
    std::vector<std::byte> got(want.size());
    ASSERT_TRUE(Quantize(*DTypeFromName(type), x, got).ok());
    EXPECT_EQ(got, want) << type;
  }
}

TEST(QuantTest, F32IsKeptAsItIs) {
  const std::vector<float> x = {1.5f, -0.0f, std::numeric_limits<float>::infinity()};
  std::vector<std::byte> bytes(12);
  ASSERT_TRUE(Quantize(DType::kF32, x, bytes).ok());
  std::vector<float> back(3);
  ASSERT_TRUE(Dequantize(DType::kF32, bytes, back).ok());
  ExpectSameBits(back, x);
}

TEST(QuantTest, EveryF16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = F16ToF32(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(value))));
      continue;
    }
    ASSERT_EQ(F32ToF16(value), bits);
  }
}

TEST(QuantTest, F16RoundsToNearestTiesToEven) {
  EXPECT_EQ(F32ToF16(1.0f + 0x1p-11f), 0x3c00);             // half way: down to even
  EXPECT_EQ(F32ToF16(1.0f + 3 * 0x1p-11f), 0x3c02);         // half way: up to even
  EXPECT_EQ(F32ToF16(1.0f + 0x1p-11f + 0x1p-23f), 0x3c01);  // just above half way
  EXPECT_EQ(F32ToF16(65519.0f), 0x7bff);                    // the largest finite one
  EXPECT_EQ(F32ToF16(65520.0f), 0x7c00);                    // half way to 65536: infinity
  EXPECT_EQ(F32ToF16(0x1p-25f), 0x0000);                    // half of the smallest: zero is even
  EXPECT_EQ(F32ToF16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(F32ToF16(-0.0f), 0x8000);
}

TEST(QuantTest, BF16RoundsToNearestAndKeepsNaN) {
  EXPECT_EQ(F32ToBF16(1.0f + 0x1p-8f), 0x3f80);      // half way: down to even
  EXPECT_EQ(F32ToBF16(1.0f + 3 * 0x1p-8f), 0x3f82);  // half way: up to even
  // A NaN whose payload lies in the lower half must not become infinity.
  EXPECT_TRUE(std::isnan(BF16ToF32(F32ToBF16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(QuantTest, Q8RefusesWhatItCannotHold) {
  std::vector<float> x(32, 1.0f);
  std::vector<std::byte> block(34);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Quantize(DType::kQ8_0, x, block).code(), StatusCode::kInvalidArgument);
  x[5] = 1e9f;  // the scale would be infinite in f16
  EXPECT_EQ(Quantize(DType::kQ8_0, x, block).code(), StatusCode::kInvalidArgument);
  // 1 / d overflows for a subnormal d; codes must stay in range.
  x.assign(32, 1e-42f);
  ASSERT_TRUE(Quantize(DType::kQ8_0, x, block).ok());
}

TEST(QuantTest, SaysWhenSizesDoNotFit) {
  std::vector<std::byte> bytes(34);
  std::vector<float> x(31);
  EXPECT_EQ(Dequantize(DType::kQ8_0, bytes, x).code(), StatusCode::kInvalidArgument);
  x.resize(64);
  const Status status = Dequantize(DType::kQ8_0, bytes, x);
  EXPECT_THAT(status.message(),
              testing::AllOf(testing::HasSubstr("64 values"), testing::HasSubstr("34 bytes")));
  x.resize(256);
  bytes.resize(144);
  EXPECT_EQ(Quantize(DType::kQ4_K, x, bytes).code(), StatusCode::kUnimplemented);
  bytes.resize(50);
  EXPECT_EQ(Dequantize(DType::kIQ1_S, bytes, x).code(), StatusCode::kUnimplemented);
}

// The checks that the specification gives for the table of IQ2_XXS.
TEST(QuantTest, Iq2XxsGridIsTheOneOfTheFormat) {
  int counts[3] = {};
  for (size_t i = 0; i < kIq2XxsCodes.size(); ++i) {
    if (i > 0) {
      EXPECT_LT(kIq2XxsCodes[i - 1], kIq2XxsCodes[i]);
    }
    int levels = 0;
    for (int j = 0; j < 8; ++j) {
      const int code = kIq2XxsCodes[i] >> (2 * j) & 3;
      ASSERT_LT(code, 3);
      ++counts[code];
      levels += 2 * code + 1;
    }
    EXPECT_EQ(levels % 4, 0);
  }
  EXPECT_THAT(counts, testing::ElementsAre(1127, 556, 365));
}

}  // namespace
}  // namespace ds4
