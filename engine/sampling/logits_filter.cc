#include "engine/sampling/logits_filter.h"

#include <algorithm>

#include "engine/kernels/math.h"

namespace ds4 {

bool IsUnfiltered(const SamplingParams& params) {
  return params.top_k == 0 && params.top_p >= 1.0f && params.min_p <= 0.0f;
}

double MassOf(float logit, float best, float temperature) {
  return Exp((logit - best) / temperature);
}

double LaneMassOf(const LaneStats& lane, float best, float temperature) {
  if (lane.sum_exp_temp <= 0.0) return 0.0;  // an empty lane has no maximum
  return lane.sum_exp_temp * MassOf(lane.max_logit, best, temperature);
}

int64_t MaxKept(const SamplingParams& params, int64_t vocab_size) {
  return params.top_k > 0 ? std::min<int64_t>(params.top_k, vocab_size) : vocab_size;
}

KeptSet FilterCandidates(const SamplingParams& params, const Candidates& merged,
                         int64_t vocab_size) {
  KeptSet kept;
  const float best = merged.top.front().logit;
  const int64_t limit = MaxKept(params, vocab_size);
  const int64_t have = std::min<int64_t>(limit, static_cast<int64_t>(merged.top.size()));
  const auto mass = [&](int64_t i) {
    return MassOf(merged.top[static_cast<size_t>(i)].logit, best, params.temperature);
  };
  double total = 0.0;
  if (params.top_k > 0) {
    if (have < limit) return kept;
    for (int64_t i = 0; i < limit; ++i) total += mass(i);
  } else {
    for (const LaneStats& lane : merged.lanes) total += LaneMassOf(lane, best, params.temperature);
  }
  for (int64_t i = 0; i < have && !kept.is_closed; ++i) {
    const double m = mass(i);
    if (i > 0 &&
        m < params.min_p) {  // the best has mass 1, so min_p * p(best) is min_p in this unit
      kept.is_closed = true;
      break;
    }
    kept.masses.push_back(m);
    kept.kept_mass += m;
    // Only below 1: a rounded sum must not drop tokens that no filter drops.
    kept.is_closed = params.top_p < 1.0f && kept.kept_mass >= params.top_p * total;
  }
  if (have == limit) kept.is_closed = true;
  return kept;
}

}  // namespace ds4
