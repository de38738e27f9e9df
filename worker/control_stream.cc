#include "worker/control_stream.h"

#include <functional>

#include "engine/base/strings.h"
#include "worker/command_codec.h"
#include "worker/log.h"

namespace ds4 {
namespace {

// Runs `late` unless it is destroyed within `timeout`. The synchronous API has no read with a
// deadline, so another thread must end it.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds timeout, std::function<void()> late)
      : thread_([this, timeout, late = std::move(late)] {
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, timeout, [this] { return done_; })) return;
          lock.unlock();
          late();
        }) {}
  ~Watchdog() {
    std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_
  std::jthread thread_;
};

}  // namespace

ControlStream::ControlStream(grpc::ServerContext* context, Stream* stream,
                             const StreamTimeouts& timeouts)
    : context_(context), stream_(stream), timeouts_(timeouts), writer_([this] { WriteEvents(); }) {}

ControlStream::~ControlStream() {
  events_.Close();
  // A coordinator that reads nothing would hold the writer, and with it this worker, for ever.
  Watchdog unread(timeouts_.farewell, [this] { context_->TryCancel(); });
  writer_.join();
}

Result<v1::Hello> ControlStream::ReadHello() {
  const Status late = DeadlineExceededError(
      StrCat("no Hello within ", timeouts_.hello.count(), " ms of the stream's start"));
  std::atomic<bool> is_late = false;
  v1::Command command;
  bool got = false;
  {
    Watchdog silence(timeouts_.hello, [&] {
      is_late = true;
      Interrupt(late);
    });
    got = Read(&command);
  }
  if (is_late) return late;
  if (!got) return CancelledError("the stream ended before a Hello");
  if (!command.has_hello()) {
    return InvalidArgumentError("the first message must be a Hello, another command came");
  }
  return command.hello();
}

bool ControlStream::Read(v1::Command* command) {
  if (stream_->Read(command)) return true;
  std::lock_guard lock(mutex_);
  read_ended_ = true;
  ended_changed_.notify_all();
  return false;
}

Status ControlStream::Send(const Event& event) {
  v1::Event message;
  EncodeEvent(event, &message);
  return SendMessage(std::move(message), timeouts_.send);
}

void ControlStream::SendHelloReply(const v1::HelloReply& reply) {
  v1::Event message;
  *message.mutable_hello() = reply;
  // The queue is empty and the stream new; should it have ended, the next Read says so.
  static_cast<void>(SendMessage(std::move(message), timeouts_.send));
}

Status ControlStream::SendMessage(v1::Event message, std::chrono::milliseconds timeout) {
  using PushResult = BoundedQueue<v1::Event>::PushResult;
  switch (events_.Push(std::move(message), timeout)) {
    case PushResult::kPushed:
      return OkStatus();
    case PushResult::kClosed:
      return CancelledError("the coordinator's stream has ended");
    case PushResult::kFull:
      break;
  }
  const Status why =
      DeadlineExceededError(StrCat("coordinator at ", peer(), " took none of ", kMaxQueuedEvents,
                                   " waiting events for ", timeout.count(), " ms"));
  LogError({}, why.ToString());
  context_->TryCancel();
  return why;
}

void ControlStream::Interrupt(const Status& why) {
  v1::Event message;
  EncodeEvent(ErrorEvent{why, -1, 0, true, 0}, &message);
  // Not worth waiting for: where there is no room, the end of the stream must do.
  static_cast<void>(SendMessage(std::move(message), std::chrono::milliseconds(0)));
  {
    std::unique_lock lock(mutex_);
    ended_changed_.wait_for(lock, timeouts_.farewell, [this] { return read_ended_; });
  }
  context_->TryCancel();
}

void ControlStream::WriteEvents() {
  while (std::optional<v1::Event> event = events_.Pop()) {
    if (stream_->Write(*event)) continue;
    // The stream is broken; senders learn it at their next event, the reader from its own call.
    events_.CloseAndClear();
    return;
  }
}

}  // namespace ds4
