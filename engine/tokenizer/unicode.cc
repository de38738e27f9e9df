#include "engine/tokenizer/unicode.h"

#include <algorithm>
#include <memory>

namespace ds4 {
namespace {

constexpr int32_t kNumCodePoints = 0x110000;

struct ClassRange {
  int32_t first;
  int32_t last;
  CharClass char_class;
};

constexpr ClassRange kClassRanges[] = {
#include "engine/tokenizer/data/unicode_ranges.inc"
};

// One byte a code point: the lookup sits in the innermost loop, and real text touches few pages of
// it.
class ClassTable {
 public:
  ClassTable() : classes_(new CharClass[kNumCodePoints]()) {
    for (const ClassRange& range : kClassRanges) {
      std::fill(classes_.get() + range.first, classes_.get() + range.last + 1, range.char_class);
    }
  }
  CharClass operator[](int32_t code_point) const { return classes_[code_point]; }

 private:
  std::unique_ptr<CharClass[]> classes_;
};

// Well-formed sequences by their first byte (RFC 3629, section 4): length and the range of the
// second byte, which is what excludes overlong forms and surrogates. Length 0: no sequence starts
// so.
struct LeadByte {
  size_t length;
  uint8_t second_min;
  uint8_t second_max;
};

LeadByte LeadByteOf(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2 || byte > 0xF4) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte < 0xF0) {
    return {3, static_cast<uint8_t>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<uint8_t>(byte == 0xED ? 0x9F : 0xBF)};
  }
  return {4, static_cast<uint8_t>(byte == 0xF0 ? 0x90 : 0x80),
          static_cast<uint8_t>(byte == 0xF4 ? 0x8F : 0xBF)};
}

uint8_t ByteAt(std::string_view text, size_t pos) { return static_cast<uint8_t>(text[pos]); }

// How many bytes from `pos` on agree with `lead`'s form, at most lead.length.
size_t MatchingBytes(std::string_view text, size_t pos, const LeadByte& lead) {
  size_t count = 1;
  while (count < lead.length && pos + count < text.size()) {
    const uint8_t byte = ByteAt(text, pos + count);
    const uint8_t low = count == 1 ? lead.second_min : 0x80;
    const uint8_t high = count == 1 ? lead.second_max : 0xBF;
    if (byte < low || byte > high) break;
    ++count;
  }
  return count;
}

}  // namespace

Utf8Char DecodeUtf8(std::string_view text, size_t pos) {
  const uint8_t first = ByteAt(text, pos);
  if (first < 0x80) return {first, 1};
  const LeadByte lead = LeadByteOf(first);
  if (lead.length == 0 || MatchingBytes(text, pos, lead) < lead.length) return {};
  int32_t code_point = first & (0x7F >> lead.length);
  for (size_t i = 1; i < lead.length; ++i) {
    code_point = (code_point << 6) | (ByteAt(text, pos + i) & 0x3F);
  }
  return {code_point, lead.length};
}

size_t IncompleteUtf8Suffix(std::string_view text) {
  for (size_t size = 1; size <= std::min<size_t>(3, text.size()); ++size) {
    const size_t pos = text.size() - size;
    const LeadByte lead = LeadByteOf(ByteAt(text, pos));
    if (lead.length > size && MatchingBytes(text, pos, lead) == size) return size;
  }
  return 0;
}

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

CharClass ClassOf(int32_t code_point) {
  static const ClassTable table;
  if (code_point < 0 || code_point >= kNumCodePoints) return CharClass::kOther;
  return table[code_point];
}

}  // namespace ds4
