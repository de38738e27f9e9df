// Finds damaged weights without decoding them: a block whose scale is not finite makes every value
// that is computed from it useless, far from the cause.
#pragma once

#include <cstddef>
#include <span>

#include "engine/base/status.h"
#include "engine/tensor/dtype.h"

namespace ds4 {

// Looks at every scale of `bytes`, for plain float types at every value; integers always pass.
// kDataLoss names the first bad block (its index in `bytes`) and what it holds; kInvalidArgument:
// no whole number of blocks.
Status CheckFinite(DType dtype, std::span<const std::byte> bytes);

}  // namespace ds4
