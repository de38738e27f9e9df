// The choice of a whole group from the choices of its ranks, on the device: every rank computes the
// same from the same gathered bytes.
#pragma once

#include <cstdint>

#include "engine/cuda/choose.h"
#include "engine/cuda/launch.h"

namespace ds4::cuda {

inline constexpr int kMaxChoiceRanks = 16;

// What one rank gives, in one message: lane sums, then choices, then lane maxima. `lanes`: the most
// that any rank has; a rank with fewer leaves the rest alone.
struct ChoiceMessage {
  double* lane_sum = nullptr;      // [rows][lanes]
  GreedyChoice* choice = nullptr;  // [rows]
  float* lane_max = nullptr;       // [rows][lanes]
};
// Bytes for `rows` rows, a multiple of 16; and its parts.
int64_t ChoiceMessageBytes(int rows, int lanes);
ChoiceMessage MakeChoiceMessage(std::byte* memory, int rows, int lanes);

// messages[r] (device): rank r's, with num_lanes[r] lanes of its own. out: the best choice of all,
// the lowest id on ties, a logit that is no number when any rank has one; the lanes of all ranks
// one after the other, [rows][sum of num_lanes].
struct RankMessages {
  int world_size = 1;
  const std::byte* messages[kMaxChoiceRanks] = {};
  int num_lanes[kMaxChoiceRanks] = {};
  int message_lanes = 1;  // lanes that a message has room for
};
void LaunchMergeChoices(const LaunchContext& launch, int rows, const RankMessages& ranks,
                        const ChoiceMessage& out);

}  // namespace ds4::cuda
