// From each rank's part of the logits to one token that all ranks agree on: candidates cross the
// network, never whole logits, and rank 0 decides (architecture 3).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/base/status.h"
#include "engine/layers/rank_context.h"
#include "engine/sampling/sampler.h"
#include "engine/session/step_plan.h"

namespace ds4 {

class TokenChooser {
 public:
  explicit TokenChooser(const RankContext& context);

  // Draws the token for position output.pos and fills token, logprob and top. logits:
  // [local_vocab]. Collective. kInternal when a logit is not a number.
  Status Choose(std::span<const float> logits, const SamplingParams& sampling, int32_t num_top,
                TokenOutput& output);

  // nll[i] = -ln p(targets[i]) after row i, 0 where the target is -1. logits: [rows, local_vocab].
  // Collective.
  Status Score(const float* logits, std::span<const int32_t> targets, std::span<float> nll);

 private:
  Result<Candidates> GatherCandidates(std::span<const float> logits, int32_t count,
                                      float temperature);
  Status Walk(std::span<const float> logits, float temperature, const Candidates& merged,
              int64_t lane, double residual, int32_t& token);
  Result<float> LogitOf(int32_t token, std::span<const float> logits, const Candidates& merged);
  // kDataLoss unless the vocabulary has the token that a peer sent.
  Status CheckToken(int32_t token, int sender) const;
  int OwnerOfLane(int64_t lane) const;

  const RankContext& context_;
  std::vector<int64_t> lane_begin_;  // of the local lanes, offsets into the local vocabulary
  int64_t max_lanes_ = 0;            // of any rank
  std::vector<std::byte> mine_, all_;
};

}  // namespace ds4
