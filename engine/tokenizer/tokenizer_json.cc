// Reads Hugging Face's tokenizer.json into a TokenizerSpec, and refuses what we would not do the
// same.
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "engine/base/strings.h"
#include "engine/tokenizer/tokenizer.h"

namespace ds4 {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kBosText = "<｜begin▁of▁sentence｜>";
constexpr std::string_view kEosText = "<｜end▁of▁sentence｜>";

// What pre_tokenizer.cc does, as the file writes it.
constexpr std::string_view kPatterns[] = {
    R"(\p{N}{1,3})",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./"
    ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
    "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
};

// The member, or null when `object` is no object or has no such member.
const Json& Member(const Json& object, const char* key) {
  static const Json null;
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

bool IsTrue(const Json& object, const char* key) {
  const Json& value = Member(object, key);
  return value.is_boolean() && value.get<bool>();
}

Status Unsupported(std::string_view what) {
  return UnimplementedError(
      StrCat("tokenizer.json: ", what, "; only DeepSeek's byte-level BPE is known"));
}

Status CheckPreTokenizer(const Json& root) {
  const Json& passes = Member(Member(root, "pre_tokenizer"), "pretokenizers");
  if (!passes.is_array() || passes.size() != std::size(kPatterns) + 1) {
    return Unsupported("pre_tokenizer is not a sequence of three splits and ByteLevel");
  }
  for (size_t i = 0; i < std::size(kPatterns); ++i) {
    const Json& regex = Member(Member(passes[i], "pattern"), "Regex");
    if (!regex.is_string() || regex.get_ref<const std::string&>() != kPatterns[i] ||
        Member(passes[i], "behavior") != "Isolated" || IsTrue(passes[i], "invert")) {
      return Unsupported(
          StrCat("pre_tokenizer split ", i, " is another than '", kPatterns[i], "'"));
    }
  }
  const Json& last = passes[std::size(kPatterns)];
  if (Member(last, "type") != "ByteLevel" || IsTrue(last, "add_prefix_space") ||
      IsTrue(last, "use_regex")) {
    return Unsupported("the last pre_tokenizer pass is no plain ByteLevel");
  }
  return OkStatus();
}

Status CheckModel(const Json& model) {
  if (Member(model, "type") != "BPE") {
    return Unsupported(StrCat("model.type is ", Member(model, "type").dump(), ", not BPE"));
  }
  for (const char* key : {"dropout", "unk_token"}) {
    if (!Member(model, key).is_null()) return Unsupported(StrCat("model.", key, " is set"));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = Member(model, key);
    if (!value.is_null() && value != "") return Unsupported(StrCat("model.", key, " is set"));
  }
  for (const char* key : {"byte_fallback", "ignore_merges"}) {
    if (IsTrue(model, key)) return Unsupported(StrCat("model.", key, " is true"));
  }
  return OkStatus();
}

Status CheckNormalizer(const Json& root) {
  const Json& normalizer = Member(root, "normalizer");
  const Json& steps = Member(normalizer, "normalizers");
  const bool is_empty = normalizer.is_null() || (steps.is_array() && steps.empty());
  return is_empty ? OkStatus() : Unsupported("a normalizer is set");
}

// Ids are dense, so none can reach `max_tokens`, the number of entries in the file.
Status AddToken(const std::string& text, const Json& id_value, TokenizerSpec::Kind kind,
                size_t max_tokens, TokenizerSpec* spec) {
  const int64_t id = id_value.is_number_integer() ? id_value.get<int64_t>() : -1;
  if (id < 0 || id >= static_cast<int64_t>(max_tokens)) {
    return InvalidArgumentError(StrCat("tokenizer.json: token '", text, "' has id ",
                                       id_value.dump(), ", must be an integer below ", max_tokens));
  }
  const size_t index = static_cast<size_t>(id);
  if (index >= spec->tokens.size()) spec->tokens.resize(index + 1);
  TokenizerSpec::Token& token = spec->tokens[index];
  // The added list repeats tokens of the vocabulary to mark them special.
  if (token.kind != TokenizerSpec::Kind::kMissing && (token.text != text || token.kind == kind)) {
    return InvalidArgumentError(
        StrCat("tokenizer.json: id ", id, " stands for '", token.text, "' and for '", text, "'"));
  }
  token = {text, kind};
  return OkStatus();
}

Status ReadTokens(const Json& root, TokenizerSpec* spec) {
  const Json& vocab = Member(Member(root, "model"), "vocab");
  if (!vocab.is_object()) return InvalidArgumentError("tokenizer.json: model.vocab is missing");
  const Json& added = Member(root, "added_tokens");
  if (!added.is_array()) return InvalidArgumentError("tokenizer.json: added_tokens is missing");
  const size_t max_tokens = vocab.size() + added.size();
  for (const auto& [text, id] : vocab.items()) {
    RETURN_IF_ERROR(AddToken(text, id, TokenizerSpec::Kind::kNormal, max_tokens, spec));
  }
  for (const Json& token : added) {
    const Json& content = Member(token, "content");
    if (!content.is_string()) {
      return InvalidArgumentError(
          StrCat("tokenizer.json: added token without content: ", token.dump()));
    }
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      if (IsTrue(token, key))
        return Unsupported(StrCat("added token ", content.dump(), " has ", key));
    }
    RETURN_IF_ERROR(AddToken(content.get<std::string>(), Member(token, "id"),
                             TokenizerSpec::Kind::kSpecial, max_tokens, spec));
  }
  return OkStatus();
}

// A merge is "left right" or ["left", "right"].
Status ReadMerges(const Json& root, TokenizerSpec* spec) {
  const Json& merges = Member(Member(root, "model"), "merges");
  if (!merges.is_array()) return InvalidArgumentError("tokenizer.json: model.merges is missing");
  spec->merges.reserve(merges.size());
  for (const Json& merge : merges) {
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos) {
        spec->merges.emplace_back(text.substr(0, space), text.substr(space + 1));
        continue;
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      spec->merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    return InvalidArgumentError(
        StrCat("tokenizer.json: merge ", spec->merges.size(), " is no pair: ", merge.dump()));
  }
  return OkStatus();
}

int64_t FindSpecial(const TokenizerSpec& spec, std::string_view text) {
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (spec.tokens[id].kind == TokenizerSpec::Kind::kSpecial && spec.tokens[id].text == text) {
      return static_cast<int64_t>(id);
    }
  }
  return -1;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(std::string_view json) {
  const Json root = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return InvalidArgumentError(
        StrCat("tokenizer.json: ", json.size(), " bytes are not a JSON object"));
  }
  RETURN_IF_ERROR(CheckModel(Member(root, "model")));
  RETURN_IF_ERROR(CheckNormalizer(root));
  RETURN_IF_ERROR(CheckPreTokenizer(root));
  TokenizerSpec spec;
  RETURN_IF_ERROR(ReadTokens(root, &spec));
  RETURN_IF_ERROR(ReadMerges(root, &spec));
  spec.bos_id = FindSpecial(spec, kBosText);
  spec.eos_id = FindSpecial(spec, kEosText);
  for (const auto& [id, text] :
       {std::pair(spec.bos_id, kBosText), std::pair(spec.eos_id, kEosText)}) {
    if (id < 0) return InvalidArgumentError(StrCat("tokenizer.json: no added token '", text, "'"));
  }
  return Create(spec);
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::FromJsonFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFoundError(StrCat("tokenizer: cannot open ", path));
  const std::string json((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return DataLossError(StrCat("tokenizer: cannot read ", path));
  auto tokenizer = FromJson(json);
  if (!tokenizer.ok()) return tokenizer.status().WithContext(path);
  return tokenizer;
}

}  // namespace ds4
