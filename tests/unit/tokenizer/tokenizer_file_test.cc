// Goal: both file forms give the same tokeniser, and a broken file is refused with its reason.
// Method: the toy vocabulary written as tokenizer.json and as GGUF metadata, whole and spoiled;
// random cuts of the JSON text, none of which may crash.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "engine/gguf/gguf_reader.h"
#include "tests/unit/tokenizer/test_data.h"
#include "tests/unit/tokenizer/toy_tokenizer.h"

namespace ds4 {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kBosText = "<｜begin▁of▁sentence｜>";
constexpr const char* kEosText = "<｜end▁of▁sentence｜>";

Json Split(const std::string& regex) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", regex}}},
          {"behavior", "Isolated"},
          {"invert", false}};
}

// The toy as tokenizer.json; BOS and EOS carry DeepSeek's names there, since they are found by
// text.
Json ToyJson() {
  const TokenizerSpec spec = ToySpec();
  Json root = {{"normalizer", nullptr}, {"added_tokens", Json::array()}};
  root["model"] = {{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}};
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    const auto& [text, kind] = spec.tokens[id];
    if (kind == TokenizerSpec::Kind::kNormal) {
      root["model"]["vocab"][text] = id;
    } else {
      const std::string content = text == "<s>" ? kBosText : text == "</s>" ? kEosText : text;
      root["added_tokens"].push_back({{"id", id}, {"content", content}, {"lstrip", false}});
    }
  }
  for (const auto& [left, right] : spec.merges)
    root["model"]["merges"].push_back(left + " " + right);
  root["pre_tokenizer"]["pretokenizers"] = {
      Split(R"(\p{N}{1,3})"),
      Split("[一-龥\u3040-ゟ゠-ヿ]+"),
      Split("[!\"#$%&'()*+,\\-./"
            ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
            "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
      {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}};
  return root;
}

TEST(TokenizerJsonTest, Toy) {
  const auto tokenizer = Tokenizer::FromJson(ToyJson().dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->bos_id(), kToyBos);
  EXPECT_EQ((*tokenizer)->eos_id(), kToyEos);
  EXPECT_EQ((*tokenizer)->Encode("abab", false), std::vector<int32_t>{kToyAbab});
}

TEST(TokenizerJsonTest, MergesAsPairs) {
  Json root = ToyJson();
  for (Json& merge : root["model"]["merges"]) {
    const std::string text = merge;
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  const auto tokenizer = Tokenizer::FromJson(root.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->Encode("abab", false), std::vector<int32_t>{kToyAbab});
}

TEST(TokenizerJsonTest, Refused) {
  struct Case {
    const char* expected;
    std::function<void(Json*)> spoil;
  };
  const Case cases[] = {
      {"not a JSON object", [](Json* j) { *j = Json::array(); }},
      {"model.type is null", [](Json* j) { j->erase("model"); }},
      {"model.type is \"Unigram\"", [](Json* j) { (*j)["model"]["type"] = "Unigram"; }},
      {"model.vocab is missing", [](Json* j) { (*j)["model"].erase("vocab"); }},
      {"model.merges is missing", [](Json* j) { (*j)["model"]["merges"] = 7; }},
      {"added_tokens is missing", [](Json* j) { j->erase("added_tokens"); }},
      {"pre_tokenizer", [](Json* j) { j->erase("pre_tokenizer"); }},
      {"pre_tokenizer split 0", [](Json* j) { (*j)["pre_tokenizer"]["pretokenizers"][0] = 1; }},
      {"normalizer",
       [](Json* j) {
         (*j)["normalizer"] = {{"type", "NFC"}};
       }},
      {"ignore_merges", [](Json* j) { (*j)["model"]["ignore_merges"] = true; }},
      {"must be an integer below 263",
       [](Json* j) { (*j)["model"]["vocab"]["ab"] = 1'000'000'000; }},
      {"must be an integer below 263", [](Json* j) { (*j)["model"]["vocab"]["ab"] = -1; }},
      {"must be an integer below 263", [](Json* j) { (*j)["model"]["vocab"]["ab"] = "256"; }},
      {"id 257 stands for", [](Json* j) { (*j)["model"]["vocab"]["ab"] = 257; }},
      {"id 261 stands for", [](Json* j) { (*j)["added_tokens"][0]["id"] = 261; }},
      {"without content", [](Json* j) { (*j)["added_tokens"][0] = 3; }},
      {"lstrip", [](Json* j) { (*j)["added_tokens"][0]["lstrip"] = true; }},
      {"no added token", [](Json* j) { (*j)["added_tokens"][1]["content"] = "</s>"; }},
      {"merge 0 is no pair", [](Json* j) { (*j)["model"]["merges"][0] = "ab"; }},
      {"merge 0", [](Json* j) { (*j)["model"]["merges"][0] = "a z"; }},
      {"has id 262", [](Json* j) { (*j)["model"]["vocab"].erase("ab"); }},
  };
  for (const Case& test : cases) {
    Json root = ToyJson();
    test.spoil(&root);
    const auto tokenizer = Tokenizer::FromJson(root.dump());
    ASSERT_FALSE(tokenizer.ok()) << test.expected;
    EXPECT_THAT(tokenizer.status().message(), HasSubstr(test.expected));
  }
}

TEST(TokenizerJsonTest, CutAndFlippedBytesNeverCrash) {
  const std::string json = ToyJson().dump();
  for (size_t size = 0; size < json.size(); size += 17) {
    EXPECT_FALSE(Tokenizer::FromJson(std::string_view(json).substr(0, size)).ok());
  }
  for (size_t pos = 0; pos < json.size(); pos += 7) {
    std::string flipped = json;
    flipped[pos] = static_cast<char>(flipped[pos] ^ 0x04);
    const auto tokenizer = Tokenizer::FromJson(flipped);  // either answer is right, a crash is not
    if (!tokenizer.ok()) continue;
    EXPECT_EQ((*tokenizer)->Decode((*tokenizer)->Encode("abc", true)), "abc");
  }
  EXPECT_EQ(Tokenizer::FromJsonFile("/no/such/tokenizer.json").status().code(),
            StatusCode::kNotFound);
}

// The project's own small model: other ids for the same special texts.
TEST(TokenizerJsonTest, TrainedTokenizer) {
  const auto tokenizer =
      Tokenizer::FromJsonFile(std::string(DS4_SOURCE_DIR) + "/scripts/train/tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = "Hello, 世界! 12345\n\n\tfoo_bar <think>";
  EXPECT_EQ((*tokenizer)->Decode((*tokenizer)->Encode(text, true)), text);
  EXPECT_TRUE((*tokenizer)->SpecialId("<｜Assistant｜>").has_value());
}

// Just enough of a GGUF writer: metadata, no tensors (GGUF version 3, little endian).
class GgufWriter {
 public:
  void Add(const std::string& key, const std::string& value) {
    Header(key, 8);
    Text(value);
  }
  void Add(const std::string& key, uint32_t value) {
    Header(key, 4);
    Raw(value);
  }
  void Add(const std::string& key, const std::vector<std::string>& values) {
    Header(key, 9);
    Raw(uint32_t{8});
    Raw(uint64_t{values.size()});
    for (const std::string& value : values) Text(value);
  }
  void Add(const std::string& key, const std::vector<int32_t>& values) {
    Header(key, 9);
    Raw(uint32_t{5});
    Raw(uint64_t{values.size()});
    for (const int32_t value : values) Raw(value);
  }
  std::string Finish() const {
    GgufWriter head;
    head.bytes_ = "GGUF";
    head.Raw(uint32_t{3});
    head.Raw(uint64_t{0});
    head.Raw(num_keys_);
    std::string file = head.bytes_ + bytes_;
    file.resize((file.size() + 31) / 32 * 32);
    return file;
  }

 private:
  template <typename T>
  void Raw(T value) {
    char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    bytes_.append(bytes, sizeof(T));
  }
  void Text(const std::string& text) {
    Raw(uint64_t{text.size()});
    bytes_ += text;
  }
  void Header(const std::string& key, uint32_t type) {
    Text(key);
    Raw(type);
    ++num_keys_;
  }
  std::string bytes_;
  uint64_t num_keys_ = 0;
};

// The toy's keys, before a case changes them.
struct ToyGguf {
  std::string model = "gpt2";
  std::string pre = "joyai-llm";
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;
  uint32_t eos_id = kToyEos;

  ToyGguf() {
    const TokenizerSpec spec = ToySpec();
    for (const auto& [text, kind] : spec.tokens) {
      tokens.push_back(text);
      types.push_back(kind == TokenizerSpec::Kind::kNormal ? 1 : 3);
    }
    for (const auto& [left, right] : spec.merges) merges.push_back(left + " " + right);
  }
  Result<std::unique_ptr<Tokenizer>> Load() const {
    GgufWriter writer;
    writer.Add("tokenizer.ggml.model", model);
    if (!pre.empty()) writer.Add("tokenizer.ggml.pre", pre);
    writer.Add("tokenizer.ggml.tokens", tokens);
    writer.Add("tokenizer.ggml.token_type", types);
    writer.Add("tokenizer.ggml.merges", merges);
    writer.Add("tokenizer.ggml.bos_token_id", uint32_t{kToyBos});
    writer.Add("tokenizer.ggml.eos_token_id", eos_id);
    const std::string bytes = writer.Finish();
    auto file =
        GgufFile::Parse(std::as_bytes(std::span(bytes)), "toy.gguf", GgufContent::kDirectory);
    if (!file.ok()) return file.status();
    return Tokenizer::FromGguf(**file);
  }
};

TEST(TokenizerGgufTest, SameAsTheSpec) {
  const auto tokenizer = ToyGguf().Load();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto expected = Tokenizer::Create(ToySpec()).value();
  EXPECT_EQ((*tokenizer)->vocab_size(), expected->vocab_size());
  EXPECT_EQ((*tokenizer)->eos_id(), kToyEos);
  for (const char* text : {"abab abc", "<s>aaa</s>", "é"}) {
    EXPECT_EQ((*tokenizer)->Encode(text, true), expected->Encode(text, true)) << text;
  }
}

TEST(TokenizerGgufTest, Refused) {
  struct Case {
    const char* expected;
    std::function<void(ToyGguf*)> spoil;
  };
  const Case cases[] = {
      {"'llama'", [](ToyGguf* g) { g->model = "llama"; }},
      {"'qwen2'", [](ToyGguf* g) { g->pre = "qwen2"; }},
      {"tokenizer.ggml.pre", [](ToyGguf* g) { g->pre.clear(); }},
      {"token_type 262", [](ToyGguf* g) { g->types.pop_back(); }},
      {"token_type[0] is 6", [](ToyGguf* g) { g->types[0] = 6; }},
      {"merges[1] is no pair", [](ToyGguf* g) { g->merges[1] = "aa"; }},
      {"EOS id 263", [](ToyGguf* g) { g->eos_id = 263; }},
      {"outside the vocabulary", [](ToyGguf* g) { g->merges[0] = "a q"; }},
  };
  for (const Case& test : cases) {
    ToyGguf gguf;
    test.spoil(&gguf);
    const auto tokenizer = gguf.Load();
    ASSERT_FALSE(tokenizer.ok()) << test.expected;
    EXPECT_THAT(tokenizer.status().message(), HasSubstr(test.expected));
  }
}

// A token that the file marks as unused is never produced from text, but decodes.
TEST(TokenizerGgufTest, UnusedTokens) {
  ToyGguf gguf;
  gguf.types[kToyLonger] = 5;
  const auto tokenizer = gguf.Load();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->Encode("<s>>", true), (std::vector<int32_t>{kToyBos, '>'}));
  EXPECT_EQ((*tokenizer)->TokenBytes(kToyLonger), "<s>>");
}

}  // namespace
}  // namespace ds4
