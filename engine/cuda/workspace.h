// Device memory that is planned before it is taken: the same code first adds up sizes, then hands
// out addresses.
#pragma once

#include <cstdint>

#include "engine/cuda/activation.h"
#include "engine/cuda/runtime.h"

namespace ds4::cuda {

class Workspace {
 public:
  // Without memory: counts only.
  Workspace() = default;
  explicit Workspace(std::byte* memory) : memory_(memory) {}

  std::byte* Take(int64_t bytes) {
    std::byte* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return at;
  }
  template <typename T>
  T* TakeArray(int64_t count) {
    return reinterpret_cast<T*>(Take(count * static_cast<int64_t>(sizeof(T))));
  }
  // Forms for up to `few` rows in float32 and int8, `many` rows in bf16 (0: not at all).
  ActivationView TakeActivation(int64_t few, int64_t many, int64_t cols) {
    ActivationView view;
    view.cols = cols;
    if (few > 0) {
      const int64_t padded = (few + 7) / 8 * 8;
      view.f32 = TakeArray<float>(padded * cols);
      view.q = TakeArray<uint64_t>(padded * cols / 8);
      view.scale = TakeArray<float>(padded * cols / 32);
      view.sums = TakeArray<float>(padded * cols / 16);
    }
    if (many > 0) view.bf16 = TakeArray<uint16_t>(many * cols);
    return view;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* memory_ = nullptr;
  int64_t used_ = 0;
};

// The view of `rows` rows with only the forms named in `forms` (ActivationForms).
inline ActivationView WithForms(ActivationView view, int rows, int forms) {
  view.rows = rows;
  if ((forms & kFormF32) == 0) view.f32 = nullptr;
  if ((forms & kFormQ8) == 0) view.q = nullptr, view.scale = nullptr, view.sums = nullptr;
  if ((forms & kFormBF16) == 0) view.bf16 = nullptr;
  return view;
}

}  // namespace ds4::cuda
