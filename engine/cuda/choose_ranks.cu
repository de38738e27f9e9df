#include "engine/base/check.h"
#include "engine/cuda/choose_ranks.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

__host__ __device__ ChoiceMessage PartsOf(std::byte* memory, int rows, int lanes) {
  ChoiceMessage message;
  message.lane_sum = reinterpret_cast<double*>(memory);
  // Choices are 16 bytes each: an odd number of sums leaves a gap before them.
  const int64_t sum_bytes = (int64_t{8} * rows * lanes + 15) / 16 * 16;
  message.choice = reinterpret_cast<GreedyChoice*>(memory + sum_bytes);
  message.lane_max = reinterpret_cast<float*>(message.choice + rows);
  return message;
}

// A thread for each row.
__global__ void __launch_bounds__(64)
    MergeChoicesKernel(const __grid_constant__ RankMessages ranks, int rows, ChoiceMessage out) {
  LaunchDependents();
  GridDependencyWait();
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  int total_lanes = 0;
  for (int r = 0; r < ranks.world_size; ++r) total_lanes += ranks.num_lanes[r];
  GreedyChoice best;
  int lane = 0;
  for (int r = 0; r < ranks.world_size; ++r) {
    const ChoiceMessage message =
        PartsOf(const_cast<std::byte*>(ranks.messages[r]), rows, ranks.message_lanes);
    const GreedyChoice choice = message.choice[row];
    // A logit that is no number beats all, and stays.
    const bool best_is_number = best.logit == best.logit;
    const bool is_number = choice.logit == choice.logit;
    if (r == 0 || (best_is_number && (!is_number || choice.logit > best.logit))) best = choice;
    for (int i = 0; i < ranks.num_lanes[r]; ++i, ++lane) {
      // This rank's lanes lie one row after the other, `num_lanes` apart.
      const int from = row * ranks.num_lanes[r] + i;
      out.lane_sum[row * total_lanes + lane] = message.lane_sum[from];
      out.lane_max[row * total_lanes + lane] = message.lane_max[from];
    }
  }
  out.choice[row] = best;
}

}  // namespace

int64_t ChoiceMessageBytes(int rows, int lanes) {
  const int64_t sums = (int64_t{8} * rows * lanes + 15) / 16 * 16;
  return (sums + rows * static_cast<int64_t>(sizeof(GreedyChoice)) + int64_t{4} * rows * lanes +
          15) /
         16 * 16;
}

ChoiceMessage MakeChoiceMessage(std::byte* memory, int rows, int lanes) {
  return PartsOf(memory, rows, lanes);
}

void LaunchMergeChoices(const LaunchContext& launch, int rows, const RankMessages& ranks,
                        const ChoiceMessage& out) {
  CHECK(ranks.world_size >= 1 && ranks.world_size <= kMaxChoiceRanks) << ranks.world_size;
  Launch(launch, dim3(static_cast<unsigned>((rows + 63) / 64)), dim3(64), 0, MergeChoicesKernel,
         ranks, rows, out);
}

}  // namespace ds4::cuda
