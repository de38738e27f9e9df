// Text to token ids and back, byte-exact: the byte-level BPE of DeepSeek V3 and V4.
// Encode: [special tokens are cut out first, when asked] -> pieces (pre_tokenizer.h) -> one symbol
// per byte -> merges (bpe.h). Decode joins the tokens' bytes; special tokens are their literal
// text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/base/status.h"
#include "engine/tokenizer/bpe.h"

namespace ds4 {

class GgufFile;

// A tokeniser as its file describes it, before any check.
struct TokenizerSpec {
  enum class Kind : uint8_t {
    kMissing,  // no such id in the file
    kNormal,   // text in the printable byte alphabet of GPT-2
    kSpecial,  // literal text, found in a prompt only when special tokens are parsed
    kUnused,   // literal text, never produced by Encode
  };
  struct Token {
    std::string text;
    Kind kind = Kind::kMissing;
  };
  std::vector<Token> tokens;                                // index = id
  std::vector<std::pair<std::string, std::string>> merges;  // index = rank
  int64_t bos_id = -1;
  int64_t eos_id = -1;
};

// Immutable after load; thread-safe.
class Tokenizer {
 public:
  // The tokenizer.ggml.* keys of a GGUF file; nothing of `file` is kept.
  static Result<std::unique_ptr<Tokenizer>> FromGguf(const GgufFile& file);
  // A Hugging Face tokenizer.json with DeepSeek's pre-tokeniser; any other is kUnimplemented.
  static Result<std::unique_ptr<Tokenizer>> FromJsonFile(const std::string& path);
  static Result<std::unique_ptr<Tokenizer>> FromJson(std::string_view json);
  // Errors: kInvalidArgument with what is wrong: an id without a token, the same token or merge
  // twice, a merge of or into an unknown token, a byte without a token, BOS or EOS out of range.
  static Result<std::unique_ptr<Tokenizer>> Create(const TokenizerSpec& spec);

  int32_t vocab_size() const { return static_cast<int32_t>(kinds_.size()); }
  int32_t bos_id() const { return bos_id_; }
  int32_t eos_id() const { return eos_id_; }

  // Any byte string, valid UTF-8 or not; Decode gives it back. With `parse_special` the leftmost,
  // then longest special text becomes its id; without it special texts are plain text, so that what
  // a user wrote can never act as a control token.
  std::vector<int32_t> Encode(std::string_view text, bool parse_special) const;
  // Joined bytes; may begin or end inside a UTF-8 character. Ids outside the vocabulary give
  // nothing.
  std::string Decode(std::span<const int32_t> ids) const;
  // Bytes of one token, empty for an id outside the vocabulary. Valid as long as the tokeniser.
  std::string_view TokenBytes(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  // Id of a special token by its whole text.
  std::optional<int32_t> SpecialId(std::string_view text) const;

 private:
  struct SpecialMatch {
    size_t size = 0;  // 0: no match
    int32_t id = -1;
  };

  Tokenizer() = default;
  Status AddTokens(const TokenizerSpec& spec);
  Status AddMerges(const TokenizerSpec& spec);
  void AddSpecials();
  void EncodePlain(std::string_view text, BpeMerger* merger, std::vector<int32_t>* ids) const;
  SpecialMatch MatchSpecial(std::string_view text, size_t pos) const;

  std::string bytes_;              // all tokens' bytes, one after another
  std::vector<uint32_t> offsets_;  // [vocab_size + 1] into bytes_
  std::vector<TokenizerSpec::Kind> kinds_;
  int32_t byte_ids_[256] = {};  // the token of each single byte
  MergeTable merges_;
  std::vector<int32_t> specials_;  // ids of special tokens, sorted by their bytes
  bool starts_special_[256] = {};  // is a first byte of a special token
  int32_t bos_id_ = -1;
  int32_t eos_id_ = -1;
};

// Text of a token stream, given out only at whole characters. What comes out is always valid UTF-8,
// as JSON and Protobuf strings demand: a byte that can no longer become part of a character is
// replaced by U+FFFD. Use Tokenizer::Decode where the exact bytes matter. Borrows the tokeniser.
// Thread-compatible.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
  // The characters that `id` completes; may be empty.
  std::string Push(int32_t id);
  // What is left at the end of the stream; the decoder can then be used again.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;  // an incomplete character, at most 3 bytes
};

}  // namespace ds4
