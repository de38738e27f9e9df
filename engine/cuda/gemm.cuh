// The one kernel behind gemm.h: what it is told. Jobs are cut into tiles of 256 weight rows x 128 x
// rows; a grid of one block an SM walks the list of tiles. At most one job is routed: its x rows
// are the pairs of each expert, known on the device only; its tiles come last in the list.
#pragma once

#include <cstdint>

#include "engine/cuda/experts.h"
#include "engine/cuda/layout.h"

namespace ds4::cuda::gemm {

inline constexpr int kMaxJobs = 16;

struct Job {
  DType dtype = DType::kF32;
  // Weights. `up` is not null in a SwiGLU job: a tile is 128 rows of `weights` and the same of
  // `up`.
  const std::byte* weights = nullptr;
  const std::byte* up = nullptr;
  int64_t tile_bytes = 0;    // of 16 rows
  int64_t matrix_bytes = 0;  // from lane to lane, and from expert to expert / lanes
  int rows = 0;
  int lane_cols = 0;  // padded columns of one lane matrix
  int lanes = 1;      // lane matrices that are summed over
  // Activations.
  const uint16_t* x = nullptr;
  int64_t x_stride = 0;
  int x_rows = 0;
  // Results: y[t * y_stride + r] and / or out[t * out_stride + r], r a weight row. In a SwiGLU job
  // only `out`, where weight rows are in lane segments.
  float* y = nullptr;
  int64_t y_stride = 0;
  uint16_t* out = nullptr;
  int64_t out_stride = 0;
  bool accumulate = false;
  int out_lane_cols = 0;  // of SwiGLU
  int out_lane_stride = 0;
  float limit = 0;
  // Tiles: `first_tile` in the list; row blocks and, unless routed, x blocks.
  int first_tile = 0;
  int row_blocks = 0;
  int x_blocks = 0;
};

struct Args {
  Job jobs[kMaxJobs];
  int num_jobs = 0;  // those with a known number of tiles
  int num_tiles = 0;
  // Tiles from num_whole on are in `parts` parts each, by x rows; num_tiles counts the parts.
  int num_whole = 0;
  int parts = 1;
  // The routed job is jobs[num_jobs] when num_experts is not 0.
  int num_experts = 0;
  int used = 0;
  bool gather = false;  // x rows by pairs[place] / used; else the place itself
  const int32_t* expert_first = nullptr;
  const int32_t* pairs = nullptr;
  const float* pair_weight = nullptr;
  // Parts of shared memory.
  int tables_at = 0;
  int experts_at = 0;
  bool uses_iq2 = false;
  int grid_copies = 1;  // of the table of IQ2_XXS
  uint16_t iq2_codes[256] = {};
};

// Job for one matrix or w.count lanes of it.
Job MakeJob(const PackedMatrix& w, int lanes, const ActivationView& x, int64_t x_col);
// Counts tiles, places the parts of shared memory, launches. `routed`: the last of args.jobs.
void LaunchTiles(const LaunchContext& launch, Args& args);

}  // namespace ds4::cuda::gemm
