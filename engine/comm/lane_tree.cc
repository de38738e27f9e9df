// Walks the tree recursively, one short run of columns at a time, so that all partial sums of a run
// stay in the first-level cache and nothing is allocated.
#include "engine/comm/lane_tree.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "engine/base/check.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

constexpr int64_t kRun = 256;  // columns that are summed together
using Run = std::array<float, kRun>;

void AddTo(float* __restrict sum, const float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

bool IsPowerOfTwo(int n) { return n > 0 && (n & (n - 1)) == 0; }

// sum = the tree over `size` lane vectors that lie `stride` floats apart.
void SumLanes(const float* lanes, int size, int64_t stride, int64_t n, float* sum) {
  if (size == 1) {
    std::memcpy(sum, lanes, n * sizeof(float));
    return;
  }
  Run right;
  SumLanes(lanes, size / 2, stride, n, sum);
  SumLanes(lanes + (size / 2) * stride, size / 2, stride, n, right.data());
  AddTo(sum, right.data(), n);
}

// The roots of the whole layout, taken one after another while the tree is walked from the left.
struct RootCursor {
  std::span<const LaneSubtree> subtrees;
  std::span<const float* const> roots;
  size_t next = 0;
};

// sum = the tree over lanes [begin, begin + size), columns [first, first + n).
void SumRoots(RootCursor& cursor, int begin, int size, int64_t first, int64_t n, float* sum) {
  if (cursor.subtrees[cursor.next] == LaneSubtree{begin, size}) {
    std::memcpy(sum, cursor.roots[cursor.next++] + first, n * sizeof(float));
    return;
  }
  Run right;
  SumRoots(cursor, begin, size / 2, first, n, sum);
  SumRoots(cursor, begin + size / 2, size / 2, first, n, right.data());
  AddTo(sum, right.data(), n);
}

std::vector<LaneSubtree> AllSubtrees(const LaneLayout& layout) {
  std::vector<LaneSubtree> all;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const auto own = SubtreesOf(layout.begin[rank], layout.begin[rank + 1]);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

}  // namespace

LaneLayout LaneLayout::Even(int num_lanes, int world_size) {
  CHECK(IsPowerOfTwo(num_lanes)) << "num_lanes " << num_lanes << " is not a power of two";
  CHECK(world_size >= 1 && world_size <= num_lanes)
      << "world_size " << world_size << ", lanes " << num_lanes;
  LaneLayout layout;
  layout.num_lanes = num_lanes;
  layout.begin.assign(1, 0);
  for (int rank = 0; rank < world_size; ++rank) {
    const int share = num_lanes / world_size + (rank < num_lanes % world_size ? 1 : 0);
    layout.begin.push_back(layout.begin.back() + share);
  }
  return layout;
}

Status LaneLayout::Validate() const {
  if (!IsPowerOfTwo(num_lanes) || num_lanes > 1024) {
    return InvalidArgumentError(
        StrCat("lane layout: num_lanes ", num_lanes, ", must be a power of two up to 1024"));
  }
  if (begin.size() < 2 || begin.front() != 0 || begin.back() != num_lanes) {
    return InvalidArgumentError(
        StrCat("lane layout: ", begin.size(), " borders",
               begin.empty() ? "" : StrCat(" from ", begin.front(), " to ", begin.back()),
               ", must run from 0 to ", num_lanes));
  }
  for (size_t i = 1; i < begin.size(); ++i) {
    if (begin[i] <= begin[i - 1]) {
      return InvalidArgumentError(StrCat("lane layout: rank ", i - 1, " has lanes [", begin[i - 1],
                                         ", ", begin[i], "), needs at least one"));
    }
  }
  return OkStatus();
}

std::vector<LaneSubtree> SubtreesOf(int begin, int end) {
  CHECK(begin >= 0 && begin <= end) << "lanes [" << begin << ", " << end << ")";
  std::vector<LaneSubtree> subtrees;
  while (begin < end) {
    int size = 1;
    while (begin % (2 * size) == 0 && begin + 2 * size <= end) size *= 2;
    subtrees.push_back({begin, size});
    begin += size;
  }
  return subtrees;
}

void AddLanes(int begin, int end, const float* lanes, int64_t count, float* roots) {
  for (const LaneSubtree& subtree : SubtreesOf(begin, end)) {
    const float* first_lane = lanes + (subtree.begin - begin) * count;
    for (int64_t first = 0; first < count; first += kRun) {
      SumLanes(first_lane + first, subtree.size, count, std::min(kRun, count - first),
               roots + first);
    }
    roots += count;
  }
}

void AddRoots(const LaneLayout& layout, std::span<const float* const> roots, int64_t count,
              float* out) {
  const std::vector<LaneSubtree> subtrees = AllSubtrees(layout);
  CHECK(subtrees.size() == roots.size())
      << "layout has " << subtrees.size() << " roots, given " << roots.size();
  Run sum;  // not `out` itself, so that `out` may be any of the inputs
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t n = std::min(kRun, count - first);
    RootCursor cursor{subtrees, roots};
    SumRoots(cursor, 0, layout.num_lanes, first, n, sum.data());
    std::memcpy(out + first, sum.data(), n * sizeof(float));
  }
}

}  // namespace ds4
