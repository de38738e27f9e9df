// UTF-8 one character at a time, and the few character classes that the pre-tokeniser tells apart.
// Any byte string is read without loss: a byte that is not part of well-formed UTF-8 (RFC 3629: no
// overlong forms, no surrogates, at most U+10FFFF) is a character of its own, of class kOther.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ds4 {

// kOther: control, format, private use, unassigned, and stray bytes. kPunctuation: P and S
// together, which no rule tells apart. The classes exclude each other.
enum class CharClass : uint8_t { kOther, kLetter, kMark, kNumber, kPunctuation, kSpace };

// One character of a text. `code_point` is -1 for a stray byte, and then `size` is 1.
struct Utf8Char {
  int32_t code_point = -1;
  size_t size = 1;
};

// The character at `pos`; requires pos < text.size().
Utf8Char DecodeUtf8(std::string_view text, size_t pos);

// How many bytes at the end of `text` begin a character that is cut off (0 to 3): more bytes may
// still make them well-formed.
size_t IncompleteUtf8Suffix(std::string_view text);

// `text` with every byte that is not part of well-formed UTF-8 replaced by U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);

// Class of a code point; -1 and everything above U+10FFFF is kOther.
CharClass ClassOf(int32_t code_point);

}  // namespace ds4
