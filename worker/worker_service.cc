#include "worker/worker_service.h"

#include <grpc/support/log.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/base/strings.h"
#include "proto/protocol.h"
#include "proto/rpc_status.h"
#include "worker/command_codec.h"
#include "worker/control_stream.h"
#include "worker/grpc_transport.h"
#include "worker/host_info.h"
#include "worker/log.h"
#include "worker/rank_loop.h"

namespace ds4 {
namespace {

// Who is being served, so that a second coordinator is refused by name.
class CoordinatorSlot {
 public:
  // Waits up to `handover` for one that is leaving. kFailedPrecondition names the one that stays,
  // kUnavailable: the worker is stopping.
  Status Claim(const std::string& who, ControlStream* stream, std::chrono::milliseconds handover) {
    std::unique_lock lock(mutex_);
    const auto decided = [this] { return !stopping_.ok() || !stream_ || !is_leaving_; };
    const bool is_free = changed_.wait_for(lock, handover, decided) && stream_ == nullptr;
    if (!stopping_.ok()) return stopping_;
    if (!is_free) {
      return FailedPreconditionError(
          StrCat("this worker serves coordinator ", holder_,
                 is_leaving_ ? ", whose group is still being freed; try again later"
                             : "; it serves one at a time, stop that one first"));
    }
    holder_ = who;
    stream_ = stream;
    is_leaving_ = false;
    return OkStatus();
  }

  // The holder's stream has ended, its group is being freed.
  void SetLeaving() {
    std::lock_guard lock(mutex_);
    is_leaving_ = true;
    changed_.notify_all();
  }

  void Release() {
    std::lock_guard lock(mutex_);
    stream_ = nullptr;
    changed_.notify_all();
  }

  // Releases a claim, also when an exception passes.
  class Holder {
   public:
    explicit Holder(CoordinatorSlot* slot) : slot_(slot) {}
    ~Holder() { slot_->Release(); }
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;

   private:
    CoordinatorSlot* const slot_;
  };

  // Refuses all later claims with `why` and ends the stream that holds the slot.
  void Stop(const Status& why) {
    std::lock_guard lock(mutex_);
    if (!stopping_.ok()) return;
    stopping_ = why;
    changed_.notify_all();
    // Under the lock, so that the stream cannot go away meanwhile.
    if (stream_ != nullptr && !is_leaving_) stream_->Interrupt(why);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by mutex_.
  std::string holder_;
  ControlStream* stream_ = nullptr;
  bool is_leaving_ = false;
  Status stopping_;
};

// Exchange is served by GrpcExchange on its own queue, with raw frames.
using WorkerServiceBase = v1::Worker::WithRawMethod_Exchange<v1::Worker::Service>;

class WorkerService final : public WorkerServiceBase {
 public:
  WorkerService(WorkerParts parts, WorkerInfo info, const StreamTimeouts& timeouts)
      : parts_(std::move(parts)), info_(std::move(info)), timeouts_(timeouts) {}

  void Stop(const Status& why) { slot_.Stop(why); }

  grpc::Status Control(grpc::ServerContext* context, ControlStream::Stream* stream) override {
    Status status;
    try {
      ControlStream control(context, stream, timeouts_);
      status = Serve(control);
      // The status of the rpc says it too, but a coordinator that waits for events sees this first.
      if (!status.ok()) static_cast<void>(control.Send(ErrorEvent{status, -1, 0, false, 0}));
    } catch (const std::exception& error) {
      status = InternalError(StrCat("exception in Control: ", error.what()));
    }
    if (!status.ok()) LogWarning({}, StrCat("stream from ", context->peer(), ": ", status));
    return ToGrpcStatus(status);
  }

 private:
  Status Serve(ControlStream& control) {
    ASSIGN_OR_RETURN(const v1::Hello hello, control.ReadHello());
    ASSIGN_OR_RETURN(const std::string name, CheckHello(hello));
    const std::string who = StrCat(name, " (", control.peer(), ")");
    RETURN_IF_ERROR(slot_.Claim(who, &control, timeouts_.handover));
    LogInfo({}, StrCat("serving coordinator ", who));
    control.SendHelloReply(MakeHelloReply(control.peer()));
    const CoordinatorSlot::Holder holder(&slot_);
    const Status status = ServeCommands(control);
    LogInfo({}, StrCat("coordinator ", who, " has left, its group is freed"));
    return status;
  }

  // Until the stream ends; the group is freed when this returns.
  Status ServeCommands(ControlStream& control) {
    RankLoop loop(parts_, &control);
    Status status;
    v1::Command command;
    while (status.ok() && control.Read(&command)) {
      status = loop.Enqueue(DecodeCommand(command, {info_.max_context, info_.max_batch_rows}));
    }
    slot_.SetLeaving();
    return status;
  }

  v1::HelloReply MakeHelloReply(const std::string& peer) const {
    v1::HelloReply reply;
    reply.set_protocol_version(kProtocolVersion);
    reply.set_build(BuildVersion());
    reply.set_host(info_.host);
    reply.set_model_path(info_.model_path);
    reply.set_model_digest(info_.model_digest);
    reply.set_model_bytes(info_.model_bytes);
    reply.set_max_context(info_.max_context);
    reply.set_max_batch_rows(info_.max_batch_rows);
    reply.set_kernel_isa(info_.kernel_isa);
    reply.set_num_threads(info_.num_threads);
    reply.set_memory_bytes(MemoryBytes());
    reply.set_data_host(info_.advertise_host.empty() ? AddressTowards(peer) : info_.advertise_host);
    reply.set_data_port(info_.data_port);
    reply.set_backend(info_.backend);
    reply.set_arithmetic(info_.arithmetic);
    return reply;
  }

  // Where the weights go.
  int64_t MemoryBytes() const {
    const int64_t host = FreeMemoryBytes();
    if (info_.device_bytes == 0) return host;
    return info_.device_bytes + (info_.uses_host_too ? host : 0);
  }

  const WorkerParts parts_;
  const WorkerInfo info_;
  const StreamTimeouts timeouts_;
  CoordinatorSlot slot_;
};

Result<std::unique_ptr<Transport>> ConnectGrpc(GrpcExchange& exchange, const GroupSpec& spec,
                                               std::stop_token stop) {
  GrpcGroup group;
  group.epoch = spec.epoch;
  group.rank = spec.rank;
  for (const PeerAddress& peer : spec.peers) group.peers.push_back(peer.control_address);
  group.join_deadline = std::chrono::steady_clock::now() + spec.join_timeout;
  group.stop = std::move(stop);
  return ConnectGrpcTransport(exchange, group);
}

// The given parts, with transport grpc served by this server's own Exchange calls.
WorkerParts WithGrpcTransport(WorkerParts parts, GrpcExchange* exchange) {
  parts.connect = [exchange, others = std::move(parts.connect)](const GroupSpec& spec,
                                                                std::stop_token stop) {
    if (spec.transport == "grpc") return ConnectGrpc(*exchange, spec, std::move(stop));
    return others(spec, std::move(stop));
  };
  return parts;
}

// gRPC's own records are for us, not for users: errors of ours say the same in one line.
void RouteGrpcLog() {
  gpr_set_log_function(
      [](gpr_log_func_args* record) { LogDebug({}, StrCat("grpc: ", record->message)); });
}

// A peer that is gone without a word (power, cable) is noticed within 15 s.
void SetLiveness(grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Coordinators may ask as often.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
}

std::string HostPort(const std::string& host, uint16_t port) {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return is_ipv6 ? StrCat("[", host, "]:", port) : StrCat(host, ":", port);
}

}  // namespace

struct WorkerServer::Impl {
  Impl(WorkerParts parts, WorkerInfo info, const StreamTimeouts& timeouts)
      : service(WithGrpcTransport(std::move(parts), &exchange), std::move(info), timeouts) {}

  GrpcExchange exchange;  // outlives the server and the groups
  WorkerService service;
  std::unique_ptr<grpc::Server> server;  // uses service
  int port = 0;
};

WorkerServer::WorkerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

WorkerServer::~WorkerServer() {
  Shutdown(CancelledError("the worker is stopping"), std::chrono::milliseconds(1000));
}

Result<std::unique_ptr<WorkerServer>> WorkerServer::Start(const std::string& host, uint16_t port,
                                                          WorkerParts parts, WorkerInfo info,
                                                          const StreamTimeouts* timeouts) {
  RouteGrpcLog();
  grpc::EnableDefaultHealthCheckService(true);
  auto impl = std::make_unique<Impl>(std::move(parts), std::move(info),
                                     timeouts == nullptr ? StreamTimeouts() : *timeouts);
  const std::string address = HostPort(host, port);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &impl->port);
  builder.RegisterService(&impl->service);
  impl->exchange.AddTo(
      &builder, [service = &impl->service](auto... args) { service->RequestExchange(args...); });
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // Without this a second worker could take the same port, and each would get some of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  SetLiveness(&builder);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr || impl->port == 0) {
    return UnavailableError(StrCat("cannot listen on ", address,
                                   ": the port is taken or the address is not this host's; choose "
                                   "another --listen, or port 0 for any free one"));
  }
  impl->server->GetHealthCheckService()->SetServingStatus(v1::Worker::service_full_name(), true);
  return std::unique_ptr<WorkerServer>(new WorkerServer(std::move(impl)));
}

uint16_t WorkerServer::port() const { return static_cast<uint16_t>(impl_->port); }

void WorkerServer::Shutdown(const Status& why, std::chrono::milliseconds grace) {
  impl_->server->GetHealthCheckService()->SetServingStatus(false);
  impl_->service.Stop(why);
  impl_->server->Shutdown(std::chrono::system_clock::now() + grace);
  impl_->server->Wait();
  impl_->exchange.Shutdown();  // the groups, and with them the transports, are gone by now
}

}  // namespace ds4
