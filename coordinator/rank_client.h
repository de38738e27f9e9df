// How the coordinator talks to one worker: the interface. The real one is grpc_rank_client, tests
// have a scripted one.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "coordinator/deadline.h"
#include "engine/base/status.h"
#include "proto/worker.pb.h"

namespace ds4 {

// What one worker said, or that its stream has ended.
struct RankEvent {
  int rank = 0;     // index of the worker in the cluster's list
  v1::Event event;  // when `ended` is not set
  bool ended = false;
  Status why;  // when ended; OK: the worker closed it in good order
};

// Events of all workers in the order they came in. Bounded: a worker that floods us is told apart
// by its stream ending with kResourceExhausted. Thread-safe.
class EventQueue {
 public:
  static constexpr size_t kMaxEvents = 1 << 16;

  // False when the queue is full: the event is not taken.
  bool Push(RankEvent event);
  // The next event; nothing when `deadline` has passed or `stop` says so (it is asked often while
  // nothing comes).
  std::optional<RankEvent> Pop(TimePoint deadline, const std::function<bool()>& stop);

 private:
  std::mutex mutex_;
  std::condition_variable not_empty_;
  std::deque<RankEvent> events_;  // guarded by mutex_
};

// One Control stream, alive from construction until Close or until the worker ends it. After
// `ended` came through the queue nothing else does. Thread: one at a time.
class RankClient {
 public:
  virtual ~RankClient() = default;  // closes
  virtual const std::string& address() const = 0;
  // Queues the command; never waits. Whether it arrived shows in the events. A stream that has
  // ended takes commands and drops them: its end is in the queue already.
  virtual void Send(v1::Command command) = 0;
  // Ends the stream at once; no event comes after it returns.
  virtual void Close() = 0;
};

// Opens a stream to the worker at `address`; does not wait for the connection. `queue` outlives it.
using RankClientFactory = std::function<std::unique_ptr<RankClient>(
    int rank, const std::string& address, EventQueue* queue)>;

}  // namespace ds4
