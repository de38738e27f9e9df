// Numbers in the byte order of the wire; for transports.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds4 {

template <typename T>
void StoreLittleEndian(T value, std::byte* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out[i] = static_cast<std::byte>((static_cast<uint64_t>(value) >> (8 * i)) & 0xff);
  }
}

template <typename T>
T LoadLittleEndian(const std::byte* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(in[i]) << (8 * i);
  return static_cast<T>(value);
}

}  // namespace ds4
