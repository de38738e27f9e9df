// What routing left on the device, and a check of its lists, for the tests of both ways to route.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "engine/cuda/experts.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {

struct RouteResult {
  std::vector<int32_t> ids, pairs, pair_place, group_expert, group_first, group_size;
  std::vector<float> weights, place_weight;
};

inline RouteResult DownloadRouting(TestDevice& device, const Routing& routing, int64_t num_pairs) {
  RouteResult r;
  r.ids = device.Download(routing.ids, num_pairs);
  r.weights = device.Download(routing.weights, num_pairs);
  r.pairs = device.Download(routing.pairs, num_pairs);
  r.pair_place = device.Download(routing.pair_place, num_pairs);
  r.place_weight = device.Download(routing.place_weight, num_pairs);
  const int num_groups = device.Download(routing.num_groups, 1)[0];
  r.group_expert = device.Download(routing.group_expert, num_groups);
  r.group_first = device.Download(routing.group_first, num_groups);
  r.group_size = device.Download(routing.group_size, num_groups);
  return r;
}

// The lists hold every pair once, by expert and then by row, in groups of at most 8.
inline void CheckLists(int num_experts, const RouteResult& r) {
  std::vector<int32_t> sorted(r.ids.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return r.ids[a] < r.ids[b]; });
  ASSERT_EQ(r.pairs, sorted);
  for (size_t place = 0; place < sorted.size(); ++place) {
    ASSERT_EQ(r.pair_place[sorted[place]], static_cast<int32_t>(place));
    ASSERT_EQ(std::bit_cast<uint32_t>(r.place_weight[place]),
              std::bit_cast<uint32_t>(r.weights[sorted[place]]));
  }
  size_t group = 0;
  int first = 0;
  for (int e = 0; e < num_experts; ++e) {
    const int count = static_cast<int>(std::count(r.ids.begin(), r.ids.end(), e));
    for (int done = 0; done < count; done += 8, ++group) {
      ASSERT_LT(group, r.group_expert.size());
      EXPECT_EQ(r.group_expert[group], e);
      EXPECT_EQ(r.group_first[group], first + done);
      EXPECT_EQ(r.group_size[group], std::min(8, count - done));
    }
    first += count;
  }
  EXPECT_EQ(group, r.group_expert.size());
}

}  // namespace ds4::cuda
