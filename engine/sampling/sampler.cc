#include "engine/sampling/sampler.h"

#include <algorithm>
#include <cmath>

#include "engine/base/strings.h"
#include "engine/sampling/logits_filter.h"
#include "engine/sampling/random.h"

namespace ds4 {
namespace {

constexpr int32_t kFirstCandidates = 256;
constexpr int32_t kGrowth = 8;

Decision DrawFromLanes(const SamplingParams& params, const Candidates& merged, double draw) {
  const float max_logit = merged.top.front().logit;
  double total = 0.0;
  for (const LaneStats& lane : merged.lanes) {
    total += LaneMassOf(lane, max_logit, params.temperature);
  }
  Decision decision;
  decision.kind = Decision::Kind::kWalkLane;
  double target = draw * total;
  for (size_t i = 0; i < merged.lanes.size(); ++i) {
    const LaneStats& lane = merged.lanes[i];
    const double mass = LaneMassOf(lane, max_logit, params.temperature);
    if (mass <= 0.0) continue;
    decision.lane = static_cast<int32_t>(i);
    decision.residual = target / mass * lane.sum_exp_temp;
    if (target < mass) return decision;
    target -= mass;
  }
  // Rounding left a crumb past the last lane: its last token.
  decision.residual = merged.lanes[decision.lane].sum_exp_temp;
  return decision;
}

}  // namespace

Status ValidateSampling(const SamplingParams& p) {
  if (!std::isfinite(p.temperature) || p.temperature < 0.0f || p.temperature > 100.0f) {
    return InvalidArgumentError(
        StrCat("temperature is ", p.temperature, ", must be from 0 to 100"));
  }
  if (p.top_k < 0) {
    return InvalidArgumentError(StrCat("top_k is ", p.top_k, ", must be 0 (all) or more"));
  }
  if (!(p.top_p > 0.0f && p.top_p <= 1.0f)) {
    return InvalidArgumentError(StrCat("top_p is ", p.top_p, ", must be above 0 and at most 1"));
  }
  if (!(p.min_p >= 0.0f && p.min_p <= 1.0f)) {
    return InvalidArgumentError(StrCat("min_p is ", p.min_p, ", must be from 0 to 1"));
  }
  return OkStatus();
}

int32_t FirstCandidateCount(const SamplingParams& params, int64_t vocab_size) {
  if (params.temperature <= 0.0f || IsUnfiltered(params)) return 1;
  const int64_t wanted = params.top_k > 0 ? params.top_k : kFirstCandidates;
  return static_cast<int32_t>(std::min(wanted, vocab_size));
}

Result<Decision> Decide(const SamplingParams& params, int64_t pos, const Candidates& merged,
                        int64_t vocab_size) {
  for (size_t i = 0; i < merged.lanes.size(); ++i) {
    if (std::isnan(merged.lanes[i].max_logit)) {
      return InternalError(
          StrCat("position ", pos, ": a logit in vocabulary lane ", i, " is not a finite number"));
    }
  }
  if (merged.top.empty()) return InternalError("no candidates to choose from");
  Decision decision;
  decision.token = merged.top.front().id;
  if (params.temperature <= 0.0f) return decision;
  const double draw = Uniform(params.seed, pos, 0);
  if (IsUnfiltered(params)) return DrawFromLanes(params, merged, draw);

  const KeptSet kept = FilterCandidates(params, merged, vocab_size);
  if (!kept.is_closed) {
    const int64_t limit = MaxKept(params, vocab_size);
    const int64_t more = static_cast<int64_t>(merged.top.size()) * kGrowth;
    decision.kind = Decision::Kind::kNeedMore;
    decision.count = static_cast<int32_t>(params.top_k > 0 ? limit : std::min(more, limit));
    return decision;
  }
  double target = draw * kept.kept_mass;
  for (size_t i = 0; i < kept.masses.size(); ++i) {
    decision.token = merged.top[i].id;
    target -= kept.masses[i];
    if (target < 0.0) break;
  }
  return decision;
}

int32_t WalkLane(std::span<const float> logits, int32_t first_id, float temperature,
                 float max_logit, double residual) {
  double sum = 0.0;
  int32_t last = first_id;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double mass = MassOf(logits[i], max_logit, temperature);
    if (mass <= 0.0) continue;
    last = first_id + static_cast<int32_t>(i);
    sum += mass;
    if (sum > residual) return last;
  }
  return last;
}

}  // namespace ds4
