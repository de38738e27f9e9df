// Goal: a sum over lanes has the same bits however the lanes are spread over ranks.
// Method: random floats of very different magnitude, where any other order of additions shows; the
// expected value comes from a tree written out level by level, which shares no code with lane_tree.
#include "engine/comm/lane_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace ds4 {
namespace {

using Vectors = std::vector<std::vector<float>>;

// Magnitudes from 2^-30 to 2^30, both signs.
Vectors RandomLanes(int num_lanes, int64_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> fraction(-1.0f, 1.0f);
  std::uniform_int_distribution<int> exponent(-30, 30);
  Vectors lanes(num_lanes, std::vector<float>(count));
  for (auto& lane : lanes) {
    for (float& x : lane) x = std::ldexp(fraction(rng), exponent(rng));
  }
  return lanes;
}

// Adds neighbours until one vector is left.
std::vector<float> ExpectedSum(Vectors level) {
  while (level.size() > 1) {
    Vectors next;
    for (size_t i = 0; i < level.size(); i += 2) {
      std::vector<float> sum(level[i].size());
      for (size_t k = 0; k < sum.size(); ++k) sum[k] = level[i][k] + level[i + 1][k];
      next.push_back(std::move(sum));
    }
    level = std::move(next);
  }
  return level[0];
}

// What the ranks of `layout` compute together.
std::vector<float> SumOverRanks(const LaneLayout& layout, const Vectors& lanes) {
  const auto count = static_cast<int64_t>(lanes[0].size());
  Vectors roots;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    std::vector<float> own;
    for (int lane = layout.begin[rank]; lane < layout.begin[rank + 1]; ++lane) {
      own.insert(own.end(), lanes[lane].begin(), lanes[lane].end());
    }
    const auto subtrees = SubtreesOf(layout.begin[rank], layout.begin[rank + 1]);
    std::vector<float> sums(subtrees.size() * count);
    AddLanes(layout.begin[rank], layout.begin[rank + 1], own.data(), count, sums.data());
    for (size_t i = 0; i < subtrees.size(); ++i) {
      roots.emplace_back(sums.begin() + i * count, sums.begin() + (i + 1) * count);
    }
  }
  std::vector<const float*> pointers;
  for (const auto& root : roots) pointers.push_back(root.data());
  std::vector<float> out(count);
  AddRoots(layout, pointers, count, out.data());
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(LaneLayoutTest, SplitsEvenlyWithTheLargerSharesFirst) {
  EXPECT_EQ(LaneLayout::Even(8, 1).begin, (std::vector<int>{0, 8}));
  EXPECT_EQ(LaneLayout::Even(8, 3).begin, (std::vector<int>{0, 3, 6, 8}));
  EXPECT_EQ(LaneLayout::Even(8, 5).begin, (std::vector<int>{0, 2, 4, 6, 7, 8}));
  EXPECT_EQ(LaneLayout::Even(8, 8).num_lanes_of(7), 1);
}

TEST(LaneLayoutTest, RefusesALayoutThatDoesNotCutTheLanesIntoRanks) {
  EXPECT_TRUE((LaneLayout{8, {0, 3, 8}}.Validate().ok()));
  for (const LaneLayout& bad :
       {LaneLayout{6, {0, 6}}, LaneLayout{0, {0, 0}}, LaneLayout{2048, {0, 2048}},
        LaneLayout{8, {}}, LaneLayout{8, {0}}, LaneLayout{8, {0, 4}}, LaneLayout{8, {1, 8}},
        LaneLayout{8, {0, 4, 4, 8}}, LaneLayout{8, {0, 6, 4, 8}}}) {
    EXPECT_EQ(bad.Validate().code(), StatusCode::kInvalidArgument) << bad.Validate();
  }
}

TEST(SubtreesOfTest, TakesTheLargestAlignedSubtrees) {
  EXPECT_EQ(SubtreesOf(0, 8), (std::vector<LaneSubtree>{{0, 8}}));
  EXPECT_EQ(SubtreesOf(0, 3), (std::vector<LaneSubtree>{{0, 2}, {2, 1}}));
  EXPECT_EQ(SubtreesOf(3, 6), (std::vector<LaneSubtree>{{3, 1}, {4, 2}}));
  EXPECT_EQ(SubtreesOf(1, 7), (std::vector<LaneSubtree>{{1, 1}, {2, 2}, {4, 2}, {6, 1}}));
  EXPECT_TRUE(SubtreesOf(5, 5).empty());
}

TEST(SubtreesOfTest, AnEvenSplitNeedsOneRootPerRankOrAtMostThree) {
  for (int world_size = 1; world_size <= 8; ++world_size) {
    const LaneLayout layout = LaneLayout::Even(8, world_size);
    const bool is_power_of_two = (world_size & (world_size - 1)) == 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const auto roots = SubtreesOf(layout.begin[rank], layout.begin[rank + 1]);
      EXPECT_LE(roots.size(), is_power_of_two ? 1u : 3u) << "rank " << rank << "/" << world_size;
    }
  }
}

TEST(LaneTreeTest, EveryWorldSizeGivesTheBitsOfTheWholeTree) {
  for (const int num_lanes : {1, 2, 4, 8, 16}) {
    // 1003 columns: whole runs and a rest.
    const Vectors lanes = RandomLanes(num_lanes, 1003, 7 + num_lanes);
    const std::vector<float> expected = ExpectedSum(lanes);
    for (int world_size = 1; world_size <= num_lanes; ++world_size) {
      const auto sum = SumOverRanks(LaneLayout::Even(num_lanes, world_size), lanes);
      EXPECT_TRUE(SameBits(sum, expected)) << num_lanes << " lanes, world_size " << world_size;
    }
  }
}

TEST(LaneTreeTest, EveryUnevenLayoutGivesTheBitsOfTheWholeTree) {
  const Vectors lanes = RandomLanes(8, 61, 99);
  const std::vector<float> expected = ExpectedSum(lanes);
  // Bit i set: a rank begins at lane i + 1. All 128 ways to cut eight lanes.
  for (int cuts = 0; cuts < 128; ++cuts) {
    LaneLayout layout{8, {0}};
    for (int lane = 1; lane < 8; ++lane) {
      if (cuts & (1 << (lane - 1))) layout.begin.push_back(lane);
    }
    layout.begin.push_back(8);
    EXPECT_TRUE(SameBits(SumOverRanks(layout, lanes), expected)) << "cuts " << cuts;
  }
}

TEST(LaneTreeTest, TheDataTellsTheOrderOfAdditions) {
  // Guards the tests above: from left to right the same lanes give other bits.
  const Vectors lanes = RandomLanes(8, 1003, 15);
  std::vector<float> from_left = lanes[0];
  for (int lane = 1; lane < 8; ++lane) {
    for (size_t k = 0; k < from_left.size(); ++k) from_left[k] += lanes[lane][k];
  }
  EXPECT_FALSE(SameBits(from_left, ExpectedSum(lanes)));
}

TEST(LaneTreeTest, TheTotalMayReplaceAnyOfTheRoots) {
  const LaneLayout layout = LaneLayout::Even(8, 8);
  const std::vector<float> expected = ExpectedSum(RandomLanes(8, 600, 3));
  for (int place = 0; place < 8; ++place) {
    Vectors lanes = RandomLanes(8, 600, 3);
    std::vector<const float*> roots;
    for (const auto& lane : lanes) roots.push_back(lane.data());
    AddRoots(layout, roots, 600, lanes[place].data());
    EXPECT_TRUE(SameBits(lanes[place], expected)) << "in place of root " << place;
  }
}

}  // namespace
}  // namespace ds4
