// Runs what ds4-bench measures: ranks as threads of this process over local transports, each with
// its engine.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/backends/backends.h"
#include "engine/base/status.h"
#include "engine/session/engine_options.h"
#include "engine/tools/bench_report.h"

namespace ds4 {

struct BenchOptions {
  enum class Mode { kDecode, kPrefill };
  Mode mode = Mode::kDecode;
  EngineOptions engine;  // model and backend; context, rows and sessions are set from the rest
  int ranks = 1;
  int num_devices = 1;  // rank r takes device (engine.device + r) mod this

  // Decode: every pair of these.
  std::vector<int64_t> contexts = {256};
  std::vector<int64_t> batches = {1};
  int64_t tokens = 32;       // measured ones of each session
  int64_t steps = 64;        // of one engine call: what the engine may queue ahead
  float temperature = 0.0f;  // 0: greedy

  // Both: then the same again, kernel by kernel.
  bool kernels = false;

  // Prefill: every pair of prompt and chunk; decode fills contexts with the first chunk.
  std::vector<int64_t> prompts = {1024};
  std::vector<int64_t> chunks = {256};

  double bandwidth_gbps = 0.0;
};

struct BenchResults {
  BenchHeader header;
  int64_t saved_bytes = 0;  // EngineStats::saved_bytes
  std::vector<DecodeRow> decode;
  std::vector<PrefillRow> prefill;
  std::vector<KernelRow> kernels;  // of rank 0, for every row above
};

// `note` gets lines on what is going on. Tokens are random ids: speed does not depend on the text
// (expert choice does, and random ids spread it). Errors name the rank.
Result<BenchResults> RunBench(const BenchOptions& options,
                              const std::function<void(const std::string&)>& note);

}  // namespace ds4
