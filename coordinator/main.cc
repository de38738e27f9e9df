// ds4-coordinator, in the order in which it happens. Exit codes: 0 fine, 2 bad usage, 128 + signal
// when a signal ended it, 1 anything else.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <thread>

#include "coordinator/cluster.h"
#include "coordinator/console.h"
#include "coordinator/form_progress.h"
#include "coordinator/grpc_rank_client.h"
#include "coordinator/interrupt.h"
#include "coordinator/local_workers.h"
#include "coordinator/model.h"
#include "coordinator/options.h"
#include "coordinator/tasks.h"
#include "engine/base/strings.h"
#include "engine/gguf/fingerprint.h"

namespace ds4 {
namespace {

constexpr int64_t kPreferredContext = 4096;
constexpr milliseconds kCountGpusLimit{60000};  // drivers of large hosts take long to start
constexpr int64_t kPerplexityContext = 1024;
constexpr int64_t kChunk = 256, kGpuChunk = 2048;

// The most that the context can be: what --ctx says, or the default before the workers' limits.
Result<int64_t> LargestContext(const Options& options, const ModelConfig& config) {
  if (options.context > config.context_length) {
    return InvalidArgumentError(
        StrCat("--ctx ", options.context, " is more than the model's ", config.context_length));
  }
  if (options.context > 0) return options.context;
  const int64_t preferred =
      options.perplexity_file.empty() ? kPreferredContext : kPerplexityContext;
  return std::min(preferred, config.context_length);
}

// What all workers that we start have in common.
std::vector<std::string> WorkerArgs(const Options& options) {
  std::vector<std::string> args = {"--backend", options.backend};
  const auto add = [&args](const char* option, const std::string& value) {
    if (!value.empty()) args.insert(args.end(), {option, value});
  };
  add("--model", options.model_path);
  add("--synthetic", options.synthetic);
  if (!options.synthetic.empty()) add("--quant", options.quant);
  if (options.synthetic_layers > 0) add("--layers", StrCat(options.synthetic_layers));
  add("--kv-type", options.kv_type);
  add("--expert-memory", options.expert_memory);
  add("--replicated-weights", options.replicated_weights);
  add("--device-transport", options.device_transport);
  if (options.deterministic) args.emplace_back("--deterministic");
  return args;
}

// Turns what stands for a number or a default into it.
Status Resolve(Options& options) {
  if (options.local_gpus) {
    ASSIGN_OR_RETURN(const std::string binary,
                     FindWorkerBinary(options.worker_binary, options.program));
    ASSIGN_OR_RETURN(options.local, CountGpus(binary, kCountGpusLimit));
    if (options.local > kMaxRanks) {
      return InvalidArgumentError(StrCat("--local gpus finds ", options.local,
                                         " GPUs, the limit is ", kMaxRanks, "; give a number"));
    }
  }
  if (options.backend.empty()) options.backend = options.local_gpus ? "cuda" : "cpu";
  if (options.chunk == 0) options.chunk = options.backend == "cuda" ? kGpuChunk : kChunk;
  return OkStatus();
}

Result<Model> OpenAnyModel(const Options& options) {
  if (options.synthetic.empty()) return OpenModel(options.model_path);
  return OpenSyntheticModel(options.synthetic, options.quant, options.synthetic_layers);
}

Result<std::unique_ptr<WorkerSource>> MakeSource(const Options& options, int64_t context,
                                                 Console* console) {
  if (options.local == 0) return std::unique_ptr<WorkerSource>(new FixedWorkers(options.workers));
  LocalWorkerOptions local;
  ASSIGN_OR_RETURN(local.binary, FindWorkerBinary(options.worker_binary, options.program));
  local.args = WorkerArgs(options);
  local.count = options.local;
  if (options.backend == "cuda") {
    ASSIGN_OR_RETURN(local.num_gpus, CountGpus(local.binary, kCountGpusLimit));
  }
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  local.threads = std::max(1, cores / options.local);
  local.context = context;
  local.max_rows = options.chunk;
  local.verbose = options.verbose;
  if (options.verbose)
    local.on_started = [console](const std::string& text) { console->Note(text); };
  return std::unique_ptr<WorkerSource>(new LocalWorkers(std::move(local)));
}

Result<ClusterOptions> MakeClusterOptions(const Options& options, const Model& model,
                                          ShardPlan plan, int64_t context) {
  ClusterOptions cluster;
  cluster.requirements.model_path = model.file->path();
  if (options.synthetic.empty()) {
    ASSIGN_OR_RETURN(cluster.requirements.model_digest, ModelDigest(*model.file));
  } else {
    cluster.requirements.model_digest = model.file->path();
  }
  // Windows of a measurement do not shrink to what a worker happens to allow.
  const bool exact = options.context > 0 || !options.perplexity_file.empty();
  cluster.requirements.context = exact ? context : 0;
  cluster.preferred_context = context;
  cluster.plan = std::move(plan);
  cluster.requirements.batch_rows = options.chunk;
  cluster.vocab_size = model.config.vocab_size;
  cluster.transport = options.transport == "auto" ? "tcp" : options.transport;
  cluster.check_state = options.check_state;
  cluster.timeout = options.timeout;
  cluster.join_timeout = options.join_timeout;
  return cluster;
}

// Rises from one coordinator to the next, so that a connection of an earlier group is never taken
// for one of ours.
uint64_t FirstEpoch() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
}

// What can be refused before a worker is asked or started.
Status CheckFits(const Options& options, int64_t prompt_tokens, int64_t context) {
  const int64_t answer = options.max_tokens_given ? options.max_tokens : 1;
  if (prompt_tokens + answer <= context) return OkStatus();
  return InvalidArgumentError(StrCat("the prompt has ", prompt_tokens, " tokens and the answer ",
                                     "needs room for ", answer, ", together ",
                                     prompt_tokens + answer, "; the context holds ", context,
                                     "; raise --ctx, lower --max-tokens or shorten the prompt"));
}

Status DryRun(const Options& options, const Model& model) {
  ASSIGN_OR_RETURN(const ShardPlan plan, PlanShards(model, options.num_ranks()));
  const std::string text = plan.ToString(/*details=*/true);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return UnavailableError("stdout takes no more text");
  }
  return OkStatus();
}

Status Run(Options options, Console& console) {
  RETURN_IF_ERROR(Resolve(options));
  ASSIGN_OR_RETURN(const Model model, OpenAnyModel(options));
  if (options.dry_run) return DryRun(options, model);
  ASSIGN_OR_RETURN(const int64_t context, LargestContext(options, model.config));
  ASSIGN_OR_RETURN(ShardPlan plan, PlanShards(model, options.num_ranks()));
  ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, OpenTokenizer(model));

  // The text, so that what cannot be answered is refused before anything starts.
  const bool measure = !options.perplexity_file.empty();
  std::vector<int32_t> tokens;
  if (measure) {
    ASSIGN_OR_RETURN(tokens, FileTokens(options, *tokenizer));
  } else if (!options.interactive()) {
    ASSIGN_OR_RETURN(tokens, PromptTokens(options, *tokenizer));
    RETURN_IF_ERROR(CheckFits(options, std::ssize(tokens), context));
  }

  // The group.
  const std::string table = plan.ToString(/*details=*/false);
  ASSIGN_OR_RETURN(ClusterOptions cluster_options,
                   MakeClusterOptions(options, model, std::move(plan), context));
  ASSIGN_OR_RETURN(const std::unique_ptr<WorkerSource> source,
                   MakeSource(options, context, &console));
  FormProgress progress(&console, options.verbose);
  Cluster cluster(std::move(cluster_options), source.get(), MakeGrpcRankClient, &progress,
                  FirstEpoch());
  cluster.set_stop([] { return PendingSignal() != 0; });
  RETURN_IF_ERROR(cluster.Form());

  // The work.
  const Parts parts{options, model, *tokenizer, cluster, console, table};
  if (measure) return MeasureFile(parts, tokens);
  return options.interactive() ? Chat(parts) : AnswerPrompt(parts, tokens);
}

int Main(int argc, char** argv) {
  const ParsedOptions parsed = ParseOptions(argc, argv);
  if (!parsed.run) {
    std::fputs(parsed.text.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code;
  }
  InstallSignalHandlers();
  Console console(STDERR_FILENO);
  const Status status = Run(parsed.options, console);
  if (status.ok()) return 0;
  if (PendingSignal() != 0) {
    console.Note("interrupted");
    return 128 + PendingSignal();
  }
  console.Error(status.message());
  return 1;
}

}  // namespace
}  // namespace ds4

int main(int argc, char** argv) { return ds4::Main(argc, argv); }
