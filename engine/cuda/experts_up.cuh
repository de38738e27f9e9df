// What the kernels of LaunchExpertsUp share (experts_up.cu says how they work): how items are
// dealt, and how an item ends. Included by .cu files only.
#pragma once

#include "engine/cuda/experts_ring.cuh"

namespace ds4::cuda {

inline constexpr int kSliceWarps = 8;
inline constexpr int kItemRows = 32;
inline constexpr int kItemTiles = kItemRows / kTileRows;
// Floats between the rows of x in the partial sums: no more than two lanes of a write meet in a
// bank, and tables, sums and rings of all formats have room for rows of 4096 columns.
inline constexpr int kPartialStride = 34;
inline constexpr int kPartialFloats = kGroupPairs * kPartialStride;

struct UpKernelJob {
  MatrixShape shapes[2][2];  // routed, shared; gate, up
  int64_t up_offset[2];      // from gate to up
  ActivationView x, out, shared_out;
  Routing routing;
  int used;
  int ffn;
  int lane_cols;
  float limit, shared_limit;
  int row_blocks;  // of kItemRows
  int max_groups;
  int num_slices;
  int shared_items;   // row_blocks * x tiles
  float item_ratio;   // cost of a shared item in routed ones
  float heavy_teams;  // teams with one shared item more than the others
  float teams_inverse;
  float light_inverse;  // of the number of other teams
  int partials;         // buffers of partial sums, 1 or 2
  int table_bytes;      // of IQ2_XXS, or 0
  int fixed_bytes;      // shared memory before the rings
  int ring_bytes;       // of one warp
};

// Those who share the items, whole blocks or halves of them: one of `count`.
struct Team {
  int index;
  int count;
};

// The items of a team: every count-th shared item, then a range of the routed ones, so that all
// teams have about the same to do.
__device__ __forceinline__ int SharedItemsOf(const UpKernelJob& job, Team team) {
  if (team.index >= job.shared_items) return 0;
  // A division takes a while.
  return job.shared_items <= team.count ? 1 : (job.shared_items - team.index - 1) / team.count + 1;
}

// End of the routed items of all teams before this one. The first `heavy` teams have one shared
// item more than the others, and so many routed items fewer.
__device__ __forceinline__ int RoutedBegin(const UpKernelJob& job, int routed_items, Team team) {
  if (team.index >= team.count) return routed_items;
  const float routed = static_cast<float>(routed_items);
  float light_share = fmaf(job.heavy_teams, job.item_ratio, routed) * job.teams_inverse;
  float heavy_share = light_share - job.item_ratio;
  if (heavy_share < 0.0f) {
    heavy_share = 0.0f;
    light_share = routed * job.light_inverse;
  }
  const int heavy = static_cast<int>(job.heavy_teams);
  // Never falls from one team to the next; what should be whole must not end just below.
  const float end = static_cast<float>(min(team.index, heavy)) * heavy_share +
                    static_cast<float>(max(team.index - heavy, 0)) * light_share + 0.01f;
  return min(static_cast<int>(end), routed_items);
}

// The first 32 groups, one a thread of each warp: a step with one row has no more, and gets them in
// one go.
struct FirstGroups {
  int expert = 0;
  int first = 0;
  int count = 0;

  // Reads groups that are perhaps not there; nobody uses those.
  __device__ __forceinline__ void Load(const UpKernelJob& job) {
    if (LaneId() >= job.max_groups) return;
    expert = job.routing.group_expert[LaneId()];
    first = job.routing.group_first[LaneId()];
    count = job.routing.group_size[LaneId()];
  }
};

// Steps through the items of a team; the same for all of its threads.
struct UpCursor {
  const UpKernelJob& job;
  Team team;
  int num_shared;
  int index = -1;
  int row_block = 0;
  int group = 0;
  bool shared = true;
  bool new_rows = true;  // other rows of x than the last item
  int expert = 0;
  int first = 0;  // first place in `pairs`, or first row of x
  int count = 0;  // 1..8

  __device__ __forceinline__ UpCursor(const UpKernelJob& j, Team t)
      : job(j), team(t), num_shared(SharedItemsOf(j, t)) {}

  // routed_begin, groups: needed once the shared items are done.
  __device__ __forceinline__ void Next(int routed_begin, const FirstGroups& groups) {
    ++index;
    new_rows = true;
    if (index < num_shared) {
      const int item = team.index + index * team.count;
      row_block = item;
      first = 0;
      if (const int x_tiles = TilesOf(job.x); x_tiles > 1) {
        row_block = item / x_tiles;
        first = item % x_tiles * kGroupPairs;
      }
      count = min(kGroupPairs, job.x.rows - first);
      return;
    }
    if (index == num_shared) {
      shared = false;
      row_block = routed_begin % job.row_blocks;
      group = routed_begin / job.row_blocks;
    } else if (++row_block == job.row_blocks) {
      row_block = 0;
      ++group;
    } else {
      new_rows = false;
      return;
    }
    if (group < kWarpSize) {
      expert = __shfl_sync(kFullMask, groups.expert, group);
      first = __shfl_sync(kFullMask, groups.first, group);
      count = __shfl_sync(kFullMask, groups.count, group);
    } else {
      expert = Uniform(job.routing.group_expert[group]);
      first = Uniform(job.routing.group_first[group]);
      count = Uniform(job.routing.group_size[group]);
    }
  }
};

__device__ __forceinline__ int SliceBlocks(int slice, int blocks) {
  return min(kSliceBlocks, blocks - slice * kSliceBlocks);
}

// Asks for this block's part of the shared expert's weights: they do not depend on the routing.
__device__ __forceinline__ void PrefetchShared(const UpKernelJob& job) {
  constexpr int kPiece = 4096;
  const int64_t bytes = min(job.shapes[1][0].matrix_bytes, job.shapes[1][1].matrix_bytes);
  const auto pieces = static_cast<int>(bytes / kPiece);
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  // Of different sizes, the larger matrix's rest comes without this.
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x * gridDim.x + blockIdx.x); i < pieces; i += threads) {
    const int64_t at = int64_t{i} * kPiece;
    PrefetchL2(job.shapes[1][0].data + at, kPiece);
    PrefetchL2(job.shapes[1][1].data + at, kPiece);
  }
}

// Sums of one slice of a row tile into partial[matrix][slice][x row][hidden row].
__device__ __forceinline__ void StorePartial(const float (&acc)[4], int tile, float* sums) {
  const int lane = LaneId();
  float* to = sums + lane % 4 * 2 * kPartialStride + tile * kTileRows + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i * kPartialStride] = acc[i];
    to[i * kPartialStride + 8] = acc[2 + i];
  }
}

// The rows of x of an item, for the lanes of this warp.
__device__ __forceinline__ void LoadRows(const UpKernelJob& job, const UpCursor& item, int* x_rows,
                                         float& weight) {
  const int lane = LaneId();
  __syncwarp();  // nobody reads the last item's rows any more
  if (lane < kGroupPairs) {
    const int place = item.first + min(lane, item.count - 1);
    x_rows[lane] = item.shared ? place : job.routing.pairs[place] / job.used;
    weight = item.shared ? 1.0f : job.routing.place_weight[place];
  }
  __syncwarp();
}

// A NaN goes through the clamps: it must show, not become the limit.
__device__ __forceinline__ float SwiGlu(float gate, float up, float limit, float weight) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g / (1.0f + expf(-g)) * u * weight;
}

// One warp ends x row j of an item: lane r has hidden row r of the 32. When x has one row only, all
// pairs have the sums of that one. kWholeItems: no item has rows of two lanes.
template <int kCols, bool kWholeItems>
__device__ __forceinline__ void FinishRow(const UpKernelJob& job, const UpCursor& item, int j,
                                          float own_weight, const float* partial) {
  const int lane = LaneId();
  constexpr int kSliceFloats = kCols == 1 ? kPartialStride : kPartialFloats;
  const float* sums = partial + (kCols == 1 ? 0 : j * kPartialStride) + lane;
  float gate = 0.0f, up = 0.0f;
  for (int slice = 0; slice < job.num_slices; ++slice) {
    gate += sums[slice * kSliceFloats];
    up += sums[(job.num_slices + slice) * kSliceFloats];
  }
  const int row = item.first + j;
  const float weight = __shfl_sync(kFullMask, own_weight, j);
  const float hidden = SwiGlu(gate, up, item.shared ? job.shared_limit : job.limit, weight);
  const ActivationView& out = item.shared ? job.shared_out : job.out;
  const int lane_stride = (job.lane_cols + kColumnGrain - 1) / kColumnGrain * kColumnGrain;
  const int first = item.row_block * kItemRows;
  if (kWholeItems || job.lane_cols % kItemRows == 0) {
    const int col = first / job.lane_cols * lane_stride + first % job.lane_cols;
    StoreActivation32(out, row, col / 32, hidden);
    return;
  }
  const int r = first + lane;
  if (r >= job.ffn) return;
  const int64_t at = row * out.cols + r / job.lane_cols * lane_stride + r % job.lane_cols;
  if (out.f32 != nullptr) out.f32[at] = hidden;
  if (out.bf16 != nullptr) out.bf16[at] = FloatToBf16(hidden);
}

// Zeros in the columns that only pad the lanes; rows of `out` are dealt to the grid's warps.
__device__ __forceinline__ void ClearPadding(const UpKernelJob& job, const ActivationView& out) {
  const int lane_stride = (job.lane_cols + kColumnGrain - 1) / kColumnGrain * kColumnGrain;
  if (lane_stride == job.lane_cols) return;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int warp = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(gridDim.x) * warps;
  const int whole = (job.lane_cols + 31) / 32;  // first block of 32 that only pads
  for (int row = warp; row < out.rows; row += num_warps) {
    for (int64_t begin = 0; begin < out.cols; begin += lane_stride) {
      for (int block = whole; block < lane_stride / 32; ++block) {
        StoreActivation32(out, row, begin / 32 + block, 0.0f);
      }
      const int col = job.lane_cols + LaneId();
      if (col >= whole * 32) continue;
      const int64_t at = row * out.cols + begin + col;
      if (out.f32 != nullptr) out.f32[at] = 0.0f;
      if (out.bf16 != nullptr) out.bf16[at] = 0;
    }
  }
}

}  // namespace ds4::cuda
