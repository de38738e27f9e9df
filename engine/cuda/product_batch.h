// The fast kernels behind product.h for batches of decoding: up to 64 rows of x, meant for more
// than the few-row kernels take, and weights in Q8_0, F16, BF16 or F32. Internal to product.cu.
#pragma once

#include <span>

#include "engine/cuda/product_few.h"

namespace ds4::cuda {

inline constexpr int kMaxBatchRows = 64;

// As LaunchFewRowProducts. All weights are in Q8_0, or all in float types, or all in others.
bool LaunchBatchProducts(const LaunchContext& launch, std::span<const ProductJob> jobs,
                         const LaneRoots& roots);

}  // namespace ds4::cuda
