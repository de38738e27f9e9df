// StreamDecoder: from token bytes to whole characters.
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/unicode.h"

namespace ds4 {

std::string ReplaceInvalidUtf8(std::string_view text) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = DecodeUtf8(text, pos);
    out += c.code_point < 0 ? kReplacement : text.substr(pos, c.size);
    pos += c.size;
  }
  return out;
}

std::string StreamDecoder::Push(int32_t id) {
  std::string bytes = std::move(pending_);
  bytes += tokenizer_->TokenBytes(id);
  const size_t whole = bytes.size() - IncompleteUtf8Suffix(bytes);
  pending_ = bytes.substr(whole);
  bytes.resize(whole);
  return ReplaceInvalidUtf8(bytes);
}

std::string StreamDecoder::Finish() {
  const std::string rest = std::move(pending_);
  pending_.clear();
  return ReplaceInvalidUtf8(rest);
}

}  // namespace ds4
