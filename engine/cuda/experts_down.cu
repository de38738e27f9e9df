// LaunchExpertsDown: products of the hidden rows with the down matrices, added up per lane in the
// one order (shared expert, then rising expert id), then the lanes' subtree roots.
//
// A block has kDownTiles row tiles of 16 outputs; a warp has one lane and one of these tiles. It
// streams the shared expert's weights, then those of every group of routed pairs: the groups stand
// by rising expert, so each row meets its experts in the right order. Sums of (lane, row, output)
// stay in shared memory, which holds kDownRows rows; more rows are more blocks.
//
// Lanes of at most 256 columns, in the usual formats, have kernels of their own: experts_down.cuh.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "engine/base/check.h"
#include "engine/comm/lane_tree.h"
#include "engine/cuda/experts_down.cuh"

namespace ds4::cuda {
namespace {

constexpr int kDownRows = 64;
constexpr int kMaxDownLanes = 16;
constexpr int kMaxDownWarps = 16;
constexpr int kMaxDownRing = 24 * 1024;
// Floats between the rows of the sums: spreads rows over the banks of shared memory.
constexpr int kSumStride = 20;

// What a warp multiplies in turn: the shared expert for each 8 rows, then the groups.
struct DownSource {
  const DownKernelJob& job;
  int lane;      // of the rank's lanes
  int row_tile;  // -1: this warp has none
  int shared_units;
  int units;  // known so far
  int unit = 0;
  int stages_left = 0;
  int own_expert = 0;  // thread i: of group 32 n + i
  const std::byte* chunk = nullptr;

  __device__ __forceinline__ bool Peek(Stage& stage) {
    if (stages_left == 0) {
      if (unit >= units || row_tile < 0) return false;
      OpenUnit();
    }
    stage.chunk = chunk;
    stage.chunk_bytes = stage.bytes = Shape().chunk_bytes;
    return true;
  }
  __device__ __forceinline__ void Advance() {
    chunk += Shape().chunk_bytes;
    --stages_left;
  }
  // Experts of groups first.. ; some are perhaps not there, and are not used.
  __device__ __forceinline__ void LoadExperts(int first) {
    const int group = first + LaneId();
    if (group < job.max_groups) own_expert = job.routing.group_expert[group];
  }

 private:
  // Of the unit that is open: number unit - 1.
  __device__ __forceinline__ const MatrixShape& Shape() const {
    return job.shapes[unit <= shared_units ? 1 : 0];
  }
  __device__ __forceinline__ void OpenUnit() {
    int64_t matrix = lane;
    if (unit >= shared_units) {
      const int group = unit - shared_units;
      if (group > 0 && group % kWarpSize == 0) LoadExperts(group);
      matrix += int64_t{__shfl_sync(kFullMask, own_expert, group % kWarpSize)} * job.lanes;
    }
    ++unit;
    const MatrixShape& w = Shape();
    stages_left = w.blocks * w.chunks_per_block;
    chunk = w.data + matrix * w.matrix_bytes + int64_t{row_tile} * w.tile_bytes;
  }
};

// The whole product of one unit: slices of the lane's columns added in rising order.
template <bool kFloats, class Stream>
__device__ __forceinline__ void MultiplyUnit(const MatrixShape& w, Stream& stream,
                                             const ActivationView& hidden, int lane_block,
                                             const int* x_rows, int count, const LaneTables& tables,
                                             float (&total)[4]) {
  const GroupX x(hidden, x_rows);
  for (int block = 0; block < w.blocks; block += kSliceBlocks) {
    const int x_block = lane_block + block * (kColumnGrain / 32);
    const int blocks = min(kSliceBlocks, w.blocks - block);
    float acc[1][4];
    if (kFloats && w.is_float) {
      DotFloats(w, stream, x, x_block, blocks, count, acc);
    } else {
      DotBlocks<1, 2>(w, stream, x, x_block, blocks, tables, acc);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = block == 0 ? acc[0][i] : total[i] + acc[0][i];
  }
}

// The sum of `size` lanes in the order of the tree; size a power of two, at most kMaxDownLanes.
__device__ __forceinline__ float SubtreeSum(const float* sums, int64_t stride, int size) {
  float level[5];  // level[i]: a finished subtree of 2^i lanes that waits for its right neighbour
  float value = 0.0f;
  for (int lane = 0; lane < size; ++lane) {
    value = sums[lane * stride];
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      if ((lane >> i & 1) == 0) {
        level[i] = value;
        break;
      }
      value = level[i] + value;
    }
  }
  return value;
}

// One warp's work on many rows: `sums` [rows][kSumStride] of its lane and row tile.
template <bool kFloats, class Stream>
__device__ __forceinline__ void SumRows(const DownKernelJob& job, Stream& stream, int model_lane,
                                        int first_row, int num_rows, int num_groups, int* x_rows,
                                        const LaneTables& tables, float* sums) {
  const int lane = LaneId();
  const int lane_block = model_lane * job.shapes[0].blocks * (kColumnGrain / 32);
  float total[4];
  for (int begin = 0; begin < num_rows; begin += kGroupPairs) {
    const int count = min(kGroupPairs, num_rows - begin);
    __syncwarp();
    if (lane < kGroupPairs) x_rows[lane] = first_row + begin + min(lane, count - 1);
    __syncwarp();
    MultiplyUnit<kFloats>(job.shapes[1], stream, job.shared_hidden, lane_block, x_rows, count,
                          tables, total);
    StoreSums<kSumStride>(total, begin, sums);
  }
  // What a group needs is loaded one group ahead, and its place in `pairs` two.
  const Routing& routing = job.routing;
  int first = 0, count = 1, pair = 0, next_first = 0, next_count = 1;
  if (num_groups > 0) {
    next_first = routing.group_first[0];
    next_count = routing.group_size[0];
  }
  for (int group = -1; group < num_groups; ++group) {
    const int this_first = first, this_count = count, this_pair = pair;
    first = next_first;
    count = next_count;
    if (group + 1 < num_groups) pair = routing.pairs[first + min(lane % kGroupPairs, count - 1)];
    if (group + 2 < num_groups) {
      next_first = routing.group_first[group + 2];
      next_count = routing.group_size[group + 2];
    }
    if (group < 0) continue;
    // Threads 0-7 know the rows of the group's columns.
    const int column = lane % kGroupPairs;
    const int row = this_pair / job.used - first_row;
    const bool mine = column < this_count && row >= 0 && row < num_rows;
    const int left = __shfl_sync(kFullMask, row, max(column - 1, 0));
    const bool twice =
        __ballot_sync(kFullMask, column > 0 && column < this_count && left == row) != 0;
    const int row_or_none = mine ? row : -1;
    const int x_row[2] = {__shfl_sync(kFullMask, row_or_none, lane % 4 * 2),
                          __shfl_sync(kFullMask, row_or_none, lane % 4 * 2 + 1)};
    __syncwarp();
    if (lane < kGroupPairs) x_rows[lane] = this_first + min(lane, this_count - 1);
    __syncwarp();
    MultiplyUnit<kFloats>(job.shapes[0], stream, job.hidden, lane_block, x_rows, this_count, tables,
                          total);
    AddSums<kSumStride>(total, x_row, twice, sums);
  }
}

// x of row `row` of the view, as the only row of a group, for 256 columns.
__device__ __forceinline__ void LoadRow(const ActivationView& view, int row, int block,
                                        BlockX<1>& to) {
  const int tiles = TilesOf(view);
  const uint64_t* q = view.q + (block * tiles + row / 8) * 32 + row % 8 * 4 + LaneId() % 4;
  const float* scale = view.scale + block * (8 * tiles) + row;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    to.q[s] = *q;
    to.scale[s][0] = *scale;
    q += 32 * tiles;
    scale += 8 * tiles;
  }
}

// The same for one row: the sums stay in registers, and x is loaded one block of 256 columns ahead.
template <class Stream>
__device__ __forceinline__ void SumOneRow(const DownKernelJob& job, Stream& stream, int model_lane,
                                          int num_groups, const LaneTables& tables, float* sums) {
  const int lane = LaneId();
  const int blocks = job.shapes[0].blocks;
  const int lane_block = model_lane * blocks * (kColumnGrain / 32);
  // Thread i has group i; one row has no more than kMaxExpertsUsed.
  const int own_first = lane < job.max_groups ? job.routing.group_first[lane] : 0;
  const int own_size = lane < job.max_groups ? job.routing.group_size[lane] : 0;
  float sum[2] = {0.0f, 0.0f}, product[2] = {0.0f, 0.0f};
  float acc[1][4];
  BlockX<1> x, next;
  LoadRow(job.shared_hidden, 0, lane_block, next);
  int unit = 0, block = 0;  // unit 0: shared expert
  while (unit <= num_groups) {
    x = next;
    const int next_block = block + 1 == blocks ? 0 : block + 1;
    const int next_unit = block + 1 == blocks ? unit + 1 : unit;
    if (next_unit <= num_groups) {
      const int place = __shfl_sync(kFullMask, own_first, max(next_unit - 1, 0));
      LoadRow(next_unit == 0 ? job.shared_hidden : job.hidden, next_unit == 0 ? 0 : place,
              lane_block + next_block * (kColumnGrain / 32), next);
    }
    if (block % kSliceBlocks == 0) Clear(acc);
    MultiplyStage<1, 1>(job.shapes[unit == 0 ? 1 : 0], stream, x, tables, acc);
    if (next_block % kSliceBlocks == 0) {
      const bool first_slice = block < kSliceBlocks;
      product[0] = first_slice ? acc[0][0] : product[0] + acc[0][0];
      product[1] = first_slice ? acc[0][2] : product[1] + acc[0][2];
    }
    if (next_block == 0) {
      // A table of ids may name an expert twice.
      const int times = unit == 0 ? 1 : __shfl_sync(kFullMask, own_size, max(unit - 1, 0));
      for (int i = 0; i < times; ++i) {
        sum[0] = unit == 0 ? product[0] : sum[0] + product[0];
        sum[1] = unit == 0 ? product[1] : sum[1] + product[1];
      }
    }
    unit = next_unit;
    block = next_block;
  }
  if (lane % 4 == 0) {
    sums[lane / 4] = sum[0];
    sums[lane / 4 + 8] = sum[1];
  }
}

// kFloats: some weights are of a float type. kOneRow: there is one row of x, and no such type.
template <bool kFloats, bool kOneRow>
__global__ void __launch_bounds__(kMaxDownWarps* kWarpSize, 1)
    ExpertsDownKernel(const __grid_constant__ DownKernelJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpSize;
  const int warp_sums = job.sum_rows * kSumStride;
  const LaneTables tables(memory);
  float* sums = reinterpret_cast<float*>(memory + job.table_bytes);
  int* x_rows = reinterpret_cast<int*>(memory + job.rows_at) + warp * kGroupPairs;
  std::byte* rings = memory + job.fixed_bytes;

  const int model_lane = warp % job.lanes;
  const int row_tile = static_cast<int>(blockIdx.x) * job.tiles + warp / job.lanes;
  const bool busy = row_tile < job.shapes[0].row_tiles;
  const int first_row = static_cast<int>(blockIdx.y) * job.sum_rows;
  const int num_rows = min(job.sum_rows, job.rows - first_row);
  const int shared_units = (num_rows + kGroupPairs - 1) / kGroupPairs;

  MixedStream<DownSource> stream = {
      rings + warp * job.ring_bytes, job.ring_bytes,
      DownSource{job, model_lane, busy ? row_tile : -1, shared_units, shared_units}};
  stream.Fill();
  if (job.table_bytes != 0) LoadIq2Tables(reinterpret_cast<uint32_t*>(memory));
  GridDependencyWait();
  stream.source.LoadExperts(0);
  const int num_groups = *job.routing.num_groups;
  stream.source.units = shared_units + num_groups;
  stream.Fill();
  __syncthreads();  // the tables are there
  if (busy) {
    float* own = sums + warp * warp_sums;
    if constexpr (kOneRow) {
      SumOneRow(job, stream, model_lane, num_groups, tables, own);
    } else {
      SumRows<kFloats>(job, stream, model_lane, first_row, num_rows, num_groups, x_rows, tables,
                       own);
    }
  }
  __syncthreads();

  const int outputs = job.tiles * kTileRows;
  for (int i = thread; i < num_rows * outputs; i += static_cast<int>(blockDim.x)) {
    const int row = i / outputs;
    const int tile = i % outputs / kTileRows;
    const int output = static_cast<int>(blockIdx.x) * outputs + i % outputs;
    if (output >= job.cols) continue;
    const float* lanes = sums + tile * job.lanes * warp_sums + row * kSumStride + i % kTileRows;
    for (int s = 0; s < job.num_subtrees; ++s) {
      const float root =
          SubtreeSum(lanes + job.subtree_begin[s] * warp_sums, warp_sums, job.subtree_size[s]);
      job.roots[(int64_t{s} * job.rows + first_row + row) * job.cols + output] = root;
    }
  }
}

// ---- The fast path.

using DownKernel = void (*)(DownKernelJob);

template <DType kType>
DownKernel FastKernel(bool one_row) {
  return one_row ? FastDownKernel<kType, true> : FastDownKernel<kType, false>;
}
// nullptr: the combination has no kernel of its own. It may not depend on the number of rows: the
// two paths add in different orders.
DownKernel ChooseFast(const DownKernelJob& k, bool one_row) {
  if (k.shapes[1].dtype != DType::kQ8_0 || k.shapes[0].blocks != 1 || k.lanes > kFastWarps ||
      k.used < 1) {
    return nullptr;
  }
  switch (k.shapes[0].dtype) {
    case DType::kQ2_K:
      return FastKernel<DType::kQ2_K>(one_row);
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

template <bool kOneRow>
void LaunchFast(const LaunchContext& launch, DownKernelJob& k, DownKernel kernel) {
  const int row_tiles = k.shapes[0].row_tiles;
  const auto tile_sets = [&] { return (row_tiles + k.tiles - 1) / k.tiles; };
  // As many warps as a block may have, unless SMs would go without.
  k.set_bits = std::bit_width(static_cast<unsigned>(kFastWarps / k.lanes)) - 1;
  for (;; --k.set_bits) {
    k.tiles = kWidth << k.set_bits;
    if (k.set_bits == 0 || tile_sets() >= launch.num_sms) break;
  }
  const int warps = k.lanes << k.set_bits;
  k.output_bits = std::countr_zero(static_cast<unsigned>(k.tiles * kTileRows));
  const int64_t expert_bytes = k.lanes * k.shapes[0].matrix_bytes;
  CHECK(expert_bytes <= INT32_MAX) << expert_bytes << " bytes of one expert";
  k.expert_bytes = static_cast<int>(expert_bytes);
  const int slot = TileSlotOf(k.shapes[0].dtype, kWidth);
  k.ring_bytes = kRingRoom<kOneRow> / slot * slot;
  const int list_bytes = kOneRow ? 0 : k.max_groups * int{sizeof(GroupEntry)} + 2 * k.rows * k.used;
  if (kOneRow) k.sum_rows = 1;
  // Where the rings have no room, a block sums fewer rows.
  int shared = 0;
  for (;; k.sum_rows -= kGroupPairs) {
    k.lists_at = warps * k.sum_rows * kRowSums * (kOneRow ? 2 : 1) * 4;
    k.fixed_bytes = (k.lists_at + list_bytes + kRingGrain - 1) / kRingGrain * kRingGrain;
    shared = k.fixed_bytes + warps * k.ring_bytes;
    if (shared <= kMaxSharedBytes || k.sum_rows <= kGroupPairs) break;
  }
  CHECK(shared <= kMaxSharedBytes) << shared << " bytes for the routing of " << k.rows << " rows";
  const int blocks = launch.num_sms * (kOneRow ? BlocksAnSm(shared) : 1);
  const dim3 grid(std::min(blocks, tile_sets()), (k.rows + k.sum_rows - 1) / k.sum_rows);
  Launch(launch, grid, dim3(warps * kWarpSize), shared, kernel, k);
}

void CheckDown(const ExpertsDown& job, int used, int rows) {
  CHECK(job.lanes >= 1 && job.lanes <= kMaxDownLanes)
      << job.lanes << " lanes, at most " << kMaxDownLanes << " are taken";
  CHECK(IsDeviceMatrixType(job.down.dtype) && IsDeviceMatrixType(job.shared_down.dtype));
  CHECK(job.down.rows == job.shared_down.rows && job.down.cols == job.shared_down.cols)
      << "down matrices of experts are [" << job.down.rows << ", " << job.down.cols
      << "], the shared one's [" << job.shared_down.rows << ", " << job.shared_down.cols << "]";
  const int64_t cols = job.lanes * job.down.padded_cols();
  CHECK(job.hidden.cols == cols && job.shared_hidden.cols == cols)
      << job.hidden.cols << " and " << job.shared_hidden.cols << " hidden columns, lanes take "
      << cols;
  CHECK(job.hidden.rows == rows * used && job.shared_hidden.rows == rows)
      << job.hidden.rows << " and " << job.shared_hidden.rows << " hidden rows for " << rows;
  CHECK(IsFloatType(job.down.dtype) ? job.hidden.f32 != nullptr : job.hidden.q != nullptr)
      << "hidden rows lack the form that weights of " << Info(job.down.dtype).name << " read";
  CHECK(IsFloatType(job.shared_down.dtype) ? job.shared_hidden.f32 != nullptr
                                           : job.shared_hidden.q != nullptr)
      << "hidden rows lack the form that weights of " << Info(job.shared_down.dtype).name
      << " read";
}

}  // namespace

void LaunchExpertsDown(const LaunchContext& launch, const ExpertsDown& job, const Routing& routing,
                       int used, int rows) {
  if (rows == 0) return;
  CheckDown(job, used, rows);
  DownKernelJob k = {};
  k.shapes[0] = ShapeOf(job.down, false);
  k.shapes[1] = ShapeOf(job.shared_down, false);
  k.hidden = job.hidden;
  k.shared_hidden = job.shared_hidden;
  k.routing = routing;
  k.used = used;
  k.max_groups = static_cast<int>(MaxGroups(job.hidden.rows, job.down.count / job.lanes));
  k.rows = rows;
  k.cols = static_cast<int>(job.down.rows);
  k.lanes = job.lanes;
  k.tiles = job.lanes > kMaxDownLanes / 2 ? 1 : 2;
  k.sum_rows = std::min(kDownRows, (rows + kGroupPairs - 1) / kGroupPairs * kGroupPairs);
  k.roots = job.roots;
  const std::vector<LaneSubtree> subtrees = SubtreesOf(job.lane_begin, job.lane_begin + job.lanes);
  CHECK(subtrees.size() <= kMaxSubtrees) << subtrees.size() << " subtrees";
  k.num_subtrees = static_cast<int>(subtrees.size());
  for (int i = 0; i < k.num_subtrees; ++i) {
    k.subtree_begin[i] = subtrees[i].begin - job.lane_begin;
    k.subtree_size[i] = subtrees[i].size;
  }

  if (DownKernel fast = ChooseFast(k, rows == 1)) {
    rows == 1 ? LaunchFast<true>(launch, k, fast) : LaunchFast<false>(launch, k, fast);
    return;
  }
  const int warps = k.lanes * k.tiles;
  CHECK(warps <= kMaxDownWarps) << warps << " warps";
  k.table_bytes = job.down.dtype == DType::kIQ2_XXS || job.shared_down.dtype == DType::kIQ2_XXS
                      ? kIq2TableBytes
                      : 0;
  const int least_ring = 2 * std::max(StageBytes(k.shapes[0]), StageBytes(k.shapes[1]));
  // Where the rings have no room, a block sums fewer rows.
  for (;; k.sum_rows -= kGroupPairs) {
    k.rows_at = k.table_bytes + warps * k.sum_rows * kSumStride * 4;
    k.fixed_bytes = k.rows_at + warps * kGroupPairs * 4;
    const int ring = (kMaxSharedBytes - k.fixed_bytes) / warps / kRingGrain * kRingGrain;
    k.ring_bytes = std::min(kMaxDownRing, ring);
    if (k.ring_bytes >= least_ring || k.sum_rows == kGroupPairs) break;
  }
  CHECK(k.ring_bytes >= least_ring)
      << k.ring_bytes << " bytes of ring for each of " << warps << " warps";
  const dim3 grid((k.shapes[0].row_tiles + k.tiles - 1) / k.tiles,
                  (rows + k.sum_rows - 1) / k.sum_rows);
  auto* kernel = k.shapes[0].is_float || k.shapes[1].is_float ? ExpertsDownKernel<true, false>
                 : rows == 1                                  ? ExpertsDownKernel<false, true>
                                                              : ExpertsDownKernel<false, false>;
  Launch(launch, grid, dim3(warps * kWarpSize), k.fixed_bytes + warps * k.ring_bytes, kernel, k);
}

}  // namespace ds4::cuda
