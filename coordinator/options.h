// Every setting of ds4-coordinator with its unit, default and range, checked once, here.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/session/step_plan.h"

namespace ds4 {

inline constexpr int kMaxRanks = 64;

struct Options {
  std::string program;  // argv[0]: the worker binary is looked for beside it

  // The cluster: exactly one of `workers` and `local`; `--dry-run` takes `ranks` instead as well.
  std::string model_path;
  std::vector<std::string> workers;  // host:port, rank order
  int local = 0;                     // start this many workers on this host, 1..64
  bool local_gpus = false;           // start one for each GPU of this host
  int ranks = 0;                     // --dry-run only: how many ranks to plan for, 1..64
  std::string worker_binary;         // empty: ds4-worker beside this program
  std::string transport = "auto";    // auto | tcp | grpc

  // In place of model_path: shapes of a preset, random weights (engine/model/synthetic.h).
  std::string synthetic;
  std::string quant = "q2";
  int64_t synthetic_layers = 0;  // 0: the preset's

  // Given on to the workers that we start: their options of the same names.
  std::string backend;             // cpu | cuda; empty: cpu, with local_gpus cuda
  std::string kv_type;             // f32 | bf16; empty: theirs
  std::string expert_memory;       // device | host; empty: theirs
  std::string replicated_weights;  // auto | file | q8_0; empty: theirs
  std::string device_transport;    // auto | push | nccl | host; empty: theirs
  bool deterministic = false;

  // What to do. With none of the three: an interactive chat.
  bool has_prompt = false;
  std::string prompt;
  std::string prompt_file;
  std::string perplexity_file;
  bool dry_run = false;

  // The prompt.
  bool raw = false;    // no chat format: the text itself after BOS
  std::string system;  // system text of the chat format
  bool think = false;  // ask for reasoning

  // The answer.
  int64_t max_tokens = 256;  // 1.. ; a default that does not fit is cut to the context
  bool max_tokens_given = false;
  SamplingParams sampling;  // temperature 0 by default: greedy
  bool ignore_eos = false;

  // Limits.
  int64_t context = 0;  // tokens; 0: chosen as the group forms
  int64_t chunk = 0;    // prefill rows of one step, 1..4096; 0: by the backend of workers we start
  std::chrono::milliseconds timeout{10000};       // a step without progress, 100 ms..1 h
  std::chrono::milliseconds join_timeout{10000};  // until all workers have joined, 100 ms..1 h

  // What is shown.
  bool stats = true;
  bool verbose = false;  // workers' own messages too
#ifdef NDEBUG
  bool check_state = false;  // compare a hash of all ranks' state after each step
#else
  bool check_state = true;
#endif

  bool interactive() const {
    return !has_prompt && prompt_file.empty() && perplexity_file.empty() && !dry_run;
  }
  int num_ranks() const;  // local_gpus must have become `local` by then
};

// What the command line asks for: run with `options`, or print `text` and exit.
struct ParsedOptions {
  bool run = false;
  int exit_code = 0;  // when not run: 0 for --help and --version, 2 for bad usage
  std::string text;   // when not run: what to print (stdout for 0, stderr otherwise)
  Options options;
};

ParsedOptions ParseOptions(int argc, const char* const* argv);

}  // namespace ds4
