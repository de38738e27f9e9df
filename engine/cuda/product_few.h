// The fast kernels behind product.h for up to 8 rows of x and weights in Q8_0, F16, BF16 or F32:
// the same additions as in the general kernel, with nothing but these types in the code. Internal
// to product.cu.
#pragma once

#include <cstdint>
#include <span>

#include "engine/cuda/product.h"

namespace ds4::cuda {

inline constexpr int kMaxFewProductRows = 8;  // of x
inline constexpr int kMaxProductLanes = 16;   // of one rank
inline constexpr int kMaxProductRoots = 8;    // aligned subtrees that 16 lanes anywhere can need

// Where a lane product leaves its sums; for ordinary products `roots` is null.
struct LaneRoots {
  float* roots = nullptr;
  int lanes = 1;
  int num_roots = 0;
  int8_t begin[kMaxProductRoots] = {};  // first local lane
  int8_t size[kMaxProductRoots] = {};
};

// Launches the jobs, checked already, and returns true, or does nothing and returns false where the
// general kernel must do them. A lane product is one job, whose w is lane 0.
bool LaunchFewRowProducts(const LaunchContext& launch, std::span<const ProductJob> jobs,
                          const LaneRoots& roots);

}  // namespace ds4::cuda
