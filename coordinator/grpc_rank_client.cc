// gRPC's callback API: reads and writes complete on gRPC's threads, so no call here ever waits for
// a peer. A blocking Write would hang on a peer that accepts the connection and then says nothing.
#include "coordinator/grpc_rank_client.h"

#include <grpcpp/grpcpp.h>

#include "proto/protocol.h"
#include "proto/rpc_status.h"
#include "proto/worker.grpc.pb.h"

namespace ds4 {
namespace {

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& address) {
  grpc::ChannelArguments args;
  // A pool of its own: a new attempt connects at once and does not inherit the back-off of the
  // last.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A host that is gone without a word is noticed within 15 s, also while nothing is asked of it.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetMaxReceiveMessageSize(kMaxMessageBytes);
  args.SetMaxSendMessageSize(kMaxMessageBytes);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
}

class GrpcRankClient final : public RankClient,
                             private grpc::ClientBidiReactor<v1::Command, v1::Event> {
 public:
  GrpcRankClient(int rank, const std::string& address, EventQueue* queue)
      : rank_(rank),
        address_(address),
        queue_(queue),
        stub_(v1::Worker::NewStub(OpenChannel(address))) {
    stub_->async()->Control(&context_, this);
    AddHold();  // Send comes from outside of the callbacks; released when reading ends
    StartRead(&incoming_);
    StartCall();
  }

  ~GrpcRankClient() override { Close(); }

  const std::string& address() const override { return address_; }

  void Send(v1::Command command) override {
    std::lock_guard lock(mutex_);
    if (!readable_) return;
    outgoing_.push_back(std::move(command));
    if (!writing_) WriteNext();
  }

  void Close() override {
    {
      std::lock_guard lock(mutex_);
      silent_ = true;
    }
    context_.TryCancel();  // completes without the peer; does nothing to a call that has ended
    std::unique_lock lock(mutex_);
    done_changed_.wait(lock, [this] { return done_; });
  }

 private:
  void WriteNext() {  // mutex_ held
    writing_ = true;
    StartWrite(&outgoing_.front());
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (ok && readable_ && !outgoing_.empty()) WriteNext();
  }

  void OnReadDone(bool ok) override {
    std::lock_guard lock(mutex_);
    if (!ok) {
      readable_ = false;
      RemoveHold();
      return;
    }
    if (!silent_ && !queue_->Push({rank_, std::move(incoming_), false, {}})) {
      flooded_ = true;
      context_.TryCancel();
    }
    incoming_.Clear();
    StartRead(&incoming_);
  }

  void OnDone(const grpc::Status& status) override {
    Status why = FromGrpcStatus(status);
    std::lock_guard lock(mutex_);
    if (flooded_) why = ResourceExhaustedError("the worker sends more events than we can take");
    if (!silent_) queue_->Push({rank_, {}, true, std::move(why)});
    done_ = true;
    done_changed_.notify_all();
  }

  const int rank_;
  const std::string address_;
  EventQueue* const queue_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  grpc::ClientContext context_;
  v1::Event incoming_;  // owned by the read in flight

  std::mutex mutex_;  // guards what follows
  std::condition_variable done_changed_;
  std::deque<v1::Command> outgoing_;  // front: the write in flight
  bool writing_ = false;
  bool readable_ = true;
  bool flooded_ = false;
  bool silent_ = false;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<RankClient> MakeGrpcRankClient(int rank, const std::string& address,
                                               EventQueue* queue) {
  return std::make_unique<GrpcRankClient>(rank, address, queue);
}

}  // namespace ds4
