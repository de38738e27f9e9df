// Where a step's time goes, kernel by kernel, in the order of their execution and with the overlap
// of programmatic launches, which profilers take away. Builds with DS4_KERNEL_TIMES only: there the
// first thread of every kernel notes the time when its wait for the kernels before it is over.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"

namespace ds4::cuda {

struct KernelTime {
  std::string name;  // as the compiler has it
  double us = 0.0;   // from the end of its wait to the end of the next kernel's wait
};

// kFailedPrecondition in builds whose kernels note no times.
Status CheckKernelTimes();
// Of the calling thread's device: notes the next kernels, at most kMaxKernelTimes of them.
inline constexpr int64_t kMaxKernelTimes = 1 << 18;
Status StartKernelTimes();
// After the stream of these kernels was waited for. The last kernel is left out.
Result<std::vector<KernelTime>> StopKernelTimes();

}  // namespace ds4::cuda
