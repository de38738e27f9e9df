// The fast kernel behind product.h for 9 to 64 rows of x and weights in Q8_0: batches of decoding.
// Internal to product.cu.
#pragma once

#include <span>

#include "engine/cuda/product_few.h"

namespace ds4::cuda {

inline constexpr int kMaxBatchRows = 64;

// As LaunchFewRowProducts.
bool LaunchBatchProducts(const LaunchContext& launch, std::span<const ProductJob> jobs,
                         const LaneRoots& roots);

}  // namespace ds4::cuda
