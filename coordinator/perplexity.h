// How well the model foretells a text: consecutive windows, each from position 0; the first tokens
// of each are seed only.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "coordinator/step_runner.h"

namespace ds4 {

inline constexpr int64_t kSeedTokens = 32;

struct PerplexityResult {
  double mean_nll = 0.0;    // nats per scored token
  double perplexity = 0.0;  // exp(mean_nll)
  int64_t num_scored = 0;
  int64_t num_windows = 0;  // that had something to score
  double seconds = 0.0;
};

struct PerplexityCallbacks {
  std::function<void(int64_t done_rows, int64_t total_rows)> on_progress = [](int64_t, int64_t) {};
  std::function<bool()> interrupted = [] { return false; };  // asked between steps
};

// tokens: the whole text, BOS first. window: tokens, more than kSeedTokens; chunk: rows of one
// step. A last window that is not longer than the seed is left out. The sum is in float64 in the
// order of the text, so equal scores give an equal result to the last digit. kInvalidArgument:
// nothing to score; kCancelled: interrupted; errors of the runner.
Result<PerplexityResult> MeasurePerplexity(StepRunner* runner, uint64_t session_id,
                                           const std::vector<int32_t>& tokens, int64_t window,
                                           int64_t chunk, const PerplexityCallbacks& callbacks);

}  // namespace ds4
