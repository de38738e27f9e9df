// How routed pairs are cut into groups: shared by the kernel that writes the lists and those that
// read them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ds4::cuda {

inline constexpr int kGroupPairs = 8;

// Full groups, and at most one more for each expert.
inline int64_t MaxGroups(int64_t num_pairs, int64_t num_experts) {
  return num_pairs / kGroupPairs + std::min(num_pairs, num_experts);
}

}  // namespace ds4::cuda
