// Goal: the random numbers are Philox, the same on every machine, and even. Method: the known
// answers published with the algorithm (Random123, kat_vectors); moments of many draws.
#include "engine/sampling/random.h"

#include <gtest/gtest.h>

#include <set>

namespace ds4 {
namespace {

using Words = std::array<uint32_t, 4>;

TEST(RandomTest, PublishedKnownAnswers) {
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(Philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(Philox4x32({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}),
            (Words{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

// Mean 1/2 and variance 1/12; four standard errors of 100,000 draws are 0.0037 and 0.0010.
TEST(RandomTest, UniformIsEven) {
  constexpr int kDraws = 100'000;
  double sum = 0.0;
  double sum_squares = 0.0;
  for (int pos = 0; pos < kDraws; ++pos) {
    const double u = Uniform(42, pos, 0);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    sum_squares += (u - 0.5) * (u - 0.5);
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.0037);
  EXPECT_NEAR(sum_squares / kDraws, 1.0 / 12, 0.0010);
}

TEST(RandomTest, EveryArgumentCounts) {
  std::set<double> draws;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
    for (const int64_t pos : {int64_t{0}, int64_t{1}, int64_t{1} << 32}) {
      for (const uint32_t stream : {0u, 1u}) {
        draws.insert(Uniform(seed, pos, stream));
        EXPECT_EQ(Uniform(seed, pos, stream), Uniform(seed, pos, stream));
      }
    }
  }
  EXPECT_EQ(draws.size(), 24u);
}

}  // namespace
}  // namespace ds4
