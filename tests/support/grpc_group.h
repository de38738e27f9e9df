// A group of grpc transports inside one process: a server for each rank, on loopback and a free
// port.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/strings.h"
#include "proto/worker.grpc.pb.h"
#include "worker/grpc_transport.h"

namespace ds4 {

// A worker's server as far as the data plane needs one.
class GrpcNode {
 public:
  GrpcNode() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&service_);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    exchange_.AddTo(&builder, [this](auto... args) { service_.RequestExchange(args...); });
    server_ = builder.BuildAndStart();
  }
  ~GrpcNode() {
    server_->Shutdown(std::chrono::system_clock::now());
    exchange_.Shutdown();
  }

  std::string address() const { return StrCat("127.0.0.1:", port_); }
  GrpcExchange& exchange() { return exchange_; }

 private:
  GrpcExchange exchange_;
  v1::Worker::WithRawMethod_Exchange<v1::Worker::Service> service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

struct GrpcNodes {
  explicit GrpcNodes(int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      nodes.push_back(std::make_unique<GrpcNode>());
      addresses.push_back(nodes.back()->address());
    }
  }
  GrpcGroup Group(int rank, uint64_t epoch, std::chrono::milliseconds patience) const {
    return {.epoch = epoch,
            .rank = rank,
            .peers = addresses,
            .join_deadline = std::chrono::steady_clock::now() + patience,
            .stop = {}};
  }

  std::vector<std::unique_ptr<GrpcNode>> nodes;
  std::vector<std::string> addresses;
};

// All ranks of `nodes` join at the same time; CHECKs that they succeed.
inline std::vector<std::unique_ptr<Transport>> JoinAll(GrpcNodes& nodes, uint64_t epoch) {
  const auto world_size = static_cast<int>(nodes.addresses.size());
  std::vector<std::unique_ptr<Transport>> transports(world_size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const GrpcGroup group = nodes.Group(rank, epoch, std::chrono::seconds(10));
      transports[rank] = ConnectGrpcTransport(nodes.nodes[rank]->exchange(), group).value();
    });
  }
  threads.clear();
  return transports;
}

// Keeps the servers until the last transport of the group is gone.
class OwnedGrpcTransport : public Transport {
 public:
  OwnedGrpcTransport(std::shared_ptr<GrpcNodes> nodes, std::unique_ptr<Transport> inner)
      : nodes_(std::move(nodes)), inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }
  std::string peer_name(int peer) const override { return inner_->peer_name(peer); }
  Status Exchange(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs,
                  std::chrono::steady_clock::time_point deadline) override {
    return inner_->Exchange(sequence, sends, recvs, deadline);
  }
  void Abort(Status why) override { inner_->Abort(std::move(why)); }

 private:
  const std::shared_ptr<GrpcNodes> nodes_;
  const std::unique_ptr<Transport> inner_;  // gone before nodes_
};

inline std::vector<std::unique_ptr<Transport>> MakeGrpcTransports(int world_size) {
  auto nodes = std::make_shared<GrpcNodes>(world_size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (auto& inner : JoinAll(*nodes, 1)) {
    transports.push_back(std::make_unique<OwnedGrpcTransport>(nodes, std::move(inner)));
  }
  return transports;
}

}  // namespace ds4
