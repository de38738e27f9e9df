// What ds4-bench found, beside what the shard plan says must be moved: a table for people, CSV for
// scripts. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/model/model_config.h"
#include "engine/shard/shard_plan.h"

namespace ds4 {

// What all rows of one run have in common.
struct BenchHeader {
  std::string model;    // path, or "synthetic flash q2, 43 layers"
  std::string backend;  // EngineStats::backend
  std::string kernels;  // of the CPU: the instruction set; empty for others
  int ranks = 1;
  int threads = 1;              // of each rank
  double bandwidth_gbps = 0.0;  // of one rank's memory; 0: not known, no share is shown
};

// One pair of context and batch, as rank 0 saw it.
struct DecodeRow {
  int64_t context = 0;        // tokens of each session before the first measured one
  int64_t batch = 1;          // sessions decoding at once
  int64_t chunk = 0;          // rows of a step while filling the context
  double fill_tps = 0.0;      // prefill tokens/s of that
  double step_seconds = 0.0;  // median over the runs, of one step of all sessions
  double comm_share = 0.0;    // of the time, waiting for peers
  double distinct = 0.0;      // different tokens in a step, mean: below `batch` sessions agree and
                              // read fewer experts than the plan expects
  int64_t step_bytes = 0;     // of rank 0: BytesPerStep, less what conversion at load saves
};

// One prompt length and chunk.
struct PrefillRow {
  int64_t prompt = 0;
  int64_t chunk = 0;
  double seconds = 0.0;  // of the whole prompt, up to its first token
  double comm_share = 0.0;
};

// One launch of a decode step, mean over some steps; or one of a whole prompt.
struct KernelRow {
  int64_t length = 0;  // context, or prompt
  int64_t rows = 1;    // batch, or chunk
  int64_t launch = 0;  // from 0 in the order of execution
  std::string kernel;
  double us = 0.0;  // until the next one had what it waits for
};

// Weight bytes that one step of `rows` sessions reads on this rank: everything shared once, a row
// of the embedding each, and of E experts the expected number that differ when each row takes k at
// random, E * (1 - (1 - k / E)^rows).
int64_t BytesPerStep(const ModelConfig& config, const RankPlan& rank, int64_t rows);

std::string DecodeTable(const BenchHeader& header, const std::vector<DecodeRow>& rows);
std::string DecodeCsv(const BenchHeader& header, const std::vector<DecodeRow>& rows);
std::string PrefillTable(const BenchHeader& header, const std::vector<PrefillRow>& rows);
std::string PrefillCsv(const BenchHeader& header, const std::vector<PrefillRow>& rows);

// Launches of each of the last `steps` steps, which are all alike; the step before them may have
// some more or fewer. kernels: the names of all launches but the very last. kInternal: there are no
// such steps.
Result<size_t> LaunchesPerStep(const std::vector<std::string>& kernels, size_t steps);

// "FastUpKernel<16, true>" of what the compiler calls a kernel.
std::string KernelName(const std::string& symbol);
// Kernels of one name together, by length and rows, the longest first.
std::string KernelTable(const std::vector<KernelRow>& rows);
std::string KernelCsv(const std::vector<KernelRow>& rows);

}  // namespace ds4
