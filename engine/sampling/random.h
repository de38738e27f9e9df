// Counter-based random numbers: the draw for a position is a function of (seed, position) alone, so
// a seed gives the same text at any world size, batch or after going back.
#pragma once

#include <array>
#include <cstdint>

namespace ds4 {

// Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Uniform in [0, 1), 53 random bits. `stream` tells apart several draws for one position.
double Uniform(uint64_t seed, int64_t pos, uint32_t stream);

}  // namespace ds4
