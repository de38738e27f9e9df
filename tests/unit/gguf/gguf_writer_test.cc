// Goal: the writer refuses what the reader would, and a file appears only when it is complete.
// Method: wrong calls one by one; what the reader makes of right ones is in gguf_reader_test.cc.
#include "engine/gguf/gguf_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

using testing::HasSubstr;

TEST(GgufWriterTest, RefusesShapesThatDoNotFitTheFormat) {
  GgufWriter writer;
  EXPECT_THAT(writer.AddTensor("a", DType::kQ8_0, {33}).message(), HasSubstr("multiple of 32"));
  EXPECT_FALSE(writer.AddTensor("a", DType::kF32, {}).ok());
  EXPECT_FALSE(writer.AddTensor("a", DType::kF32, {4, 0}).ok());
  EXPECT_FALSE(writer.AddTensor("a", DType::kF32, {1, 1, 1, 1, 1}).ok());
  EXPECT_FALSE(writer.AddTensor("a", DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}).ok());
  EXPECT_FALSE(writer.AddTensor(std::string(64, 'x'), DType::kF32, {1}).ok());
  EXPECT_TRUE(writer.AddTensor(std::string(63, 'x'), DType::kF32, {1}).ok());
  EXPECT_THAT(writer.AddTensor(std::string(63, 'x'), DType::kF32, {1}).message(),
              HasSubstr("twice"));
}

TEST(GgufWriterTest, WantsTheDataInOrderAndWhole) {
  TestFolder folder;
  GgufWriter writer;
  ASSERT_TRUE(writer.AddTensor("first", DType::kF32, {2}).ok());
  ASSERT_TRUE(writer.AddTensor("second", DType::kF32, {1}).ok());
  ASSERT_TRUE(writer.Begin(folder / "out.gguf").ok());
  const std::vector<std::byte> word(4);
  EXPECT_THAT(writer.Append("second", word).message(), HasSubstr("first was due"));
  ASSERT_TRUE(writer.Append("first", word).ok());
  EXPECT_THAT(writer.Append("first", std::vector<std::byte>(8)).message(),
              HasSubstr("12 bytes, it has room for 8"));
  EXPECT_THAT(writer.Finish().message(), HasSubstr("first got 4 of 8 bytes"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out.gguf"));
}

TEST(GgufWriterTest, AnUnfinishedFileLeavesTheOldOneAndNoRest) {
  TestFolder folder;
  const std::vector<std::byte> old(3, std::byte{1});
  WriteBytes(folder / "out.gguf", old);
  {
    GgufWriter writer;
    ASSERT_TRUE(writer.AddTensor("t", DType::kF32, {1}).ok());
    ASSERT_TRUE(writer.Begin(folder / "out.gguf").ok());
    EXPECT_EQ(folder.NumFiles(), 2u);
  }
  EXPECT_EQ(folder.NumFiles(), 1u);
  EXPECT_EQ(ReadBytes(folder / "out.gguf"), old);
}

TEST(GgufWriterTest, SaysWhichFolderIsMissing) {
  TestFolder folder;
  GgufWriter writer;
  EXPECT_THAT(writer.Begin(folder / "no/such/out.gguf").message(), HasSubstr("no/such/out.gguf"));
}

}  // namespace
}  // namespace ds4
