// StreamDecoder: from token bytes to whole characters.
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/unicode.h"

namespace ds4 {

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
