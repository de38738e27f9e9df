// From merged candidates to one token: temperature, top-k, top-p, min-p in this order, then a draw
// from what is left (spec 5.5). Pure: depends on its arguments only, so it is the same for any
// world size.
#pragma once

#include <cstdint>
#include <span>

#include "engine/base/status.h"
#include "engine/sampling/candidates.h"
#include "engine/session/step_plan.h"

namespace ds4 {

// kInvalidArgument with the value and its range.
Status ValidateSampling(const SamplingParams& params);

struct Decision {
  enum class Kind {
    kToken,     // `token` is drawn
    kNeedMore,  // the kept set is not closed yet: ask again with `count` candidates
    kWalkLane,  // no filter: the owner of `lane` draws inside it (WalkLane)
  };
  Kind kind = Kind::kToken;
  int32_t token = 0;
  int32_t count = 0;
  int32_t lane = 0;
  double residual = 0.0;  // mass to walk, in units of the lane's sum_exp_temp
};

// How many candidates to ask for first.
int32_t FirstCandidateCount(const SamplingParams& params, int64_t vocab_size);

// kInternal when a lane holds a logit that is not finite.
Result<Decision> Decide(const SamplingParams& params, int64_t pos, const Candidates& merged,
                        int64_t vocab_size);

// The token of a lane at which the running sum of e^((logit - max) / temperature) passes
// `residual`.
int32_t WalkLane(std::span<const float> logits, int32_t first_id, float temperature,
                 float max_logit, double residual);

}  // namespace ds4
