// Goal: safetensors files are read right and hostile ones refused in words.
// Method: files built in memory from a header text, one wrong thing each; truncations and byte
// flips.
#include "engine/gguf/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "engine/base/byte_order.h"
#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The bytes of a file with this header and `data_bytes` zeros behind it.
std::vector<std::byte> MakeFile(const std::string& header, size_t data_bytes) {
  std::vector<std::byte> bytes(8 + header.size() + data_bytes);
  StoreLittleEndian(static_cast<uint64_t>(header.size()), bytes.data());
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  return bytes;
}

std::string ErrorOf(const std::string& header, size_t data_bytes) {
  const auto bytes = MakeFile(header, data_bytes);
  const auto file = SafetensorsFile::Parse(bytes, "x.safetensors");
  return file.ok() ? "accepted" : file.status().message();
}

constexpr char kGood[] = R"({"__metadata__":{"config_json":"{}"},)"
                         R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
                         R"("a":{"dtype":"I64","shape":[],"data_offsets":[0,8]}})";

TEST(SafetensorsTest, ReadsTensorsInFileOrder) {
  const auto bytes = MakeFile(kGood, 20);
  const auto file = SafetensorsFile::Parse(bytes, "x.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->tensors().size(), 2u);
  EXPECT_EQ((*file)->tensors()[0].name, "a");
  const SafetensorInfo* b = (*file)->Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_THAT(b->shape, ElementsAre(2, 3));
  EXPECT_EQ(b->num_elems(), 6);
  EXPECT_EQ((*file)->data(*b).size(), 12u);
  EXPECT_EQ((*file)->data(*b).data(), bytes.data() + bytes.size() - 12);
  EXPECT_EQ((*file)->metadata().at("config_json"), "{}");
}

TEST(SafetensorsTest, NamesWhatIsWrong) {
  const auto entry = [](const std::string& text) { return "{\"t\":" + text + "}"; };
  EXPECT_THAT(ErrorOf("[1]", 0), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf("{\"t\":", 0), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf(entry("{}"), 0), HasSubstr("tensor t needs dtype"));
  EXPECT_THAT(ErrorOf(entry(R"({"dtype":"F9","shape":[1],"data_offsets":[0,4]})"), 4),
              HasSubstr("unknown dtype F9"));
  EXPECT_THAT(ErrorOf(entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), 4),
              HasSubstr("has 4 bytes, dtype F32 and its shape need 8"));
  EXPECT_THAT(ErrorOf(entry(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), 4),
              HasSubstr("dim -1"));
  EXPECT_THAT(ErrorOf(entry(R"({"dtype":"F32","shape":[4294967296,4294967296],)"
                            R"("data_offsets":[0,4]})"),
                      4),
              HasSubstr("too large"));
  EXPECT_THAT(ErrorOf(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), 4),
              HasSubstr("cut short"));
  EXPECT_THAT(ErrorOf(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[8,4]})"), 8),
              HasSubstr("data_offsets [8,4]"));
  EXPECT_THAT(ErrorOf(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                      R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                      2),
              HasSubstr("\"t\" appears twice"));
  EXPECT_THAT(ErrorOf(R"({"s":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                      R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                      2),
              testing::AllOf(HasSubstr("overlap"), HasSubstr("s "), HasSubstr("t ")));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"a":1}})", 0), HasSubstr("metadata a is not text"));
}

TEST(SafetensorsTest, RefusesAHeaderLongerThanTheFile) {
  auto bytes = MakeFile(kGood, 20);
  StoreLittleEndian(~uint64_t{0}, bytes.data());
  EXPECT_FALSE(SafetensorsFile::Parse(bytes, "x").ok());
}

TEST(SafetensorsTest, SurvivesTruncationAndFlips) {
  const auto good = MakeFile(kGood, 20);
  for (size_t size = 0; size < good.size(); ++size) {
    const std::vector<std::byte> cut(good.begin(), good.begin() + static_cast<ptrdiff_t>(size));
    ASSERT_FALSE(SafetensorsFile::Parse(cut, "cut").ok()) << size;
  }
  std::mt19937 random(2);
  for (int round = 0; round < 20000; ++round) {
    auto damaged = good;
    damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    const auto file = SafetensorsFile::Parse(damaged, "damaged");
    if (!file.ok()) continue;
    for (const SafetensorInfo& tensor : (*file)->tensors()) {
      const auto data = (*file)->data(tensor);
      ASSERT_LE(data.data() + data.size(), damaged.data() + damaged.size());
    }
  }
}

}  // namespace
}  // namespace ds4
