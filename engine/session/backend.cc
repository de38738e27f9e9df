#include "engine/session/backend.h"

#include <array>
#include <atomic>

#include "engine/base/check.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

// Programs link engines in or not; what is linked does not change while they run.
std::array<std::atomic<BackendFactory>, static_cast<size_t>(Backend::kCount)> g_factories{};

}  // namespace

void RegisterBackend(Backend backend, BackendFactory factory) {
  CHECK(backend != Backend::kCpu && backend < Backend::kCount) << BackendName(backend);
  g_factories[static_cast<size_t>(backend)] = factory;
}

BackendFactory FindBackend(Backend backend) { return g_factories[static_cast<size_t>(backend)]; }

Status MissingBackendError(Backend backend) {
  CHECK(backend == Backend::kCuda) << BackendName(backend);
  return FailedPreconditionError(
      "this build has no CUDA engine: it was configured without the CUDA toolkit (nvcc); install "
      "CUDA 13 and build again, or use --backend cpu");
}

}  // namespace ds4
