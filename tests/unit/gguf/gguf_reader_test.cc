// Goal: a good GGUF file is read right; no bytes whatsoever make the reader crash, read outside the
// file or allocate much. Method: 54 files with known verdicts, every truncation and many byte flips
// of a good one (the sanitizer build sees stray reads), and files of our own writer with one thing
// wrong.
#include "engine/gguf/gguf_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <sstream>

#include "engine/base/strings.h"
#include "engine/gguf/gguf_writer.h"
#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Reads all that a reader can ask of an accepted file, so that a wrong check shows as a stray read.
void TouchEverything(const GgufFile& file) {
  size_t sum = 0;
  for (const GgufKeyText& key : file.KeyTexts()) {
    sum += key.value.size();
    (void)file.GetInt(key.key).ok();
    (void)file.GetFloatArray(key.key).ok();
    (void)file.GetStringArray(key.key).ok();
  }
  for (const TensorInfo& tensor : file.tensors()) {
    for (const std::byte byte : file.data(tensor)) sum += std::to_integer<size_t>(byte);
    ASSERT_EQ(file.FindTensor(tensor.name), &tensor);
  }
  ASSERT_GE(sum, 0u);
}

struct Verdicts {
  bool complete;   // the file as a whole
  bool directory;  // header, metadata and directory only
};

// File name to verdicts of ggml's reader. The tensors_* files end after the directory, so their
// first verdict was made without data too.
std::map<std::string, Verdicts> Manifest() {
  std::map<std::string, Verdicts> manifest;
  std::ifstream in(TestData("gguf_cases/manifest.tsv"));
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    const auto fields = StrSplit(line, '\t');
    manifest[fields.at(0)] = {fields.at(2) == "accept", fields.at(4) == "accept"};
  }
  return manifest;
}

TEST(GgufReaderTest, GivesTheKnownVerdictOnEveryCase) {
  const auto manifest = Manifest();
  ASSERT_EQ(manifest.size(), 54u);
  for (const auto& [name, verdicts] : manifest) {
    const std::string path = TestData("gguf_cases/" + name);
    const auto directory = GgufFile::Open(path, GgufContent::kDirectory);
    EXPECT_EQ(directory.ok(), verdicts.directory) << name << ": " << directory.status();
    if (directory.ok()) TouchEverything(**directory);
    if (name.starts_with("tensors_")) continue;
    const auto complete = GgufFile::Open(path);
    EXPECT_EQ(complete.ok(), verdicts.complete) << name << ": " << complete.status();
    if (complete.ok()) TouchEverything(**complete);
    if (!complete.ok()) {
      EXPECT_THAT(complete.status().message(), HasSubstr(name));
    }
  }
}

TEST(GgufReaderTest, ADirectoryWithoutDataIsNoCompleteFile) {
  const std::string path = TestData("gguf_cases/tensors_success_1.gguf");
  const auto complete = GgufFile::Open(path);
  ASSERT_FALSE(complete.ok());
  EXPECT_THAT(complete.status().message(), HasSubstr("cut short"));
  const auto directory = GgufFile::Open(path, GgufContent::kDirectory);
  ASSERT_TRUE(directory.ok());
  EXPECT_TRUE((*directory)->data((*directory)->tensors()[0]).empty());
}

// A small file with one key of most kinds and two tensors.
class SmallFileTest : public testing::Test {
 protected:
  void SetUp() override {
    GgufWriter writer;
    writer.AddString("general.architecture", "test");
    writer.AddU32("number", 43);
    writer.AddF32("ratio", 0.5f);
    writer.AddBool("flag", true);
    writer.AddI32Array("list", std::vector<int32_t>{0, 4, -128});
    writer.AddF32Array("limits", std::vector<float>{1.5f, 10.0f});
    writer.AddStringArray("words", std::vector<std::string>{"a", "", "\xc4\xa0the"});
    ASSERT_TRUE(writer.AddTensor("matrix", DType::kF32, {3, 2}).ok());
    ASSERT_TRUE(writer.AddTensor("blocks", DType::kQ8_0, {64}).ok());
    ASSERT_TRUE(writer.Begin(folder_ / "small.gguf").ok());
    const float values[6] = {1, 2, 3, 4, 5, 6};
    ASSERT_TRUE(writer.Append("matrix", std::as_bytes(std::span(values))).ok());
    ASSERT_TRUE(writer.Append("blocks", std::vector<std::byte>(68, std::byte{7})).ok());
    ASSERT_TRUE(writer.Finish().ok());
    bytes_ = ReadBytes(folder_ / "small.gguf");
  }

  // The error message of the bytes with `from` (at its first place) replaced by `to`.
  std::string ErrorAfterReplacing(std::string_view from, std::string_view to) {
    const std::string_view all(reinterpret_cast<const char*>(bytes_.data()), bytes_.size());
    const size_t at = all.find(from);
    EXPECT_NE(at, std::string_view::npos);
    EXPECT_EQ(from.size(), to.size());
    std::memcpy(bytes_.data() + at, to.data(), to.size());
    const auto file = GgufFile::Parse(bytes_, "small.gguf");
    return file.ok() ? "accepted" : file.status().message();
  }

  TestFolder folder_;
  std::vector<std::byte> bytes_;
};

TEST_F(SmallFileTest, ReadsBackWhatWasWritten) {
  const auto opened = GgufFile::Open(folder_ / "small.gguf");
  ASSERT_TRUE(opened.ok()) << opened.status();
  const GgufFile& file = **opened;
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(*file.GetString("general.architecture"), "test");
  EXPECT_EQ(*file.GetInt("number"), 43);
  EXPECT_EQ(*file.GetFloat("ratio"), 0.5);
  EXPECT_TRUE(*file.GetBool("flag"));
  EXPECT_THAT(*file.GetIntArray("list"), ElementsAre(0, 4, -128));
  EXPECT_THAT(*file.GetFloatArray("limits"), ElementsAre(1.5, 10.0));
  EXPECT_THAT(*file.GetStringArray("words"), ElementsAre("a", "", "\xc4\xa0the"));
  const TensorInfo* matrix = file.FindTensor("matrix");
  ASSERT_NE(matrix, nullptr);
  EXPECT_THAT(matrix->dims, ElementsAre(3, 2));
  EXPECT_EQ(matrix->offset % 32, 0);
  float last = 0;
  std::memcpy(&last, file.data(*matrix).data() + 20, 4);
  EXPECT_EQ(last, 6.0f);
  EXPECT_EQ(file.data(*file.FindTensor("blocks"))[67], std::byte{7});
  EXPECT_EQ(file.FindTensor("other"), nullptr);
}

TEST_F(SmallFileTest, NamesKeyAndBothTypesOfAWrongGet) {
  const auto opened = GgufFile::Open(folder_ / "small.gguf");
  ASSERT_TRUE(opened.ok());
  const GgufFile& file = **opened;
  EXPECT_EQ(file.GetInt("absent").status().code(), StatusCode::kNotFound);
  const Status text = file.GetInt("general.architecture").status();
  EXPECT_EQ(text.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(text.message(), testing::AllOf(HasSubstr("general.architecture"), HasSubstr("string"),
                                             HasSubstr("integer")));
  EXPECT_THAT(file.GetInt("list").status().message(), HasSubstr("an array of i32"));
  EXPECT_THAT(file.GetIntArray("number").status().message(), HasSubstr("one u32"));
  EXPECT_FALSE(file.GetFloat("number").ok());
  EXPECT_FALSE(file.GetBool("number").ok());
  EXPECT_FALSE(file.GetStringArray("list").ok());
}

TEST_F(SmallFileTest, PrintsEveryKey) {
  const auto opened = GgufFile::Open(folder_ / "small.gguf");
  ASSERT_TRUE(opened.ok());
  const auto texts = (*opened)->KeyTexts();
  ASSERT_EQ(texts.size(), 7u);
  EXPECT_EQ(texts[0].value, "\"test\"");
  EXPECT_EQ(texts[4].type, "array of i32");
  EXPECT_EQ(texts[4].value, "[0, 4, -128]");
}

TEST_F(SmallFileTest, EveryTruncationIsRefused) {
  for (size_t size = 0; size < bytes_.size(); ++size) {
    // A copy of exactly this size, so that a read past it is a read past an allocation.
    const std::vector<std::byte> cut(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(size));
    const auto file = GgufFile::Parse(cut, "cut.gguf");
    ASSERT_FALSE(file.ok()) << size << " of " << bytes_.size() << " bytes";
  }
}

TEST_F(SmallFileTest, SurvivesRandomByteFlips) {
  std::mt19937 random(1);
  int num_accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> damaged = bytes_;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    }
    const auto file = GgufFile::Parse(damaged, "damaged.gguf");
    if (!file.ok()) continue;
    ++num_accepted;
    TouchEverything(**file);
  }
  // Flips in tensor data and in texts leave a right file; both outcomes must have been seen.
  EXPECT_GT(num_accepted, 1000);
  EXPECT_LT(num_accepted, 19000);
}

TEST_F(SmallFileTest, RefusesTwoTensorsOfOneName) {
  EXPECT_THAT(ErrorAfterReplacing("blocks", "matrix"), HasSubstr("matrix appears twice"));
}

TEST_F(SmallFileTest, RefusesTwoKeysOfOneName) {
  EXPECT_THAT(ErrorAfterReplacing("limits", "number"), HasSubstr("number appears twice"));
}

TEST_F(SmallFileTest, SaysWhichTensorsOverlap) {
  // The offset of "blocks" (32) follows its type id, 8.
  EXPECT_THAT(ErrorAfterReplacing(std::string_view("\x08\0\0\0\x20\0\0\0\0\0\0\0", 12),
                                  std::string_view("\x08\0\0\0\0\0\0\0\0\0\0\0", 12)),
              testing::AllOf(HasSubstr("overlap"), HasSubstr("matrix"), HasSubstr("blocks")));
}

TEST_F(SmallFileTest, RefusesACountThatTheFileCannotHold) {
  // Number of keys: 7, after the number of tensors: 2.
  EXPECT_THAT(
      ErrorAfterReplacing(std::string_view("\x02\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0", 16),
                          std::string_view("\x02\0\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\0", 16)),
      testing::AllOf(HasSubstr("number of metadata keys"), HasSubstr("4294967295")));
}

TEST_F(SmallFileTest, ReadsVersion2AndNamesOthers) {
  bytes_[4] = std::byte{2};
  EXPECT_TRUE(GgufFile::Parse(bytes_, "v2.gguf").ok());
  bytes_[4] = std::byte{0};
  bytes_[7] = std::byte{3};
  const auto swapped = GgufFile::Parse(bytes_, "swapped.gguf");
  EXPECT_THAT(swapped.status().message(), HasSubstr("big-endian"));
}

TEST(GgufReaderTest, SaysWhatItCannotOpen) {
  TestFolder folder;
  const auto missing = GgufFile::Open(folder / "none.gguf");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("none.gguf"));
  EXPECT_THAT(GgufFile::Open(folder / "").status().message(), HasSubstr("not a regular file"));
  WriteBytes(folder / "empty.gguf", {});
  EXPECT_FALSE(GgufFile::Open(folder / "empty.gguf").ok());
}

}  // namespace
}  // namespace ds4
