#include "worker/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>

#include "engine/base/strings.h"
#include "engine/model/synthetic.h"
#include "proto/protocol.h"
#include "worker/host_info.h"

namespace ds4 {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxContext = int64_t{1} << 30;
constexpr int64_t kMaxBatchRows = 65536;
constexpr int kMaxDevices = 1024;
constexpr int kMaxLayers = 256;

constexpr const char* kAbout =
    "One rank of a ds4 cluster: holds its share of the model and runs the coordinator's steps.\n"
    "Start one on every machine, then start ds4-coordinator once with all their addresses.";

constexpr const char* kExamples =
    "Examples\n"
    "  this machine only:\n"
    "    ds4-worker --model v4.gguf\n"
    "  for a coordinator on another machine (the network must be trusted: there is no password):\n"
    "    ds4-worker --model v4.gguf --listen 0.0.0.0:9911\n"
    "  behind a firewall or in a container, with fixed ports and the name that peers dial:\n"
    "    ds4-worker --model v4.gguf --listen 0.0.0.0:9911 --data-port 9912 --advertise node3.lan\n"
    "  from a script, on any free ports:\n"
    "    ds4-worker --model v4.gguf --listen 127.0.0.1:0 --port-file ports.txt\n"
    "  on the second GPU of this machine; which there are:\n"
    "    ds4-worker --model v4.gguf --backend cuda --device 1\n"
    "    ds4-worker --list-devices\n"
    "  Flash's shapes with random weights, to measure speed without the file:\n"
    "    ds4-worker --synthetic flash --quant q2 --backend cuda\n"
    "All ranks of a group must have the same --kv-type, --deterministic and "
    "--replicated-weights.\n";

// Values as text, so that our own checks name option, value and range in one way.
struct RawOptions {
  std::string listen = "127.0.0.1:9911";
  std::string data_port = "0";
  std::string threads;
  std::string ctx;
  std::string max_rows;
  std::string device = "0";
  std::string layers;
  std::string expert_memory = "device";
  std::string replicated_weights = "auto";
};

std::string OneOf(const std::vector<std::string>& values) { return StrJoin(values, "|"); }

void DeclareEngine(CLI::App& app, RawOptions& raw, WorkerOptions& options) {
  app.add_option("--backend", options.backend,
                 "what computes; auto takes cuda when there is a device, else cpu, and says which")
      ->type_name("auto|cpu|cuda")
      ->capture_default_str();
  app.add_option("--device", raw.device, "CUDA device, as --list-devices counts")
      ->type_name(StrCat("0..", kMaxDevices - 1))
      ->capture_default_str();
  app.add_option("--synthetic", options.synthetic,
                 "in place of --model: the shapes of this model, random weights; text is noise")
      ->type_name(OneOf(SyntheticPresets()));
  app.add_option("--quant", options.quant, "with --synthetic: type of the routed experts")
      ->type_name(OneOf(SyntheticQuants()))
      ->capture_default_str();
  app.add_option("--layers", raw.layers, "with --synthetic: so many layers (default: all)")
      ->type_name(StrCat("1..", kMaxLayers));
  app.add_option("--kv-type", options.kv_type,
                 "of cached keys (default: f32 on cpu, which has no other; bf16 on cuda)")
      ->type_name("f32|bf16");
  app.add_flag("--deterministic", options.deterministic,
               "cuda: keep the order of sums between ranks in prefill too, so that any number of "
               "ranks gives the same bits (decode and the CPU always do)");
  app.add_option("--expert-memory", raw.expert_memory,
                 "cuda: where routed experts live; host is slower, for a model that does not fit")
      ->type_name("device|host")
      ->capture_default_str();
  app.add_option(
         "--replicated-weights", raw.replicated_weights,
         "cuda: type in memory of the compressors' and the indexer's F16 and BF16 matrices: "
         "as in the file, or Q8_0, half as much to read for each token; auto takes Q8_0 "
         "in layers whose other projections are")
      ->type_name("auto|file|q8_0")
      ->capture_default_str();
  app.add_option("--device-transport", options.device_transport,
                 "cuda: how small sums go from GPU to GPU; auto measures at start and says which")
      ->type_name("auto|push|nccl|host")
      ->capture_default_str();
  app.add_flag("--list-devices", options.list_devices, "print one line for each device, and end");
}

void Declare(CLI::App& app, RawOptions& raw, WorkerOptions& options) {
  app.footer(kExamples);
  app.set_version_flag("--version",
                       StrCat("ds4-worker ", BuildVersion(), ", protocol ", kProtocolVersion));
  app.add_option("--model", options.model_path, "GGUF file; the same bytes on every machine")
      ->type_name("FILE");
  app.add_option("--listen", raw.listen,
                 "control address for the coordinator; port 0 takes a free one and prints it")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  app.add_option("--data-port", raw.data_port,
                 "port on the same host for the peers' data; 0 takes a free one")
      ->type_name("0..65535")
      ->capture_default_str();
  app.add_option("--advertise", options.advertise,
                 "name or address that peers dial (default: the --listen host; when that means all "
                 "addresses, the one the coordinator is reached by)")
      ->type_name("HOST");
  app.add_option("--threads", raw.threads, "compute threads (default: all cores)")
      ->type_name(StrCat("1..", kMaxThreads));
  app.add_option("--ctx", raw.ctx,
                 "largest context of one session, in tokens (default: the model's)")
      ->type_name(StrCat("1..", kMaxContext));
  app.add_option(
         "--max-rows", raw.max_rows,
         StrCat("largest batch of one forward pass, in rows, that a coordinator may ask for "
                "with --chunk: bounds the working memory (default: ",
                DefaultBatchRows(Backend::kCpu), " on cpu, ", DefaultBatchRows(Backend::kCuda),
                " on cuda, which needs more to be busy)"))
      ->type_name(StrCat("1..", kMaxBatchRows));
  DeclareEngine(app, raw, options);
  app.add_option("--port-file", options.port_file,
                 "write \"control_port data_port\" there once ready, in one go")
      ->type_name("PATH");
  app.add_flag("--exit-with-parent", options.exit_with_parent, "end when standard input closes");
  app.add_flag("--verbose", options.verbose, "log more");
}

Result<int64_t> ParseInt(const char* option, const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stop == end && value >= low && value <= high) return value;
  return InvalidArgumentError(
      StrCat(option, " is \"", text, "\", must be a whole number in [", low, ", ", high, "]"));
}

Status CheckOneOf(const char* option, const std::string& value,
                  const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return OkStatus();
  return InvalidArgumentError(
      StrCat(option, " is \"", value, "\", must be ", StrJoin(allowed, ", ")));
}

Status CheckModel(const CLI::App& app, const RawOptions& raw, WorkerOptions& options) {
  if (options.synthetic.empty()) {
    if (app.count("--synthetic") > 0) {
      return CheckOneOf("--synthetic", options.synthetic, SyntheticPresets());
    }
    if (app.count("--model") == 0) {
      return InvalidArgumentError("--model is required (or --synthetic, for random weights)");
    }
    if (options.model_path.empty()) {
      return InvalidArgumentError("--model is empty, must name a file");
    }
    if (app.count("--quant") > 0 || app.count("--layers") > 0) {
      return InvalidArgumentError("--quant and --layers are for --synthetic; a file has its own");
    }
    return OkStatus();
  }
  if (app.count("--model") > 0) {
    return InvalidArgumentError(StrCat("--model ", options.model_path, " and --synthetic ",
                                       options.synthetic, " do not go together; give one"));
  }
  RETURN_IF_ERROR(CheckOneOf("--synthetic", options.synthetic, SyntheticPresets()));
  RETURN_IF_ERROR(CheckOneOf("--quant", options.quant, SyntheticQuants()));
  if (!raw.layers.empty()) {
    ASSIGN_OR_RETURN(options.synthetic_layers, ParseInt("--layers", raw.layers, 1, kMaxLayers));
  }
  return OkStatus();
}

Status CheckEngine(const CLI::App& app, const RawOptions& raw, WorkerOptions& options) {
  RETURN_IF_ERROR(CheckOneOf("--backend", options.backend, {"auto", "cpu", "cuda"}));
  ASSIGN_OR_RETURN(const int64_t device, ParseInt("--device", raw.device, 0, kMaxDevices - 1));
  options.device = static_cast<int>(device);
  if (app.count("--kv-type") > 0) {
    RETURN_IF_ERROR(CheckOneOf("--kv-type", options.kv_type, {"f32", "bf16"}));
  }
  RETURN_IF_ERROR(CheckOneOf("--expert-memory", raw.expert_memory, {"device", "host"}));
  if (raw.expert_memory == "host") options.expert_memory = ExpertMemory::kHost;
  RETURN_IF_ERROR(
      CheckOneOf("--replicated-weights", raw.replicated_weights, {"auto", "file", "q8_0"}));
  ASSIGN_OR_RETURN(options.replicated_weights, ParseReplicatedWeights(raw.replicated_weights));
  return CheckOneOf("--device-transport", options.device_transport,
                    {"auto", "push", "nccl", "host"});
}

Status Check(const CLI::App& app, const RawOptions& raw, WorkerOptions& options) {
  auto listen = ParseHostPort(raw.listen);
  if (!listen.ok()) return listen.status().WithContext("--listen");
  options.listen = std::move(listen).value();
  ASSIGN_OR_RETURN(const int64_t data_port, ParseInt("--data-port", raw.data_port, 0, 65535));
  options.data_port = static_cast<uint16_t>(data_port);
  if (options.data_port != 0 && options.data_port == options.listen.port) {
    return InvalidArgumentError(
        StrCat("--data-port and --listen both use port ", data_port, "; choose two"));
  }
  RETURN_IF_ERROR(CheckModel(app, raw, options));
  RETURN_IF_ERROR(CheckEngine(app, raw, options));
  options.num_threads = UsableCores();
  if (!raw.threads.empty()) {
    ASSIGN_OR_RETURN(const int64_t threads, ParseInt("--threads", raw.threads, 1, kMaxThreads));
    options.num_threads = static_cast<int>(threads);
  }
  if (!raw.ctx.empty()) {
    ASSIGN_OR_RETURN(options.max_context, ParseInt("--ctx", raw.ctx, 1, kMaxContext));
  }
  if (!raw.max_rows.empty()) {
    ASSIGN_OR_RETURN(options.max_batch_rows,
                     ParseInt("--max-rows", raw.max_rows, 1, kMaxBatchRows));
  }
  if (IsWildcard(options.advertise)) {
    return InvalidArgumentError(StrCat("--advertise is \"", options.advertise,
                                       "\", which peers cannot dial; give this host's own name or "
                                       "address"));
  }
  return OkStatus();
}

}  // namespace

Result<HostPort> ParseHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) {
    return InvalidArgumentError(StrCat("\"", text, "\" has no port, must be HOST:PORT"));
  }
  HostPort address;
  ASSIGN_OR_RETURN(const int64_t port, ParseInt("port", text.substr(colon + 1), 0, 65535));
  address.port = static_cast<uint16_t>(port);
  address.host = text.substr(0, colon);
  if (address.host.starts_with('[') && address.host.ends_with(']') && address.host.size() > 2) {
    address.host = address.host.substr(1, address.host.size() - 2);
  } else if (address.host.find(':') != std::string::npos) {
    return InvalidArgumentError(
        StrCat("\"", text, "\" is not clear; write an IPv6 address as [address]:port"));
  }
  if (address.host.empty() || address.host == "*") address.host = "0.0.0.0";
  return address;
}

Result<std::variant<WorkerOptions, PrintAndExit>> ParseWorkerOptions(int argc,
                                                                     const char* const* argv) {
  CLI::App app(kAbout, "ds4-worker");
  RawOptions raw;
  WorkerOptions options;
  Declare(app, raw, options);
  try {
    app.parse(argc, const_cast<char**>(argv));
  } catch (const CLI::CallForHelp&) {
    return std::variant<WorkerOptions, PrintAndExit>(PrintAndExit{app.help()});
  } catch (const CLI::CallForVersion& version) {
    return std::variant<WorkerOptions, PrintAndExit>(PrintAndExit{StrCat(version.what(), "\n")});
  } catch (const CLI::ParseError& error) {
    return InvalidArgumentError(StrCat(error.what(), "; see ds4-worker --help"));
  }
  // Needs nothing else, so that it can be asked before anything is known.
  if (options.list_devices) return std::variant<WorkerOptions, PrintAndExit>(std::move(options));
  RETURN_IF_ERROR(Check(app, raw, options));
  return std::variant<WorkerOptions, PrintAndExit>(std::move(options));
}

}  // namespace ds4
