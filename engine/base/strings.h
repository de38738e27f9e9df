// StrCat and friends: text from values, since g++ 12 has no <format>.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace ds4 {

// The values' operator<< texts, joined.
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  ((out << args), ...);
  return std::move(out).str();
}

// StrJoin({"a", "b"}, ", ") is "a, b".
std::string StrJoin(const std::vector<std::string>& parts, const std::string& separator);

// Parts between separators; an empty text has no parts.
std::vector<std::string> StrSplit(const std::string& text, char separator);

// 12345678 is "11.8 MiB"; exact below 1 KiB.
std::string HumanBytes(int64_t bytes);

// "1.5" with `digits` decimals.
std::string Fixed(double value, int digits);

}  // namespace ds4
