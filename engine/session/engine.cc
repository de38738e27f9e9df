// One rank's engine: checks a step plan, runs its rows, and lets rank 0 decide the tokens.

#include "engine/session/engine.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "engine/base/strings.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/layers/transformer.h"
#include "engine/model/synthetic.h"
#include "engine/session/backend.h"
#include "engine/session/plan_check.h"
#include "engine/session/token_chooser.h"
#include "engine/weights/weight_loader.h"

namespace ds4 {
namespace {

// Rows whose logits are computed at once when scoring; bounds the logits' memory.
constexpr int64_t kScoreRows = 32;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A part that sampled a token and may run further rows.
struct Running {
  int32_t part = 0;
  KvState* state = nullptr;
  int32_t token = 0;
};

class CpuEngine : public Engine {
 public:
  CpuEngine(const EngineOptions& options, ModelConfig config, ShardPlan plan, Weights weights,
            Communicator* comm)
      : options_(options),
        config_(std::move(config)),
        plan_(std::move(plan)),
        weights_(std::move(weights)),
        pool_(options.num_threads),
        context_{&config_, &plan_.ranks[comm->rank()], &weights_, comm, &pool_},
        transformer_(context_),
        chooser_(context_),
        comm_(comm) {
    stats_.weight_bytes = weights_.size_bytes;
    stats_.kv_bytes_per_session =
        KvState::SizeBytes(config_, options.max_context, options.max_batch_rows);
  }

  Status OpenSession(uint64_t session_id, int64_t max_context) override;
  Status CloseSession(uint64_t session_id) override;
  Result<StepResult> Run(const StepPlan& plan, const TokenCallback& on_token) override;
  Result<uint64_t> StateHash(uint64_t session_id) override;
  const EngineStats& stats() const override { return stats_; }
  EngineStats& mutable_stats() { return stats_; }

 private:
  const SessionPosition* FindPosition(uint64_t session_id) const;
  // Runs the batch and moves its sessions on.
  Result<const float*> Forward(const Batch& batch);
  Status Score(const StepPlan& plan, const float* streams, StepResult& result);
  // Draws one token for each listed (part, stream row) and reports it.
  Status Sample(const StepPlan& plan, const std::vector<std::pair<int32_t, int64_t>>& rows,
                const float* streams, StepResult& result, const TokenCallback& on_token,
                std::vector<Running>& running);

  EngineOptions options_;
  ModelConfig config_;
  ShardPlan plan_;
  Weights weights_;
  ThreadPool pool_;
  RankContext context_;
  Transformer transformer_;
  TokenChooser chooser_;
  Communicator* comm_;
  EngineStats stats_;
  std::map<uint64_t, std::unique_ptr<KvState>> sessions_;
  Scratch<float> picked_streams_;
};

Status CpuEngine::OpenSession(uint64_t session_id, int64_t max_context) {
  RETURN_IF_ERROR(CheckOpenSession(options_, session_id, max_context,
                                   sessions_.contains(session_id), std::ssize(sessions_)));
  ASSIGN_OR_RETURN(sessions_[session_id],
                   KvState::Create(config_, max_context, options_.max_batch_rows));
  return OkStatus();
}

Status CpuEngine::CloseSession(uint64_t session_id) {
  if (sessions_.erase(session_id) == 0) return SessionNotOpenError(session_id);
  return OkStatus();
}

Result<uint64_t> CpuEngine::StateHash(uint64_t session_id) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return SessionNotOpenError(session_id);
  return it->second->Hash();
}

const SessionPosition* CpuEngine::FindPosition(uint64_t session_id) const {
  const auto it = sessions_.find(session_id);
  return it == sessions_.end() ? nullptr : &it->second->position();
}

Result<const float*> CpuEngine::Forward(const Batch& batch) {
  ASSIGN_OR_RETURN(const float* streams, transformer_.Forward(batch));
  for (const BatchRow& row : batch) row.state->Advance(1);
  return streams;
}

Status CpuEngine::Score(const StepPlan& plan, const float* streams, StepResult& result) {
  const int64_t row_size = config_.num_streams * config_.hidden_dim;
  int64_t first_row = 0;
  for (const StepPart& part : plan.parts) {
    const int64_t rows = static_cast<int64_t>(part.tokens.size());
    std::vector<float>& nll = result.nll.emplace_back(part.score_targets.size());
    for (size_t begin = 0; begin < part.score_targets.size(); begin += kScoreRows) {
      const int64_t count = std::min<int64_t>(kScoreRows, rows - static_cast<int64_t>(begin));
      const float* logits = transformer_.Logits(streams + (first_row + begin) * row_size, count);
      RETURN_IF_ERROR(
          chooser_.Score(logits, {part.score_targets.data() + begin, static_cast<size_t>(count)},
                         {nll.data() + begin, static_cast<size_t>(count)}));
    }
    first_row += rows;
  }
  return OkStatus();
}

Status CpuEngine::Sample(const StepPlan& plan, const std::vector<std::pair<int32_t, int64_t>>& rows,
                         const float* streams, StepResult& result, const TokenCallback& on_token,
                         std::vector<Running>& running) {
  running.clear();
  if (rows.empty()) return OkStatus();
  const int64_t row_size = config_.num_streams * config_.hidden_dim;
  float* picked = picked_streams_.Get(static_cast<int64_t>(rows.size()) * row_size);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(streams + rows[i].second * row_size, row_size, picked + i * row_size);
  }
  const float* logits = transformer_.Logits(picked, static_cast<int64_t>(rows.size()));
  const int64_t local_vocab = context_.plan->vocab.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    const StepPart& part = plan.parts[rows[i].first];
    KvState* state = sessions_.at(part.session_id).get();
    TokenOutput output;
    output.part = rows[i].first;
    output.pos = state->n();
    RETURN_IF_ERROR(chooser_.Choose({logits + i * local_vocab, static_cast<size_t>(local_vocab)},
                                    part.sampling, part.num_top, output));
    output.is_stop =
        std::find(part.stop_ids.begin(), part.stop_ids.end(), output.token) != part.stop_ids.end();
    if (on_token) on_token(output);
    if (!output.is_stop && state->n() < state->max_context()) {
      running.push_back({output.part, state, output.token});
    }
    result.tokens.push_back(std::move(output));
  }
  return OkStatus();
}

Result<StepResult> CpuEngine::Run(const StepPlan& plan, const TokenCallback& on_token) {
  RETURN_IF_ERROR(CheckPlan(plan, config_.vocab_size, options_.max_batch_rows,
                            [this](uint64_t id) { return FindPosition(id); }));
  const auto start = std::chrono::steady_clock::now();
  const double comm_start = comm_->wait_seconds();
  StepResult result;

  Batch batch;
  std::vector<std::pair<int32_t, int64_t>> sampled;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const StepPart& part = plan.parts[i];
    KvState* state = sessions_.at(part.session_id).get();
    RETURN_IF_ERROR(state->Rewind(part.pos));
    for (size_t r = 0; r < part.tokens.size(); ++r) {
      batch.push_back({part.tokens[r], part.pos + static_cast<int64_t>(r), state});
    }
    if (part.sample) {
      sampled.emplace_back(static_cast<int32_t>(i), static_cast<int64_t>(batch.size()) - 1);
    }
  }
  ASSIGN_OR_RETURN(const float* streams, Forward(batch));
  RETURN_IF_ERROR(Score(plan, streams, result));
  std::vector<Running> running;
  RETURN_IF_ERROR(Sample(plan, sampled, streams, result, on_token, running));

  for (int32_t step = 0; step < plan.decode_steps && !running.empty(); ++step) {
    batch.clear();
    sampled.clear();
    for (const Running& part : running) {
      sampled.emplace_back(part.part, static_cast<int64_t>(batch.size()));
      batch.push_back({part.token, part.state->n(), part.state});
    }
    ASSIGN_OR_RETURN(streams, Forward(batch));
    RETURN_IF_ERROR(Sample(plan, sampled, streams, result, on_token, running));
  }
  // All end a step together: a rank that is lost in it is noticed by the others, who know where.
  comm_->set_site(static_cast<int>(config_.num_layers) - 1, "after the head, ending the step");
  RETURN_IF_ERROR(comm_->Barrier());
  result.seconds = SecondsSince(start);
  result.comm_seconds = comm_->wait_seconds() - comm_start;
  return result;
}

// What only a device does; doing something else silently would surprise.
Status CheckCpuOptions(const EngineOptions& options) {
  if (options.expert_memory != ExpertMemory::kDevice) {
    return InvalidArgumentError(
        "expert memory host is for a device; the CPU engine keeps all weights in host memory");
  }
  if (options.device_transport != "auto") {
    return InvalidArgumentError(StrCat("device transport is ", options.device_transport,
                                       ", the CPU engine has no device: it must be auto"));
  }
  if (options.replicated_weights == ReplicatedWeights::kQ8_0) {
    return InvalidArgumentError(
        "replicated weights q8_0 are for a device; the CPU engine computes with the file's");
  }
  return OkStatus();
}

Result<std::unique_ptr<GgufFile>> OpenWithData(const EngineOptions& options) {
  if (options.synthetic.empty()) return OpenEngineModel(options);
  return MakeSyntheticModel(options.synthetic, options.quant, options.synthetic_layers);
}

Result<std::unique_ptr<Engine>> LoadCpu(const EngineOptions& options, Communicator* comm,
                                        const Engine::LoadProgress& progress) {
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(CheckCpuOptions(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, OpenWithData(options));
  ASSIGN_OR_RETURN(ModelConfig config, ReadModelConfig(*file));
  RETURN_IF_ERROR(CheckEngineOptions(options, config));
  ASSIGN_OR_RETURN(ShardPlan plan, MakeShardPlan(config, *file, comm->lanes()));
  ASSIGN_OR_RETURN(Weights weights, LoadWeights(config, *file, plan.ranks[comm->rank()], progress));
  auto engine = std::make_unique<CpuEngine>(options, std::move(config), std::move(plan),
                                            std::move(weights), comm);
  engine->mutable_stats().load_seconds = SecondsSince(start);
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::Load(const EngineOptions& options, Communicator* comm,
                                             const LoadProgress& progress) {
  if (options.backend == Backend::kCpu) return LoadCpu(options, comm, progress);
  const BackendFactory factory = FindBackend(options.backend);
  if (factory == nullptr) return MissingBackendError(options.backend);
  return factory(options, comm, progress);
}

}  // namespace ds4
