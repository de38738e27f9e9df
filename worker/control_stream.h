// One coordinator's Control stream: reading with a deadline for the hello, and one writer thread
// that takes events from a bounded queue.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "engine/base/status.h"
#include "proto/worker.grpc.pb.h"
#include "worker/commands.h"
#include "worker/queue.h"

namespace ds4 {

// How long things may take. Tests shorten them.
struct StreamTimeouts {
  std::chrono::milliseconds hello{5000};     // from the stream's start to the Hello
  std::chrono::milliseconds send{10000};     // a full event queue makes room within this
  std::chrono::milliseconds farewell{500};   // a refused coordinator closes within this
  std::chrono::milliseconds handover{5000};  // the coordinator before has left within this
};

// Read calls are for the rpc's own thread; Send and Interrupt for any.
class ControlStream : public EventSink {
 public:
  using Stream = grpc::ServerReaderWriter<v1::Event, v1::Command>;

  // Events that may wait for the network; a decode step makes one event a token.
  static constexpr size_t kMaxQueuedEvents = 4096;

  // Both outlive this object.
  ControlStream(grpc::ServerContext* context, Stream* stream, const StreamTimeouts& timeouts);
  // Writes what is queued (for at most `farewell`), then ends the writer.
  ~ControlStream() override;

  // kDeadlineExceeded: no message in time (the stream is then cancelled); kCancelled: it ended
  // first; kInvalidArgument: something else came.
  Result<v1::Hello> ReadHello();
  // False when the stream has ended.
  bool Read(v1::Command* command);

  Status Send(const Event& event) override;
  void SendHelloReply(const v1::HelloReply& reply);
  // Tells the coordinator why, gives it `farewell` to read that, then cancels the stream.
  void Interrupt(const Status& why);

  bool cancelled() const { return context_->IsCancelled(); }
  std::string peer() const { return context_->peer(); }

 private:
  Status SendMessage(v1::Event message, std::chrono::milliseconds timeout);
  void WriteEvents();

  grpc::ServerContext* const context_;
  Stream* const stream_;
  const StreamTimeouts timeouts_;
  BoundedQueue<v1::Event> events_{kMaxQueuedEvents};
  std::mutex mutex_;
  std::condition_variable ended_changed_;
  bool read_ended_ = false;  // guarded by mutex_
  std::jthread writer_;      // last: it uses everything above
};

}  // namespace ds4
