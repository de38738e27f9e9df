#include "engine/tokenizer/pre_tokenizer.h"

#include "engine/tokenizer/unicode.h"

namespace ds4 {
namespace {

// What passes 1 and 2 tell apart.
enum class RunKind { kText, kNumber, kCjk };

bool IsCjk(int32_t code_point) {
  return (code_point >= 0x4E00 && code_point <= 0x9FA5) ||
         (code_point >= 0x3040 && code_point <= 0x30FF);
}

RunKind RunKindOf(int32_t code_point) {
  if (IsCjk(code_point)) return RunKind::kCjk;
  return ClassOf(code_point) == CharClass::kNumber ? RunKind::kNumber : RunKind::kText;
}

bool IsAsciiLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool IsNewline(char c) { return c == '\r' || c == '\n'; }

bool IsLetterOrMark(CharClass c) { return c == CharClass::kLetter || c == CharClass::kMark; }

// May stand as the one odd character in front of a word.
bool IsWordPrefix(const Utf8Char& c, CharClass char_class) {
  return char_class != CharClass::kLetter && char_class != CharClass::kPunctuation &&
         c.code_point != '\r' && c.code_point != '\n';
}

}  // namespace

std::string_view PreTokenizer::Next() {
  if (pos_ >= text_.size()) return {};
  const size_t begin = pos_;
  if (begin >= run_end_) {
    if (RunKindOf(DecodeUtf8(text_, begin).code_point) == RunKind::kNumber) {
      pos_ = run_end_ = MatchNumber(begin);
      return text_.substr(begin, pos_ - begin);
    }
    run_end_ = FindRunEnd(begin);
  }
  size_t end = MatchWord(begin);
  if (end == begin) {  // a gap: everything up to the next match is one piece
    do {
      end += DecodeUtf8(text_, end).size;
    } while (end < run_end_ && MatchWord(end) == end);
  }
  pos_ = end;
  return text_.substr(begin, end - begin);
}

// End of the run of equal kind that starts at `begin`.
size_t PreTokenizer::FindRunEnd(size_t begin) const {
  const Utf8Char first = DecodeUtf8(text_, begin);
  const RunKind kind = RunKindOf(first.code_point);
  size_t pos = begin + first.size;
  while (pos < text_.size()) {
    const Utf8Char c = DecodeUtf8(text_, pos);
    if (RunKindOf(c.code_point) != kind) break;
    pos += c.size;
  }
  return pos;
}

size_t PreTokenizer::MatchNumber(size_t begin) const {
  size_t pos = begin;
  for (int count = 0; count < 3 && pos < text_.size(); ++count) {
    const Utf8Char c = DecodeUtf8(text_, pos);
    if (RunKindOf(c.code_point) != RunKind::kNumber) break;
    pos += c.size;
  }
  return pos;
}

size_t PreTokenizer::SkipLetters(size_t pos) const {
  while (pos < run_end_) {
    const Utf8Char c = DecodeUtf8(text_, pos);
    if (!IsLetterOrMark(ClassOf(c.code_point))) break;
    pos += c.size;
  }
  return pos;
}

size_t PreTokenizer::MatchWord(size_t begin) const {
  const Utf8Char first = DecodeUtf8(text_, begin);
  const CharClass char_class = ClassOf(first.code_point);
  const size_t next = begin + first.size;
  // All 32 ASCII characters of class P or S are in the first alternative's list.
  if (char_class == CharClass::kPunctuation && first.size == 1 && next < run_end_ &&
      IsAsciiLetter(text_[next])) {
    size_t pos = next;
    while (pos < run_end_ && IsAsciiLetter(text_[pos])) ++pos;
    return pos;
  }
  if (IsLetterOrMark(char_class)) return SkipLetters(next);
  if (IsWordPrefix(first, char_class)) {
    const size_t end = SkipLetters(next);
    if (end > next) return end;
  }
  const size_t end = MatchPunctuation(begin);
  return end > begin ? end : MatchSpaces(begin);
}

// " "?[\p{P}\p{S}]+[\r\n]*
size_t PreTokenizer::MatchPunctuation(size_t begin) const {
  const size_t start = text_[begin] == ' ' ? begin + 1 : begin;
  size_t pos = start;
  while (pos < run_end_) {
    const Utf8Char c = DecodeUtf8(text_, pos);
    if (ClassOf(c.code_point) != CharClass::kPunctuation) break;
    pos += c.size;
  }
  if (pos == start) return begin;
  while (pos < run_end_ && IsNewline(text_[pos])) ++pos;
  return pos;
}

// \s*[\r\n]+ ends behind the last line break of the spaces; \s+(?!\S) leaves the last space to the
// word that follows; \s+ takes the one space that is left.
size_t PreTokenizer::MatchSpaces(size_t begin) const {
  size_t pos = begin;
  size_t last_char = begin;
  size_t newline_end = begin;
  while (pos < run_end_) {
    const Utf8Char c = DecodeUtf8(text_, pos);
    if (ClassOf(c.code_point) != CharClass::kSpace) break;
    last_char = pos;
    pos += c.size;
    if (IsNewline(text_[last_char])) newline_end = pos;
  }
  if (newline_end > begin) return newline_end;
  if (pos == run_end_ || last_char == begin) return pos;
  return last_char;
}

}  // namespace ds4
