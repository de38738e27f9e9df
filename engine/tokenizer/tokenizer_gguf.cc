// Reads the tokenizer.ggml.* keys of a GGUF file into a TokenizerSpec.
#include "engine/base/strings.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/tokenizer/tokenizer.h"

namespace ds4 {
namespace {

// tokenizer.ggml.token_type, as llama.cpp numbers them.
enum TokenType : int64_t {
  kTypeNormal = 1,
  kTypeControl = 3,
  kTypeUserDefined = 4,
  kTypeUnused = 5
};

Result<TokenizerSpec::Kind> KindOf(int64_t type, size_t id) {
  switch (type) {
    case kTypeNormal:
      return TokenizerSpec::Kind::kNormal;
    case kTypeControl:
    case kTypeUserDefined:
      return TokenizerSpec::Kind::kSpecial;
    case kTypeUnused:
      return TokenizerSpec::Kind::kUnused;
    default:
      return UnimplementedError(
          StrCat("tokenizer.ggml.token_type[", id, "] is ", type, ", known are 1, 3, 4 and 5"));
  }
}

// "joyai-llm" is the name that V4 files carry for the rules of DeepSeek V3.
Status CheckNames(const GgufFile& file) {
  ASSIGN_OR_RETURN(const std::string model, file.GetString("tokenizer.ggml.model"));
  ASSIGN_OR_RETURN(const std::string pre, file.GetString("tokenizer.ggml.pre"));
  if (model != "gpt2" || (pre != "joyai-llm" && pre != "deepseek-v3")) {
    return UnimplementedError(StrCat("tokenizer.ggml.model is '", model, "' and .pre is '", pre,
                                     "', known are 'gpt2' with 'joyai-llm' or 'deepseek-v3'"));
  }
  return OkStatus();
}

Status ReadTokens(const GgufFile& file, TokenizerSpec* spec) {
  ASSIGN_OR_RETURN(std::vector<std::string> texts, file.GetStringArray("tokenizer.ggml.tokens"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> types, file.GetIntArray("tokenizer.ggml.token_type"));
  if (texts.size() != types.size()) {
    return InvalidArgumentError(StrCat("tokenizer.ggml.tokens has ", texts.size(),
                                       " entries and token_type ", types.size()));
  }
  spec->tokens.reserve(texts.size());
  for (size_t id = 0; id < texts.size(); ++id) {
    ASSIGN_OR_RETURN(const TokenizerSpec::Kind kind, KindOf(types[id], id));
    spec->tokens.push_back({std::move(texts[id]), kind});
  }
  return OkStatus();
}

Status ReadMerges(const GgufFile& file, TokenizerSpec* spec) {
  ASSIGN_OR_RETURN(const std::vector<std::string> merges,
                   file.GetStringArray("tokenizer.ggml.merges"));
  spec->merges.reserve(merges.size());
  for (const std::string& merge : merges) {
    const size_t space = merge.find(' ');
    if (space == std::string::npos) {
      return InvalidArgumentError(
          StrCat("tokenizer.ggml.merges[", spec->merges.size(), "] is no pair: '", merge, "'"));
    }
    spec->merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::FromGguf(const GgufFile& file) {
  RETURN_IF_ERROR(CheckNames(file));
  TokenizerSpec spec;
  RETURN_IF_ERROR(ReadTokens(file, &spec));
  RETURN_IF_ERROR(ReadMerges(file, &spec));
  ASSIGN_OR_RETURN(spec.bos_id, file.GetInt("tokenizer.ggml.bos_token_id"));
  ASSIGN_OR_RETURN(spec.eos_id, file.GetInt("tokenizer.ggml.eos_token_id"));
  return Create(spec);
}

}  // namespace ds4
