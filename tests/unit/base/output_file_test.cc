// Goal: a file appears whole or not at all, and a mapping shows its bytes.
// Method: files in a folder of the test; the mapping reads back what was written.
#include "engine/base/output_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "engine/base/mapped_file.h"
#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

TEST(OutputFileTest, AppearsOnCommitWithAllItsBytes) {
  TestFolder folder;
  // More than the buffer, in pieces that do not divide it.
  std::vector<std::byte> piece(300'001);
  for (size_t i = 0; i < piece.size(); ++i) piece[i] = static_cast<std::byte>(i * 7);
  auto file = OutputFile::Create(folder / "a");
  ASSERT_TRUE(file.ok()) << file.status();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(file->Write(piece).ok());
  EXPECT_EQ(file->bytes_written(), 3'000'010);
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(folder.NumFiles(), 1u);
  const auto mapped = MappedFile::Open(folder / "a");
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  ASSERT_EQ(mapped->bytes().size(), 3'000'010u);
  Prefetch(mapped->bytes().subspan(12345, 100));
  for (size_t i = 0; i < 10; ++i) {
    const auto part = mapped->bytes().subspan(i * piece.size(), piece.size());
    ASSERT_TRUE(std::equal(part.begin(), part.end(), piece.begin())) << "piece " << i;
  }
}

TEST(OutputFileTest, LeavesNothingWithoutCommit) {
  TestFolder folder;
  {
    auto file = OutputFile::Create(folder / "a");
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->Write(std::vector<std::byte>(10)).ok());
    const OutputFile moved = std::move(file).value();  // the moved-from one must not remove it
    EXPECT_EQ(folder.NumFiles(), 1u);
  }
  EXPECT_EQ(folder.NumFiles(), 0u);
}

TEST(MappedFileTest, AnEmptyFileHasNoBytesAndAMoveKeepsTheMapping) {
  TestFolder folder;
  WriteBytes(folder / "empty", {});
  const auto empty = MappedFile::Open(folder / "empty");
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->bytes().empty());
  WriteBytes(folder / "one", std::vector<std::byte>{std::byte{9}});
  auto one = MappedFile::Open(folder / "one");
  ASSERT_TRUE(one.ok());
  MappedFile target;
  target = std::move(one).value();
  EXPECT_EQ(target.bytes()[0], std::byte{9});
}

TEST(MappedFileTest, NamesThePathOfAFailure) {
  TestFolder folder;
  const Status missing = MappedFile::Open(folder / "none").status();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), testing::HasSubstr("none"));
  EXPECT_EQ(MappedFile::Open(folder / "").status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ds4
