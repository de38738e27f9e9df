#include "coordinator/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <set>

#include "engine/base/strings.h"
#include "engine/model/synthetic.h"
#include "proto/protocol.h"

namespace ds4 {
namespace {

constexpr int kUsageError = 2;

void AddClusterOptions(CLI::App& app, Options& o, std::string& local) {
  app.add_option("--model", o.model_path, "GGUF file of the model")->type_name("FILE");
  app.add_option("--synthetic", o.synthetic,
                 "in place of --model: the shapes of this model, random weights; text is noise")
      ->check(CLI::IsMember(SyntheticPresets()));
  app.add_option("--quant", o.quant, "with --synthetic: type of the routed experts")
      ->check(CLI::IsMember(SyntheticQuants()))
      ->capture_default_str();
  app.add_option("--layers", o.synthetic_layers, "with --synthetic: so many layers (default: all)")
      ->check(CLI::Range(1, 256))
      ->type_name("N");
  app.add_option("--workers", o.workers, "workers that run already, in rank order: host:port,...")
      ->delimiter(',')
      ->type_name("LIST");
  app.add_option("--local", local,
                 "start N workers on this host, or one for each of its GPUs, and stop them at the "
                 "end; N workers run on the CPU unless --backend says cuda")
      ->type_name("N|gpus");
  app.add_option("--ranks", o.ranks, "with --dry-run: plan for N ranks")
      ->check(CLI::Range(1, kMaxRanks))
      ->type_name("N");
  app.add_option("--worker-binary", o.worker_binary,
                 "with --local: the program to start (default: ds4-worker beside this one)")
      ->type_name("FILE");
  app.add_option("--transport", o.transport,
                 "how ranks exchange data: tcp, grpc, or auto, which is tcp")
      ->check(CLI::IsMember({"auto", "tcp", "grpc"}))
      ->capture_default_str();
}

// What workers that run already were started with is theirs.
void AddLocalWorkerOptions(CLI::App& app, Options& o) {
  app.add_option("--backend", o.backend,
                 "with --local: cpu, or cuda, where ranks take this host's GPUs in turn")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--kv-type", o.kv_type, "with --local: type of cached keys; ds4-worker --help")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--expert-memory", o.expert_memory,
                 "with --local on GPUs: where routed experts live")
      ->check(CLI::IsMember({"device", "host"}));
  app.add_option("--replicated-weights", o.replicated_weights,
                 "with --local on GPUs: type of the compressors' and the indexer's matrices; "
                 "ds4-worker --help")
      ->check(CLI::IsMember({"auto", "file", "q8_0"}));
  app.add_option("--device-transport", o.device_transport,
                 "with --local on GPUs: how small sums go from GPU to GPU")
      ->check(CLI::IsMember({"auto", "push", "nccl", "host"}));
  app.add_flag("--deterministic", o.deterministic,
               "with --local on GPUs: the same bits on any number of ranks in prefill too");
}

void AddTaskOptions(CLI::App& app, Options& o) {
  app.add_option("--prompt", o.prompt, "answer this and exit; without a prompt: interactive chat")
      ->type_name("TEXT");
  app.add_option("--prompt-file", o.prompt_file, "the same, with the text of a file")
      ->type_name("FILE");
  app.add_option(
         "--perplexity-file", o.perplexity_file,
         "mean negative log-likelihood of a file's tokens and its exponential, in windows of "
         "--ctx tokens (default here: the smaller of 1024 and the model's) of which the "
         "first 32 are not scored")
      ->type_name("FILE");
  app.add_flag("--dry-run", o.dry_run,
               "print what each rank would hold and read; contacts no worker and loads nothing");
  app.add_flag("--raw", o.raw, "give the prompt as it is, not in the chat format");
  app.add_option("--system", o.system, "system text of the chat")->type_name("TEXT");
  app.add_flag("--think", o.think, "let the model reason before it answers");
}

void AddAnswerOptions(CLI::App& app, Options& o) {
  app.add_option("-n,--max-tokens", o.max_tokens, "stop after this many tokens")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--temperature", o.sampling.temperature,
                 "0: greedy, always the likeliest token; higher: more varied")
      ->check(CLI::Range(0.0f, 100.0f))
      ->type_name("T")
      ->capture_default_str();
  app.add_option("--top-k", o.sampling.top_k, "draw from the K likeliest tokens; 0: all")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("K")
      ->capture_default_str();
  app.add_option("--top-p", o.sampling.top_p, "draw from the likeliest tokens that sum to P")
      ->check(CLI::Range(0.0f, 1.0f))
      ->type_name("P")
      ->capture_default_str();
  app.add_option("--min-p", o.sampling.min_p, "drop tokens below P times the likeliest one")
      ->check(CLI::Range(0.0f, 1.0f))
      ->type_name("P")
      ->capture_default_str();
  app.add_option("--seed", o.sampling.seed,
                 "the same seed gives the same text on any number of ranks")
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("--ignore-eos", o.ignore_eos, "go on to --max-tokens even after the end token");
}

void AddLimitOptions(CLI::App& app, Options& o, int64_t& timeout_ms, int64_t& join_timeout_ms) {
  app.add_option(
         "--ctx", o.context,
         "context: tokens of prompt and answer together (default: the smallest of 4096, the "
         "model's and the workers')")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->type_name("N");
  app.add_option(
         "--chunk", o.chunk,
         "prompt tokens run in one step, at most the workers' --max-rows (default: 256; with "
         "--local on GPUs 2048)")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->type_name("N");
  app.add_option("--timeout-ms", timeout_ms, "longest wait for progress inside a step")
      ->check(CLI::Range(int64_t{100}, int64_t{3600000}))
      ->type_name("MS")
      ->capture_default_str();
  app.add_option("--join-timeout-ms", join_timeout_ms, "longest wait for all workers to join")
      ->check(CLI::Range(int64_t{100}, int64_t{3600000}))
      ->type_name("MS")
      ->capture_default_str();
}

Status ReadLocal(const CLI::App& app, const std::string& text, Options& o) {
  if (app.count("--local") == 0) return OkStatus();
  o.local_gpus = text == "gpus";
  if (o.local_gpus) return OkStatus();
  const bool digits = !text.empty() && text.size() <= 2 &&
                      text.find_first_not_of("0123456789") == std::string::npos;
  o.local = digits ? std::stoi(text) : 0;
  if (o.local >= 1 && o.local <= kMaxRanks) return OkStatus();
  return InvalidArgumentError(
      StrCat("--local is \"", text, "\", must be from 1 to ", kMaxRanks, ", or gpus"));
}

Status CheckModel(const CLI::App& app, const Options& o) {
  if (o.model_path.empty() == o.synthetic.empty()) {
    return InvalidArgumentError(
        StrCat("give exactly one of --model and --synthetic; got ", o.synthetic.empty() ? 0 : 2));
  }
  if (o.synthetic.empty() && (app.count("--quant") > 0 || app.count("--layers") > 0)) {
    return InvalidArgumentError("--quant and --layers are for --synthetic; a file has its own");
  }
  return OkStatus();
}

Status CheckLocalWorkers(const Options& o) {
  const bool any = !o.backend.empty() || !o.kv_type.empty() || !o.expert_memory.empty() ||
                   !o.replicated_weights.empty() || !o.device_transport.empty() || o.deterministic;
  if (any && o.local == 0 && !o.local_gpus) {
    return InvalidArgumentError(
        "--backend, --kv-type, --expert-memory, --replicated-weights, --device-transport and "
        "--deterministic are for the workers that --local starts; give them to the workers of "
        "--workers themselves");
  }
  if (o.local_gpus && o.backend == "cpu") {
    return InvalidArgumentError("--local gpus and --backend cpu contradict each other");
  }
  return OkStatus();
}

// What single options cannot check about each other.
Status CheckTogether(const Options& o) {
  const int sources =
      (o.workers.empty() ? 0 : 1) + (o.local > 0 || o.local_gpus ? 1 : 0) + (o.ranks > 0 ? 1 : 0);
  if (o.ranks > 0 && !o.dry_run) return InvalidArgumentError("--ranks is for --dry-run only");
  if (sources != 1) {
    return InvalidArgumentError(StrCat("give exactly one of --workers and --local",
                                       o.dry_run ? " and --ranks" : "", "; got ", sources));
  }
  const int tasks = (o.has_prompt ? 1 : 0) + (o.prompt_file.empty() ? 0 : 1) +
                    (o.perplexity_file.empty() ? 0 : 1);
  if (tasks > 1) {
    return InvalidArgumentError(
        "give at most one of --prompt, --prompt-file and --perplexity-file");
  }
  if (o.has_prompt && o.prompt.empty() && !o.raw) {
    return InvalidArgumentError("--prompt is empty; give a text, or --raw to start from nothing");
  }
  if (o.raw && (o.think || !o.system.empty())) {
    return InvalidArgumentError("--raw has no chat format, so --system and --think do not apply");
  }
  if (o.raw && o.interactive()) {
    return InvalidArgumentError("--raw needs --prompt or --prompt-file; the chat has a format");
  }
  const SamplingParams& s = o.sampling;
  if (!std::isfinite(s.temperature) || !std::isfinite(s.top_p) || !std::isfinite(s.min_p)) {
    return InvalidArgumentError("--temperature, --top-p and --min-p must be finite numbers");
  }
  if (static_cast<int>(o.workers.size()) > kMaxRanks) {
    return InvalidArgumentError(
        StrCat("--workers names ", o.workers.size(), " workers, the limit is ", kMaxRanks));
  }
  return OkStatus();
}

Status CheckAddresses(const std::vector<std::string>& workers) {
  std::set<std::string> seen;
  for (const std::string& address : workers) {
    const size_t colon = address.rfind(':');
    const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
    const bool digits = !port.empty() && port.size() <= 5 &&
                        port.find_first_not_of("0123456789") == std::string::npos;
    if (colon == 0 || !digits || std::stoi(port) < 1 || std::stoi(port) > 65535) {
      return InvalidArgumentError(
          StrCat("--workers: '", address, "' is not host:port with a port from 1 to 65535"));
    }
    if (!seen.insert(address).second) {
      return InvalidArgumentError(StrCat("--workers: ", address,
                                         " stands there twice; every rank "
                                         "needs its own worker"));
    }
  }
  return OkStatus();
}

ParsedOptions UsageError(const std::string& message) {
  return {.run = false,
          .exit_code = kUsageError,
          .text = StrCat("error: ", message, "\nds4-coordinator --help lists the options.\n"),
          .options = {}};
}

}  // namespace

int Options::num_ranks() const {
  if (ranks > 0) return ranks;
  return local > 0 ? local : static_cast<int>(workers.size());
}

ParsedOptions ParseOptions(int argc, const char* const* argv) {
  ParsedOptions parsed;
  Options& o = parsed.options;
  int64_t timeout_ms = o.timeout.count();
  int64_t join_timeout_ms = o.join_timeout.count();
  CLI::App app("Answers prompts with a DeepSeek V4 class model that is split over several workers.",
               "ds4-coordinator");
  app.set_version_flag("--version",
                       StrCat("ds4-coordinator ", BuildVersion(), ", protocol ", kProtocolVersion));
  std::string local;
  AddClusterOptions(app, o, local);
  AddLocalWorkerOptions(app, o);
  AddTaskOptions(app, o);
  AddAnswerOptions(app, o);
  AddLimitOptions(app, o, timeout_ms, join_timeout_ms);
  app.add_flag("--stats,!--no-stats", o.stats, "print tokens/s after the answer (default)");
  app.add_flag(
      "--check-state", o.check_state,
      "compare a hash of all ranks' state after each step: slow, finds a rank that computes "
      "something else");
  app.add_flag("--verbose", o.verbose, "show the workers' own messages too");
  app.footer(
      "Answer text goes to stdout, everything else to stderr. Exit code: 0 fine, 2 bad usage, "
      "130 interrupted, 1 anything else.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return {.run = false, .exit_code = 0, .text = app.help(), .options = {}};
  } catch (const CLI::CallForVersion& e) {
    return {.run = false, .exit_code = 0, .text = StrCat(e.what(), "\n"), .options = {}};
  } catch (const CLI::ParseError& e) {
    return UsageError(e.what());
  }
  o.program = argc > 0 ? argv[0] : "";
  o.has_prompt = app.count("--prompt") > 0;
  o.max_tokens_given = app.count("--max-tokens") > 0;
  o.timeout = std::chrono::milliseconds(timeout_ms);
  o.join_timeout = std::chrono::milliseconds(join_timeout_ms);
  if (const Status status = ReadLocal(app, local, o); !status.ok()) {
    return UsageError(status.message());
  }
  for (const Status& status :
       {CheckModel(app, o), CheckTogether(o), CheckLocalWorkers(o), CheckAddresses(o.workers)}) {
    if (!status.ok()) return UsageError(status.message());
  }
  parsed.run = true;
  return parsed;
}

}  // namespace ds4
