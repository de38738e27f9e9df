#include "worker/node.h"

#include <algorithm>

#include "engine/base/strings.h"
#include "engine/gguf/fingerprint.h"
#include "engine/kernels/matmul.h"
#include "engine/session/engine.h"
#include "engine/shard/shard_plan.h"
#include "worker/host_info.h"

namespace ds4 {
namespace {

// Asking a socket again and again saves two wake-ups per exchange, but takes the core from the peer
// when ranks share cores (measured: 8 us against milliseconds).
constexpr int kSpinUs = 50;

int SpinUs(const GroupSpec& spec, int num_threads) {
  const std::string& own_host = spec.peers[spec.rank].host;
  const int64_t ranks_here =
      std::count_if(spec.peers.begin(), spec.peers.end(),
                    [&](const PeerAddress& peer) { return peer.host == own_host; });
  return ranks_here * num_threads > UsableCores() ? 0 : kSpinUs;
}

// Empty: the address at which the coordinator reached us, known once it has called.
std::string AdvertisedHost(const WorkerOptions& options) {
  if (!options.advertise.empty()) return options.advertise;
  if (IsWildcard(options.listen.host)) return "";
  return IsLoopback(options.listen.host) ? "127.0.0.1" : options.listen.host;
}

}  // namespace

Result<std::unique_ptr<Node>> Node::Open(const WorkerOptions& options) {
  std::unique_ptr<Node> node(new Node);
  RETURN_IF_ERROR(node->OpenModel(options));
  auto listener = TcpListener::Listen(options.listen.host, options.data_port);
  if (!listener.ok()) return listener.status().WithContext("--data-port");
  node->listener_ = std::move(listener).value();
  node->info_.data_port = node->listener_->port();
  node->info_.host = HostName();
  node->info_.advertise_host = AdvertisedHost(options);
  node->info_.kernel_isa = std::string(KernelIsa());
  node->info_.num_threads = options.num_threads;
  node->info_.max_batch_rows = options.max_batch_rows;
  return node;
}

Status Node::OpenModel(const WorkerOptions& options) {
  ASSIGN_OR_RETURN(file_, GgufFile::Open(options.model_path));
  ASSIGN_OR_RETURN(config_, ReadModelConfig(*file_));
  ASSIGN_OR_RETURN(info_.model_digest, ModelDigest(*file_));
  info_.model_path = options.model_path;
  info_.model_bytes = file_->file_bytes();
  info_.max_context = options.max_context == 0 ? config_.context_length : options.max_context;
  if (info_.max_context > config_.context_length) {
    return InvalidArgumentError(StrCat("--ctx is ", info_.max_context, ", ", options.model_path,
                                       " was made for at most ", config_.context_length));
  }
  return OkStatus();
}

// Transport grpc never comes here: the server that owns the Exchange calls connects it.
Result<std::unique_ptr<Transport>> Node::Connect(const GroupSpec& spec, std::stop_token stop) {
  if (spec.transport != "tcp") {
    return InvalidArgumentError(StrCat("transport \"", spec.transport, "\" is not tcp"));
  }
  TcpGroup group;
  group.epoch = spec.epoch;
  group.rank = spec.rank;
  for (const PeerAddress& peer : spec.peers) group.peers.push_back({peer.host, peer.data_port});
  group.join_deadline = std::chrono::steady_clock::now() + spec.join_timeout;
  group.spin_us = SpinUs(spec, info_.num_threads);
  group.stop = std::move(stop);
  return ConnectTcpTransport(*listener_, group);
}

WorkerParts Node::parts() {
  WorkerParts parts;
  parts.load_engine = [this](const EngineOptions& asked, Communicator* comm,
                             const Engine::LoadProgress& progress) {
    EngineOptions options = asked;
    options.model_path = info_.model_path;
    options.num_threads = info_.num_threads;
    return Engine::Load(options, comm, progress);
  };
  parts.connect = [this](const GroupSpec& spec, std::stop_token stop) {
    return Connect(spec, std::move(stop));
  };
  parts.plan_digest = [this](const LaneLayout& lanes) -> Result<std::string> {
    ASSIGN_OR_RETURN(const ShardPlan plan, MakeShardPlan(config_, *file_, lanes));
    return plan.Digest();
  };
  return parts;
}

}  // namespace ds4
