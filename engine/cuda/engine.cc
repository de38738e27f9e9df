#include "engine/cuda/engine.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/strings.h"
#include "engine/cuda/cuda_backend.h"
#include "engine/session/backend.h"
#include "engine/session/plan_check.h"

namespace ds4::cuda {
namespace {

// Steps in the queue ahead of the one that the host waits for, and places for their records.
constexpr int kAheadSteps = 4;
constexpr int kRingSteps = 16;
// What the driver, its context and its modules take beside our own memory.
constexpr int64_t kDriverBytes = int64_t{1} << 30;
constexpr std::chrono::seconds kStepLimit{60};
// Where a session may go back to, its rings still have all that is read, whatever the steps in the
// queue wrote beyond its end.
static_assert(kMaxSlackRows <= kMaxFewRows && kDraftSlack + kAheadSteps <= kRewindSlack);

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The batch sizes that have graphs of their own.
int GraphRows(int rows) {
  for (int size : {1, 2, 4, 8, 16, 24, 32, 48}) {
    if (rows <= size) return size;
  }
  return kMaxFewRows;
}

WeightOptions WeightOptionsOf(const EngineOptions& options) {
  WeightOptions weights;
  weights.synthetic = !options.synthetic.empty();
  weights.experts_on_host = options.expert_memory == ExpertMemory::kHost;
  weights.replicated = options.replicated_weights;
  weights.num_threads = options.num_threads;
  return weights;
}

}  // namespace

CudaEngine::~CudaEngine() {
  // Kernels in flight read memory that goes now.
  if (stream_.handle() != nullptr) (void)stream_.Synchronize(std::chrono::seconds(30));
}

// The largest message of a rank: its roots for all rows of a few-row pass, its sum for many rows,
// or its logits of all rows that draw.
int64_t CudaEngine::ExchangeBytes() const {
  const int64_t few = std::min<int64_t>(options_.max_batch_rows, kMaxFewRows);
  const int64_t sums = std::max(few * MostRoots(plan_.lanes), options_.max_batch_rows) *
                       config_.hidden_dim * int64_t{sizeof(float)};
  const int64_t logits = few * MostVocab(config_, plan_.lanes) * int64_t{sizeof(float)};
  return std::max({sums, logits, ChoiceMessageBytes(kMaxFewRows, config_.num_lanes)});
}

Status CudaEngine::PlanMemory(const DeviceInfo& device, const GgufFile& file) {
  const RankPlan& own = plan_.ranks[comm_->rank()];
  TransformerOptions sizes;
  sizes.max_rows = options_.max_batch_rows;
  sizes.max_context = options_.max_context;
  sizes.slots = options_.max_sessions;
  sizes.kv_type = options_.kv_f32 ? KvType::kF32 : KvType::kBF16;
  sizes.deterministic = options_.deterministic;
  ASSIGN_OR_RETURN(const WeightBytes bytes,
                   DeviceWeightBytes(config_, file, own, WeightOptionsOf(options_)));
  const int64_t weights = bytes.device;
  const int64_t scratch =
      DeviceTransformer::ScratchBytes(config_, own, plan_.lanes, sizes, bytes.has_f32_matrices);
  const int64_t caches = DeviceTransformer::CacheBytes(config_, sizes);
  const int64_t exchange =
      comm_->world_size() == 1 ? 0 : 3 * int64_t{comm_->world_size()} * ExchangeBytes();
  const int64_t total = weights + scratch + caches + exchange;
  stats_.device_bytes = total;
  stats_.saved_bytes = bytes.saved;
  stats_.kv_bytes_per_session = caches / options_.max_sessions;
  if (total > device.free_bytes - kDriverBytes) {
    return ResourceExhaustedError(
        StrCat(device.name, " (device ", device.index, ") has ", HumanBytes(device.free_bytes),
               " free; rank ", comm_->rank(), " needs ", HumanBytes(total + kDriverBytes),
               ": weights ", HumanBytes(weights), ", caches of ", options_.max_sessions,
               " sessions of ", options_.max_context, " tokens ", HumanBytes(caches),
               ", working memory for ", options_.max_batch_rows, " rows ", HumanBytes(scratch),
               ", exchange ", HumanBytes(exchange), ", driver ", HumanBytes(kDriverBytes), "; ",
               HumanBytes(total + kDriverBytes - device.free_bytes),
               " too much. Use more ranks, fewer sessions, a shorter context or a smaller batch, "
               "or keep the "
               "experts in host memory (--expert-memory host)"));
  }
  return OkStatus();
}

Status CudaEngine::LoadModel(const LoadProgress& progress) {
  ASSIGN_OR_RETURN(const std::vector<DeviceInfo> devices, ListDevices());
  if (options_.device < 0 || options_.device >= static_cast<int>(devices.size())) {
    return InvalidArgumentError(StrCat("device ", options_.device, " was asked for, there are ",
                                       devices.size(), " (0 to ", devices.size() - 1, ")"));
  }
  const DeviceInfo& device = devices[options_.device];
  RETURN_IF_ERROR(UseDevice(options_.device));
  ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, OpenEngineModel(options_));
  ASSIGN_OR_RETURN(config_, ReadModelConfig(*file));
  RETURN_IF_ERROR(CheckEngineOptions(options_, config_));
  ASSIGN_OR_RETURN(plan_, MakeShardPlan(config_, *file, comm_->lanes()));
  const RankPlan& own = plan_.ranks[comm_->rank()];
  RETURN_IF_ERROR(PlanMemory(device, *file));

  ASSIGN_OR_RETURN(stream_, Stream::Create());
  DeviceGroup::Options group;
  group.max_bytes = ExchangeBytes();
  if (options_.device_transport == "push") group.kind = DeviceGroup::Kind::kPush;
  if (options_.device_transport == "nccl") group.kind = DeviceGroup::Kind::kNccl;
  if (options_.device_transport == "host") group.kind = DeviceGroup::Kind::kHost;
  ASSIGN_OR_RETURN(group_, DeviceGroup::Create(comm_, stream_, group));

  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(weights_, LoadDeviceWeights(config_, *file, own, WeightOptionsOf(options_),
                                               stream_, progress));
  TransformerOptions sizes;
  sizes.max_rows = options_.max_batch_rows;
  sizes.max_context = options_.max_context;
  sizes.slots = options_.max_sessions;
  sizes.kv_type = options_.kv_f32 ? KvType::kF32 : KvType::kBF16;
  sizes.deterministic = options_.deterministic;
  ASSIGN_OR_RETURN(transformer_,
                   DeviceTransformer::Create(config_, own, plan_.lanes, weights_, sizes,
                                             group_.get(), &stream_, device.num_sms));
  slot_taken_.assign(options_.max_sessions, false);
  context_ = {&config_, &own, nullptr, comm_, nullptr};
  chooser_ = std::make_unique<TokenChooser>(context_);

  const int64_t rows = std::max<int64_t>(options_.max_batch_rows, kMaxFewRows);
  ASSIGN_OR_RETURN(row_memory_,
                   DeviceBuffer::Allocate((4 * rows + 2 * kMaxFewRows) * int64_t{sizeof(int32_t)}));
  token_ = row_memory_.as<int32_t>();
  pos_ = token_ + rows;
  slot_ = pos_ + rows;
  row_index_ = slot_ + rows;
  identity_ = row_index_ + rows;
  step_counter_ = reinterpret_cast<uint32_t*>(identity_ + kMaxFewRows);
  step_ = {token_, pos_, slot_};
  ASSIGN_OR_RETURN(draw_memory_, DeviceBuffer::Allocate(kMaxFewRows * int64_t{sizeof(DrawRow)}));
  ASSIGN_OR_RETURN(draw_staging_, PinnedBuffer::Allocate(kMaxFewRows * int64_t{sizeof(DrawRow)}));
  ASSIGN_OR_RETURN(staging_, PinnedBuffer::Allocate(4 * rows * int64_t{sizeof(int32_t)}));
  ASSIGN_OR_RETURN(host_logits_,
                   PinnedBuffer::Allocate(std::min<int64_t>(rows, kMaxFewRows) *
                                          transformer_->local_vocab() * int64_t{sizeof(float)}));
  std::iota(staging_.as<int32_t>(), staging_.as<int32_t>() + kMaxFewRows, 0);
  RETURN_IF_ERROR(
      stream_.CopyToDevice(identity_, staging_.data(), kMaxFewRows * int64_t{sizeof(int32_t)}));
  const int64_t record_bytes = kRingSteps * kMaxFewRows * int64_t{sizeof(TokenRecord)};
  ASSIGN_OR_RETURN(records_,
                   PinnedBuffer::Allocate(record_bytes + kRingSteps * int64_t{sizeof(uint32_t)}));
  record_ = records_.as<TokenRecord>();
  record_flags_ = reinterpret_cast<uint32_t*>(records_.data() + record_bytes);

  stats_.backend = StrCat("cuda, ", device.name);
  stats_.weight_bytes = weights_.source_bytes;
  stats_.load_seconds = SecondsSince(start);
  return OkStatus();
}

Result<std::unique_ptr<Engine>> CudaEngine::Load(const EngineOptions& options, Communicator* comm,
                                                 const LoadProgress& progress) {
  std::unique_ptr<CudaEngine> engine(new CudaEngine(options, comm));
  RETURN_IF_ERROR(engine->LoadModel(progress));
  return std::unique_ptr<Engine>(std::move(engine));
}

Status CudaEngine::OpenSession(uint64_t session_id, int64_t max_context) {
  RETURN_IF_ERROR(CheckOpenSession(options_, session_id, max_context,
                                   sessions_.contains(session_id),
                                   static_cast<int64_t>(sessions_.size())));
  const auto free = std::find(slot_taken_.begin(), slot_taken_.end(), false);
  const int slot = static_cast<int>(free - slot_taken_.begin());
  slot_taken_[slot] = true;
  sessions_.emplace(session_id,
                    Session{slot, SessionPosition(max_context, options_.max_batch_rows)});
  return OkStatus();
}

Status CudaEngine::CloseSession(uint64_t session_id) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return SessionNotOpenError(session_id);
  slot_taken_[it->second.slot] = false;
  sessions_.erase(it);
  return OkStatus();
}

Result<uint64_t> CudaEngine::StateHash(uint64_t session_id) {
  RETURN_IF_ERROR(UseDevice(options_.device));
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return SessionNotOpenError(session_id);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  const int64_t n = it->second.position.n();
  XXH3_64bits_update(&state, &n, sizeof(n));
  RETURN_IF_ERROR(transformer_->VisitState(
      it->second.slot, n,
      [&](const void* data, int64_t bytes) { XXH3_64bits_update(&state, data, bytes); }));
  return XXH3_64bits_digest(&state);
}

Status CudaEngine::SetRows(const std::vector<Row>& rows, int padded) {
  // The staging memory may still be read by an earlier copy.
  RETURN_IF_ERROR(stream_.Synchronize(kStepLimit));
  auto* host = staging_.as<int32_t>();
  for (int i = 0; i < padded; ++i) {
    const Row row = i < static_cast<int>(rows.size()) ? rows[i] : Row{};
    host[i] = row.token;
    host[padded + i] = row.pos;
    host[2 * padded + i] = row.slot;
  }
  const int64_t bytes = padded * int64_t{sizeof(int32_t)};
  RETURN_IF_ERROR(stream_.CopyToDevice(token_, host, bytes));
  RETURN_IF_ERROR(stream_.CopyToDevice(pos_, host + padded, bytes));
  return stream_.CopyToDevice(slot_, host + 2 * padded, bytes);
}

Status CudaEngine::Forward(const std::vector<Row>& rows, bool many) {
  RETURN_IF_ERROR(SetRows(rows, static_cast<int>(rows.size())));
  int64_t max_pos = 0;
  for (const Row& row : rows) max_pos = std::max<int64_t>(max_pos, row.pos);
  RETURN_IF_ERROR(transformer_->Forward(step_, static_cast<int>(rows.size()), max_pos, many));
  if (comm_->world_size() > 1) RETURN_IF_ERROR(group_->EvenUp(transformer_->launch()));
  return OkStatus();
}

Status CudaEngine::FetchLogits(const std::vector<int32_t>& rows, int pass_rows) {
  const int64_t count = static_cast<int64_t>(rows.size());
  RETURN_IF_ERROR(stream_.Synchronize(kStepLimit));
  std::copy(rows.begin(), rows.end(), staging_.as<int32_t>());
  RETURN_IF_ERROR(
      stream_.CopyToDevice(row_index_, staging_.data(), count * int64_t{sizeof(int32_t)}));
  RETURN_IF_ERROR(transformer_->Logits(row_index_, static_cast<int>(count), pass_rows));
  RETURN_IF_ERROR(stream_.CopyToHost(host_logits_.data(), transformer_->logits(),
                                     count * transformer_->local_vocab() * int64_t{sizeof(float)}));
  RETURN_IF_ERROR(stream_.Synchronize(kStepLimit));
  return group_->CheckHealth();
}

Status CudaEngine::Score(const StepPlan& plan, const std::vector<int>& parts, StepResult& result) {
  int pass_rows = 0;
  for (int p : parts) pass_rows += static_cast<int>(plan.parts[p].tokens.size());
  int32_t first_row = 0;
  for (int p : parts) {
    const StepPart& part = plan.parts[p];
    std::vector<float>& nll = result.nll[p];
    for (size_t begin = 0; begin < part.score_targets.size(); begin += kMaxFewRows) {
      const size_t count = std::min<size_t>(std::min<int64_t>(kMaxFewRows, options_.max_batch_rows),
                                            part.score_targets.size() - begin);
      std::vector<int32_t> rows(count);
      for (size_t i = 0; i < count; ++i) rows[i] = first_row + static_cast<int32_t>(begin + i);
      RETURN_IF_ERROR(FetchLogits(rows, pass_rows));
      RETURN_IF_ERROR(chooser_->Score(host_logits_.as<float>(),
                                      {part.score_targets.data() + begin, count},
                                      {nll.data() + begin, count}));
    }
    first_row += static_cast<int32_t>(part.tokens.size());
  }
  return OkStatus();
}

Result<bool> CudaEngine::SetDraws(const StepPlan& plan, const std::vector<int32_t>& parts,
                                  int padded) {
  bool any = false;
  auto* host = draw_staging_.as<DrawRow>();  // no copy of it is under way: SetRows has waited
  for (int i = 0; i < padded; ++i) {
    host[i] = DrawRow{};
    if (i >= static_cast<int>(parts.size())) continue;
    const SamplingParams& p = plan.parts[parts[i]].sampling;
    host[i] = {p.temperature, p.top_p, p.min_p, p.top_k, p.seed};
    any = any || p.temperature > 0.0f;
  }
  if (any) {
    RETURN_IF_ERROR(stream_.CopyToDevice(draw_memory_.data(), host,
                                         padded * static_cast<int64_t>(sizeof(DrawRow))));
  }
  return any;
}

DecodeQueue CudaEngine::Queue() const {
  DecodeQueue queue;
  queue.token = token_;
  queue.pos = pos_;
  queue.slot = slot_;
  queue.record = record_;
  queue.record_flags = record_flags_;
  queue.step_counter = step_counter_;
  queue.ring_steps = kRingSteps;
  queue.last_pos = static_cast<int32_t>(options_.max_context - 1);
  return queue;
}

Result<const TokenRecord*> CudaEngine::ChooseTokens(const StepPlan& plan,
                                                    std::span<const Draw> draws, int pass_rows) {
  const int count = static_cast<int>(draws.size());
  std::vector<Row> rows;
  std::vector<int32_t> parts;
  for (const Draw& draw : draws) {
    // Only for the draw's position: no slot, so that nothing moves.
    const Session& session = SessionOf(plan.parts[draw.part]);
    rows.push_back({0, static_cast<int32_t>(session.position.n() - 1), -1});
    parts.push_back(draw.part);
  }
  RETURN_IF_ERROR(SetRows(rows, count));
  auto* index = staging_.as<int32_t>() + 3 * count;
  for (int i = 0; i < count; ++i) index[i] = draws[i].row;
  RETURN_IF_ERROR(stream_.CopyToDevice(row_index_, index, count * int64_t{sizeof(int32_t)}));
  ASSIGN_OR_RETURN(const bool drawn, SetDraws(plan, parts, count));
  RETURN_IF_ERROR(transformer_->Logits(row_index_, count, pass_rows));
  RETURN_IF_ERROR(transformer_->Greedy(count));
  if (drawn) RETURN_IF_ERROR(transformer_->Draw(count, draw_memory_.as<DrawRow>(), pos_));
  transformer_->Advance(count, Queue());
  if (comm_->world_size() > 1) RETURN_IF_ERROR(group_->EvenUp(transformer_->launch()));
  RETURN_IF_ERROR(LaunchStatus());
  const uint32_t step = steps_launched_++;
  RETURN_IF_ERROR(WaitForRecord(step));
  return record_ + step % kRingSteps * count;
}

Status CudaEngine::Emit(const StepPlan& plan, int32_t part, const TokenRecord& record,
                        StepResult& result, const TokenCallback& on_token, TokenOutput& output) {
  if (!(record.logit == record.logit)) {
    return InternalError(StrCat("position ", record.pos, ": a logit is not a finite number"));
  }
  output.part = part;
  output.pos = record.pos;
  output.token = record.token;
  output.logprob = record.logit - record.log_sum_exp;
  const std::vector<int32_t>& stops = plan.parts[part].stop_ids;
  output.is_stop = std::find(stops.begin(), stops.end(), output.token) != stops.end();
  if (on_token) on_token(output);
  result.tokens.push_back(output);
  return OkStatus();
}

Status CudaEngine::Sample(const StepPlan& plan, const std::vector<Draw>& draws, int pass_rows,
                          StepResult& result, const TokenCallback& on_token,
                          std::vector<Running>& running) {
  for (size_t first = 0; first < draws.size(); first += transformer_->max_few_rows()) {
    const size_t count =
        std::min<size_t>(draws.size() - first, static_cast<size_t>(transformer_->max_few_rows()));
    ASSIGN_OR_RETURN(const TokenRecord* found,
                     ChooseTokens(plan, std::span(draws).subspan(first, count), pass_rows));
    const std::vector<TokenRecord> records(found, found + count);
    for (size_t i = 0; i < count; ++i) {
      const Draw& draw = draws[first + i];
      const StepPart& part = plan.parts[draw.part];
      Session& session = SessionOf(part);
      TokenOutput output;
      if (part.num_top > 0) {
        RETURN_IF_ERROR(FetchLogits({draw.row}, pass_rows));
        RETURN_IF_ERROR(chooser_->Choose(
            {host_logits_.as<float>(), static_cast<size_t>(transformer_->local_vocab())},
            SamplingParams{}, part.num_top, output));
      }
      RETURN_IF_ERROR(Emit(plan, draw.part, records[i], result, on_token, output));
      if (!output.is_stop && session.position.n() < session.position.max_context()) {
        running.push_back({draw.part, &session, output.token});
      }
    }
  }
  return OkStatus();
}

Status CudaEngine::RunParts(const StepPlan& plan, const std::vector<int>& parts, bool many,
                            StepResult& result, const TokenCallback& on_token,
                            std::vector<Running>& running) {
  std::vector<Row> rows;
  std::vector<Draw> draws;
  for (int p : parts) {
    const StepPart& part = plan.parts[p];
    Session& session = SessionOf(part);
    for (size_t r = 0; r < part.tokens.size(); ++r) {
      rows.push_back(
          {part.tokens[r], static_cast<int32_t>(part.pos + static_cast<int64_t>(r)), session.slot});
    }
    if (part.sample) draws.push_back({p, static_cast<int32_t>(rows.size()) - 1});
  }
  RETURN_IF_ERROR(Forward(rows, many));
  for (int p : parts) {
    SessionOf(plan.parts[p]).position.Advance(static_cast<int64_t>(plan.parts[p].tokens.size()));
  }
  RETURN_IF_ERROR(Score(plan, parts, result));
  return Sample(plan, draws, static_cast<int>(rows.size()), result, on_token, running);
}

bool CudaEngine::CanQueue(const StepPlan& plan, const std::vector<Running>& running) const {
  // Every rank chooses from the same gathered bytes, so all go on, and stop, alike.
  if (comm_->world_size() > 1 && !group_->graph_safe()) return false;
  return std::all_of(running.begin(), running.end(),
                     [&](const Running& r) { return plan.parts[r.part].num_top == 0; });
}

Status CudaEngine::DecodeByHost(const StepPlan& plan, int32_t steps, StepResult& result,
                                const TokenCallback& on_token, std::vector<Running>& running) {
  for (int32_t step = 0; step < steps && !running.empty(); ++step) {
    std::vector<Running> next;
    // Batches larger than the few-row kernels take go in turns.
    for (size_t first = 0; first < running.size(); first += transformer_->max_few_rows()) {
      const size_t end = std::min<size_t>(
          running.size(), first + static_cast<size_t>(transformer_->max_few_rows()));
      std::vector<Row> rows;
      std::vector<Draw> draws;
      for (size_t i = first; i < end; ++i) {
        const Running& r = running[i];
        draws.push_back({r.part, static_cast<int32_t>(rows.size())});
        rows.push_back({r.token, static_cast<int32_t>(r.session->position.n()), r.session->slot});
      }
      RETURN_IF_ERROR(Forward(rows, false));
      for (size_t i = first; i < end; ++i) running[i].session->position.Advance(1);
      RETURN_IF_ERROR(Sample(plan, draws, static_cast<int>(rows.size()), result, on_token, next));
    }
    running = std::move(next);
  }
  return OkStatus();
}

Result<Graph*> CudaEngine::GraphFor(const GraphKey& wanted) {
  // One graph serves all positions below the next power of two.
  int64_t bound = 1024;
  while (bound <= wanted.max_pos) bound *= 2;
  bound = std::min(bound, options_.max_context) - 1;
  GraphKey key = wanted;
  key.max_pos = bound;
  const int rows = key.rows;
  if (const auto it = graphs_.find(key); it != graphs_.end()) return &it->second;
  const auto work = [&]() -> Status {
    RETURN_IF_ERROR(transformer_->Forward(step_, rows, bound, false));
    RETURN_IF_ERROR(transformer_->Logits(identity_, rows, rows));
    RETURN_IF_ERROR(transformer_->Greedy(rows));
    if (key.draws) RETURN_IF_ERROR(transformer_->Draw(rows, draw_memory_.as<DrawRow>(), pos_));
    transformer_->Advance(rows, Queue());
    if (comm_->world_size() > 1) RETURN_IF_ERROR(group_->EvenUp(transformer_->launch()));
    return LaunchStatus();
  };
  ASSIGN_OR_RETURN(Graph graph, Graph::Capture(stream_, work));
  return &graphs_.emplace(key, std::move(graph)).first->second;
}

Status CudaEngine::WaitForRecord(uint32_t step) {
  const volatile uint32_t* flag = record_flags_ + step % kRingSteps;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t spins = 0; *flag != step + 1; ++spins) {
    if (spins % 1024 != 1023) continue;
    if (std::chrono::steady_clock::now() - start > kStepLimit) {
      return DeadlineExceededError(StrCat("device ", options_.device, ": decode step ", step,
                                          " made no progress for ", kStepLimit.count(), " s"));
    }
    RETURN_IF_ERROR(group_->CheckHealth());
    if (spins > (int64_t{1} << 22)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  // After a failed exchange the step still ends, with rubbish.
  return group_->CheckHealth();
}

Status CudaEngine::DecodeQueued(const StepPlan& plan, int32_t steps, StepResult& result,
                                const TokenCallback& on_token, std::vector<Running>& running) {
  while (steps > 0 && !running.empty()) {
    const int count = static_cast<int>(running.size());
    const int padded =
        std::min<int>(GraphRows(count), static_cast<int>(transformer_->max_few_rows()));
    std::vector<Row> rows;
    std::vector<int32_t> parts;
    int64_t max_pos = 0;
    for (const Running& r : running) {
      parts.push_back(r.part);
      rows.push_back({r.token, static_cast<int32_t>(r.session->position.n()), r.session->slot});
      max_pos = std::max(max_pos, r.session->position.n());
    }
    RETURN_IF_ERROR(SetRows(rows, padded));
    ASSIGN_OR_RETURN(const bool draws, SetDraws(plan, parts, padded));
    std::vector<bool> live(count, true);
    int alive = count;
    int32_t launched = 0, read = 0;
    const uint32_t first = steps_launched_;
    // A part that ends leaves its row running for the few steps in the queue: then the rows are set
    // anew without it.
    while (read < launched || (launched < steps && alive == count)) {
      while (launched < steps && launched - read < kAheadSteps && alive == count) {
        ASSIGN_OR_RETURN(
            Graph * graph,
            GraphFor({padded, std::min(max_pos + launched, options_.max_context - 1), draws}));
        RETURN_IF_ERROR(graph->Launch(stream_));
        ++launched;
        ++steps_launched_;
      }
      RETURN_IF_ERROR(WaitForRecord(first + static_cast<uint32_t>(read)));
      const TokenRecord* records =
          record_ + (first + static_cast<uint32_t>(read)) % kRingSteps * padded;
      ++read;
      for (int i = 0; i < count; ++i) {
        Running& r = running[i];
        if (!live[i]) continue;
        r.session->position.Advance(1);
        TokenOutput output;
        RETURN_IF_ERROR(Emit(plan, r.part, records[i], result, on_token, output));
        r.token = output.token;
        if (output.is_stop || r.session->position.n() >= r.session->position.max_context()) {
          live[i] = false;
          --alive;
        }
      }
    }
    steps -= read;
    std::vector<Running> next;
    for (int i = 0; i < count; ++i) {
      if (live[i]) next.push_back(running[i]);
    }
    running = std::move(next);
  }
  return OkStatus();
}

Result<StepResult> CudaEngine::Run(const StepPlan& plan, const TokenCallback& on_token) {
  RETURN_IF_ERROR(UseDevice(options_.device));
  RETURN_IF_ERROR(CheckPlan(plan, config_.vocab_size, options_.max_batch_rows,
                            [&](uint64_t id) -> const SessionPosition* {
                              const auto it = sessions_.find(id);
                              return it == sessions_.end() ? nullptr : &it->second.position;
                            }));
  const auto start = std::chrono::steady_clock::now();
  const double comm_start = comm_->wait_seconds();
  StepResult result;
  result.nll.resize(plan.parts.size());
  std::vector<int> few, many;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const StepPart& part = plan.parts[i];
    RETURN_IF_ERROR(SessionOf(part).position.Rewind(part.pos));
    result.nll[i].resize(part.score_targets.size());
    const bool is_long = static_cast<int64_t>(part.tokens.size()) > kFewPartRows;
    (is_long && transformer_->has_many_row_path() ? many : few).push_back(static_cast<int>(i));
  }
  std::vector<Running> running;
  if (!many.empty()) RETURN_IF_ERROR(RunParts(plan, many, true, result, on_token, running));
  // Parts in batches of what the few-row kernels take; a longer part goes in pieces.
  std::vector<int> batch;
  int64_t batch_rows = 0;
  const auto flush = [&]() -> Status {
    if (batch.empty()) return OkStatus();
    RETURN_IF_ERROR(RunParts(plan, batch, false, result, on_token, running));
    batch.clear();
    batch_rows = 0;
    return OkStatus();
  };
  for (int p : few) {
    const int64_t rows = static_cast<int64_t>(plan.parts[p].tokens.size());
    if (batch_rows + rows > transformer_->max_few_rows()) RETURN_IF_ERROR(flush());
    if (rows <= transformer_->max_few_rows()) {
      batch.push_back(p);
      batch_rows += rows;
      continue;
    }
    // Piece by piece; only the last one draws.
    StepPlan piece = plan;
    StepPart& part = piece.parts[p];
    const StepPart& whole = plan.parts[p];
    for (int64_t at = 0; at < rows; at += transformer_->max_few_rows()) {
      const int64_t count = std::min(transformer_->max_few_rows(), rows - at);
      part.pos = whole.pos + at;
      part.tokens.assign(whole.tokens.begin() + at, whole.tokens.begin() + at + count);
      part.sample = whole.sample && at + count == rows;
      StepResult scored;
      scored.nll.resize(plan.parts.size());
      if (!whole.score_targets.empty()) {
        part.score_targets.assign(whole.score_targets.begin() + at,
                                  whole.score_targets.begin() + at + count);
        scored.nll[p].resize(count);
      }
      RETURN_IF_ERROR(RunParts(piece, {p}, false, scored, on_token, running));
      std::copy(scored.nll[p].begin(), scored.nll[p].end(), result.nll[p].begin() + at);
      for (TokenOutput& token : scored.tokens) result.tokens.push_back(std::move(token));
    }
  }
  RETURN_IF_ERROR(flush());

  if (plan.decode_steps > 0 && !running.empty()) {
    const bool queue = CanQueue(plan, running) &&
                       static_cast<int64_t>(running.size()) <= transformer_->max_few_rows();
    RETURN_IF_ERROR(queue ? DecodeQueued(plan, plan.decode_steps, result, on_token, running)
                          : DecodeByHost(plan, plan.decode_steps, result, on_token, running));
  }
  RETURN_IF_ERROR(stream_.Synchronize(kStepLimit));
  RETURN_IF_ERROR(group_->CheckHealth());
  comm_->set_site(static_cast<int>(config_.num_layers) - 1, "after the head, ending the step");
  RETURN_IF_ERROR(comm_->Barrier());
  result.seconds = SecondsSince(start);
  result.comm_seconds = comm_->wait_seconds() - comm_start;
  return result;
}

void RegisterCudaBackend() { RegisterBackend(Backend::kCuda, &CudaEngine::Load); }

}  // namespace ds4::cuda
