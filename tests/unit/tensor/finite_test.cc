// Goal: a scale that is not finite is found in every format, wherever in the block it lies.
// Method: good blocks of ggml pass; then one scale of the second block is overwritten.
#include "engine/tensor/finite.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace ds4 {
namespace {

std::vector<std::byte> GoodBlocks(const std::string& type) {
  std::ifstream in(std::string(DS4_SOURCE_DIR) + "/tests/data/quant/" + type + ".q",
                   std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(chars));
  EXPECT_FALSE(bytes.empty()) << type;
  return {bytes.begin(), bytes.end()};
}

struct Damage {
  const char* type;
  size_t byte;  // the scale's high byte in its block
  int value;    // makes it infinite or NaN
};

class FiniteTest : public testing::TestWithParam<Damage> {};

TEST_P(FiniteTest, FindsTheDamagedBlock) {
  const Damage damage = GetParam();
  const DType dtype = *DTypeFromName(damage.type);
  auto bytes = GoodBlocks(damage.type);
  ASSERT_TRUE(CheckFinite(dtype, bytes).ok());
  const auto block_bytes = static_cast<size_t>(Info(dtype).block_bytes);
  bytes[block_bytes + damage.byte] = static_cast<std::byte>(damage.value);
  if (dtype == DType::kQ8_K) bytes[block_bytes + 2] = std::byte{0x80};
  if (dtype == DType::kBF16) bytes[block_bytes] = std::byte{0x80};
  const Status status = CheckFinite(dtype, bytes);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), testing::HasSubstr("block 1 "));
}

INSTANTIATE_TEST_SUITE_P(
    Types, FiniteTest,
    testing::Values(Damage{"f16", 1, 0x7c}, Damage{"bf16", 1, 0x7f}, Damage{"q4_0", 1, 0x7c},
                    Damage{"q8_0", 1, 0xfc}, Damage{"q2_k", 81, 0x7c}, Damage{"q2_k", 83, 0x7c},
                    Damage{"q3_k", 109, 0x7c}, Damage{"q4_k", 1, 0x7c}, Damage{"q4_k", 3, 0x7c},
                    Damage{"q5_k", 3, 0xfc}, Damage{"q6_k", 209, 0x7c}, Damage{"q8_k", 3, 0x7f},
                    Damage{"iq2_xxs", 1, 0x7c}, Damage{"iq4_nl", 1, 0x7c},
                    Damage{"iq4_xs", 1, 0x7c}, Damage{"mxfp4", 0, 0xff}, Damage{"nvfp4", 3, 0x7f}));

TEST(FiniteSizesTest, IntegersAlwaysPassAndPartsOfBlocksDoNot) {
  const std::vector<std::byte> bytes(8, std::byte{0xff});
  EXPECT_TRUE(CheckFinite(DType::kI32, bytes).ok());
  EXPECT_EQ(CheckFinite(DType::kQ8_0, bytes).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ds4
