// What a rank tells the others of its part of the logits: the best few and, for each vocabulary
// lane, the sums that normalise probabilities. All of it is independent of how lanes are spread
// over ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/session/step_plan.h"

namespace ds4 {

// Over one vocabulary lane, sums in rising id order, relative to the lane's own maximum.
struct LaneStats {
  float max_logit = 0.0f;     // NaN when some logit of the lane is not finite
  double sum_exp = 0.0;       // sum of e^(logit - max)
  double sum_exp_temp = 0.0;  // sum of e^((logit - max) / temperature); 0 at temperature 0
};

struct Candidates {
  std::vector<LaneStats> lanes;  // in lane order
  std::vector<TopToken> top;     // best first; the lower id first on ties
};

// Of this rank: logits of ids first_id, first_id + 1, ...; lane_begin: offsets of the local lanes
// into logits, plus its size at the end; the `count` best (all when there are fewer).
Candidates LocalCandidates(std::span<const float> logits, int32_t first_id,
                           std::span<const int64_t> lane_begin, int32_t count, float temperature);

// Of all ranks, in rank order: all lanes, and the `count` best of all.
Candidates MergeCandidates(std::span<const Candidates> ranks, int32_t count);

// ln sum e^logit over the whole vocabulary; NaN when a lane has one.
double LogSumExp(std::span<const LaneStats> lanes);

}  // namespace ds4
