#include "engine/tokenizer/byte_alphabet.h"

#include <array>

#include "engine/tokenizer/unicode.h"

namespace ds4 {
namespace {

constexpr int kAlphabetEnd = 256 + 68;

bool StandsForItself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

// Code point to byte, -1 where there is none.
std::array<int, kAlphabetEnd> MakeAlphabet() {
  std::array<int, kAlphabetEnd> byte_of;
  byte_of.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) byte_of[StandsForItself(byte) ? byte : next++] = byte;
  return byte_of;
}

}  // namespace

std::optional<std::string> BytesFromAlphabet(std::string_view text) {
  static const std::array<int, kAlphabetEnd> byte_of = MakeAlphabet();
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = DecodeUtf8(text, pos);
    if (c.code_point < 0 || c.code_point >= kAlphabetEnd || byte_of[c.code_point] < 0) return {};
    bytes += static_cast<char>(byte_of[c.code_point]);
    pos += c.size;
  }
  return bytes;
}

}  // namespace ds4
