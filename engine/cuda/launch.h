// What every launch function takes. Launch functions return nothing: a bad launch shows in
// LaunchStatus() or at the stream's next Synchronize.
#pragma once

#include "engine/cuda/runtime.h"

namespace ds4::cuda {

struct LaunchContext {
  Stream* stream = nullptr;
  int num_sms = 1;
  // Programmatic dependent launch: a kernel may start while the one before it ends, and waits
  // (GridDependencyWait) before it reads what that one wrote. Every kernel must call
  // LaunchDependents() early and GridDependencyWait() before its first read of, or write to,
  // anything but weights, on every path, whether or not this is set.
  bool overlap = true;
};

}  // namespace ds4::cuda
