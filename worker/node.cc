#include "worker/node.h"

#include <algorithm>

#include "engine/backends/backends.h"
#include "engine/base/strings.h"
#include "engine/gguf/fingerprint.h"
#include "engine/kernels/matmul.h"
#include "engine/session/engine.h"
#include "engine/shard/shard_plan.h"
#include "worker/host_info.h"
#include "worker/log.h"

namespace ds4 {
namespace {

// What gives other bits, whatever the backend. Both values stand in the coordinator's error.
std::string ArithmeticText(const EngineOptions& engine) {
  const bool is_cpu = engine.backend == Backend::kCpu;
  const bool as_file = is_cpu || engine.replicated_weights == ReplicatedWeights::kFile;
  return StrCat(
      "kv ", is_cpu || engine.kv_f32 ? "f32" : "bf16", ", sums in lanes ",
      is_cpu || engine.deterministic ? "always" : "in decode",
      as_file ? ""
              : StrCat(", replicated weights ", ReplicatedWeightsName(engine.replicated_weights)));
}

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
  RETURN_IF_ERROR(node->ChooseEngine(options));
  RETURN_IF_ERROR(node->OpenModel(options));
  auto listener = TcpListener::Listen(options.listen.host, options.data_port);
  if (!listener.ok()) return listener.status().WithContext("--data-port");
  node->listener_ = std::move(listener).value();
  node->info_.data_port = node->listener_->port();
  node->info_.host = HostName();
  node->info_.advertise_host = AdvertisedHost(options);
  node->info_.num_threads = options.num_threads;
  node->info_.max_batch_rows =
      options.max_batch_rows > 0 ? options.max_batch_rows : DefaultBatchRows(node->engine_.backend);
  return node;
}

Status Node::ChooseEngine(const WorkerOptions& options) {
  RegisterBuiltBackends();
  ASSIGN_OR_RETURN(const BackendChoice choice, ChooseBackend(options.backend, options.device));
  LogInfo({}, StrCat("backend ", choice.why));
  const bool is_cpu = choice.backend == Backend::kCpu;
  if (is_cpu && options.kv_type == "bf16") {
    return InvalidArgumentError(
        "--kv-type is bf16, the CPU engine keeps keys in f32 only; leave it out, or f32");
  }
  engine_.model_path = options.model_path;
  engine_.num_threads = options.num_threads;
  engine_.backend = choice.backend;
  engine_.synthetic = options.synthetic;
  engine_.quant = options.quant;
  engine_.synthetic_layers = options.synthetic_layers;
  engine_.device = options.device;
  engine_.kv_f32 = options.kv_type == "f32";
  engine_.deterministic = options.deterministic;
  engine_.expert_memory = options.expert_memory;
  engine_.replicated_weights = options.replicated_weights;
  engine_.device_transport = options.device_transport;
  info_.backend = std::string(BackendName(choice.backend));
  info_.kernel_isa = is_cpu ? std::string(KernelIsa()) : info_.backend;
  info_.arithmetic = ArithmeticText(engine_);
  info_.device_bytes = choice.free_bytes;
  info_.uses_host_too = options.expert_memory == ExpertMemory::kHost;
  return OkStatus();
}

Status Node::OpenModel(const WorkerOptions& options) {
  ASSIGN_OR_RETURN(file_, OpenEngineModel(engine_));
  ASSIGN_OR_RETURN(config_, ReadModelConfig(*file_));
  info_.model_path = file_->path();
  info_.model_bytes = file_->file_bytes();
  if (options.synthetic.empty()) {
    ASSIGN_OR_RETURN(info_.model_digest, ModelDigest(*file_));
  } else {
    info_.model_digest = file_->path();  // all of it follows from the name
  }
  info_.max_context = options.max_context == 0 ? config_.context_length : options.max_context;
  if (info_.max_context > config_.context_length) {
    return InvalidArgumentError(StrCat("--ctx is ", info_.max_context, ", ", info_.model_path,
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
    EngineOptions options = engine_;
    options.max_context = asked.max_context;
    options.max_batch_rows = asked.max_batch_rows;
    options.max_sessions = asked.max_sessions;
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
