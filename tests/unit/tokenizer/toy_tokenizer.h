// A vocabulary small enough to encode by hand: 256 bytes (id = byte), four merges, three specials.
#pragma once

#include <string>

#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/unicode.h"

namespace ds4 {

inline constexpr int32_t kToyAb = 256;      // rank 0: a b
inline constexpr int32_t kToyAa = 257;      // rank 1: a a
inline constexpr int32_t kToyBc = 258;      // rank 2: b c
inline constexpr int32_t kToyAbab = 259;    // rank 3: ab ab
inline constexpr int32_t kToyBos = 260;     // <s>
inline constexpr int32_t kToyEos = 261;     // </s>
inline constexpr int32_t kToyLonger = 262;  // <s>>

// The entry that stands for one byte (GPT-2's alphabet, here written the other way round).
inline std::string ToyByteText(int byte) {
  static const std::vector<int> code_points = [] {
    std::vector<int> result;
    int next = 256;
    for (int b = 0; b < 256; ++b) {
      const bool is_itself = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
      result.push_back(is_itself ? b : next++);
    }
    return result;
  }();
  const int c = code_points[static_cast<size_t>(byte)];
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  return {static_cast<char>(0xC0 | (c >> 6)), static_cast<char>(0x80 | (c & 0x3F))};
}

inline TokenizerSpec ToySpec() {
  using Kind = TokenizerSpec::Kind;
  TokenizerSpec spec;
  for (int byte = 0; byte < 256; ++byte) spec.tokens.push_back({ToyByteText(byte), Kind::kNormal});
  for (const char* text : {"ab", "aa", "bc", "abab"}) spec.tokens.push_back({text, Kind::kNormal});
  for (const char* text : {"<s>", "</s>", "<s>>"}) spec.tokens.push_back({text, Kind::kSpecial});
  spec.merges = {{"a", "b"}, {"a", "a"}, {"b", "c"}, {"ab", "ab"}};
  spec.bos_id = kToyBos;
  spec.eos_id = kToyEos;
  return spec;
}

}  // namespace ds4
