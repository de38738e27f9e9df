// This worker's time in one group: connect, load, run, and the one reason why it ended.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/base/status.h"
#include "worker/abort_switch.h"
#include "worker/commands.h"
#include "worker/log.h"
#include "worker/parts.h"

namespace ds4 {

// What a step gave.
struct StepOutcome {
  StepResult result;
  std::vector<uint64_t> state_hash;  // per part, when asked for
};

// Owns transport, communicator and engine of one epoch. Once broken it stays broken: every later
// call returns the first reason at once. Thread: the rank's own only; other threads reach it
// through the AbortSwitch.
class Group {
 public:
  // Compares the plan's digest, connects with all peers, loads the weights. `abort` outlives the
  // group; `ticket` is the forming command's. Ends early with the reason when the switch is
  // tripped. kFailedPrecondition: this file gives another plan (both digests); kDeadlineExceeded:
  // peers missing.
  static Result<std::unique_ptr<Group>> Form(const GroupSpec& spec, const WorkerParts& parts,
                                             AbortSwitch* abort, uint64_t ticket,
                                             const Engine::LoadProgress& progress);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Status OpenSession(uint64_t session_id, int64_t max_context);
  Status CloseSession(uint64_t session_id);
  // A plan that does not fit is refused with kInvalidArgument and nothing has run; any other error
  // has broken the group.
  Result<StepOutcome> Run(const StepCommand& step, const Engine::TokenCallback& on_token);
  // A step that could not be read used up its sequence number: all ranks got the same bytes and
  // refuse it alike.
  void SkipSequence(uint64_t sequence);

  // Breaks the group from the rank's thread; peers that wait for us learn of it. Returns `why`.
  Status Break(Status why);
  // Why it is broken, or OK.
  const Status& broken() const { return broken_; }

  const GroupSpec& spec() const { return spec_; }
  const EngineStats& stats() const { return engine_->stats(); }
  LogContext who() const { return {spec_.rank, spec_.epoch}; }

 private:
  Group(const GroupSpec& spec, AbortSwitch* abort) : spec_(spec), abort_(abort) {}
  Status Connect(const WorkerParts& parts, std::stop_token stop);
  Status Load(const WorkerParts& parts, const Engine::LoadProgress& progress);
  Status CheckAlive() const;
  Status CheckStep(const StepCommand& step) const;
  Result<std::vector<uint64_t>> HashStates(const StepPlan& plan);

  const GroupSpec spec_;
  AbortSwitch* const abort_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<Engine> engine_;  // uses comm_, so it is declared after it
  Status broken_;
  std::optional<uint64_t> next_sequence_;  // unset before the first step
};

}  // namespace ds4
