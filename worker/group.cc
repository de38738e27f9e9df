#include "worker/group.h"

#include "engine/base/strings.h"

namespace ds4 {
namespace {

Status CheckPlanDigest(const GroupSpec& spec, const WorkerParts& parts) {
  ASSIGN_OR_RETURN(const std::string own, parts.plan_digest(spec.lanes));
  if (own == spec.plan_digest) return OkStatus();
  return FailedPreconditionError(StrCat("this worker's file gives shard plan ", own,
                                        ", the coordinator's gives ", spec.plan_digest,
                                        "; give both the same model file"));
}

}  // namespace

Result<std::unique_ptr<Group>> Group::Form(const GroupSpec& spec, const WorkerParts& parts,
                                           AbortSwitch* abort, uint64_t ticket,
                                           const Engine::LoadProgress& progress) {
  RETURN_IF_ERROR(CheckPlanDigest(spec, parts));
  std::unique_ptr<Group> group(new Group(spec, abort));
  std::stop_source stop;
  RETURN_IF_ERROR(abort->BeginJoin(ticket, stop));
  Status status = group->Connect(parts, stop.get_token());
  if (status.ok()) status = group->Load(parts, progress);
  // An outside end explains more than what it led to.
  RETURN_IF_ERROR(abort->Check(ticket));
  RETURN_IF_ERROR(status);
  return group;
}

Group::~Group() {
  // First, so that no other thread aborts a communicator that is going away.
  abort_->Disarm();
}

Status Group::Connect(const WorkerParts& parts, std::stop_token stop) {
  ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport, parts.connect(spec_, std::move(stop)));
  comm_ = MakeExchangeCommunicator(std::move(transport), spec_.lanes);
  comm_->set_timeout(spec_.timeout);
  return abort_->Arm(comm_.get());
}

Status Group::Load(const WorkerParts& parts, const Engine::LoadProgress& progress) {
  EngineOptions options;
  options.max_context = spec_.max_context;
  options.max_batch_rows = spec_.max_batch_rows;
  options.max_sessions = spec_.max_sessions;
  auto engine = parts.load_engine(options, comm_.get(), progress);
  if (!engine.ok()) return Break(engine.status().WithContext("loading the weights"));
  engine_ = std::move(engine).value();
  return OkStatus();
}

Status Group::OpenSession(uint64_t session_id, int64_t max_context) {
  RETURN_IF_ERROR(CheckAlive());
  if (max_context > spec_.max_context) {
    return InvalidArgumentError(StrCat("session ", session_id, " asks for a context of ",
                                       max_context, ", the group was formed with ",
                                       spec_.max_context));
  }
  return engine_->OpenSession(session_id, max_context);
}

Status Group::CloseSession(uint64_t session_id) {
  RETURN_IF_ERROR(CheckAlive());
  return engine_->CloseSession(session_id);
}

Result<StepOutcome> Group::Run(const StepCommand& step, const Engine::TokenCallback& on_token) {
  RETURN_IF_ERROR(CheckAlive());
  if (Status status = CheckStep(step); !status.ok()) return Break(std::move(status));
  next_sequence_ = step.plan.sequence + 1;
  auto result = engine_->Run(step.plan, on_token);
  if (!broken_.ok()) return broken_;  // the callback broke it
  if (!result.ok()) {
    // By the engine's contract the plan did not fit and nothing has run, on any rank.
    if (result.status().code() == StatusCode::kInvalidArgument) return result.status();
    return Break(result.status());
  }
  StepOutcome outcome;
  outcome.result = std::move(result).value();
  if (step.want_state_hash) {
    auto hashes = HashStates(step.plan);
    if (!hashes.ok()) return Break(hashes.status());
    outcome.state_hash = std::move(hashes).value();
  }
  return outcome;
}

void Group::SkipSequence(uint64_t sequence) {
  if (!next_sequence_ || sequence == *next_sequence_) next_sequence_ = sequence + 1;
}

Status Group::Break(Status why) {
  if (!broken_.ok()) return broken_;
  broken_ = std::move(why);
  if (comm_ != nullptr) comm_->Abort(broken_);
  return broken_;
}

Status Group::CheckAlive() const {
  if (broken_.ok()) return OkStatus();
  return broken_.WithContext(StrCat("the group of epoch ", spec_.epoch,
                                    " is broken, leave it or form it anew; first cause"));
}

Status Group::CheckStep(const StepCommand& step) const {
  if (step.epoch != spec_.epoch) {
    return FailedPreconditionError(StrCat("step ", step.plan.sequence, " is of epoch ", step.epoch,
                                          ", this group's epoch is ", spec_.epoch));
  }
  if (next_sequence_ && step.plan.sequence != *next_sequence_) {
    return FailedPreconditionError(
        StrCat("step ", step.plan.sequence, " came where step ", *next_sequence_, " was expected"));
  }
  if (const uint64_t own = step.plan.Digest(); step.digest != own) {
    return FailedPreconditionError(StrCat("step ", step.plan.sequence, " has plan digest ",
                                          step.digest, ", this rank computes ", own,
                                          " from the same plan"));
  }
  return OkStatus();
}

Result<std::vector<uint64_t>> Group::HashStates(const StepPlan& plan) {
  std::vector<uint64_t> hashes;
  for (const StepPart& part : plan.parts) {
    ASSIGN_OR_RETURN(const uint64_t hash, engine_->StateHash(part.session_id));
    hashes.push_back(hash);
  }
  return hashes;
}

}  // namespace ds4
