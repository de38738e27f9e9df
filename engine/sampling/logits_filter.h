// Which tokens may be drawn: temperature, top-k, top-p, min-p, always in this order. Pure.
//
//   top-k  keeps the k best; 0 keeps all.
//   p(i) = mass(i) / total, where mass(i) = e^((logit(i) - best) / temperature) and total is that
//   of the
//          tokens which top-k kept.
//   Walking down from the best: min-p ends before the first p(i) < min_p * p(best), never dropping
//   the best; top-p ends behind the token with which the sum of p reaches top_p.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sampling/candidates.h"
#include "engine/session/step_plan.h"

namespace ds4 {

struct KeptSet {
  std::vector<double> masses;  // of the kept tokens, best first: masses[i] belongs to merged.top[i]
  double kept_mass = 0.0;      // their sum, added in that order
  bool is_closed = false;  // false: tokens behind the given candidates may belong to the set too
};

// True when no filter is set: every token may be drawn.
bool IsUnfiltered(const SamplingParams& params);

// e^((logit - best) / temperature), the weight of a token relative to the best one.
double MassOf(float logit, float best, float temperature);

// Sum of the masses of a whole lane, relative to `best`.
double LaneMassOf(const LaneStats& lane, float best, float temperature);

// How many tokens the filters can keep at most: min(top_k, vocab_size), or all.
int64_t MaxKept(const SamplingParams& params, int64_t vocab_size);

// Requires temperature > 0, at least one candidate and finite lanes. With top_k > 0 and fewer
// candidates than MaxKept the total is unknown: the set is empty and not closed.
KeptSet FilterCandidates(const SamplingParams& params, const Candidates& merged,
                         int64_t vocab_size);

}  // namespace ds4
