// Little-endian numbers in byte buffers, whatever the host's order and the address's alignment.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ds4 {

template <typename T>
T LoadLittleEndian(const std::byte* from) {
  static_assert(std::is_arithmetic_v<T>);
  std::byte raw[sizeof(T)];
  for (size_t i = 0; i < sizeof(T); ++i) {
    raw[i] = from[std::endian::native == std::endian::little ? i : sizeof(T) - 1 - i];
  }
  T value;
  std::memcpy(&value, raw, sizeof(T));
  return value;
}

template <typename T>
void StoreLittleEndian(T value, std::byte* to) {
  static_assert(std::is_arithmetic_v<T>);
  std::byte raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  for (size_t i = 0; i < sizeof(T); ++i) {
    to[std::endian::native == std::endian::little ? i : sizeof(T) - 1 - i] = raw[i];
  }
}

}  // namespace ds4
