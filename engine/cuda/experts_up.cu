// LaunchExpertsUp: gate and up products of the chosen experts and the shared one, SwiGLU, and the
// hidden rows in the forms that the down products read.
//
// A work item is 32 hidden rows (32 rows of gate, the same 32 of up) of one group of at most 8 rows
// of x. Warp k of eight takes slices k, k + 8, ... of 512 columns. The slices' sums meet in shared
// memory and are added in rising order. Who takes which item changes no bits.
//
// Two forms of it. Routed experts in some formats beside a shared one in Q8_0 have kernels of their
// own (experts_up_fast.cuh); all other combinations share one, of one block an SM, whose warps 0-7
// read gate, 8-15 up.
//
// Every block calls LaunchDependents only when its own wait is over: once the next kernel
// (ExpertsDown) runs, the routing is there, and it may read it before it waits for this one.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/experts_up_fast.cuh"

namespace ds4::cuda {
namespace {

constexpr int kUpWarps = 2 * kSliceWarps;
constexpr int kUpThreads = kUpWarps * kWarpSize;

// What this warp reads: gate (0) or up (1), from which slice on.
__device__ __forceinline__ int OwnMatrix() {
  return static_cast<int>(threadIdx.x) / (kSliceWarps * kWarpSize);
}
__device__ __forceinline__ int OwnSlice() {
  return static_cast<int>(threadIdx.x) / kWarpSize % kSliceWarps;
}

// The chunks of one warp: for each item its slices, for each slice the item's row tiles.
struct UpSource {
  UpCursor cursor;
  FirstGroups groups;
  int end = 0;  // items known so far
  int routed_begin = 0;
  int slice;
  int tile = kItemTiles;  // first of the stages at hand
  int stages_left = 0;
  const std::byte* chunk = nullptr;

  __device__ explicit UpSource(const UpCursor& start)
      : cursor(start), slice(start.job.num_slices) {}

  __device__ __forceinline__ bool Peek(Stage& next) {
    while (stages_left == 0) {
      if (!OpenSlice()) return false;
    }
    const MatrixShape& w = Shape();
    next.chunk = chunk;
    next.chunk_bytes = w.chunk_bytes;
    next.bytes = w.paired ? 2 * w.chunk_bytes : w.chunk_bytes;
    next.next_tile = w.paired && cursor.row_block * kItemTiles + 1 < w.row_tiles ? w.tile_bytes : 0;
    return true;
  }
  __device__ __forceinline__ void Advance() {
    chunk += Shape().chunk_bytes;
    --stages_left;
  }

 private:
  __device__ __forceinline__ const MatrixShape& Shape() const {
    return cursor.job.shapes[cursor.shared ? 1 : 0][OwnMatrix()];
  }
  // The stages of the next slice and row tile (or pair of tiles); false when the items end.
  __device__ __forceinline__ bool OpenSlice() {
    const UpKernelJob& job = cursor.job;
    tile += tile < kItemTiles && !Shape().paired ? 1 : kItemTiles;
    if (tile >= kItemTiles) {
      if (slice + kSliceWarps >= job.num_slices) {
        if (cursor.index + 1 >= end || OwnSlice() >= job.num_slices) return false;
        cursor.Next(routed_begin, groups);
        slice = OwnSlice() - kSliceWarps;
      }
      tile = 0;
      slice += kSliceWarps;
    }
    const MatrixShape& w = Shape();
    const int row_tile = cursor.row_block * kItemTiles + tile;
    if (row_tile < w.row_tiles) {
      stages_left = SliceBlocks(slice, w.blocks) * w.chunks_per_block;
      chunk = w.data + cursor.expert * w.matrix_bytes + int64_t{row_tile} * w.tile_bytes +
              slice * (kSliceBlocks * w.chunks_per_block * w.chunk_bytes);
    }
    return true;
  }
};

// One warp's products for one item. kFloats: some weights are of a float type. weight: thread j of
// each warp gets that of the item's row j.
template <bool kFloats, class Stream>
__device__ __forceinline__ void MultiplyItem(const UpKernelJob& job, const UpCursor& item,
                                             Stream& stream, int* x_rows, float& weight,
                                             const LaneTables& tables, float* partial) {
  const MatrixShape& w = job.shapes[item.shared ? 1 : 0][OwnMatrix()];
  if (item.new_rows) LoadRows(job, item, x_rows, weight);
  const GroupX x(job.x, x_rows);
  const int num_tiles = min(kItemTiles, w.row_tiles - item.row_block * kItemTiles);
  for (int slice = OwnSlice(); slice < job.num_slices; slice += kSliceWarps) {
    float* sums = partial + (OwnMatrix() * job.num_slices + slice) * kPartialFloats;
    const int blocks = SliceBlocks(slice, w.blocks);
    if constexpr (kFloats) {
      if (w.is_float) {
        for (int tile = 0; tile < num_tiles; ++tile) {
          float acc[1][4];
          DotFloats(w, stream, x, slice * (kSliceCols / 32), blocks, item.count, acc);
          StorePartial(acc[0], tile, sums);
        }
        continue;
      }
    }
    const int step = w.paired ? kItemTiles : 1;
    for (int tile = 0; tile < num_tiles; tile += step) {
      float acc[kItemTiles][4];
      DotBlocks<kItemTiles, 2>(w, stream, x, slice * (kSliceCols / 32), blocks, tables, acc);
      StorePartial(acc[0], tile, sums);
      // Where the second tile is not there, this is nonsense that nobody reads.
      if (w.paired) StorePartial(acc[1], 1, sums);
    }
  }
}

template <bool kFloats>
__global__ void __launch_bounds__(kUpThreads, 1)
    ExpertsUpKernel(const __grid_constant__ UpKernelJob job) {
  DS4_DYNAMIC_SHARED(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const Team team{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const LaneTables tables(memory);
  float* partial = reinterpret_cast<float*>(memory + job.table_bytes);
  const int partial_floats = 2 * job.num_slices * kPartialFloats;
  int* x_rows =
      reinterpret_cast<int*>(partial + job.partials * partial_floats) + warp * kGroupPairs;
  std::byte* rings = memory + job.fixed_bytes;

  UpCursor item(job, team);
  const int num_shared = item.num_shared;
  MixedStream<UpSource> stream = {rings + warp * job.ring_bytes, job.ring_bytes, UpSource(item)};
  stream.source.end = num_shared;
  stream.Fill();
  PrefetchShared(job);
  if (job.table_bytes != 0) LoadIq2Tables(reinterpret_cast<uint32_t*>(memory));
  GridDependencyWait();
  LaunchDependents();  // not earlier: see above
  FirstGroups groups;
  groups.Load(job);
  const int routed_items = *job.routing.num_groups * job.row_blocks;
  const int routed_begin = RoutedBegin(job, routed_items, team);
  const int routed_end = RoutedBegin(job, routed_items, {team.index + 1, team.count});
  const int num_items = num_shared + routed_end - routed_begin;
  stream.source.groups = groups;
  stream.source.routed_begin = routed_begin;
  stream.source.end = num_items;
  stream.Fill();
  __syncthreads();

  float weight = 0.0f;
  while (item.index + 1 < num_items) {
    item.Next(routed_begin, groups);
    float* sums = partial + item.index % job.partials * partial_floats;
    MultiplyItem<kFloats>(job, item, stream, x_rows, weight, tables, sums);
    __syncthreads();
    const int j = (warp + item.index) % kUpWarps;
    if (j < item.count) FinishRow<2, false>(job, item, j, weight, sums);
    // With two buffers the next item's sums go to the other one.
    if (job.partials == 1) __syncthreads();
  }
  ClearPadding(job, job.out);
  ClearPadding(job, job.shared_out);
}

using UpKernel = void (*)(UpKernelJob);

template <DType kType>
UpKernel FastKernel(bool one_row) {
  return one_row ? FastUpKernel<kType, true> : FastUpKernel<kType, false>;
}
// nullptr: the combination has no kernel of its own. It may not depend on the number of rows: the
// two paths add in different orders.
UpKernel ChooseFast(const UpKernelJob& k, bool one_row) {
  if (k.shapes[0][0].dtype != k.shapes[0][1].dtype || k.lane_cols % kItemRows != 0) return nullptr;
  for (const MatrixShape& w : k.shapes[1]) {
    if (w.dtype != DType::kQ8_0) return nullptr;
  }
  switch (k.shapes[0][0].dtype) {
    case DType::kIQ2_XXS:
      return FastKernel<DType::kIQ2_XXS>(one_row);
    case DType::kQ4_K:
      return FastKernel<DType::kQ4_K>(one_row);
    case DType::kMXFP4:
      return FastKernel<DType::kMXFP4>(one_row);
    case DType::kQ8_0:
      return FastKernel<DType::kQ8_0>(one_row);
    default:
      return nullptr;
  }
}

struct FastPlan {
  int teams;  // of a block
  int blocks_an_sm;
  int shared_bytes;
};

// Cuts the shared memory of a fast kernel. The table of IQ2_XXS lies at a place that only the
// device knows: what rings leave unused before it is less than a ring.
FastPlan PlanFast(UpKernelJob& k, bool one_row) {
  const DType type = k.shapes[0][0].dtype;
  const int buffer = 2 * k.num_slices * (one_row ? kPartialStride : kPartialFloats) * 4;
  const int ring = RingBytesOf(type);
  // Two teams on an SM, in one block or in two; else one.
  for (const int on_sm : {kTeamsAnSm, 1}) {
    FastPlan plan;
    plan.teams = std::min(TeamsOf(type), on_sm);
    plan.blocks_an_sm = on_sm / plan.teams;
    const int limit = plan.blocks_an_sm > 1 ? kHalfSharedBytes : kMaxSharedBytes;
    for (k.partials = 2; k.partials >= 1; --k.partials) {
      const int of_team =
          kSliceWarps * (ring + kGroupPairs * static_cast<int>(sizeof(int))) + k.partials * buffer;
      plan.shared_bytes = plan.teams * of_team;
      if (type == DType::kIQ2_XXS) {
        // Before the table no ring is cut in two, and there may be room for more than there are.
        const int rings = plan.teams * kSliceWarps * ring;
        plan.shared_bytes += kIq2TableBytes + std::max(ring, kIq2TableBytes - rings);
      }
      if (plan.shared_bytes <= limit) return plan;
    }
  }
  CHECK(false) << "rows of " << k.num_slices << " slices have no room in shared memory";
  return {};
}

// About the time of 16 rows x 256 columns on one SM, in ten cycles: what memory gives an SM, but no
// less than what decoding takes. The shared expert's weights come from L2, where they were fetched
// ahead.
int BlockCost(DType dtype, bool from_l2) {
  const int bytes = ChunkBytes(dtype) * kColumnGrain / ChunkCols(dtype);
  return std::max(11, bytes / (from_l2 ? 350 : 200));
}

// Cuts the block's shared memory: tables, partial sums, rows of x, rings.
void PlanShared(UpKernelJob& k) {
  int stage_bytes = 0;
  for (const auto& pair : k.shapes) {
    for (const MatrixShape& w : pair) {
      if (w.dtype == DType::kIQ2_XXS) k.table_bytes = kIq2TableBytes;
      stage_bytes = std::max(stage_bytes, StageBytes(w));
    }
  }
  for (k.partials = 2; k.partials >= 1; --k.partials) {
    const int partial_bytes = k.partials * 2 * k.num_slices * kPartialFloats * 4;
    k.fixed_bytes = k.table_bytes + partial_bytes + kUpWarps * kGroupPairs * 4;
    k.ring_bytes = (kMaxSharedBytes - k.fixed_bytes) / kUpWarps / kRingGrain * kRingGrain;
    if (k.ring_bytes >= 2 * stage_bytes) return;
  }
  CHECK(false) << "rows of " << k.num_slices << " slices leave no room for two stages of "
               << stage_bytes << " bytes a warp";
}

// What RoutedBegin would have to divide by, in every thread and while all wait for it.
void PlanShares(UpKernelJob& k, int teams) {
  const int heavy = k.shared_items % teams;
  k.heavy_teams = static_cast<float>(heavy);
  k.teams_inverse = 1.0f / static_cast<float>(teams);
  k.light_inverse = 1.0f / static_cast<float>(teams - heavy);
}

void CheckUp(const ExpertsUp& job, const UpKernelJob& k) {
  for (const PackedMatrix* w : {&job.gate, &job.up, &job.shared_gate, &job.shared_up}) {
    CHECK(IsDeviceMatrixType(w->dtype) && w->rows == job.gate.rows && w->cols == job.gate.cols)
        << "gate and up of experts are [" << job.gate.rows << ", " << job.gate.cols << "], one is ["
        << w->rows << ", " << w->cols << "]";
    CHECK(IsFloatType(w->dtype) ? job.x.f32 != nullptr : job.x.q != nullptr)
        << "x lacks the form that weights of " << Info(w->dtype).name << " read";
  }
  CHECK(job.x.cols == job.gate.padded_cols())
      << job.x.cols << " columns of x, the weights have " << job.gate.padded_cols();
  CHECK(job.lane_cols > 0 && k.ffn % job.lane_cols == 0)
      << k.ffn << " hidden rows in lanes of " << job.lane_cols;
  CHECK(job.lane_cols % kItemRows == 0 || (job.out.q == nullptr && job.shared_out.q == nullptr))
      << "lanes of " << job.lane_cols << " columns have no int8 form";
  CHECK(job.out.rows == job.x.rows * k.used && job.shared_out.rows == job.x.rows)
      << job.out.rows << " and " << job.shared_out.rows << " hidden rows for " << job.x.rows;
  const int64_t cols = k.ffn / job.lane_cols * PaddedCols(job.lane_cols);
  CHECK(job.out.cols == cols && job.shared_out.cols == cols)
      << job.out.cols << " and " << job.shared_out.cols << " hidden columns, lanes take " << cols;
}

}  // namespace

void LaunchExpertsUp(const LaunchContext& launch, const ExpertsUp& job, const Routing& routing,
                     int used) {
  if (job.x.rows == 0) return;
  UpKernelJob k = {};
  k.shapes[0][0] = ShapeOf(job.gate, true);
  k.shapes[0][1] = ShapeOf(job.up, true);
  k.shapes[1][0] = ShapeOf(job.shared_gate, true);
  k.shapes[1][1] = ShapeOf(job.shared_up, true);
  for (int i = 0; i < 2; ++i) k.up_offset[i] = k.shapes[i][1].data - k.shapes[i][0].data;
  k.x = job.x;
  k.out = job.out;
  k.shared_out = job.shared_out;
  k.routing = routing;
  k.used = used;
  k.ffn = static_cast<int>(job.gate.rows);
  k.lane_cols = static_cast<int>(job.lane_cols);
  k.limit = job.limit;
  k.shared_limit = job.shared_limit;
  CheckUp(job, k);
  k.row_blocks = (k.ffn + kItemRows - 1) / kItemRows;
  k.num_slices = (k.shapes[0][0].blocks + kSliceBlocks - 1) / kSliceBlocks;
  k.max_groups = static_cast<int>(MaxGroups(job.out.rows, job.gate.count));
  k.shared_items = k.row_blocks * job.x.tiles();
  const int shared_cost =
      BlockCost(job.shared_gate.dtype, true) + BlockCost(job.shared_up.dtype, true);
  const int routed_cost = BlockCost(job.gate.dtype, false) + BlockCost(job.up.dtype, false);
  k.item_ratio = static_cast<float>(shared_cost) / static_cast<float>(routed_cost);

  const bool one_row = job.x.rows == 1;
  if (UpKernel fast = ChooseFast(k, one_row)) {
    const FastPlan plan = PlanFast(k, one_row);
    PlanShares(k, launch.num_sms * plan.blocks_an_sm * plan.teams);
    Launch(launch, dim3(launch.num_sms * plan.blocks_an_sm), dim3(plan.teams * kTeamThreads),
           plan.shared_bytes, fast, k);
    return;
  }
  PlanShared(k);
  PlanShares(k, launch.num_sms);
  bool floats = false;
  for (const auto& pair : k.shapes) floats = floats || pair[0].is_float || pair[1].is_float;
  auto* kernel = floats ? ExpertsUpKernel<true> : ExpertsUpKernel<false>;
  Launch(launch, dim3(launch.num_sms), dim3(kUpThreads), k.fixed_bytes + kUpWarps * k.ring_bytes,
         kernel, k);
}

}  // namespace ds4::cuda
