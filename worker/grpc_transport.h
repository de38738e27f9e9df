// The data plane over gRPC: engine's Transport on bidirectional streams of Worker.Exchange, for
// networks where nothing else passes. One completion queue, pumped by the rank thread alone.
//
//   set-up   the higher rank of each pair calls the lower one; first message each way:
//            ExchangeFrame with a hello (the answer carries the called rank's own values)
//   after it raw frames, not Protobuf: magic u32, zero u32, sequence u64, size u64
//            (little-endian), then `size` bytes, cut into messages of at most kMaxMessageBytes
//
// How a worker's server takes part (the service must leave Exchange to the queue):
//
//   class WorkerService : public v1::Worker::WithRawMethod_Exchange<v1::Worker::Service> {...};
//
//   GrpcExchange exchange;  // outlives the server and every transport made with it
//   builder.RegisterService(&service);
//   exchange.AddTo(&builder, [&service](auto... args) { service.RequestExchange(args...); });
//   auto server = builder.BuildAndStart();
//
//   ConnectGrpcTransport(exchange, group);  // in the rank thread, once for each group
//
//   server->Shutdown(deadline);
//   exchange.Shutdown();
//   server.reset();
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/comm/transport.h"

namespace grpc {
class ByteBuffer;
class CompletionQueue;
class ServerBuilder;
class ServerCompletionQueue;
class ServerContext;
template <class W, class R>
class ServerAsyncReaderWriter;
}  // namespace grpc

namespace ds4 {

// One worker's end of all Exchange calls, those it makes and those it takes. A call that comes
// while no group is being joined waits, as in the backlog of a socket. Thread: Join and the
// transport it gave belong to one thread at a time; AddTo and Shutdown as said.
class GrpcExchange {
 public:
  static constexpr size_t kMaxMessageBytes = 1 << 20;  // the server must allow as much

  // The service's RequestExchange.
  using RequestCall = std::function<void(
      grpc::ServerContext*, grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>*,
      grpc::CompletionQueue*, grpc::ServerCompletionQueue*, void* tag)>;

  GrpcExchange();
  // Shutdown must have been called if AddTo was.
  ~GrpcExchange();
  GrpcExchange(const GrpcExchange&) = delete;
  GrpcExchange& operator=(const GrpcExchange&) = delete;

  // Before builder->BuildAndStart(), once.
  void AddTo(grpc::ServerBuilder* builder, RequestCall request_call);

  // After server->Shutdown() and after every transport is gone, before the server goes. Later joins
  // fail with kCancelled. Harmless when repeated.
  void Shutdown();

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct GrpcGroup {
  uint64_t epoch = 0;
  int rank = 0;
  std::vector<std::string> peers;  // gRPC targets ("10.0.0.3:9911") of all ranks, in order
  std::chrono::steady_clock::time_point join_deadline;
  std::stop_token stop;  // ends the join early (kCancelled)
};

// Connects with all peers of the group. A stale or silent caller is refused and takes no slot.
// Errors: kDeadlineExceeded listing every missing rank, its address and why; kFailedPrecondition
// when a peer refuses for good (later epoch, other rank or world_size) or this worker still is in a
// group; kInvalidArgument for a group that makes no sense.
Result<std::unique_ptr<Transport>> ConnectGrpcTransport(GrpcExchange& exchange,
                                                        const GrpcGroup& group);

}  // namespace ds4
