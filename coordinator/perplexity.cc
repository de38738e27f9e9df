#include "coordinator/perplexity.h"

#include <algorithm>
#include <cmath>

#include "coordinator/deadline.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

struct Sum {
  double nll = 0.0;
  int64_t count = 0;
};

// Rows [begin, end) of a window: row i sees tokens 0..i and is scored on token i + 1, unless that
// one belongs to the seed.
StepPlan PlanRows(uint64_t session_id, const int32_t* window, int64_t begin, int64_t end) {
  StepPlan plan;
  StepPart& part = plan.parts.emplace_back();
  part.session_id = session_id;
  part.pos = begin;
  part.tokens.assign(window + begin, window + end);
  for (int64_t row = begin; row < end; ++row) {
    part.score_targets.push_back(row + 1 >= kSeedTokens ? window[row + 1] : -1);
  }
  return plan;
}

Status AddScores(const StepPlan& plan, const StepResult& result, Sum* sum) {
  const std::vector<int32_t>& targets = plan.parts[0].score_targets;
  if (result.nll.size() != 1 || result.nll[0].size() != targets.size()) {
    return InternalError(StrCat("rank 0 gave scores for ", result.nll.size(),
                                " parts, expected one with ", targets.size()));
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] < 0) continue;
    const float nll = result.nll[0][i];
    if (!std::isfinite(nll)) {
      return InternalError(StrCat("the score at position ", plan.parts[0].pos + i, " is ", nll));
    }
    sum->nll += nll;
    ++sum->count;
  }
  return OkStatus();
}

// Rows that windows of `num_tokens` tokens run: a window's last token is only a target.
int64_t TotalRows(int64_t num_tokens, int64_t window) {
  int64_t rows = 0;
  for (int64_t begin = 0; begin < num_tokens; begin += window) {
    const int64_t size = std::min(window, num_tokens - begin);
    if (size > kSeedTokens) rows += size - 1;
  }
  return rows;
}

}  // namespace

Result<PerplexityResult> MeasurePerplexity(StepRunner* runner, uint64_t session_id,
                                           const std::vector<int32_t>& tokens, int64_t window,
                                           int64_t chunk, const PerplexityCallbacks& callbacks) {
  const int64_t num_tokens = std::ssize(tokens);
  if (window <= kSeedTokens || num_tokens <= kSeedTokens) {
    return InvalidArgumentError(StrCat("nothing to score: the text has ", num_tokens,
                                       " tokens, a window ", window, ", and the first ",
                                       kSeedTokens, " of each are seed only"));
  }
  const TimePoint start = Now();
  const int64_t total_rows = TotalRows(num_tokens, window);
  int64_t done_rows = 0;
  PerplexityResult measured;
  Sum sum;
  for (int64_t begin = 0; begin < num_tokens; begin += window) {
    const int64_t size = std::min(window, num_tokens - begin);
    if (size <= kSeedTokens) break;
    ++measured.num_windows;
    for (int64_t row = 0; row < size - 1;) {
      if (callbacks.interrupted()) return CancelledError("interrupted");
      const int64_t end = std::min(row + chunk, size - 1);
      const StepPlan plan = PlanRows(session_id, tokens.data() + begin, row, end);
      ASSIGN_OR_RETURN(const StepResult result, runner->RunStep(plan, [](const TokenOutput&) {}));
      RETURN_IF_ERROR(AddScores(plan, result, &sum));
      done_rows += end - row;
      row = end;
      callbacks.on_progress(done_rows, total_rows);
    }
  }
  measured.num_scored = sum.count;
  measured.mean_nll = sum.nll / static_cast<double>(sum.count);
  measured.perplexity = std::exp(measured.mean_nll);
  measured.seconds = SecondsSince(start);
  return measured;
}

}  // namespace ds4
