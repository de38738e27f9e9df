// ds4-bench: prefill and decode speed of the engine on this host, without any network program.
//
// Ranks are threads of this process over the local transport. Tokens are random ids: speed does not
// depend on the text (expert choice does, and random ids spread it).

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <random>
#include <thread>

#include "engine/base/strings.h"
#include "engine/comm/local_transport.h"
#include "engine/comm/transport.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/kernels/matmul.h"
#include "engine/model/model_config.h"
#include "engine/session/engine.h"
#include "engine/shard/shard_plan.h"

namespace ds4 {
namespace {

struct BenchOptions {
  std::string model;
  int ranks = 1;
  int threads = 1;
  int64_t chunk = 256;
  std::vector<int64_t> contexts = {256};
  int64_t decode = 32;
  bool csv = false;
};

// What rank 0 saw for one context length.
struct Measurement {
  int64_t context = 0;
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
  double comm_seconds = 0.0;
};

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab) {
  std::mt19937_64 random(1);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab);
  return tokens;
}

Result<Measurement> Measure(Engine& engine, const BenchOptions& options, int64_t context,
                            int64_t vocab, uint64_t& sequence) {
  Measurement out{context, 0.0, 0.0, 0.0};
  RETURN_IF_ERROR(engine.OpenSession(1, context + options.decode));
  const std::vector<int32_t> tokens = RandomTokens(context, vocab);
  for (int64_t pos = 0; pos < context; pos += options.chunk) {
    StepPlan plan;
    plan.sequence = ++sequence;
    StepPart part;
    part.session_id = 1;
    part.pos = pos;
    part.tokens.assign(tokens.begin() + pos,
                       tokens.begin() + std::min(context, pos + options.chunk));
    plan.parts = {part};
    ASSIGN_OR_RETURN(const StepResult result, engine.Run(plan, nullptr));
    out.prefill_seconds += result.seconds;
  }
  for (int64_t i = 0; i < options.decode; ++i) {
    StepPlan plan;
    plan.sequence = ++sequence;
    StepPart part;
    part.session_id = 1;
    part.pos = context + i;
    part.tokens = {tokens[i % context]};
    part.sample = true;
    plan.parts = {part};
    ASSIGN_OR_RETURN(const StepResult result, engine.Run(plan, nullptr));
    out.decode_seconds += result.seconds;
    out.comm_seconds += result.comm_seconds;
  }
  RETURN_IF_ERROR(engine.CloseSession(1));
  return out;
}

Status RunRank(const BenchOptions& options, std::unique_ptr<Transport> transport,
               const LaneLayout& lanes, int64_t vocab, std::vector<Measurement>& out) {
  std::unique_ptr<Communicator> comm = MakeExchangeCommunicator(std::move(transport), lanes);
  comm->set_timeout(std::chrono::minutes(10));  // ranks load at different speeds
  EngineOptions engine_options;
  engine_options.model_path = options.model;
  engine_options.num_threads = options.threads;
  engine_options.max_context =
      *std::max_element(options.contexts.begin(), options.contexts.end()) + options.decode;
  engine_options.max_batch_rows = options.chunk;
  ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                   Engine::Load(engine_options, comm.get(), nullptr));
  uint64_t sequence = 0;
  for (int64_t context : options.contexts) {
    ASSIGN_OR_RETURN(const Measurement m, Measure(*engine, options, context, vocab, sequence));
    out.push_back(m);
  }
  return OkStatus();
}

void Print(const BenchOptions& options, const ShardPlan& plan,
           const std::vector<Measurement>& rows) {
  const int64_t bytes = plan.ranks[0].read_bytes_per_token;
  if (options.csv) {
    std::cout << "isa,ranks,threads,chunk,context,prefill_tps,decode_tps,decode_gbps,comm_share\n";
  } else {
    std::cout << "kernels " << KernelIsa() << ", " << options.ranks << " rank(s) of "
              << options.threads << " thread(s), chunk " << options.chunk << ", rank 0 reads "
              << HumanBytes(bytes) << " of weights per token\n"
              << "context   prefill t/s   decode t/s   weights GB/s   waiting for peers\n";
  }
  for (const Measurement& m : rows) {
    const double prefill = static_cast<double>(m.context) / m.prefill_seconds;
    const double decode = static_cast<double>(options.decode) / m.decode_seconds;
    const double gbps = static_cast<double>(bytes) * decode / 1e9;
    const double share = m.comm_seconds / m.decode_seconds;
    if (options.csv) {
      std::cout << KernelIsa() << "," << options.ranks << "," << options.threads << ","
                << options.chunk << "," << m.context << "," << Fixed(prefill, 2) << ","
                << Fixed(decode, 2) << "," << Fixed(gbps, 2) << "," << Fixed(share, 3) << "\n";
    } else {
      std::cout << std::left << std::setw(10) << m.context << std::setw(14) << Fixed(prefill, 1)
                << std::setw(13) << Fixed(decode, 1) << std::setw(15) << Fixed(gbps, 2)
                << Fixed(100.0 * share, 1) << " %\n";
    }
  }
}

Status RunBench(const BenchOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(options.model));
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(*file));
  for (int64_t context : options.contexts) {
    if (context < 1 || context + options.decode > config.context_length) {
      return InvalidArgumentError(StrCat("context ", context, " plus ", options.decode,
                                         " decoded tokens must be from 1 to the model's ",
                                         config.context_length));
    }
  }
  if (options.ranks > config.num_lanes) {
    return InvalidArgumentError(
        StrCat(options.ranks, " ranks, the model splits over 1 to ", config.num_lanes));
  }
  const LaneLayout lanes = LaneLayout::Even(config.num_lanes, options.ranks);
  ASSIGN_OR_RETURN(const ShardPlan plan, MakeShardPlan(config, *file, lanes));
  std::vector<std::unique_ptr<Transport>> transports = MakeLocalTransports(options.ranks);
  std::vector<Status> status(options.ranks);
  std::vector<std::vector<Measurement>> rows(options.ranks);
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < options.ranks; ++r) {
      threads.emplace_back([&, r] {
        status[r] = RunRank(options, std::move(transports[r]), lanes, config.vocab_size, rows[r]);
      });
    }
  }
  for (int r = 0; r < options.ranks; ++r) {
    RETURN_IF_ERROR(status[r].WithContext(StrCat("rank ", r)));
  }
  Print(options, plan, rows[0]);
  return OkStatus();
}

}  // namespace
}  // namespace ds4

int main(int argc, char** argv) {
  ds4::BenchOptions options;
  options.threads = std::max(1U, std::thread::hardware_concurrency());
  CLI::App app{
      "Measures prefill and decode speed of the engine on this host.\n\n"
      "  ds4-bench --model model.gguf --contexts 256,2048\n"
      "  ds4-bench --model model.gguf --ranks 2 --threads 1 --csv"};
  app.add_option("--model", options.model, "GGUF file")->required();
  app.add_option("--ranks", options.ranks, "ranks, as threads of this process")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "threads of each rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--chunk", options.chunk, "prefill rows of one step")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--contexts", options.contexts, "prompt lengths, with commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--decode", options.decode, "tokens decoded after each prompt")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_flag("--csv", options.csv, "comma-separated values");
  CLI11_PARSE(app, argc, argv);
  const ds4::Status status = ds4::RunBench(options);
  if (!status.ok()) {
    std::cerr << "ds4-bench: " << status.message() << "\n";
    return 1;
  }
  return 0;
}
