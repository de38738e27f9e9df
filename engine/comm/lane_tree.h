// The fixed order in which a split sum is added (architecture 4, docs/adr/0004). Pure.
//
// A sum that ranks share is num_lanes lane vectors added in one balanced binary tree,
// ((0+1)+(2+3))+((4+5)+(6+7)). A rank owns whole lanes [begin, end), adds the aligned subtrees that
// lie inside its range, and sends their roots; everyone adds the rest of the tree in the same
// order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/base/status.h"

namespace ds4 {

// Which lanes each rank owns: rank r has [begin[r], begin[r+1]). begin[0] = 0, the last is
// num_lanes.
struct LaneLayout {
  int num_lanes = 8;  // a power of two
  std::vector<int> begin;

  int world_size() const { return static_cast<int>(begin.size()) - 1; }
  int num_lanes_of(int rank) const { return begin[rank + 1] - begin[rank]; }

  // num_lanes split as evenly as can be, larger shares first: 8 over 3 is 3, 3, 2.
  // world_size must be in [1, num_lanes] (CHECK; callers refuse earlier).
  static LaneLayout Even(int num_lanes, int world_size);

  // kInvalidArgument unless num_lanes is a power of two up to 1024 and `begin` cuts [0, num_lanes)
  // into one or more rising ranges with at least one lane each. For layouts that a peer sent.
  Status Validate() const;
};

// An aligned subtree: lanes [begin, begin + size), size a power of two that divides begin.
struct LaneSubtree {
  int begin = 0;
  int size = 1;
  bool operator==(const LaneSubtree&) const = default;
};

// The largest aligned subtrees that cover lanes [begin, end), in rising order.
std::vector<LaneSubtree> SubtreesOf(int begin, int end);

// Adds lane vectors of one rank to its subtree roots, in the tree's order.
//   lanes: [end - begin, count] float32; roots: [SubtreesOf(begin, end).size(), count].
void AddLanes(int begin, int end, const float* lanes, int64_t count, float* roots);

// Adds the roots of all ranks to the total, in the tree's order.
//   roots: for each rank in order its roots [num_subtrees(rank)][count], given as one pointer per
//   subtree in lane order over the whole layout; out: [count], may be one of the inputs (the same
//   address), but must not overlap one otherwise.
void AddRoots(const LaneLayout& layout, std::span<const float* const> roots, int64_t count,
              float* out);

}  // namespace ds4
