// Goal: the same ids as DeepSeek's own tokeniser. Method: 10,207 texts encoded by Hugging Face's
// Rust library with the V4 vocabulary (tests/data/tokenizer/README.md), with special texts
// recognised and as plain text; each must give the same ids here, and the ids must give the text
// back.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/unit/tokenizer/test_data.h"

namespace ds4 {
namespace {

using Json = nlohmann::json;

TEST(TokenizerGoldenTest, AllCasesMatch) {
  const Tokenizer& tokenizer = V4Tokenizer();
  std::ifstream file(TokenizerDataPath("deepseek_v4.golden.jsonl"));
  int num_cases = 0;
  int num_failed = 0;
  for (std::string line; std::getline(file, line);) {
    const Json test = Json::parse(line);
    const std::string text = test["text"];
    const std::vector<int32_t> ids = test["ids"];
    const std::vector<int32_t> ids_plain =
        test.contains("ids_plain") ? test["ids_plain"] : test["ids"];
    const bool is_same = tokenizer.Encode(text, true) == ids &&
                         tokenizer.Encode(text, false) == ids_plain &&
                         tokenizer.Decode(ids) == text;
    ++num_cases;
    if (is_same) continue;
    if (++num_failed <= 20) {
      ADD_FAILURE() << line << "\nhere " << Json(tokenizer.Encode(text, true)) << "\nplain "
                    << Json(tokenizer.Encode(text, false));
    }
  }
  EXPECT_EQ(num_cases, 10207);
  EXPECT_EQ(num_failed, 0);
}

TEST(TokenizerGoldenTest, V4IdsOfSpecialTokens) {
  const Tokenizer& tokenizer = V4Tokenizer();
  EXPECT_EQ(tokenizer.vocab_size(), 129280);
  EXPECT_EQ(tokenizer.bos_id(), 0);
  EXPECT_EQ(tokenizer.eos_id(), 1);
  const std::map<std::string, int32_t> expected = {
      {"<｜User｜>", 128803}, {"<｜Assistant｜>", 128804}, {"<think>", 128821},
      {"</think>", 128822},   {"｜DSML｜", 128825},        {"<｜title｜>", 128836}};
  for (const auto& [text, id] : expected) {
    EXPECT_EQ(tokenizer.SpecialId(text), id) << text;
    EXPECT_TRUE(tokenizer.IsSpecial(id));
    EXPECT_EQ(tokenizer.TokenBytes(id), text);
  }
}

}  // namespace
}  // namespace ds4
