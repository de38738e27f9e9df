// Goal: ds4-gguf does what its help says: inspect shows a file, check finds damage and says where,
// convert makes a file that check accepts; wrong usage and wrong files have their own exit status.
// Method: the program itself, run by the shell; damage is done to bytes of a converted golden
// model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine/gguf/gguf_reader.h"
#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Outcome {
  int status;
  std::string text;  // standard output and error together
};

Outcome RunTool(const std::string& arguments) {
  const std::string command = std::string(DS4_BINARY_DIR) + "/bin/ds4-gguf " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {-1, "popen failed"};
  Outcome outcome{0, ""};
  std::array<char, 4096> buffer;
  for (size_t n = 0; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    outcome.text.append(buffer.data(), n);
  }
  const int raw = pclose(pipe);
  outcome.status = WIFEXITED(raw) ? WEXITSTATUS(raw) : -1;
  return outcome;
}

class GgufToolTest : public testing::Test {
 protected:
  void SetUp() override {
    const Outcome convert =
        RunTool("convert --in " + std::string(DS4_SOURCE_DIR) +
                "/tests/golden/tiny_v4.safetensors --type q8_0 --name Tiny --out " + path_);
    ASSERT_EQ(convert.status, 0) << convert.text;
    ASSERT_THAT(convert.text, AllOf(HasSubstr("[210/210]"), HasSubstr("\nok\n")));
  }

  // Overwrites the tensor's byte and checks the file.
  Outcome CheckAfterDamage(const std::string& tensor, int64_t byte, int value) {
    int64_t offset = 0;
    {
      const auto file = GgufFile::Open(path_);
      EXPECT_TRUE(file.ok());
      offset = (*file)->FindTensor(tensor)->offset + byte;
    }
    auto bytes = ReadBytes(path_);
    bytes[static_cast<size_t>(offset)] = static_cast<std::byte>(value);
    WriteBytes(path_, bytes);
    return RunTool("check " + path_);
  }

  TestFolder folder_;
  const std::string path_ = folder_ / "tiny.gguf";
};

TEST_F(GgufToolTest, InspectShowsMetadataTensorsAndTotals) {
  const Outcome outcome = RunTool("inspect " + path_);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("general.name"), HasSubstr("\"Tiny\""),
                                  HasSubstr("blk.3.ffn_down_exps.weight"), HasSubstr("[64, 64, 8]"),
                                  HasSubstr("Totals by type"), HasSubstr("8.50 bits each")));
}

TEST_F(GgufToolTest, InspectPrintsJson) {
  const Outcome outcome = RunTool("inspect --json " + path_);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.text,
              AllOf(testing::StartsWith("{"), HasSubstr("\"name\": \"output.weight\"")));
}

TEST_F(GgufToolTest, CheckFindsABadScale) {
  // Block 2 of Q8_0: bytes 68 and 69 are its scale; 0x7c in the upper one makes it infinite or NaN.
  const Outcome outcome = CheckAfterDamage("blk.1.attn_q_b.weight", 2 * 34 + 1, 0x7c);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("blk.1.attn_q_b.weight"), HasSubstr("block 2 of Q8_0"),
                                  HasSubstr("1 problem\n")));
}

TEST_F(GgufToolTest, CheckFindsAnExpertThatDoesNotExist) {
  const Outcome outcome = CheckAfterDamage("blk.0.ffn_gate_tid2eid.weight", 4 * 9, 8);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.text, HasSubstr("expert 8 at index 9, there are 8"));
}

TEST_F(GgufToolTest, CheckFindsAMissingTensor) {
  auto bytes = ReadBytes(path_);
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  bytes[all.find("blk.4.attn_sinks")] = std::byte{'B'};
  WriteBytes(path_, bytes);
  const Outcome outcome = RunTool("check " + path_);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("tensor blk.4.attn_sinks.weight is missing"),
                                  HasSubstr("note: tensor Blk.4.attn_sinks.weight is not used")));
}

TEST_F(GgufToolTest, SaysWhatIsWrongWithFileOrUsage) {
  const Outcome missing = RunTool("check " + (folder_ / "none.gguf"));
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.text, HasSubstr("none.gguf: No such file"));
  EXPECT_EQ(RunTool("").status, 2);
  EXPECT_EQ(RunTool("check").status, 2);
  EXPECT_EQ(RunTool("convert --in a --out b --type q3").status, 2);
  const Outcome help = RunTool("--help");
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.text, HasSubstr("ds4-gguf convert --in model.safetensors"));
}

}  // namespace
}  // namespace ds4
