// The printable alphabet in which byte-level vocabularies are written (GPT-2): bytes 33-126,
// 161-172 and 174-255 stand for themselves, the other 68 in increasing order for U+0100, U+0101,
// ...
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ds4 {

// The bytes that a vocabulary entry stands for; nothing when a character is outside the alphabet.
std::optional<std::string> BytesFromAlphabet(std::string_view text);

}  // namespace ds4
