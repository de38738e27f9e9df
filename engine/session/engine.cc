// One rank's engine: checks a step plan, runs its rows, and lets rank 0 decide the tokens.

#include "engine/session/engine.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "engine/base/strings.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/layers/transformer.h"
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
  Status Check(const StepPlan& plan) const;
  Status CheckPart(const StepPart& part, const std::string& where) const;
  Status CheckTokens(const std::vector<int32_t>& tokens, int32_t lowest, const std::string& where,
                     const char* what) const;
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
  if (sessions_.contains(session_id)) {
    return {StatusCode::kAlreadyExists, StrCat("session ", session_id, " is open already")};
  }
  if (static_cast<int>(sessions_.size()) >= options_.max_sessions) {
    return ResourceExhaustedError(StrCat("session ", session_id,
                                         " is one too many: ", sessions_.size(), " of ",
                                         options_.max_sessions, " are open; close one first"));
  }
  if (max_context < 1 || max_context > options_.max_context) {
    return InvalidArgumentError(StrCat("session ", session_id, " asks for a context of ",
                                       max_context, " tokens, this group was formed for 1 to ",
                                       options_.max_context));
  }
  ASSIGN_OR_RETURN(sessions_[session_id],
                   KvState::Create(config_, max_context, options_.max_batch_rows));
  return OkStatus();
}

Status CpuEngine::CloseSession(uint64_t session_id) {
  if (sessions_.erase(session_id) == 0) {
    return NotFoundError(StrCat("session ", session_id, " is not open"));
  }
  return OkStatus();
}

Result<uint64_t> CpuEngine::StateHash(uint64_t session_id) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return NotFoundError(StrCat("session ", session_id, " is not open"));
  return it->second->Hash();
}

Status CpuEngine::CheckTokens(const std::vector<int32_t>& tokens, int32_t lowest,
                              const std::string& where, const char* what) const {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < lowest || tokens[i] >= config_.vocab_size) {
      return InvalidArgumentError(StrCat(where, ": ", what, "[", i, "] is ", tokens[i],
                                         ", the vocabulary has ids 0 to ", config_.vocab_size - 1));
    }
  }
  return OkStatus();
}

Status CpuEngine::CheckPart(const StepPart& part, const std::string& where) const {
  const auto it = sessions_.find(part.session_id);
  if (it == sessions_.end()) {
    return InvalidArgumentError(StrCat(where, ": session ", part.session_id, " is not open"));
  }
  const KvState& state = *it->second;
  const int64_t rows = static_cast<int64_t>(part.tokens.size());
  if (rows == 0) return InvalidArgumentError(StrCat(where, " has no tokens"));
  if (part.pos < 0 || part.pos > state.n() || (part.pos != 0 && part.pos < state.LowestRewind())) {
    return InvalidArgumentError(StrCat(where, " starts at position ", part.pos,
                                       ", the session is at ", state.n(), " and goes back to ",
                                       state.LowestRewind(), " or 0"));
  }
  if (rows > state.max_context() - part.pos) {
    return InvalidArgumentError(StrCat(where, " ends at position ", part.pos + rows,
                                       ", the session's context is ", state.max_context()));
  }
  if (!part.score_targets.empty() && part.score_targets.size() != part.tokens.size()) {
    return InvalidArgumentError(
        StrCat(where, " has ", part.score_targets.size(), " score targets for ", rows, " tokens"));
  }
  if (part.num_top < 0 || part.num_top > config_.vocab_size) {
    return InvalidArgumentError(
        StrCat(where, ": num_top is ", part.num_top, ", must be from 0 to ", config_.vocab_size));
  }
  RETURN_IF_ERROR(CheckTokens(part.tokens, 0, where, "tokens"));
  RETURN_IF_ERROR(CheckTokens(part.score_targets, -1, where, "score_targets"));
  RETURN_IF_ERROR(CheckTokens(part.stop_ids, 0, where, "stop_ids"));
  return ValidateSampling(part.sampling).WithContext(where);
}

Status CpuEngine::Check(const StepPlan& plan) const {
  const std::string step = StrCat("step ", plan.sequence);
  if (plan.parts.empty()) return InvalidArgumentError(step + " has no parts");
  if (plan.decode_steps < 0) {
    return InvalidArgumentError(StrCat(step, ": decode_steps is ", plan.decode_steps));
  }
  if (plan.num_rows() > options_.max_batch_rows) {
    return InvalidArgumentError(
        StrCat(step, " has ", plan.num_rows(), " rows, a batch holds ", options_.max_batch_rows));
  }
  std::vector<uint64_t> seen;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const std::string where = StrCat(step, ", part ", i);
    const StepPart& part = plan.parts[i];
    RETURN_IF_ERROR(CheckPart(part, where));
    if (std::find(seen.begin(), seen.end(), part.session_id) != seen.end()) {
      return InvalidArgumentError(StrCat(where, ": session ", part.session_id, " is in it twice"));
    }
    seen.push_back(part.session_id);
  }
  return OkStatus();
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
  RETURN_IF_ERROR(Check(plan));
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

Status CheckOptions(const EngineOptions& options, const ModelConfig& config) {
  if (options.num_threads < 1) {
    return InvalidArgumentError(StrCat("threads is ", options.num_threads, ", must be at least 1"));
  }
  if (options.max_context < 1 || options.max_context > config.context_length) {
    return InvalidArgumentError(StrCat("a context of ", options.max_context,
                                       " tokens was asked for, the model was made for 1 to ",
                                       config.context_length));
  }
  if (options.max_batch_rows < 1 || options.max_batch_rows > 65536) {
    return InvalidArgumentError(
        StrCat("batch rows is ", options.max_batch_rows, ", must be from 1 to 65536"));
  }
  if (options.max_sessions < 1) {
    return InvalidArgumentError(
        StrCat("sessions is ", options.max_sessions, ", must be at least 1"));
  }
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::Load(const EngineOptions& options, Communicator* comm,
                                             const LoadProgress& progress) {
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(options.model_path));
  ASSIGN_OR_RETURN(ModelConfig config, ReadModelConfig(*file));
  RETURN_IF_ERROR(CheckOptions(options, config));
  ASSIGN_OR_RETURN(ShardPlan plan, MakeShardPlan(config, *file, comm->lanes()));
  ASSIGN_OR_RETURN(Weights weights, LoadWeights(config, *file, plan.ranks[comm->rank()], progress));
  auto engine = std::make_unique<CpuEngine>(options, std::move(config), std::move(plan),
                                            std::move(weights), comm);
  engine->mutable_stats().load_seconds = SecondsSince(start);
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace ds4
