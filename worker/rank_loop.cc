#include "worker/rank_loop.h"

#include <exception>
#include <new>
#include <utility>

#include "engine/base/strings.h"
#include "worker/log.h"

namespace ds4 {
namespace {

Status NoGroup(const char* what) {
  return FailedPreconditionError(
      StrCat(what, " came before a group was formed; send FormGroup first"));
}

bool EndsGroup(const Command& command) {
  return std::holds_alternative<GroupSpec>(command) ||
         std::holds_alternative<LeaveGroupCommand>(command);
}

const char* NameOf(const Command& command) {
  static constexpr const char* kNames[] = {"FormGroup", "OpenSession", "CloseSession",
                                           "Step",      "LeaveGroup",  "a refused command"};
  static_assert(std::size(kNames) == std::variant_size_v<Command>);
  return kNames[command.index()];
}

}  // namespace

RankLoop::RankLoop(WorkerParts parts, EventSink* sink)
    : parts_(std::move(parts)), sink_(sink), thread_([this] { Run(); }) {}

RankLoop::~RankLoop() { Stop(CancelledError("the coordinator's stream has ended")); }

Status RankLoop::Enqueue(Command command) {
  command = CheckEpoch(std::move(command));
  const uint64_t ticket = next_ticket_++;
  const char* name = NameOf(command);
  if (EndsGroup(command)) {
    abort_.Trip(ticket, AbortedError(StrCat("ended by ", name, " from the coordinator")));
  }
  using PushResult = BoundedQueue<Ticketed>::PushResult;
  // No waiting here: a coordinator that sends this far ahead is not keeping to the protocol.
  const PushResult pushed = queue_.Push({ticket, std::move(command)}, std::chrono::milliseconds(0));
  if (pushed == PushResult::kPushed) return OkStatus();
  if (pushed == PushResult::kClosed) return CancelledError("the worker is stopping");
  return ResourceExhaustedError(
      StrCat("no room for ", name, ": ", kMaxQueuedCommands, " commands wait already"));
}

// A group that would not raise the epoch is refused here, before it ends the one that lives.
Command RankLoop::CheckEpoch(Command command) {
  const auto* spec = std::get_if<GroupSpec>(&command);
  if (spec == nullptr) return command;
  if (spec->epoch <= last_epoch_) {
    return RejectedCommand{
        FailedPreconditionError(StrCat("FormGroup has epoch ", spec->epoch,
                                       ", it must be above the last one, ", last_epoch_)),
        std::nullopt};
  }
  last_epoch_ = spec->epoch;
  return command;
}

void RankLoop::Stop(Status why) {
  abort_.Trip(UINT64_MAX, std::move(why));
  queue_.CloseAndClear();
}

void RankLoop::Run() {
  while (std::optional<Ticketed> item = queue_.Pop()) HandleGuarded(*item);
  group_.reset();
}

// The thread's top: libraries below may throw, and a thrown exception must become a message.
void RankLoop::HandleGuarded(const Ticketed& item) {
  current_ticket_ = item.ticket;
  try {
    std::visit([this](const auto& command) { Handle(command); }, item.command);
  } catch (const std::bad_alloc&) {
    ReportThrown(ResourceExhaustedError(StrCat("out of memory in ", NameOf(item.command))));
  } catch (const std::exception& error) {
    ReportThrown(InternalError(StrCat("exception in ", NameOf(item.command), ": ", error.what())));
  }
}

void RankLoop::Handle(const GroupSpec& spec) {
  group_.reset();  // frees the old weights before the new ones come
  last_progress_ = {};
  const LogContext me{spec.rank, spec.epoch};
  LogInfo(me, StrCat("joining a group of ", spec.world_size(), " over ", spec.transport));
  auto group =
      Group::Form(spec, parts_, &abort_, current_ticket_, [this](int64_t done, int64_t total) {
        ReportProgress(done, total);
        return abort_.Check(current_ticket_).ok();
      });
  if (!group.ok()) {
    LogError(me, StrCat("no group: ", group.status()));
    Send(ErrorEvent{group.status(), spec.rank, spec.epoch, true, 0});
    return;
  }
  group_ = std::move(group).value();
  const EngineStats& stats = group_->stats();
  LogInfo(me, StrCat("ready: ", HumanBytes(stats.weight_bytes), " of weights, ",
                     HumanBytes(stats.kv_bytes_per_session), " of KV per session, loaded in ",
                     Fixed(stats.load_seconds, 2), " s"));
  Send(GroupReadyEvent{spec.epoch, spec.rank, stats});
}

void RankLoop::Handle(const OpenSessionCommand& command) {
  const Status status = group_ == nullptr
                            ? NoGroup("OpenSession")
                            : group_->OpenSession(command.session_id, command.max_context);
  if (!status.ok()) return Refuse(status);
  Send(SessionOpenedEvent{command.session_id});
}

void RankLoop::Handle(const CloseSessionCommand& command) {
  const Status status =
      group_ == nullptr ? NoGroup("CloseSession") : group_->CloseSession(command.session_id);
  if (!status.ok()) return Refuse(status);
  Send(SessionClosedEvent{command.session_id});
}

void RankLoop::Handle(const StepCommand& step) {
  const uint64_t sequence = step.plan.sequence;
  if (group_ == nullptr) return Refuse(NoGroup("Step"), sequence);
  const auto on_token = [&](const TokenOutput& token) {
    if (group_->spec().rank == 0) Send(TokenEvent{sequence, token});
  };
  const bool was_broken = !group_->broken().ok();
  // A later command has ended this group while the step waited in the queue.
  if (Status ended = abort_.Check(current_ticket_); !ended.ok()) {
    return Refuse(group_->Break(std::move(ended)), sequence);
  }
  auto outcome = group_->Run(step, on_token);
  if (!outcome.ok()) {
    // Logged once, where it broke; later steps only repeat the first cause.
    if (!was_broken) LogError(who(), StrCat("step ", sequence, ": ", outcome.status()));
    return Refuse(outcome.status(), sequence);
  }
  StepDoneEvent done{sequence, std::move(outcome->result), std::move(outcome->state_hash)};
  if (group_->spec().rank != 0) done.result.nll.clear();
  Send(done);
}

void RankLoop::Handle(const LeaveGroupCommand&) {
  if (group_ != nullptr) LogInfo(who(), "leaving the group");
  group_.reset();
  Send(LeftGroupEvent{});
}

void RankLoop::Handle(const RejectedCommand& command) {
  if (group_ != nullptr && command.sequence) group_->SkipSequence(*command.sequence);
  LogWarning(who(), StrCat("command refused: ", command.why));
  Refuse(command.why, command.sequence.value_or(0));
}

void RankLoop::ReportProgress(int64_t done, int64_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (done < total && now - last_progress_ < kProgressInterval) return;
  last_progress_ = now;
  Send(LoadProgressEvent{done, total});
}

void RankLoop::Send(const Event& event) {
  const Status status = sink_->Send(event);
  if (status.ok() || group_ == nullptr) return;
  // Nobody hears this rank any more: its peers must not wait for it.
  static_cast<void>(group_->Break(status.WithContext("telling the coordinator")));
}

// The error answers one command; whether the group still lives is said along.
void RankLoop::Refuse(const Status& why, uint64_t sequence) {
  const bool broken = group_ != nullptr && !group_->broken().ok();
  const LogContext me = who();
  Send(ErrorEvent{why, me.rank, me.epoch, broken, sequence});
}

void RankLoop::ReportThrown(const Status& why) {
  LogError(who(), why.ToString());
  if (group_ != nullptr) static_cast<void>(group_->Break(why));
  Refuse(why);
}

LogContext RankLoop::who() const { return group_ == nullptr ? LogContext() : group_->who(); }

}  // namespace ds4
