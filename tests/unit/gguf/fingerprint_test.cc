// Goal: equal files have equal digests, any changed byte of a small file changes it, and a large
// file is told apart by its sampled windows. Method: small files written here; the large one is
// sparse (1 GiB of holes, nothing on the disk).
#include "engine/gguf/fingerprint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "engine/gguf/gguf_writer.h"
#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

std::string DigestOf(const std::string& path) {
  const auto file = GgufFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  const auto digest = ModelDigest(**file);
  EXPECT_TRUE(digest.ok()) << digest.status();
  return *digest;
}

void WriteSmall(const std::string& path, const std::string& name, std::byte fill) {
  GgufWriter writer;
  writer.AddString("general.name", name);
  ASSERT_TRUE(writer.AddTensor("t", DType::kI8, {100}).ok());
  ASSERT_TRUE(writer.Begin(path).ok());
  ASSERT_TRUE(writer.Append("t", std::vector<std::byte>(100, fill)).ok());
  ASSERT_TRUE(writer.Finish().ok());
}

TEST(FingerprintTest, SmallFilesCountEveryByte) {
  TestFolder folder;
  const std::string path = folder / "a.gguf";
  WriteSmall(path, "one", std::byte{1});
  const std::string digest = DigestOf(path);
  EXPECT_THAT(digest, testing::StartsWith("full-"));
  EXPECT_EQ(digest.size(), 5u + 32u);
  std::filesystem::copy_file(path, folder / "b.gguf");
  EXPECT_EQ(DigestOf(folder / "b.gguf"), digest) << "the path must not count";
  WriteSmall(path, "two", std::byte{1});
  EXPECT_NE(DigestOf(path), digest) << "metadata counts";
  WriteSmall(path, "one", std::byte{1});
  auto bytes = ReadBytes(path);
  bytes[bytes.size() - 32 + 3] = std::byte{2};  // the last byte of the tensor
  WriteBytes(path, bytes);
  EXPECT_NE(DigestOf(path), digest) << "data counts";
}

// The directory of one I8 tensor of 1 GiB + 1000 bytes; its data is a hole.
void WriteSparse(const std::string& path) {
  constexpr int64_t kBytes = (int64_t{1} << 30) + 1000;
  GgufWriter writer;
  ASSERT_TRUE(writer.AddTensor("t", DType::kI8, {32}).ok());
  ASSERT_TRUE(writer.Begin(path).ok());
  ASSERT_TRUE(writer.Append("t", std::vector<std::byte>(32)).ok());
  ASSERT_TRUE(writer.Finish().ok());
  auto bytes = ReadBytes(path);
  // Header 24 bytes, name 8 + 1, number of dims 4: the dim.
  for (int i = 0; i < 8; ++i)
    bytes[37 + static_cast<size_t>(i)] = std::byte(kBytes >> (8 * i) & 255);
  WriteBytes(path, bytes);
  std::filesystem::resize_file(path, 64 + static_cast<uintmax_t>((kBytes + 31) / 32 * 32));
}

void Poke(const std::string& path, int64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(offset);
  file.put('x');
  ASSERT_TRUE(file.good());
}

TEST(FingerprintTest, LargeFilesAreSampled) {
  TestFolder folder;
  const std::string path = folder / "large.gguf";
  WriteSparse(path);
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const TensorInfo& tensor = (*file)->tensors()[0];
  const std::string digest = DigestOf(path);
  EXPECT_THAT(digest, testing::StartsWith("sampled-"));
  Poke(path, tensor.offset + (int64_t{16} << 20) + (64 << 10));
  EXPECT_EQ(DigestOf(path), digest) << "between the windows";
  Poke(path, tensor.offset + tensor.size_bytes - 1);
  const std::string changed = DigestOf(path);
  EXPECT_NE(changed, digest) << "the last byte is in a window";
  Poke(path, tensor.offset + (int64_t{32} << 20));
  EXPECT_NE(DigestOf(path), changed) << "so is one at a multiple of 16 MiB";
}

TEST(FingerprintTest, ADirectoryHasNoDigest) {
  const auto file =
      GgufFile::Open(TestData("gguf_cases/tensors_success_1.gguf"), GgufContent::kDirectory);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(ModelDigest(**file).status().code(), StatusCode::kDataLoss);
}

}  // namespace
}  // namespace ds4
