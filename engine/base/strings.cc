#include "engine/base/strings.h"

#include <array>
#include <cmath>
#include <cstdio>

namespace ds4 {

std::string StrJoin(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += separator;
    out += parts[i];
  }
  return out;
}

std::vector<std::string> StrSplit(const std::string& text, char separator) {
  std::vector<std::string> parts;
  if (text.empty()) return parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

std::string Fixed(double value, int digits) {
  const int length = std::snprintf(nullptr, 0, "%.*f", digits, value);
  std::string text(static_cast<size_t>(length), '\0');
  std::snprintf(text.data(), text.size() + 1, "%.*f", digits, value);
  return text;
}

std::string HumanBytes(int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  // From here on one decimal would print 1024.0: the next unit's 1.0.
  constexpr double kNextUnit = 1023.95;
  if (bytes > -1024 && bytes < 1024) return StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024.0;
  size_t unit = 1;
  while (std::abs(value) >= kNextUnit && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return StrCat(Fixed(value, 1), " ", kUnits[unit]);
}

}  // namespace ds4
