#include "engine/kernels/compressor.h"

#include "engine/base/check.h"
#include "engine/kernels/isa.h"

namespace ds4 {

void PoolWindow(std::span<const float* const> values, std::span<const float* const> scores,
                int64_t dim, float* out) {
  CHECK(values.size() == scores.size())
      << values.size() << " values, " << scores.size() << " scores";
  bool any = false;
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK((values[i] == nullptr) == (scores[i] == nullptr)) << "slot " << i << " is half empty";
    any = any || values[i] != nullptr;
  }
  CHECK(any) << "all " << values.size() << " slots are empty";
  ActiveKernels().pool_window(values.data(), scores.data(), static_cast<int64_t>(values.size()),
                              dim, out);
}

}  // namespace ds4
