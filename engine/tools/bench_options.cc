#include "engine/tools/bench_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <thread>

#include "engine/base/strings.h"
#include "engine/model/synthetic.h"

namespace ds4 {
namespace {

constexpr const char* kAbout =
    "Measures decode and prefill speed of the engine on this host, without any network program.";

constexpr const char* kExamples =
    "Examples\n"
    "  a model on the CPU, then the same on two ranks:\n"
    "    ds4-bench --model model.gguf --contexts 256,2048\n"
    "    ds4-bench --model model.gguf --ranks 2 --threads 1 --csv\n"
    "  Flash's shapes with random weights on a GPU, no file:\n"
    "    ds4-bench decode --backend cuda --synthetic flash --quant q2 \\\n"
    "      --contexts 2048,65536 --batches 1 --decode 512 --csv-file decode.csv\n"
    "    ds4-bench prefill --backend cuda --synthetic flash --quant q2 \\\n"
    "      --prompts 4096,65536 --chunks 2048,4096\n"
    "  a few of its layers, to look at one kind of work:\n"
    "    ds4-bench decode --synthetic flash --layers 4 --quant q4 --batches 1,16,64\n"
    "Every session has memory for the largest context, and every step for the largest chunk:\n"
    "measure large batches and large contexts in runs of their own.";

// Values that need a look before they are options.
struct Raw {
  std::string kv_type;
  std::string expert_memory = "device";
  std::string replicated_weights = "auto";
};

void AddModelOptions(CLI::App& app, BenchCommand& command, Raw& raw) {
  EngineOptions& engine = command.run.engine;
  app.add_option("--model", engine.model_path, "GGUF file")->type_name("FILE");
  app.add_option("--synthetic", engine.synthetic,
                 "in place of --model: this model's shapes, random weights")
      ->check(CLI::IsMember(SyntheticPresets()));
  app.add_option("--quant", engine.quant, "with --synthetic: type of the routed experts")
      ->check(CLI::IsMember(SyntheticQuants()))
      ->capture_default_str();
  app.add_option("--layers", engine.synthetic_layers,
                 "with --synthetic: this many layers (0: the preset's)")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  app.add_option("--backend", command.backend, "auto: cuda when there is a device, else cpu")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--device", engine.device, "CUDA device of rank 0; rank r takes the r-th after it")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str();
  app.add_option("--kv-type", raw.kv_type, "of cached keys (default: cpu f32, cuda bf16)")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_flag("--deterministic", engine.deterministic,
               "cuda: shared sums keep their lanes in prefill too");
  app.add_option("--expert-memory", raw.expert_memory, "cuda: where routed experts live")
      ->check(CLI::IsMember({"device", "host"}))
      ->capture_default_str();
  app.add_option(
         "--replicated-weights", raw.replicated_weights,
         "cuda: type of the compressors' and the indexer's F16 and BF16 matrices in memory; "
         "auto: q8_0 in layers whose other projections are")
      ->check(CLI::IsMember({"auto", "file", "q8_0"}))
      ->capture_default_str();
  app.add_option("--device-transport", engine.device_transport,
                 "cuda: how small sums cross devices")
      ->check(CLI::IsMember({"auto", "push", "nccl", "host"}))
      ->capture_default_str();
  app.add_option("--ranks", command.run.ranks, "ranks, as threads of this process")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--threads", engine.num_threads, "CPU threads of each rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
}

void AddWorkOptions(CLI::App& app, BenchOptions& run) {
  const auto list = [&](const char* name, std::vector<int64_t>& values, int64_t high,
                        const char* what) {
    app.add_option(name, values, what)
        ->delimiter(',')
        ->check(CLI::Range(int64_t{1}, high))
        ->capture_default_str();
  };
  constexpr int64_t kMaxTokens = int64_t{1} << 26;
  list("--contexts", run.contexts, kMaxTokens, "decode: tokens in each session before it starts");
  list("--batches", run.batches, 4096, "decode: sessions at once");
  app.add_option("--decode", run.tokens, "decode: measured tokens of each session")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--steps", run.steps, "decode: steps of one engine call")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--temperature", run.temperature, "decode: 0 is greedy")
      ->check(CLI::Range(0.0f, 100.0f))
      ->capture_default_str();
  list("--prompts", run.prompts, kMaxTokens, "prefill: prompt lengths");
  list("--chunk,--chunks", run.chunks, 65536,
       "prefill rows of one step; decode fills its contexts with the first of them");
}

void AddOutputOptions(CLI::App& app, BenchCommand& command) {
  app.add_option("--bandwidth", command.bandwidth_gbps,
                 "memory of one rank, GB/s: what the share is of (default: cuda 4640, an H200; "
                 "cpu none)")
      ->check(CLI::Range(0.0, 1e6));
  app.add_flag("--csv", command.csv, "print comma-separated values in place of the table");
  app.add_option("--csv-file", command.csv_file, "write comma-separated values there too")
      ->type_name("PATH");
  app.add_option(
         "--kernels", command.kernels_file,
         "cuda, in builds with DS4_KERNEL_TIMES: what each kernel of a decode step or a prompt "
         "takes, as a table; each launch to this file")
      ->type_name("PATH");
}

Status Check(const CLI::App& app, const Raw& raw, BenchCommand& command) {
  EngineOptions& engine = command.run.engine;
  const int sources = (engine.model_path.empty() ? 0 : 1) + (engine.synthetic.empty() ? 0 : 1);
  if (sources != 1) {
    return InvalidArgumentError(
        StrCat("give exactly one of --model and --synthetic; got ", sources));
  }
  if (engine.synthetic.empty() && (app.count("--quant") > 0 || app.count("--layers") > 0)) {
    return InvalidArgumentError("--quant and --layers are for --synthetic; a file has its own");
  }
  engine.kv_f32 = raw.kv_type == "f32";
  if (raw.kv_type == "bf16" && command.backend == "cpu") {
    return InvalidArgumentError("--kv-type is bf16, the CPU engine keeps keys in f32 only");
  }
  if (raw.expert_memory == "host") engine.expert_memory = ExpertMemory::kHost;
  ASSIGN_OR_RETURN(engine.replicated_weights, ParseReplicatedWeights(raw.replicated_weights));
  return OkStatus();
}

}  // namespace

Result<std::variant<BenchCommand, BenchHelp>> ParseBenchOptions(int argc, const char* const* argv) {
  CLI::App app(kAbout, "ds4-bench");
  app.footer(kExamples);
  BenchCommand command;
  command.run.engine.num_threads =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  Raw raw;
  AddModelOptions(app, command, raw);
  AddWorkOptions(app, command.run);
  AddOutputOptions(app, command);
  app.fallthrough();
  app.require_subcommand(0, 1);
  // Both take the options above, before or after their name.
  app.add_subcommand("decode", "Tokens/s by context and batch (the default)")->fallthrough();
  const CLI::App* prefill =
      app.add_subcommand("prefill", "Prompt tokens/s by length and chunk")->fallthrough();
  try {
    app.parse(argc, const_cast<char**>(argv));
  } catch (const CLI::CallForHelp&) {
    return std::variant<BenchCommand, BenchHelp>(BenchHelp{app.help()});
  } catch (const CLI::ParseError& error) {
    return InvalidArgumentError(StrCat(error.what(), "; see ds4-bench --help"));
  }
  if (prefill->parsed()) command.run.mode = BenchOptions::Mode::kPrefill;
  command.run.kernels = !command.kernels_file.empty();
  RETURN_IF_ERROR(Check(app, raw, command));
  return std::variant<BenchCommand, BenchHelp>(std::move(command));
}

}  // namespace ds4
