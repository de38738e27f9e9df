// The engines that this program has besides the CPU's: they register here at start, so that nothing
// in session/ depends on them.
#pragma once

#include <memory>

#include "engine/base/status.h"
#include "engine/comm/communicator.h"
#include "engine/session/engine.h"

namespace ds4 {

using BackendFactory = Result<std::unique_ptr<Engine>> (*)(const EngineOptions& options,
                                                           Communicator* comm,
                                                           const Engine::LoadProgress& progress);

// Makes Engine::Load use `factory` for `backend`, which is not kCpu (CHECK). Thread-safe; the last
// one registered counts.
void RegisterBackend(Backend backend, BackendFactory factory);

// nullptr when none is registered.
BackendFactory FindBackend(Backend backend);

// kFailedPrecondition that says what the build lacks and what to do.
Status MissingBackendError(Backend backend);

}  // namespace ds4
