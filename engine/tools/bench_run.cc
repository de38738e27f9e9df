#include "engine/tools/bench_run.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "engine/base/strings.h"
#include "engine/comm/local_transport.h"
#include "engine/comm/transport.h"
#include "engine/kernels/matmul.h"
#include "engine/session/engine.h"

namespace ds4 {
namespace {

using Note = std::function<void(const std::string&)>;

// Decoded before the clock counts: graphs, caches and clocks settle.
constexpr int64_t kWarmUpTokens = 4;
// Steps that kernel times are the mean of.
constexpr int64_t kKernelSteps = 16;
// Between two notes while loading.
constexpr double kLoadNoteSeconds = 5.0;

int64_t Largest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// What a session decodes after its context.
int64_t MoreTokens(const BenchOptions& options) {
  return kWarmUpTokens + options.tokens + (options.kernels ? kKernelSteps + 1 : 0);
}

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  }
  return tokens;
}

// Seconds of some steps, of which waiting for peers.
struct Time {
  double seconds = 0.0;
  double comm_seconds = 0.0;
  void Add(const StepResult& result) {
    seconds += result.seconds;
    comm_seconds += result.comm_seconds;
  }
  double comm_share() const { return seconds > 0 ? comm_seconds / seconds : 0.0; }
};

// One rank's engine and what it measures. All ranks make the same calls in the same order.
class Bench {
 public:
  Bench(const BenchOptions& options, int rank, Engine* engine, int64_t vocab)
      : options_(options), is_first_rank_(rank == 0), engine_(*engine), vocab_(vocab) {}

  // With options.kernels, rank 0 adds a step's kernels to `kernels`.
  Result<DecodeRow> Decode(int64_t context, int64_t batch, std::vector<KernelRow>& kernels);
  Result<PrefillRow> Prefill(int64_t prompt, int64_t chunk, std::vector<KernelRow>& kernels);

 private:
  // Runs random tokens as the session's first `count`, and gives the token drawn after them.
  Result<int32_t> Fill(uint64_t session, int64_t count, int64_t chunk, Time& time);
  Status RunPrompt(int64_t prompt, int64_t chunk, Time& time);
  // Each session decodes `count` tokens in one engine call; tokens_ and pos_ move on.
  Result<StepResult> DecodeRun(int64_t count);
  double DistinctPerStep(const StepResult& result) const;
  Status TimeKernels(int64_t context, std::vector<KernelRow>& rows);

  const BenchOptions& options_;
  const bool is_first_rank_;
  Engine& engine_;
  const int64_t vocab_;
  uint64_t sequence_ = 0;
  std::vector<int32_t> tokens_;  // the last one of each session: session i has id i + 1
  int64_t pos_ = 0;              // where they stand
};

Result<int32_t> Bench::Fill(uint64_t session, int64_t count, int64_t chunk, Time& time) {
  const std::vector<int32_t> tokens = RandomTokens(count, vocab_, session);
  int32_t drawn = 0;
  for (int64_t pos = 0; pos < count; pos += chunk) {
    const int64_t end = std::min(count, pos + chunk);
    StepPart part;
    part.session_id = session;
    part.pos = pos;
    part.tokens.assign(tokens.begin() + pos, tokens.begin() + end);
    part.sample = end == count;
    StepPlan plan;
    plan.sequence = ++sequence_;
    plan.parts = {std::move(part)};
    ASSIGN_OR_RETURN(const StepResult result, engine_.Run(plan, nullptr));
    time.Add(result);
    if (!result.tokens.empty()) drawn = result.tokens[0].token;
  }
  return drawn;
}

Result<StepResult> Bench::DecodeRun(int64_t count) {
  StepPlan plan;
  plan.sequence = ++sequence_;
  plan.decode_steps = static_cast<int32_t>(count - 1);  // the first comes from the rows themselves
  for (size_t i = 0; i < tokens_.size(); ++i) {
    StepPart part;
    part.session_id = i + 1;
    part.pos = pos_;
    part.tokens = {tokens_[i]};
    part.sample = true;
    part.sampling.temperature = options_.temperature;
    part.sampling.seed = i + 1;
    plan.parts.push_back(std::move(part));
  }
  ASSIGN_OR_RETURN(StepResult result, engine_.Run(plan, nullptr));
  const auto wanted = static_cast<size_t>(count) * tokens_.size();
  if (result.tokens.size() != wanted) {
    return InternalError(
        StrCat("the engine gave ", result.tokens.size(), " tokens, ", wanted, " were asked for"));
  }
  for (const TokenOutput& output : result.tokens) {
    tokens_[static_cast<size_t>(output.part)] = output.token;
  }
  pos_ += count;
  return result;
}

// Tokens come step by step, one of each session.
double Bench::DistinctPerStep(const StepResult& result) const {
  const size_t batch = tokens_.size();
  size_t distinct = 0;
  for (size_t first = 0; first < result.tokens.size(); first += batch) {
    std::set<int32_t> ids;
    for (size_t i = 0; i < batch; ++i) ids.insert(result.tokens[first + i].token);
    distinct += ids.size();
  }
  return static_cast<double>(distinct * batch) / static_cast<double>(result.tokens.size());
}

Status Bench::TimeKernels(int64_t context, std::vector<KernelRow>& rows) {
  if (!is_first_rank_) return DecodeRun(kKernelSteps + 1).status();
  RETURN_IF_ERROR(StartKernelTimes());
  RETURN_IF_ERROR(DecodeRun(kKernelSteps + 1).status());
  ASSIGN_OR_RETURN(const std::vector<KernelTime> times, StopKernelTimes());
  std::vector<std::string> names;
  for (const KernelTime& time : times) names.push_back(time.name);
  ASSIGN_OR_RETURN(const size_t launches, LaunchesPerStep(names, kKernelSteps));
  const size_t first_step = times.size() + 1 - kKernelSteps * launches;
  const size_t first_row = rows.size();
  for (size_t i = 0; i < launches; ++i) {
    KernelRow row;
    row.length = context;
    row.rows = static_cast<int64_t>(tokens_.size());
    row.launch = static_cast<int64_t>(i);
    row.kernel = KernelName(times[first_step + i].name);
    rows.push_back(std::move(row));
  }
  std::vector<int> counts(launches);
  for (size_t i = first_step; i < times.size(); ++i) {
    rows[first_row + (i - first_step) % launches].us += times[i].us;
    ++counts[(i - first_step) % launches];
  }
  for (size_t i = 0; i < launches; ++i) rows[first_row + i].us /= counts[i];
  return OkStatus();
}

Result<DecodeRow> Bench::Decode(int64_t context, int64_t batch, std::vector<KernelRow>& kernels) {
  DecodeRow row;
  row.context = context;
  row.batch = batch;
  row.chunk = options_.chunks[0];
  Time fill;
  tokens_.assign(static_cast<size_t>(batch), 0);
  for (size_t i = 0; i < tokens_.size(); ++i) {
    RETURN_IF_ERROR(engine_.OpenSession(i + 1, context + MoreTokens(options_)));
    ASSIGN_OR_RETURN(tokens_[i], Fill(i + 1, context, row.chunk, fill));
  }
  row.fill_tps = static_cast<double>(context * batch) / fill.seconds;
  pos_ = context;
  RETURN_IF_ERROR(DecodeRun(kWarmUpTokens).status());

  Time time;
  std::vector<double> step_seconds;
  std::vector<double> distinct;
  for (int64_t done = 0; done < options_.tokens;) {
    const int64_t count = std::min(options_.steps, options_.tokens - done);
    ASSIGN_OR_RETURN(const StepResult result, DecodeRun(count));
    time.Add(result);
    // A shorter last run would weigh its start more than the others do.
    if (count == options_.steps || done == 0) {
      step_seconds.push_back(result.seconds / static_cast<double>(count));
      distinct.push_back(DistinctPerStep(result));
    }
    done += count;
  }
  if (options_.kernels) RETURN_IF_ERROR(TimeKernels(context, kernels));
  for (size_t i = 0; i < tokens_.size(); ++i) RETURN_IF_ERROR(engine_.CloseSession(i + 1));
  row.step_seconds = Median(step_seconds);
  row.distinct = Median(distinct);
  row.comm_share = time.comm_share();
  return row;
}

Status Bench::RunPrompt(int64_t prompt, int64_t chunk, Time& time) {
  RETURN_IF_ERROR(engine_.OpenSession(1, prompt));
  RETURN_IF_ERROR(Fill(1, prompt, chunk, time).status());
  return engine_.CloseSession(1);
}

Result<PrefillRow> Bench::Prefill(int64_t prompt, int64_t chunk, std::vector<KernelRow>& kernels) {
  Time time;
  RETURN_IF_ERROR(RunPrompt(prompt, chunk, time));
  if (options_.kernels) {
    if (is_first_rank_) RETURN_IF_ERROR(StartKernelTimes());
    Time again;
    RETURN_IF_ERROR(RunPrompt(prompt, chunk, again));
    if (is_first_rank_) {
      ASSIGN_OR_RETURN(const std::vector<KernelTime> times, StopKernelTimes());
      for (size_t i = 0; i < times.size(); ++i) {
        kernels.push_back(
            {prompt, chunk, static_cast<int64_t>(i), KernelName(times[i].name), times[i].us});
      }
    }
  }
  return PrefillRow{prompt, chunk, time.seconds, time.comm_share()};
}

EngineOptions EngineOptionsFor(const BenchOptions& options, int rank) {
  EngineOptions engine = options.engine;
  engine.device = (engine.device + rank) % options.num_devices;
  if (options.mode == BenchOptions::Mode::kDecode) {
    engine.max_context = Largest(options.contexts) + MoreTokens(options);
    engine.max_sessions = static_cast<int>(Largest(options.batches));
    engine.max_batch_rows = std::max(options.chunks[0], Largest(options.batches));
  } else {
    engine.max_context = Largest(options.prompts);
    engine.max_sessions = 1;
    engine.max_batch_rows = Largest(options.chunks);
  }
  return engine;
}

// Rank 0's progress, now and then.
Engine::LoadProgress LoadNotes(const Note& note) {
  return [&note, last = std::chrono::steady_clock::now()](int64_t done, int64_t total) mutable {
    const auto now = std::chrono::steady_clock::now();
    if (std::chrono::duration<double>(now - last).count() >= kLoadNoteSeconds) {
      note(StrCat("loading: ", HumanBytes(done), " of ", HumanBytes(total)));
      last = now;
    }
    return true;
  };
}

std::string LoadedText(const EngineStats& stats) {
  const double gbps = static_cast<double>(stats.weight_bytes) / 1e9 / stats.load_seconds;
  return StrCat("rank 0 loaded: ", stats.backend, ", ", HumanBytes(stats.weight_bytes),
                " of weights in ", Fixed(stats.load_seconds, 2), " s (", Fixed(gbps, 2), " GB/s), ",
                HumanBytes(stats.kv_bytes_per_session), " for each session",
                stats.device_bytes > 0
                    ? StrCat(", ", HumanBytes(stats.device_bytes), " of device memory in all")
                    : "");
}

Status MeasureAll(const BenchOptions& options, Bench& bench, const Note& note,
                  BenchResults& results) {
  if (options.mode == BenchOptions::Mode::kPrefill) {
    // The first step of an engine pays for what later ones find ready.
    const int64_t first = std::min(options.prompts[0], options.chunks[0]);
    std::vector<KernelRow> unused;
    RETURN_IF_ERROR(bench.Prefill(first, options.chunks[0], unused).status());
    for (const int64_t prompt : options.prompts) {
      for (const int64_t chunk : options.chunks) {
        ASSIGN_OR_RETURN(results.prefill.emplace_back(),
                         bench.Prefill(prompt, chunk, results.kernels));
        note(StrCat("prefill of ", prompt, " in chunks of ", chunk, ": ",
                    Fixed(static_cast<double>(prompt) / results.prefill.back().seconds, 1),
                    " tokens/s"));
      }
    }
    return OkStatus();
  }
  for (const int64_t context : options.contexts) {
    for (const int64_t batch : options.batches) {
      ASSIGN_OR_RETURN(results.decode.emplace_back(),
                       bench.Decode(context, batch, results.kernels));
      note(StrCat("decode at ", context, ", batch ", batch, ": ",
                  Fixed(static_cast<double>(batch) / results.decode.back().step_seconds, 1),
                  " tokens/s"));
    }
  }
  return OkStatus();
}

Status RunRank(const BenchOptions& options, std::unique_ptr<Transport> transport,
               const LaneLayout& lanes, int64_t vocab, const Note& note, BenchResults& results) {
  const int rank = transport->rank();
  std::unique_ptr<Communicator> comm = MakeExchangeCommunicator(std::move(transport), lanes);
  comm->set_timeout(std::chrono::minutes(10));  // ranks load at different speeds
  auto engine = Engine::Load(EngineOptionsFor(options, rank), comm.get(),
                             rank == 0 ? LoadNotes(note) : Engine::LoadProgress());
  Status status = engine.status();
  if (status.ok()) {
    results.header.backend = (*engine)->stats().backend;
    results.saved_bytes = (*engine)->stats().saved_bytes;
    note(LoadedText((*engine)->stats()));
    Bench bench(options, rank, engine->get(), vocab);
    status = MeasureAll(options, bench, note, results);
  }
  // Peers that wait for us learn of it at once.
  if (!status.ok()) comm->Abort(status);
  return status;
}

Status CheckOptions(const BenchOptions& options, const ModelConfig& config) {
  const bool decode = options.mode == BenchOptions::Mode::kDecode;
  const int64_t more = decode ? MoreTokens(options) : 0;
  for (const int64_t length : decode ? options.contexts : options.prompts) {
    if (length < 1 || length + more > config.context_length) {
      return InvalidArgumentError(StrCat(decode ? "context " : "prompt ", length, " plus ", more,
                                         " decoded tokens must be from 1 to the model's ",
                                         config.context_length));
    }
  }
  if (options.ranks < 1 || options.ranks > config.num_lanes) {
    return InvalidArgumentError(
        StrCat(options.ranks, " ranks, the model splits over 1 to ", config.num_lanes));
  }
  return OkStatus();
}

// What caused the others' failures, before what it led to.
Status FirstCause(const std::vector<Status>& statuses) {
  Status found;
  for (size_t r = 0; r < statuses.size(); ++r) {
    const Status& status = statuses[r];
    if (status.ok()) continue;
    if (found.ok() || found.code() == StatusCode::kAborted) {
      found = status.WithContext(StrCat("rank ", r));
    }
  }
  return found;
}

}  // namespace

Result<BenchResults> RunBench(const BenchOptions& options, const Note& note) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, OpenEngineModel(options.engine));
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(*file));
  RETURN_IF_ERROR(CheckOptions(options, config));
  const LaneLayout lanes = LaneLayout::Even(config.num_lanes, options.ranks);
  ASSIGN_OR_RETURN(const ShardPlan plan, MakeShardPlan(config, *file, lanes));

  std::vector<std::unique_ptr<Transport>> transports = MakeLocalTransports(options.ranks);
  std::vector<Status> status(static_cast<size_t>(options.ranks));
  std::vector<BenchResults> results(static_cast<size_t>(options.ranks));
  const Note silent = [](const std::string&) {};
  {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < status.size(); ++r) {
      threads.emplace_back([&, r] {
        status[r] = RunRank(options, std::move(transports[r]), lanes, config.vocab_size,
                            r == 0 ? note : silent, results[r]);
      });
    }
  }
  RETURN_IF_ERROR(FirstCause(status));

  BenchResults& found = results[0];
  found.header.model = file->path();
  found.header.ranks = options.ranks;
  found.header.threads = options.engine.num_threads;
  found.header.bandwidth_gbps = options.bandwidth_gbps;
  if (options.engine.backend == Backend::kCpu) found.header.kernels = std::string(KernelIsa());
  for (DecodeRow& row : found.decode) {
    row.step_bytes = BytesPerStep(config, plan.ranks[0], row.batch) - found.saved_bytes;
  }
  return std::move(found);
}

}  // namespace ds4
