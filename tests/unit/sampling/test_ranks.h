// Sampling as a group of ranks does it, without a group: each rank's part is cut out of whole
// logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/sampling/sampler.h"

namespace ds4 {

inline constexpr int kNumLanes = 8;

inline int64_t LaneBegin(int64_t vocab_size, int lane) { return vocab_size * lane / kNumLanes; }

// All ranks' candidates, merged; rank r of n has lanes [8r/n, 8(r+1)/n).
inline Candidates GatherFrom(std::span<const float> logits, int num_ranks, int32_t count,
                             float temperature) {
  const int64_t vocab_size = static_cast<int64_t>(logits.size());
  std::vector<Candidates> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int first = kNumLanes * rank / num_ranks;
    const int last = kNumLanes * (rank + 1) / num_ranks;
    const int64_t begin = LaneBegin(vocab_size, first);
    std::vector<int64_t> lane_begin;
    for (int lane = first; lane <= last; ++lane)
      lane_begin.push_back(LaneBegin(vocab_size, lane) - begin);
    ranks.push_back(LocalCandidates(
        logits.subspan(static_cast<size_t>(begin), static_cast<size_t>(lane_begin.back())),
        static_cast<int32_t>(begin), lane_begin, count, temperature));
  }
  return MergeCandidates(ranks, count);
}

struct Sampled {
  int32_t token = -1;
  int num_rounds = 0;
};

// Asks for more candidates until the token is decided; at most 20 rounds. `count` 0: the usual
// first.
inline Result<Sampled> SampleWith(std::span<const float> logits, const SamplingParams& params,
                                  int64_t pos, int num_ranks, int32_t count = 0) {
  const int64_t vocab_size = static_cast<int64_t>(logits.size());
  if (count == 0) count = FirstCandidateCount(params, vocab_size);
  Sampled sampled;
  while (sampled.num_rounds < 20) {
    ++sampled.num_rounds;
    const Candidates merged = GatherFrom(logits, num_ranks, count, params.temperature);
    ASSIGN_OR_RETURN(const Decision decision, Decide(params, pos, merged, vocab_size));
    if (decision.kind == Decision::Kind::kNeedMore) {
      count = decision.count;
      continue;
    }
    sampled.token = decision.token;
    if (decision.kind == Decision::Kind::kWalkLane) {
      const int64_t begin = LaneBegin(vocab_size, decision.lane);
      const int64_t size = LaneBegin(vocab_size, decision.lane + 1) - begin;
      sampled.token =
          WalkLane(logits.subspan(static_cast<size_t>(begin), static_cast<size_t>(size)),
                   static_cast<int32_t>(begin), params.temperature,
                   merged.lanes[static_cast<size_t>(decision.lane)].max_logit, decision.residual);
    }
    return sampled;
  }
  return DeadlineExceededError("no decision after 20 rounds");
}

}  // namespace ds4
