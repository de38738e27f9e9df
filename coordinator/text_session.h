// One sequence of tokens on the ranks and how it is continued: prefill in chunks, decode in bursts.
// What the ranks hold already is not run again: a new prompt starts where it first differs, or anew
// when that is further back than ranks go.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "coordinator/step_runner.h"

namespace ds4 {

struct GenerateOptions {
  int64_t max_tokens = 256;  // exact, unless a stop id comes first
  SamplingParams sampling;
  std::vector<int32_t> stop_ids;  // the answer ends with the first of them
  int64_t chunk = 256;            // prompt rows of one step
  int64_t burst = 8;              // tokens of one decode step
};

enum class StopReason { kStopToken, kMaxTokens, kInterrupted };

struct GenerateStats {
  int64_t prompt_tokens = 0;   // of which
  int64_t reused_tokens = 0;   // were on the ranks already
  double prefill_seconds = 0;  // until the first token is here
  int64_t decoded_tokens = 0;  // after the first
  double decode_seconds = 0;
  double comm_seconds = 0;  // rank 0's share of both that it waited for its peers
};

struct Answer {
  std::vector<int32_t> tokens;  // with the stop token, if one came
  StopReason reason = StopReason::kMaxTokens;
  GenerateStats stats;
};

struct GenerateCallbacks {
  // As soon as it is drawn; not for the stop token.
  std::function<void(int32_t token)> on_token = [](int32_t) {};
  std::function<void(int64_t done, int64_t total)> on_prefill = [](int64_t, int64_t) {};
  // Asked between steps.
  std::function<bool()> interrupted = [] { return false; };
};

// Thread: one at a time.
class TextSession {
 public:
  // `runner` outlives this. context: tokens of prompt and answer that fit.
  TextSession(StepRunner* runner, uint64_t session_id, int64_t context)
      : runner_(runner), session_id_(session_id), context_(context) {}

  // Continues `prompt` (at least one token). kInvalidArgument, before anything runs: prompt and
  // answer do not fit, with the numbers. Errors of the runner: the ranks hold nothing any more.
  Result<Answer> Generate(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                          const GenerateCallbacks& callbacks);

  // The ranks have forgotten everything (a new group).
  void Reset(int64_t context) {
    Forget();
    context_ = context;
  }
  const std::vector<int32_t>& held() const { return held_; }

 private:
  Status Fits(const std::vector<int32_t>& prompt, int64_t max_tokens) const;
  int64_t Reusable(const std::vector<int32_t>& prompt, int64_t chunk) const;
  void Forget() {
    held_.clear();
    most_held_ = 0;
  }
  Status Prefill(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                 const GenerateCallbacks& callbacks, Answer* answer);
  Status Decode(const GenerateOptions& options, const GenerateCallbacks& callbacks, Answer* answer);
  Status Step(StepPlan plan, const GenerateCallbacks& callbacks, Answer* answer);
  StepPlan PlanFor(std::vector<int32_t> tokens) const;

  StepRunner* runner_;
  uint64_t session_id_;
  int64_t context_;
  std::vector<int32_t> held_;  // tokens whose rows the ranks have run, position 0 first
  int64_t most_held_ = 0;      // since there were none
};

}  // namespace ds4
