#include "engine/sampling/random.h"

namespace ds4 {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

double Uniform(uint64_t seed, int64_t pos, uint32_t stream) {
  const auto p = static_cast<uint64_t>(pos);
  const std::array<uint32_t, 4> bits =
      Philox4x32({static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), stream, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t mantissa = (uint64_t{bits[0]} << 21) ^ (bits[1] >> 11);
  return static_cast<double>(mantissa & ((uint64_t{1} << 53) - 1)) * 0x1.0p-53;
}

}  // namespace ds4
