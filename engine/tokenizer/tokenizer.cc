#include "engine/tokenizer/tokenizer.h"

#include <algorithm>
#include <unordered_map>

#include "engine/base/strings.h"
#include "engine/tokenizer/byte_alphabet.h"
#include "engine/tokenizer/pre_tokenizer.h"

namespace ds4 {
namespace {

// Far above any vocabulary; keeps ids in int32_t and offsets in uint32_t.
constexpr size_t kMaxTokens = size_t{1} << 24;
constexpr size_t kMaxBytes = size_t{1} << 30;

using Kind = TokenizerSpec::Kind;

Result<int32_t> CheckId(std::string_view name, int64_t id, size_t vocab_size) {
  if (id < 0 || id >= static_cast<int64_t>(vocab_size)) {
    return InvalidArgumentError(StrCat("tokenizer: ", name, " id ", id,
                                       " is outside the vocabulary of ", vocab_size, " tokens"));
  }
  return static_cast<int32_t>(id);
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::Create(const TokenizerSpec& spec) {
  if (spec.tokens.empty() || spec.tokens.size() > kMaxTokens) {
    return InvalidArgumentError(
        StrCat("tokenizer: ", spec.tokens.size(), " tokens, must be 1 to ", kMaxTokens));
  }
  auto tokenizer = std::unique_ptr<Tokenizer>(new Tokenizer());
  ASSIGN_OR_RETURN(tokenizer->bos_id_, CheckId("BOS", spec.bos_id, spec.tokens.size()));
  ASSIGN_OR_RETURN(tokenizer->eos_id_, CheckId("EOS", spec.eos_id, spec.tokens.size()));
  RETURN_IF_ERROR(tokenizer->AddTokens(spec));
  RETURN_IF_ERROR(tokenizer->AddMerges(spec));
  tokenizer->AddSpecials();
  return tokenizer;
}

Status Tokenizer::AddTokens(const TokenizerSpec& spec) {
  std::fill(std::begin(byte_ids_), std::end(byte_ids_), -1);
  offsets_.reserve(spec.tokens.size() + 1);
  offsets_.push_back(0);
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    const TokenizerSpec::Token& token = spec.tokens[id];
    if (token.kind == Kind::kMissing) {
      return InvalidArgumentError(
          StrCat("tokenizer: id ", id, " of ", spec.tokens.size(), " has no token"));
    }
    std::optional<std::string> bytes = token.text;
    if (token.kind == Kind::kNormal) bytes = BytesFromAlphabet(token.text);
    if (!bytes || bytes->empty()) {
      return InvalidArgumentError(StrCat("tokenizer: token ", id, " '", token.text, "' is ",
                                         bytes ? "empty" : "not written in the byte alphabet"));
    }
    if (bytes_.size() + bytes->size() > kMaxBytes) {
      return InvalidArgumentError(StrCat("tokenizer: tokens hold more than ", kMaxBytes, " bytes"));
    }
    if (token.kind == Kind::kNormal && bytes->size() == 1) {
      byte_ids_[static_cast<uint8_t>(bytes->front())] = static_cast<int32_t>(id);
    }
    bytes_ += *bytes;
    offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
    kinds_.push_back(token.kind);
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (byte_ids_[byte] < 0) {
      return InvalidArgumentError(
          StrCat("tokenizer: no token for byte ", byte, "; all 256 are needed"));
    }
  }
  return OkStatus();
}

Status Tokenizer::AddMerges(const TokenizerSpec& spec) {
  std::unordered_map<std::string_view, int32_t> id_of[2];  // normal, special
  id_of[0].reserve(kinds_.size());
  for (int32_t id = 0; id < vocab_size(); ++id) {
    const TokenizerSpec::Token& token = spec.tokens[static_cast<size_t>(id)];
    if (token.kind == Kind::kUnused) continue;
    const auto [it, is_new] = id_of[token.kind == Kind::kSpecial].emplace(token.text, id);
    if (!is_new) {
      return InvalidArgumentError(
          StrCat("tokenizer: token '", token.text, "' has ids ", it->second, " and ", id));
    }
  }
  merges_ = MergeTable(spec.merges.size());
  const auto find = [&](const std::string& text) {
    const auto it = id_of[0].find(text);
    return it == id_of[0].end() ? -1 : it->second;
  };
  for (size_t rank = 0; rank < spec.merges.size(); ++rank) {
    const auto& [left, right] = spec.merges[rank];
    const int32_t ids[] = {find(left), find(right), find(left + right)};
    if (*std::min_element(std::begin(ids), std::end(ids)) < 0) {
      return InvalidArgumentError(StrCat("tokenizer: merge ", rank, " '", left, "' + '", right,
                                         "' has a token outside the vocabulary (ids ", ids[0], ", ",
                                         ids[1], ", ", ids[2], ")"));
    }
    if (!merges_.Insert(ids[0], ids[1], {static_cast<uint32_t>(rank), ids[2]})) {
      return InvalidArgumentError(
          StrCat("tokenizer: merge ", rank, " '", left, "' + '", right, "' is there twice"));
    }
  }
  return OkStatus();
}

void Tokenizer::AddSpecials() {
  for (int32_t id = 0; id < vocab_size(); ++id) {
    if (!IsSpecial(id)) continue;
    specials_.push_back(id);
    starts_special_[static_cast<uint8_t>(TokenBytes(id).front())] = true;
  }
  std::sort(specials_.begin(), specials_.end(),
            [this](int32_t a, int32_t b) { return TokenBytes(a) < TokenBytes(b); });
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text, bool parse_special) const {
  std::vector<int32_t> ids;
  BpeMerger merger(merges_);
  size_t plain_begin = 0;
  for (size_t pos = 0; parse_special && pos < text.size();) {
    const SpecialMatch match = MatchSpecial(text, pos);
    if (match.size == 0) {
      ++pos;
      continue;
    }
    EncodePlain(text.substr(plain_begin, pos - plain_begin), &merger, &ids);
    ids.push_back(match.id);
    pos += match.size;
    plain_begin = pos;
  }
  EncodePlain(text.substr(plain_begin), &merger, &ids);
  return ids;
}

void Tokenizer::EncodePlain(std::string_view text, BpeMerger* merger,
                            std::vector<int32_t>* ids) const {
  std::vector<int32_t> symbols;
  PreTokenizer pre_tokenizer(text);
  for (std::string_view piece = pre_tokenizer.Next(); !piece.empty();
       piece = pre_tokenizer.Next()) {
    symbols.clear();
    for (const char byte : piece) symbols.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
    merger->Apply(&symbols);
    ids->insert(ids->end(), symbols.begin(), symbols.end());
  }
}

// Narrows the sorted specials byte by byte; those that are a prefix of others sort first, so a
// whole match at some depth is always the first of the range.
Tokenizer::SpecialMatch Tokenizer::MatchSpecial(std::string_view text, size_t pos) const {
  SpecialMatch match;
  if (!starts_special_[static_cast<uint8_t>(text[pos])]) return match;
  auto first = specials_.begin();
  auto last = specials_.end();
  for (size_t depth = 0; pos + depth < text.size(); ++depth) {
    const uint8_t byte = static_cast<uint8_t>(text[pos + depth]);
    const auto byte_at = [this, depth](int32_t id) {  // -1 sorts in front: the token ends here
      const std::string_view bytes = TokenBytes(id);
      return depth < bytes.size() ? static_cast<uint8_t>(bytes[depth]) : -1;
    };
    first = std::partition_point(first, last, [&](int32_t id) { return byte_at(id) < byte; });
    last = std::partition_point(first, last, [&](int32_t id) { return byte_at(id) == byte; });
    if (first == last) break;
    if (TokenBytes(*first).size() == depth + 1) match = {depth + 1, *first};
  }
  return match;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += TokenBytes(id);
  return text;
}

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  const size_t index = static_cast<size_t>(id);
  return std::string_view(bytes_).substr(offsets_[index], offsets_[index + 1] - offsets_[index]);
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocab_size() && kinds_[static_cast<size_t>(id)] == Kind::kSpecial;
}

std::optional<int32_t> Tokenizer::SpecialId(std::string_view text) const {
  const auto it =
      std::lower_bound(specials_.begin(), specials_.end(), text,
                       [this](int32_t id, std::string_view t) { return TokenBytes(id) < t; });
  if (it == specials_.end() || TokenBytes(*it) != text) return std::nullopt;
  return *it;
}

}  // namespace ds4
