// From logits to what the host or the next step needs, on the device.
#pragma once

#include <cstdint>

#include "engine/cuda/launch.h"

namespace ds4::cuda {

// The best token of each row of this rank's logits and what its probability needs.
struct GreedyChoice {
  int32_t token = 0;    // global id; the lower one on ties
  float logit = 0;      // NaN when a logit is not finite
  float max_logit = 0;  // of the row (this rank's part)
  float pad = 0;
};
inline constexpr int kMaxVocabLanes = 16;

// logits: [rows][stride]; this rank's vocabulary is first_id, first_id + 1, ..., cut into num_lanes
// lanes at lane_begin[0..num_lanes] (device). choice: [rows]; lane_max (float) and lane_sum
// (double): [rows][num_lanes], per lane the maximum and sum of e^(logit - max), in one fixed order.
void LaunchGreedy(const LaunchContext& launch, const float* logits, int64_t stride, int rows,
                  int32_t first_id, const int32_t* lane_begin, int num_lanes, GreedyChoice* choice,
                  float* lane_max, double* lane_sum, std::byte* scratch);
int64_t GreedyScratchBytes(int rows);

// One step of a queue of decode steps: the record that the host reads (pinned, mapped), and the
// next step's rows: token = choice, pos += 1 (idle rows stay). record: [rows] at ring place
// *step_counter mod ring_steps; then a fence and record_flags[place] = *step_counter + 1; then
// *step_counter += 1. One block.
struct TokenRecord {
  int32_t token = 0;
  int32_t pos = 0;  // at which the token stands
  float logit = 0;
  float log_sum_exp = 0;  // of the whole row, in lane order
};
struct DecodeQueue {
  int32_t* token = nullptr;  // [rows], the StepRows arrays
  int32_t* pos = nullptr;
  const int32_t* slot = nullptr;
  TokenRecord* record = nullptr;     // [ring_steps][rows], pinned
  uint32_t* record_flags = nullptr;  // [ring_steps], pinned
  uint32_t* step_counter = nullptr;  // [1], device
  int ring_steps = 0;
  int32_t last_pos = 0;  // rows do not move past it
};
void LaunchAdvance(const LaunchContext& launch, int rows, const GreedyChoice* choice,
                   const float* lane_max, const double* lane_sum, int num_lanes,
                   const DecodeQueue& queue);

}  // namespace ds4::cuda
