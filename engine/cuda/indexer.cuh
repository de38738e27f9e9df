// What the indexer's kernels share: their arguments, and how many rows a row sees.
#pragma once

#include "engine/cuda/attention.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

struct IndexArgs {
  AttentionParams params;
  Divider by_ratio;
  StepRows step;
  RopeView rope;
  const float* q = nullptr;
  const float* head_weights = nullptr;
  const void* keys = nullptr;  // [slots][max_rows][index_dim]
  int max_rows = 0;
  int first = 0;  // rows [first, end) of the step
  int end = 0;
  float scale = 0;
  float* scores = nullptr;  // [end - first][stride]
  int64_t stride = 0;
};

// Rows that a row at `pos` sees; none for a row that only fills up the batch. Without a branch, in
// which the compiler would hide the load of the position behind that of the slot.
__device__ __forceinline__ int VisibleRows(const IndexArgs& args, int slot, int pos) {
  return args.by_ratio.Quotient(pos + 1) & ~(slot >> 31);
}
__device__ __forceinline__ int VisibleRows(const IndexArgs& args, int t) {
  return VisibleRows(args, args.step.slot[t], args.step.pos[t]);
}

// The best of the scored rows (indexer_choose.cu), of rows [first, end). max_visible: as for
// LaunchIndex; up to index_top_k there need be no scores.
void LaunchChoose(const LaunchContext& launch, const IndexArgs& args, int64_t max_visible,
                  int32_t* picks, int32_t* count);

}  // namespace ds4::cuda
