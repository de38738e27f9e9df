// Streams are calls on one completion queue; each has at most one read and one write on its way,
// and the operation's address is its tag. The rank thread takes events off the queue, first for the
// join, then for one exchange after the other. A stream is freed when the last of its operations
// has come back, so nothing that gRPC still holds goes away under it.
#include "worker/grpc_transport.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/base/check.h"
#include "engine/base/strings.h"
#include "engine/comm/exchange_errors.h"
#include "engine/comm/little_endian.h"
#include "proto/worker.grpc.pb.h"

namespace ds4 {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kMethod = "/ds4.v1.Worker/Exchange";
constexpr uint32_t kFrameMagic = 0x47345344;  // "DS4G"
constexpr size_t kHeaderBytes = 24;
constexpr size_t kMaxHelloBytes = 256;
constexpr milliseconds kHelloTimeout{1000};  // for a caller to say who it is
constexpr size_t kMaxUnknownCallers = 64;    // at the same time
constexpr milliseconds kFirstPause{10};      // before a rank is called again
constexpr milliseconds kLongestPause{500};
constexpr milliseconds kStopCheck{20};
constexpr milliseconds kLeaveTime{200};  // for cancelled operations to come back
constexpr milliseconds kShutdownTime{10'000};

gpr_timespec ToGrpcTime(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(std::max<int64_t>(left.count(), 0), GPR_TIMESPAN));
}

class Stream;

// One operation of a stream; its address is the tag on the queue.
struct Operation {
  enum class Kind { kAccept, kStart, kRead, kWrite, kFinish };
  Kind kind;
  Stream* stream;
};

// One Exchange call, made by us (client side) or taken by us (server side).
// Thread: the rank's; TryCancel from any once the call has begun.
class Stream {
 public:
  // Calls `target`; kStart comes back.
  static std::unique_ptr<Stream> Dial(const std::string& target, grpc::CompletionQueue* queue) {
    std::unique_ptr<Stream> stream(new Stream());
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(GrpcExchange::kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(GrpcExchange::kMaxMessageBytes);
    // A connection of its own, so that no other call of this process delays a frame.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    stream->client_context_ = std::make_unique<grpc::ClientContext>();
    stream->stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
    stream->client_ = stream->stub_->PrepareCall(stream->client_context_.get(), kMethod, queue);
    stream->client_->StartCall(stream->Begin(stream->start_));
    return stream;
  }

  // Takes the next call that comes; kAccept comes back then.
  static std::unique_ptr<Stream> Accept(const GrpcExchange::RequestCall& request_call,
                                        grpc::ServerCompletionQueue* queue) {
    std::unique_ptr<Stream> stream(new Stream());
    stream->server_context_ = std::make_unique<grpc::ServerContext>();
    stream->server_ = std::make_unique<ServerCall>(stream->server_context_.get());
    request_call(stream->server_context_.get(), stream->server_.get(), queue, queue,
                 stream->Begin(stream->accept_));
    return stream;
  }

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Read() {
    void* tag = Begin(read_);
    if (client_ != nullptr) {
      client_->Read(&in_, tag);
    } else {
      server_->Read(&in_, tag);
    }
  }
  void Write(const grpc::ByteBuffer& message) {
    out_ = message;  // shares the bytes
    void* tag = Begin(write_);
    if (client_ != nullptr) {
      client_->Write(out_, tag);
    } else {
      server_->Write(out_, tag);
    }
  }
  // Asks why the call has ended; kFinish comes back with the answer in end().
  void AskWhyEnded() { client_->Finish(&end_, Begin(finish_)); }
  // Ends a call that we took.
  void Refuse(const grpc::Status& why) { server_->Finish(why, Begin(finish_)); }

  void TryCancel() {
    if (client_context_ != nullptr) {
      client_context_->TryCancel();
    } else {
      server_context_->TryCancel();
    }
  }

  // An operation has come back.
  void End() { --num_in_flight_; }
  bool is_idle() const { return num_in_flight_ == 0; }
  bool is_dialled() const { return client_ != nullptr; }
  const grpc::ByteBuffer& in() const { return in_; }
  const grpc::Status& end() const { return end_; }

  int peer = -1;            // known after the hello (taken) or at once (dialled)
  bool is_retired = false;  // waits only for its operations to come back

 private:
  using ServerCall = grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

  Stream() = default;
  void* Begin(Operation& operation) {
    ++num_in_flight_;
    return &operation;
  }

  std::unique_ptr<grpc::ClientContext> client_context_;
  std::unique_ptr<grpc::GenericStub> stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> client_;
  std::unique_ptr<grpc::ServerContext> server_context_;
  std::unique_ptr<ServerCall> server_;

  Operation accept_{Operation::Kind::kAccept, this};
  Operation start_{Operation::Kind::kStart, this};
  Operation read_{Operation::Kind::kRead, this};
  Operation write_{Operation::Kind::kWrite, this};
  Operation finish_{Operation::Kind::kFinish, this};
  int num_in_flight_ = 0;
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
  grpc::Status end_;
};

// An operation that came back; `ok` as gRPC means it: false when the call has ended.
struct CompletionEvent {
  Operation::Kind kind;
  Stream* stream;
  bool ok;
};

}  // namespace

struct GrpcExchange::Impl {
  Stream* Dial(const std::string& target) { return Own(Stream::Dial(target, queue.get())); }

  // One call at a time is asked for; it comes in this join or is parked for the next.
  void RequestCallOnce() {
    if (requested == nullptr) requested = Own(Stream::Accept(request_call, queue.get()));
  }

  // The next operation that came back, or none before the deadline (or after the shutdown).
  std::optional<CompletionEvent> Next(Clock::time_point deadline) {
    const gpr_timespec limit = ToGrpcTime(deadline);
    std::optional<CompletionEvent> event;
    while (!event.has_value() && Poll(limit, &event)) {
    }
    return event;
  }

  // Waits for one operation; `event` stays empty when it was a retired stream's. False: none came.
  bool Poll(gpr_timespec limit, std::optional<CompletionEvent>* event) {
    void* tag = nullptr;
    bool ok = false;
    if (queue->AsyncNext(&tag, &ok, limit) != grpc::CompletionQueue::GOT_EVENT) return false;
    const auto* operation = static_cast<Operation*>(tag);
    Stream* stream = operation->stream;
    const Operation::Kind kind = operation->kind;
    stream->End();
    if (kind == Operation::Kind::kAccept) TakeCall(stream, ok);
    if (!stream->is_retired) {
      *event = CompletionEvent{kind, stream, ok};
    } else if (stream->is_idle()) {
      streams.erase(stream);
    }
    return true;
  }

  // Ends the call; the stream must not be used any more.
  void Retire(Stream* stream) {
    stream->TryCancel();
    stream->is_retired = true;
    if (stream->is_idle()) streams.erase(stream);
  }

  // Lets retired streams go, as far as that is quick; the rest goes with later events.
  void Drain() {
    const gpr_timespec limit = ToGrpcTime(Clock::now() + kLeaveTime);
    std::optional<CompletionEvent> event;
    while (HasRetired() && Poll(limit, &event)) {
    }
  }

  bool HasRetired() const {
    return std::any_of(streams.begin(), streams.end(),
                       [](const auto& entry) { return entry.second->is_retired; });
  }

  std::unique_ptr<grpc::ServerCompletionQueue> queue;  // null before AddTo
  RequestCall request_call;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  Stream* requested = nullptr;  // waits for a call
  std::vector<Stream*> parked;  // calls that came and were not heard yet
  bool is_in_group = false;
  bool is_shut_down = false;

 private:
  Stream* Own(std::unique_ptr<Stream> stream) {
    Stream* raw = stream.get();
    streams.emplace(raw, std::move(stream));
    return raw;
  }

  void TakeCall(Stream* stream, bool ok) {
    requested = nullptr;
    if (ok) {
      parked.push_back(stream);
    } else {  // the server is shutting down; there is no call to cancel
      is_shut_down = true;
      stream->is_retired = true;
    }
  }
};

GrpcExchange::GrpcExchange() : impl_(std::make_unique<Impl>()) {}

GrpcExchange::~GrpcExchange() {
  CHECK(impl_->queue == nullptr || impl_->streams.empty()) << "GrpcExchange goes before Shutdown";
}

void GrpcExchange::AddTo(grpc::ServerBuilder* builder, RequestCall request_call) {
  CHECK(impl_->queue == nullptr) << "GrpcExchange belongs to one server";
  impl_->queue = builder->AddCompletionQueue();
  impl_->request_call = std::move(request_call);
}

void GrpcExchange::Shutdown() {
  Impl& impl = *impl_;
  if (impl.queue == nullptr || (impl.is_shut_down && impl.streams.empty())) return;
  CHECK(!impl.is_in_group) << "GrpcExchange is shut down before its transport is gone";
  for (Stream* stream : std::exchange(impl.parked, {})) impl.Retire(stream);
  impl.is_shut_down = true;
  impl.queue->Shutdown();
  // Everything on its way has been cancelled by now, here or by the server's end.
  const gpr_timespec limit = ToGrpcTime(Clock::now() + kShutdownTime);
  std::optional<CompletionEvent> event;
  while (impl.Poll(limit, &event)) {
  }
  CHECK(impl.streams.empty()) << impl.streams.size() << " Exchange calls did not end in "
                              << kShutdownTime.count() << " ms: was the server shut down first?";
}

namespace {

// --- Messages.

grpc::ByteBuffer ToMessage(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer MakeHello(const GrpcGroup& group) {
  v1::ExchangeFrame frame;
  frame.mutable_hello()->set_epoch(group.epoch);
  frame.mutable_hello()->set_rank(group.rank);
  frame.mutable_hello()->set_world_size(static_cast<int32_t>(group.peers.size()));
  return ToMessage(frame.SerializeAsString());
}

std::optional<v1::ExchangeHello> ParseHello(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (message.Length() > kMaxHelloBytes || !message.Dump(&slices).ok()) return std::nullopt;
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  v1::ExchangeFrame frame;
  if (!frame.ParseFromString(bytes) || !frame.has_hello()) return std::nullopt;
  return frame.hello();
}

std::string Describe(const v1::ExchangeHello& hello) {
  return StrCat("rank ", hello.rank(), "/", hello.world_size(), " epoch ", hello.epoch());
}

// --- Set-up.

class GrpcJoin {
 public:
  GrpcJoin(GrpcExchange::Impl& exchange, const GrpcGroup& group)
      : exchange_(exchange),
        group_(group),
        world_size_(static_cast<int>(group.peers.size())),
        joined_(group.peers.size(), nullptr),
        dials_(group.rank),
        why_missing_(group.peers.size(), "it has not called") {
    for (int peer = 0; peer < group_.rank; ++peer) why_missing_[peer] = "not reached yet";
  }

  // The streams by rank, null for our own.
  Result<std::vector<Stream*>> Run() {
    num_missing_ = world_size_ - 1;
    while (num_missing_ > 0 && CanGoOn()) Step();
    LeaveUnfinished();
    if (num_missing_ == 0) return joined_;
    for (Stream* stream : joined_) {
      if (stream != nullptr) exchange_.Retire(stream);
    }
    exchange_.Drain();
    if (!fatal_.ok()) return fatal_.WithContext(Me());
    return MissingError();
  }

 private:
  using Kind = Operation::Kind;

  struct DialState {
    Stream* stream = nullptr;
    Clock::time_point next_try;
    milliseconds pause = kFirstPause;
  };

  std::string Me() const {
    return StrCat("rank ", group_.rank, "/", world_size_, " epoch ", group_.epoch);
  }
  std::string NameOf(int peer) const { return PeerName(peer, group_.peers[peer]); }

  bool CanGoOn() {
    if (exchange_.is_shut_down) fatal_ = CancelledError("the worker is stopping");
    if (group_.stop.stop_requested()) fatal_ = CancelledError("the join was called off");
    return fatal_.ok() && Clock::now() < group_.join_deadline;
  }

  void Step() {
    HearParkedCalls();
    DropSilentCallers();
    DialWhoIsDue();
    const auto limit = std::min<Clock::time_point>(group_.join_deadline, Clock::now() + kStopCheck);
    const std::optional<CompletionEvent> event = exchange_.Next(limit);
    if (!event.has_value() || event->kind == Kind::kAccept) return;
    if (event->stream->is_dialled()) {
      OnDialled(*event);
    } else {
      OnCaller(*event);
    }
  }

  void LeaveUnfinished() {
    for (const auto& [stream, limit] : std::exchange(callers_, {})) exchange_.Retire(stream);
    for (DialState& dial : dials_) {
      if (dial.stream != nullptr) exchange_.Retire(std::exchange(dial.stream, nullptr));
    }
    exchange_.Drain();
  }

  // A second stream replaces the first: its rank has given the first one up.
  void Take(int peer, Stream* stream) {
    if (joined_[peer] == nullptr) {
      --num_missing_;
    } else {
      exchange_.Retire(joined_[peer]);
    }
    joined_[peer] = stream;
  }

  Status MissingError() const {
    std::vector<std::string> missing;
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == group_.rank || joined_[peer] != nullptr) continue;
      missing.push_back(StrCat(NameOf(peer), ": ", why_missing_[peer]));
    }
    return DeadlineExceededError(
        StrCat(Me(), ": ", missing.size(), " of ", world_size_ - 1,
               " peers missing at the join deadline: ", StrJoin(missing, "; ")));
  }

  // The side that is called.

  void HearParkedCalls() {
    const bool expects_calls = group_.rank + 1 < world_size_;
    for (Stream* stream : std::exchange(exchange_.parked, {})) {
      callers_[stream] = Clock::now() + kHelloTimeout;
      stream->Read();
    }
    if (expects_calls && callers_.size() < kMaxUnknownCallers) exchange_.RequestCallOnce();
  }

  void DropSilentCallers() {
    const Clock::time_point now = Clock::now();
    for (auto it = callers_.begin(); it != callers_.end();) {
      if (now < it->second) {
        ++it;
      } else {
        exchange_.Retire(it->first);
        it = callers_.erase(it);
      }
    }
  }

  void OnCaller(const CompletionEvent& event) {
    if (callers_.count(event.stream) == 0)
      return;  // a joined stream has ended; the exchange says so
    if (event.kind == Kind::kRead && event.ok) {
      HearHello(event.stream);
      return;
    }
    callers_.erase(event.stream);
    if (event.kind == Kind::kWrite && event.ok) {
      Take(event.stream->peer, event.stream);
    } else {
      exchange_.Retire(event.stream);
    }
  }

  void HearHello(Stream* stream) {
    const auto hello = ParseHello(stream->in());
    if (!hello.has_value()) {
      stream->Refuse({grpc::StatusCode::INVALID_ARGUMENT, "the first message must be a hello"});
      return;
    }
    const grpc::Status verdict = Judge(*hello);
    const bool is_above = hello->rank() > group_.rank && hello->rank() < world_size_;
    if (!verdict.ok()) {
      if (is_above) why_missing_[hello->rank()] = StrCat("it called as ", Describe(*hello));
      stream->Refuse(verdict);
      return;
    }
    stream->peer = hello->rank();
    stream->Write(MakeHello(group_));
  }

  grpc::Status Judge(const v1::ExchangeHello& hello) const {
    const std::string both = StrCat("this is ", Me(), ", the call came from ", Describe(hello));
    // The caller is ahead: it may try again until this worker joins the later group.
    if (hello.epoch() > group_.epoch) return {grpc::StatusCode::UNAVAILABLE, both};
    const bool fits = hello.epoch() == group_.epoch && hello.world_size() == world_size_ &&
                      hello.rank() > group_.rank && hello.rank() < world_size_;
    if (!fits) return {grpc::StatusCode::FAILED_PRECONDITION, both};
    return grpc::Status::OK;
  }

  // The side that calls.

  void DialWhoIsDue() {
    for (int peer = 0; peer < group_.rank; ++peer) {
      DialState& dial = dials_[peer];
      const bool is_due = dial.stream == nullptr && joined_[peer] == nullptr;
      if (!is_due || Clock::now() < dial.next_try) continue;
      dial.stream = exchange_.Dial(group_.peers[peer]);
      dial.stream->peer = peer;
    }
  }

  void OnDialled(const CompletionEvent& event) {
    Stream* stream = event.stream;
    if (stream == joined_[stream->peer]) return;  // it has ended; the exchange says so
    if (event.kind == Kind::kFinish) {
      HearRefusal(stream);
    } else if (!event.ok) {
      stream->AskWhyEnded();
    } else if (event.kind == Kind::kStart) {
      stream->Write(MakeHello(group_));
    } else if (event.kind == Kind::kWrite) {
      // It answers when it joins this group itself, which may be as late as the join deadline.
      why_missing_[stream->peer] = "connected, but it does not answer: it is not joining a group";
      stream->Read();
    } else {
      HearReply(stream);
    }
  }

  void HearReply(Stream* stream) {
    const int peer = stream->peer;
    const auto reply = ParseHello(stream->in());
    const bool is_same = reply.has_value() && reply->epoch() == group_.epoch &&
                         reply->rank() == peer && reply->world_size() == world_size_;
    dials_[peer].stream = nullptr;
    if (is_same) {
      Take(peer, stream);
      return;
    }
    fatal_ = FailedPreconditionError(
        StrCat(NameOf(peer), " answers as ", reply.has_value() ? Describe(*reply) : "nobody"));
    exchange_.Retire(stream);
  }

  void HearRefusal(Stream* stream) {
    const int peer = stream->peer;
    DialState& dial = dials_[peer];
    why_missing_[peer] = stream->end().error_message();
    if (stream->end().error_code() == grpc::StatusCode::FAILED_PRECONDITION) {
      fatal_ = FailedPreconditionError(StrCat(NameOf(peer), ": ", why_missing_[peer]));
    }
    exchange_.Retire(stream);
    dial.stream = nullptr;
    dial.next_try = Clock::now() + dial.pause;
    dial.pause = std::min(2 * dial.pause, kLongestPause);
  }

  GrpcExchange::Impl& exchange_;
  const GrpcGroup& group_;
  const int world_size_;
  std::vector<Stream*> joined_;
  std::vector<DialState> dials_;                  // of the lower ranks
  std::map<Stream*, Clock::time_point> callers_;  // not known yet, with the end of our patience
  std::vector<std::string> why_missing_;
  int num_missing_ = 0;
  Status fatal_;  // no use in trying on
};

// --- The data path.

using Header = std::array<std::byte, kHeaderBytes>;

Header MakeHeader(uint64_t sequence, uint64_t size) {
  Header header{};
  StoreLittleEndian(kFrameMagic, header.data());
  StoreLittleEndian(sequence, header.data() + 8);
  StoreLittleEndian(size, header.data() + 16);
  return header;
}

struct Sending {
  bool is_active = false;
  std::span<const std::byte> body;
  size_t done = 0;  // bytes of the body that were given to gRPC
};

struct Receiving {
  bool is_active = false;
  bool has_header = false;
  std::span<std::byte> body;
  size_t done = 0;
};

class GrpcTransport : public Transport {
 public:
  GrpcTransport(GrpcExchange::Impl& exchange, const GrpcGroup& group, std::vector<Stream*> streams)
      : exchange_(exchange),
        rank_(group.rank),
        streams_(std::move(streams)),
        sending_(streams_.size()),
        receiving_(streams_.size()) {
    for (int peer = 0; peer < world_size(); ++peer) {
      names_.push_back(PeerName(peer, group.peers[peer]));
    }
  }

  ~GrpcTransport() override {
    for (Stream* stream : streams_) {
      if (stream != nullptr) exchange_.Retire(stream);
    }
    exchange_.Drain();
    exchange_.is_in_group = false;
  }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(streams_.size()); }
  std::string name() const override { return "grpc"; }
  std::string peer_name(int peer) const override { return names_[peer]; }

  Status Exchange(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs,
                  Clock::time_point deadline) override {
    if (is_broken_) return Reason();
    Start(sequence, sends, recvs);
    const Status status = Drive(sequence, deadline);
    if (status.ok()) return status;
    Abort(status);
    return Reason();  // of an Abort from elsewhere, when that came first
  }

  void Abort(Status why) override {
    {
      const std::lock_guard lock(mutex_);
      if (is_broken_) return;
      reason_ = std::move(why);
      is_broken_ = true;
    }
    // Brings operations in flight back, which wakes the rank thread, and tells the peers at once.
    for (Stream* stream : streams_) {
      if (stream != nullptr) stream->TryCancel();
    }
  }

 private:
  void Start(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs) {
    num_pending_ = sends.size() + recvs.size();
    for (const RecvOp& op : recvs) {
      receiving_[op.peer] = {.is_active = true, .has_header = false, .body = op.data, .done = 0};
      streams_[op.peer]->Read();
    }
    for (const SendOp& op : sends) {
      sending_[op.peer] = {.is_active = true, .body = op.data, .done = 0};
      WriteFirst(op.peer, MakeHeader(sequence, op.data.size()));
    }
  }

  Status Drive(uint64_t sequence, Clock::time_point deadline) {
    Clock::time_point last_progress = Clock::now();
    while (num_pending_ > 0) {
      const std::optional<CompletionEvent> event = exchange_.Next(deadline);
      if (is_broken_) return Reason();
      const Clock::time_point now = Clock::now();
      if (!event.has_value()) return NoProgressError(now - last_progress, PendingPeers());
      last_progress = now;
      if (event->kind == Operation::Kind::kRead) RETURN_IF_ERROR(OnRead(*event, sequence));
      if (event->kind == Operation::Kind::kWrite) RETURN_IF_ERROR(OnWritten(*event));
    }
    return OkStatus();
  }

  // gRPC may hold a message longer than the caller's buffer lives, so it gets a copy.
  void WriteFirst(int peer, const Header& header) {
    Sending& op = sending_[peer];
    op.done = std::min(op.body.size(), GrpcExchange::kMaxMessageBytes - kHeaderBytes);
    const grpc::Slice parts[2] = {grpc::Slice(header.data(), header.size()),
                                  grpc::Slice(op.body.data(), op.done)};
    streams_[peer]->Write(grpc::ByteBuffer(parts, op.done > 0 ? 2 : 1));
  }

  void WriteMore(int peer) {
    Sending& op = sending_[peer];
    const size_t size = std::min(op.body.size() - op.done, GrpcExchange::kMaxMessageBytes);
    const grpc::Slice part(op.body.data() + op.done, size);
    op.done += size;
    streams_[peer]->Write(grpc::ByteBuffer(&part, 1));
  }

  Status OnWritten(const CompletionEvent& event) {
    const int peer = event.stream->peer;
    if (!event.ok) return LostPeerError(names_[peer], "the stream to it has ended");
    Sending& op = sending_[peer];
    if (op.done < op.body.size()) {
      WriteMore(peer);
    } else {
      op.is_active = false;
      --num_pending_;
    }
    return OkStatus();
  }

  Status OnRead(const CompletionEvent& event, uint64_t sequence) {
    const int peer = event.stream->peer;
    if (!event.ok) return LostPeerError(names_[peer], "its stream has ended");
    if (!event.stream->in().Dump(&slices_).ok()) {
      return InternalError(StrCat("message from ", names_[peer], " cannot be read"));
    }
    RETURN_IF_ERROR(TakeMessage(peer, sequence, event.stream->in().Length()));
    Receiving& op = receiving_[peer];
    if (op.done < op.body.size()) {
      event.stream->Read();
    } else {
      op.is_active = false;
      --num_pending_;
    }
    return OkStatus();
  }

  // Copies the message in slices_; the header, which opens the first one, is checked before the
  // rest.
  Status TakeMessage(int peer, uint64_t sequence, size_t size) {
    Receiving& op = receiving_[peer];
    size_t skip = 0;
    if (!op.has_header) {
      RETURN_IF_ERROR(CheckHeader(peer, sequence, size));
      op.has_header = true;
      skip = kHeaderBytes;
    }
    const size_t body_size = size - skip;
    const size_t room = op.body.size() - op.done;
    if (body_size > room || (body_size == 0 && room > 0)) {
      return InternalError(StrCat("frame ", sequence, " from ", names_[peer], " goes on with ",
                                  body_size, " bytes, ", room, " are left"));
    }
    for (const grpc::Slice& slice : slices_) {
      const size_t skipped = std::min(skip, slice.size());
      const size_t n = slice.size() - skipped;
      std::copy_n(reinterpret_cast<const std::byte*>(slice.begin()) + skipped, n,
                  op.body.data() + op.done);
      skip -= skipped;
      op.done += n;
    }
    return OkStatus();
  }

  Status CheckHeader(int peer, uint64_t sequence, size_t size) const {
    Header header{};
    size_t done = 0;
    for (const grpc::Slice& slice : slices_) {
      const size_t n = std::min(slice.size(), kHeaderBytes - done);
      std::copy_n(reinterpret_cast<const std::byte*>(slice.begin()), n, header.data() + done);
      done += n;
    }
    const auto magic = LoadLittleEndian<uint32_t>(header.data());
    if (done < kHeaderBytes || magic != kFrameMagic) {
      return InternalError(StrCat("frame from ", names_[peer], " has ", size,
                                  " bytes and begins with ", magic, ", must have at least ",
                                  kHeaderBytes, " and begin with ", kFrameMagic));
    }
    return CheckFrame(names_[peer], LoadLittleEndian<uint64_t>(header.data() + 8),
                      LoadLittleEndian<uint64_t>(header.data() + 16), sequence,
                      receiving_[peer].body.size());
  }

  std::vector<std::string> PendingPeers() const {
    std::vector<std::string> pending;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (sending_[peer].is_active || receiving_[peer].is_active) pending.push_back(names_[peer]);
    }
    return pending;
  }

  Status Reason() {
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  GrpcExchange::Impl& exchange_;
  const int rank_;
  const std::vector<Stream*> streams_;  // by rank, null for our own
  std::vector<std::string> names_;
  std::vector<Sending> sending_;      // by rank
  std::vector<Receiving> receiving_;  // by rank
  std::vector<grpc::Slice> slices_;
  size_t num_pending_ = 0;

  std::mutex mutex_;
  Status reason_;  // guarded by mutex_
  std::atomic<bool> is_broken_ = false;
};

Status CheckCanJoin(const GrpcExchange::Impl& exchange, const GrpcGroup& group) {
  const auto world_size = static_cast<int>(group.peers.size());
  if (group.rank < 0 || group.rank >= world_size) {
    return InvalidArgumentError(
        StrCat("epoch ", group.epoch, ": rank ", group.rank, " of ", world_size, " peers"));
  }
  if (exchange.is_shut_down) return CancelledError("the worker is stopping");
  if (exchange.queue == nullptr) {
    return FailedPreconditionError("transport grpc: this worker has no gRPC server");
  }
  if (exchange.is_in_group) {
    return FailedPreconditionError(
        StrCat("epoch ", group.epoch, ": this worker has not left its last group"));
  }
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<Transport>> ConnectGrpcTransport(GrpcExchange& exchange,
                                                        const GrpcGroup& group) {
  RETURN_IF_ERROR(CheckCanJoin(exchange.impl(), group));
  ASSIGN_OR_RETURN(std::vector<Stream*> streams, GrpcJoin(exchange.impl(), group).Run());
  exchange.impl().is_in_group = true;
  return std::unique_ptr<Transport>(
      std::make_unique<GrpcTransport>(exchange.impl(), group, std::move(streams)));
}

}  // namespace ds4
