// Every setting of ds4-worker with unit, default and range, checked once.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "engine/base/status.h"
#include "engine/session/engine_options.h"

namespace ds4 {

struct HostPort {
  std::string host;
  uint16_t port = 0;  // 0: any free one
};

struct WorkerOptions {
  HostPort listen{"127.0.0.1", 9911};
  uint16_t data_port = 0;      // 0: any free one
  std::string advertise;       // empty: see --help
  std::string model_path;      // empty with --synthetic
  int num_threads = 0;         // resolved: at least 1
  int64_t max_context = 0;     // 0: the model's
  int64_t max_batch_rows = 0;  // 0: DefaultBatchRows
  std::string port_file;       // empty: none

  // The engine (engine/session/engine_options.h says what each means).
  std::string backend = "auto";  // auto, cpu, cuda
  int device = 0;
  std::string synthetic;  // empty: model_path
  std::string quant = "q2";
  int64_t synthetic_layers = 0;  // 0: the preset's
  std::string kv_type;           // f32, bf16; empty: cpu f32, cuda bf16
  bool deterministic = false;
  ExpertMemory expert_memory = ExpertMemory::kDevice;
  ReplicatedWeights replicated_weights = ReplicatedWeights::kAuto;
  std::string device_transport = "auto";

  bool list_devices = false;  // print them and end
  bool exit_with_parent = false;
  bool verbose = false;
};

// --help and --version: print this and end with 0.
struct PrintAndExit {
  std::string text;
};

// kInvalidArgument names the option, its value and the range.
Result<std::variant<WorkerOptions, PrintAndExit>> ParseWorkerOptions(int argc,
                                                                     const char* const* argv);

// "host:port", "[v6]:port", ":port" (all addresses).
Result<HostPort> ParseHostPort(const std::string& text);

}  // namespace ds4
