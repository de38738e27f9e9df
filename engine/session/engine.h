// The boundary that the worker uses: one rank's loaded weights, its sessions, and steps.
//
// Every rank of a group makes the same calls in the same order; the calls are collective where
// ranks share sums. Thread: the rank's own thread only (rank_loop); LoadProgress runs on it too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/base/status.h"
#include "engine/comm/communicator.h"
#include "engine/session/engine_options.h"
#include "engine/session/step_plan.h"

namespace ds4 {

struct EngineStats {
  int64_t weight_bytes = 0;  // held by this rank
  int64_t kv_bytes_per_session = 0;
  double load_seconds = 0.0;
  // By so much less do matrices that every step reads take than in the file, converted at load
  // (EngineOptions::replicated_weights).
  int64_t saved_bytes = 0;
  int64_t device_bytes = 0;     // of device memory, everything taken at start; 0 on the CPU
  std::string backend = "cpu";  // and, of a device, its name: "cuda, NVIDIA H200"
};

class Engine {
 public:
  // done and total count bytes of this rank's weights; false calls the loading off (kCancelled).
  using LoadProgress = std::function<bool(int64_t done, int64_t total)>;
  using TokenCallback = std::function<void(const TokenOutput&)>;

  // Reads this rank's slices (comm->rank() of comm->world_size(), lanes as comm->lanes()).
  // `comm` outlives the engine. kInvalidArgument: file or options; kResourceExhausted: no memory;
  // kFailedPrecondition: this program was built without options.backend (backend.h).
  static Result<std::unique_ptr<Engine>> Load(const EngineOptions& options, Communicator* comm,
                                              const LoadProgress& progress);
  virtual ~Engine() = default;

  // kAlreadyExists, kResourceExhausted (max_sessions), kInvalidArgument (context over the limit).
  virtual Status OpenSession(uint64_t session_id, int64_t max_context) = 0;
  virtual Status CloseSession(uint64_t session_id) = 0;

  // Runs one step. `on_token` sees each token as soon as it is decided.
  // kInvalidArgument: the plan does not fit (unknown session, position, token id, too many rows):
  // nothing has run. kAborted, kUnavailable, kDeadlineExceeded: the group is broken.
  virtual Result<StepResult> Run(const StepPlan& plan, const TokenCallback& on_token) = 0;

  // Hash of everything that later steps can read of the session, equal on all ranks.
  virtual Result<uint64_t> StateHash(uint64_t session_id) = 0;

  virtual const EngineStats& stats() const = 0;
};

}  // namespace ds4
