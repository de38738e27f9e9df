// The one thread that owns communicator, engine and sessions. It takes commands in the order they
// came and answers each of them through the event sink.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "engine/base/status.h"
#include "worker/abort_switch.h"
#include "worker/commands.h"
#include "worker/group.h"
#include "worker/parts.h"
#include "worker/queue.h"

namespace ds4 {

// Lives as long as one coordinator's stream. Enqueue is for one thread (the stream's reader), Stop
// for any; everything else happens on the rank's thread.
class RankLoop {
 public:
  // Commands that may wait; a coordinator that keeps to one step at a time never comes near.
  static constexpr size_t kMaxQueuedCommands = 256;
  // At most ten load reports a second.
  static constexpr std::chrono::milliseconds kProgressInterval{100};

  // `sink` outlives this object.
  RankLoop(WorkerParts parts, EventSink* sink);
  // Stops, waits for the command in flight to end, frees the group.
  ~RankLoop();
  RankLoop(const RankLoop&) = delete;
  RankLoop& operator=(const RankLoop&) = delete;

  // LeaveGroup and FormGroup also end the group before them: a step in flight returns kAborted
  // soon. kResourceExhausted: too many commands wait.
  Status Enqueue(Command command);

  // Ends the command in flight and drops those that wait. Later commands are dropped too.
  void Stop(Status why);

 private:
  struct Ticketed {
    uint64_t ticket = 0;
    Command command;
  };

  void Run();
  void HandleGuarded(const Ticketed& item);
  void Handle(const GroupSpec& spec);
  void Handle(const OpenSessionCommand& command);
  void Handle(const CloseSessionCommand& command);
  void Handle(const StepCommand& step);
  void Handle(const LeaveGroupCommand& command);
  void Handle(const RejectedCommand& command);

  Command CheckEpoch(Command command);
  void ReportProgress(int64_t done, int64_t total);
  void Send(const Event& event);
  void Refuse(const Status& why, uint64_t sequence = 0);
  void ReportThrown(const Status& why);
  LogContext who() const;

  const WorkerParts parts_;
  EventSink* const sink_;
  BoundedQueue<Ticketed> queue_{kMaxQueuedCommands};
  AbortSwitch abort_;
  uint64_t next_ticket_ = 1;     // of the enqueuing thread
  uint64_t last_epoch_ = 0;      // of the enqueuing thread
  uint64_t current_ticket_ = 0;  // of the rank's thread, as all below
  std::unique_ptr<Group> group_;
  std::chrono::steady_clock::time_point last_progress_;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace ds4
