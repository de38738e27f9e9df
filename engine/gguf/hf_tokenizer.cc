#include "engine/gguf/hf_tokenizer.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/base/mapped_file.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

using Json = nlohmann::json;

constexpr char kBosText[] = "<｜begin▁of▁sentence｜>";
constexpr char kEosText[] = "<｜end▁of▁sentence｜>";
constexpr char kPadText[] = "<｜▁pad▁｜>";
// Token types of the GGUF format.
constexpr int32_t kNormal = 1;
constexpr int32_t kControl = 3;
constexpr int32_t kUserDefined = 4;

class TokenTable {
 public:
  explicit TokenTable(int64_t size)
      : texts_(static_cast<size_t>(size)), types_(static_cast<size_t>(size), 0) {}

  // An added token may repeat an entry of the vocabulary: same id, same text.
  Status Set(const std::string& text, const Json& id_json, int32_t type) {
    if (!id_json.is_number_unsigned() || id_json.get<uint64_t>() >= texts_.size()) {
      return InvalidArgumentError(StrCat("token \"", text, "\" has id ", id_json.dump(),
                                         ", the configuration's vocabulary has ", texts_.size()));
    }
    const auto id = id_json.get<size_t>();
    const auto [it, is_new] = ids_.emplace(text, id);
    if (it->second != id || (types_[id] != 0 && texts_[id] != text)) {
      return InvalidArgumentError(StrCat("token \"", text, "\" with id ", id, " clashes with \"",
                                         texts_[it->second != id ? it->second : id], "\", id ",
                                         it->second));
    }
    texts_[id] = text;
    types_[id] = type;
    return OkStatus();
  }
  Status CheckDense() const {
    for (size_t id = 0; id < types_.size(); ++id) {
      if (types_[id] != 0) continue;
      return InvalidArgumentError(
          StrCat("no token has id ", id, ", the configuration's vocabulary has ", types_.size()));
    }
    return OkStatus();
  }
  std::optional<size_t> IdOf(const std::string& text) const {
    const auto it = ids_.find(text);
    return it == ids_.end() ? std::nullopt : std::optional(it->second);
  }
  const std::vector<std::string>& texts() const { return texts_; }
  const std::vector<int32_t>& types() const { return types_; }

 private:
  std::vector<std::string> texts_;
  std::vector<int32_t> types_;  // 0: no token yet
  std::unordered_map<std::string, size_t> ids_;
};

// The member if it has the wanted type, else an error with its name.
Result<const Json*> Member(const Json& object, const char* key, Json::value_t type) {
  const auto it = object.find(key);
  if (!object.is_object() || it == object.end() || it->type() != type) {
    return InvalidArgumentError(StrCat("\"", key, "\" is missing or has the wrong type"));
  }
  return &*it;
}

Status ReadTokens(const Json& json, const Json& model, TokenTable* table) {
  ASSIGN_OR_RETURN(const Json* vocab, Member(model, "vocab", Json::value_t::object));
  for (const auto& [text, id] : vocab->items()) RETURN_IF_ERROR(table->Set(text, id, kNormal));
  ASSIGN_OR_RETURN(const Json* added, Member(json, "added_tokens", Json::value_t::array));
  for (const Json& token : *added) {
    ASSIGN_OR_RETURN(const Json* content, Member(token, "content", Json::value_t::string));
    ASSIGN_OR_RETURN(const Json* special, Member(token, "special", Json::value_t::boolean));
    if (!token.contains("id")) return InvalidArgumentError("an added token has no id");
    RETURN_IF_ERROR(table->Set(content->get<std::string>(), token["id"],
                               special->get<bool>() ? kControl : kUserDefined));
  }
  return table->CheckDense();
}

// "a b", or ["a", "b"] in newer files.
std::optional<std::pair<std::string, std::string>> SplitMerge(const Json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return std::pair(merge[0].get<std::string>(), merge[1].get<std::string>());
  }
  if (!merge.is_string()) return std::nullopt;
  const auto text = merge.get<std::string>();
  const size_t space = text.find(' ');
  if (space == std::string::npos) return std::nullopt;
  return std::pair(text.substr(0, space), text.substr(space + 1));
}

Result<std::vector<std::string>> ReadMerges(const Json& model, const TokenTable& table) {
  ASSIGN_OR_RETURN(const Json* list, Member(model, "merges", Json::value_t::array));
  std::vector<std::string> merges;
  for (const Json& item : *list) {
    const auto pair = SplitMerge(item);
    if (!pair || pair->first.find(' ') != std::string::npos ||
        pair->second.find(' ') != std::string::npos) {
      return InvalidArgumentError(StrCat("merge ", merges.size(), " is ", item.dump(),
                                         ", it must be two tokens without spaces"));
    }
    if (!table.IdOf(pair->first) || !table.IdOf(pair->second) ||
        !table.IdOf(pair->first + pair->second)) {
      return InvalidArgumentError(StrCat("merge ", merges.size(), " joins \"", pair->first,
                                         "\" and \"", pair->second,
                                         "\": a part or the whole is not in the vocabulary"));
    }
    merges.push_back(pair->first + " " + pair->second);
  }
  return merges;
}

Status WriteSpecialIds(const TokenTable& table, const HfConfig& config, GgufWriter* writer) {
  const auto write = [&](const char* text, int64_t config_id, const char* key) {
    const auto id = table.IdOf(text);
    if (!id) return InvalidArgumentError(StrCat("the vocabulary has no token ", text));
    if (static_cast<int64_t>(*id) != config_id) {
      return InvalidArgumentError(
          StrCat("token ", text, " has id ", *id, ", the configuration says ", config_id));
    }
    writer->AddU32(key, static_cast<uint32_t>(*id));
    return OkStatus();
  };
  RETURN_IF_ERROR(write(kBosText, config.bos_token_id, "tokenizer.ggml.bos_token_id"));
  RETURN_IF_ERROR(write(kEosText, config.eos_token_id, "tokenizer.ggml.eos_token_id"));
  if (const auto pad = table.IdOf(kPadText)) {
    writer->AddU32("tokenizer.ggml.padding_token_id", static_cast<uint32_t>(*pad));
  }
  writer->AddBool("tokenizer.ggml.add_bos_token", true);
  writer->AddBool("tokenizer.ggml.add_eos_token", false);
  return OkStatus();
}

Status WriteKeys(std::string_view text, const HfConfig& config, GgufWriter* writer) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return InvalidArgumentError("not a JSON object");
  ASSIGN_OR_RETURN(const Json* model, Member(json, "model", Json::value_t::object));
  if (model->value("type", Json("BPE")) != "BPE") {
    return UnimplementedError(
        StrCat("tokenizer model ", (*model)["type"].dump(), ", only BPE is known"));
  }
  TokenTable table(config.vocab_size);
  RETURN_IF_ERROR(ReadTokens(json, *model, &table));
  ASSIGN_OR_RETURN(const std::vector<std::string> merges, ReadMerges(*model, table));
  writer->AddString("tokenizer.ggml.model", "gpt2");
  writer->AddString("tokenizer.ggml.pre", "joyai-llm");
  writer->AddStringArray("tokenizer.ggml.tokens", table.texts());
  writer->AddI32Array("tokenizer.ggml.token_type", table.types());
  writer->AddStringArray("tokenizer.ggml.merges", merges);
  return WriteSpecialIds(table, config, writer);
}

}  // namespace

Status WriteTokenizerKeys(const std::string& path, const HfConfig& config, GgufWriter* writer) {
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  return WriteKeys(text, config, writer).WithContext(path);
}

}  // namespace ds4
