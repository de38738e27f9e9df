// LaunchExpertsDown: products of the hidden rows with the down matrices, added up per lane in the
// one order (shared expert, then rising expert id), then the lanes' subtree roots.
//
// A block has kDownTiles row tiles of 16 outputs; a warp has one lane and one of these tiles. It
// streams the shared expert's weights, then those of every group of routed pairs: the groups stand
// by rising expert, so each row meets its experts in the right order. Sums of (lane, row, output)
// stay in shared memory, which holds kDownRows rows; more rows are more blocks.
//
// Lanes of at most 256 columns, in the usual formats, have kernels of their own
// (experts_ring.cuh): at most two blocks an SM, which take one set of row tiles after the other
// while their rings go on filling. They read the routing before they wait for the kernel ahead of
// them: that is ExpertsUp, which lets this one start only when it has seen the routing itself.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/comm/lane_tree.h"
#include "engine/cuda/experts_ring.cuh"

namespace ds4::cuda {
namespace {

constexpr int kDownRows = 64;
constexpr int kMaxDownLanes = 16;
constexpr int kMaxDownWarps = 16;
constexpr int kMaxSubtrees = 8;
constexpr int kMaxDownRing = 24 * 1024;
// Floats between the rows of the sums: spreads rows over the banks of shared memory.
constexpr int kSumStride = 20;

struct DownKernelJob {
  MatrixShape shapes[2];  // routed, shared
  ActivationView hidden, shared_hidden;
  Routing routing;
  int used;
  int max_groups;
  int rows;
  int cols;  // outputs, D
  int lanes;
  int tiles;        // row tiles of a block
  int sum_rows;     // rows of a block, a multiple of 8
  int table_bytes;  // of IQ2_XXS, or 0
  int rows_at;      // shared memory: tables, sums, rows of x, rings
  int fixed_bytes;  // of all but the rings
  int ring_bytes;   // of one warp
  float* roots;
  int num_subtrees;
  int subtree_begin[kMaxSubtrees];  // first lane, of this rank's
  int subtree_size[kMaxSubtrees];
};

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

// Rows first_row.. of the shared product begin the sums.
__device__ __forceinline__ void StoreSums(const float (&total)[4], int row, float* sums) {
  const int lane = LaneId();
  float* to = sums + (row + lane % 4 * 2) * kSumStride + lane / 4;
  to[0] = total[0];
  to[kSumStride] = total[1];
  to[8] = total[2];
  to[kSumStride + 8] = total[3];
}

// Adds column j of the group to the sums of row x_row[j] (-1: not of this block). A table of ids
// may name an expert twice for one row; `twice` then adds column after column.
__device__ __forceinline__ void AddSums(const float (&total)[4], const int (&x_row)[2], bool twice,
                                        float* sums) {
  const int lane = LaneId();
  const int turns = twice ? 4 : 1;
  for (int turn = 0; turn < turns; ++turn) {
    if (!twice || lane % 4 == turn) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (x_row[i] < 0) continue;
        float* to = sums + x_row[i] * kSumStride + lane / 4;
        to[0] += total[i];
        to[8] += total[2 + i];
      }
    }
    __syncwarp();
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
    StoreSums(total, begin, sums);
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
    AddSums(total, x_row, twice, sums);
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

constexpr int kFastWarps = 8;
// With one row of x a warp's part is short: most of it is asked for before the wait.
template <bool kOneRow>
inline constexpr int kSlots = kOneRow ? 6 : kRingSlots;

// The parts of one warp: for each of its row tiles the shared expert for each 8 rows, then the
// groups.
struct FastSource {
  const DownKernelJob& job;
  int lane;  // of the rank's lanes
  int shared_units;
  int units;     // of a row tile
  int row_tile;  // of the next unit
  int unit = 0;
  int own_expert = 0;  // thread i: of group 32 n + i

  __device__ __forceinline__ bool Next(SlicePart& part) {
    if (unit == units) {
      unit = 0;
      row_tile += static_cast<int>(gridDim.x) * job.tiles;
    }
    if (row_tile >= job.shapes[0].row_tiles) return false;
    part.shared = unit < shared_units;
    part.columns = 1;
    int64_t matrix = lane;
    if (!part.shared) {
      const int group = unit - shared_units;
      if (group % kWarpSize == 0 && group + LaneId() < job.max_groups) {
        own_expert = job.routing.group_expert[group + LaneId()];
      }
      matrix += int64_t{__shfl_sync(kFullMask, own_expert, group % kWarpSize)} * job.lanes;
    }
    const MatrixShape& w = job.shapes[part.shared ? 1 : 0];
    part.at = w.data + matrix * w.matrix_bytes + int64_t{row_tile} * w.tile_bytes;
    ++unit;
    return true;
  }
};

// One row tile for one row of x: the shared product, then the groups'. first, size: of group i in
// thread i; one row has no more than kMaxExpertsUsed.
template <DType kType, class Ring>
__device__ __forceinline__ float2 SumRow(const DownKernelJob& job, Ring& ring, int block,
                                         int num_groups, int first, int size,
                                         const LaneTables& tables) {
  OwnRows<1, 2> next;
  next.Load(job.shared_hidden, {0}, block, 1);
  float sum[1][2] = {};
#pragma unroll 1
  for (int unit = 0; unit <= num_groups; ++unit) {
    const OwnRows<1, 2> x = next;
    if (unit < num_groups) {
      next.Load(job.hidden, {__shfl_sync(kFullMask, first, unit)}, block, 1);
    }
    if (unit == 0) {
      DotOwn<DType::kQ8_0>(ring, x, tables, sum);
      continue;
    }
    float product[1][2];
    DotOwn<kType>(ring, x, tables, product);
    // A table of ids may name an expert twice.
    const int times = __shfl_sync(kFullMask, size, unit - 1);
    for (int i = 0; i < times; ++i) {
      sum[0][0] += product[0][0];
      sum[0][1] += product[0][1];
    }
  }
  return make_float2(sum[0][0], sum[0][1]);
}

// x of a group whose rows stand together: `first` and the next, count of them.
__device__ __forceinline__ void LoadTogether(const ActivationView& x, int block, int first,
                                             int count, BlockX<2>& to) {
  const int lane = LaneId();
  const int tiles = TilesOf(x);
  const int row = first + min(lane / 4, count - 1);
  const int even = first + min(lane % 4 * 2, count - 1);
  const int odd = first + min(lane % 4 * 2 + 1, count - 1);
  const uint64_t* q = x.q + (block * tiles + row / 8) * 32 + row % 8 * 4 + lane % 4;
  const float* scale = x.scale + block * (8 * tiles);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    to.q[s] = *q;
    to.scale[s][0] = scale[even];
    to.scale[s][1] = scale[odd];
    q += 32 * tiles;
    scale += 8 * tiles;
  }
}

// Adds the products of one row of a group.
__device__ __forceinline__ void AddRow(const float (&product)[2], int row, int num_rows,
                                       float* sums) {
  if (LaneId() % 4 != 0 || row < 0 || row >= num_rows) return;
  float* to = sums + row * kSumStride + LaneId() / 4;
  to[0] += product[0];
  to[8] += product[1];
}

// One row tile for rows first_row .. of x: `sums` [rows][kSumStride] of the warp. What a unit reads
// is asked for one unit ahead, a group's place in `pairs` two.
template <DType kType, class Ring>
__device__ __forceinline__ void SumGroups(const DownKernelJob& job, Ring& ring, int block,
                                          int first_row, int num_rows, int num_groups,
                                          const LaneTables& tables, float* sums) {
  const Routing& routing = job.routing;
  const int shared_units = (num_rows + kGroupPairs - 1) / kGroupPairs;
  const int units = shared_units + num_groups;
  const int column = LaneId() % kGroupPairs;
  OwnRows<2, 2> next_pair_x = {};
  int count = 0, pair = 0, first = 0;
  int next_count = 0, next_pair = 0, next_first = 0;
  int far_first = num_groups > 0 ? routing.group_first[0] : 0;
  int far_count = num_groups > 0 ? routing.group_size[0] : 0;
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    const OwnRows<2, 2> pair_x = next_pair_x;
    count = next_count;
    pair = next_pair;
    first = next_first;
    const int next_group = unit + 1 - shared_units;
    if (next_group >= 0 && next_group < num_groups) {
      if (far_count <= 2) {
        next_pair_x.Load(job.hidden, {far_first, far_first + far_count - 1}, block, 1);
      }
      next_first = far_first;
      next_count = far_count;
      next_pair = routing.pairs[far_first + min(column, far_count - 1)];
      if (next_group + 1 < num_groups) {
        far_first = routing.group_first[next_group + 1];
        far_count = routing.group_size[next_group + 1];
      }
    }
    float total[4];
    if (unit < shared_units) {
      const int begin = unit * kGroupPairs;
      const auto load = [&](int, BlockX<2>& x) {
        LoadTogether(job.shared_hidden, block, first_row + begin,
                     min(kGroupPairs, num_rows - begin), x);
      };
      DotGroup<DType::kQ8_0>(ring, load, 1, tables, total);
      StoreSums(total, unit * kGroupPairs, sums);
      __syncwarp();
      continue;
    }
    const int row = pair / job.used - first_row;
    if (count == 1) {
      float product[1][2];
      DotOwn<kType>(ring, pair_x.First(), tables, product);
      AddRow(product[0], __shfl_sync(kFullMask, row, 0), num_rows, sums);
      __syncwarp();
      continue;
    }
    if (count == 2) {
      float product[2][2];
      DotOwn<kType>(ring, pair_x, tables, product);
      // One after the other: they may be the same row.
      AddRow(product[0], __shfl_sync(kFullMask, row, 0), num_rows, sums);
      AddRow(product[1], __shfl_sync(kFullMask, row, 1), num_rows, sums);
      __syncwarp();
      continue;
    }
    const auto load = [&](int, BlockX<2>& x) { LoadTogether(job.hidden, block, first, count, x); };
    DotGroup<kType>(ring, load, 1, tables, total);
    const bool mine = column < count && row >= 0 && row < num_rows;
    const int left = __shfl_sync(kFullMask, row, max(column - 1, 0));
    const bool twice = __ballot_sync(kFullMask, column > 0 && column < count && left == row) != 0;
    const int row_or_none = mine ? row : -1;
    const int x_row[2] = {__shfl_sync(kFullMask, row_or_none, LaneId() % 4 * 2),
                          __shfl_sync(kFullMask, row_or_none, LaneId() % 4 * 2 + 1)};
    AddSums(total, x_row, twice, sums);
  }
}

// Subtree roots of the block's row tiles from the sums of its warps, [rows][stride] each.
__device__ __forceinline__ void StoreRoots(const DownKernelJob& job, int first_tile, int first_row,
                                           int num_rows, const float* sums, int stride) {
  const int outputs = job.tiles * kTileRows;
  const int warp_sums = job.sum_rows * stride;
  for (int i = static_cast<int>(threadIdx.x); i < num_rows * outputs;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / outputs;
    const int tile = i % outputs / kTileRows;
    const int output = first_tile * kTileRows + i % outputs;
    if (output >= job.cols) continue;
    const float* lanes = sums + tile * job.lanes * warp_sums + row * stride + i % kTileRows;
    for (int s = 0; s < job.num_subtrees; ++s) {
      const float root =
          SubtreeSum(lanes + job.subtree_begin[s] * warp_sums, warp_sums, job.subtree_size[s]);
      job.roots[(int64_t{s} * job.rows + first_row + row) * job.cols + output] = root;
    }
  }
}

// kType: of the routed experts; the shared one has Q8_0.
template <DType kType, bool kOneRow>
__global__ void __launch_bounds__(kFastWarps* kWarpSize, kBlocksAnSm)
    FastDownKernel(const __grid_constant__ DownKernelJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  const LaneTables tables(memory);  // none of the types here looks anything up
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = warp % job.lanes;
  const int own_tile = warp / job.lanes;
  const int first_row = static_cast<int>(blockIdx.y) * job.sum_rows;
  const int num_rows = min(job.sum_rows, job.rows - first_row);
  const int shared_units = (num_rows + kGroupPairs - 1) / kGroupPairs;
  // Before the wait: see above. The acquire makes sure that nothing of an earlier layer's routing
  // is read from L1.
  const int num_groups = static_cast<int>(
      LoadAcquireSystem(reinterpret_cast<const uint32_t*>(job.routing.num_groups)));
  const int block = lane * (kColumnGrain / 32);
  float* sums = reinterpret_cast<float*>(memory);
  constexpr int kStride = kOneRow ? kTileRows : kSumStride;
  const int buffer = static_cast<int>(blockDim.x) / kWarpSize * job.sum_rows * kStride;

  int tile = static_cast<int>(blockIdx.x) * job.tiles;
  ExpertRing<kType, 1, kSlots<kOneRow>, FastSource> ring = {
      memory + job.fixed_bytes + warp * job.ring_bytes,
      FastSource{job, lane, shared_units, shared_units + num_groups, tile + own_tile}};
  ring.Begin();
  ring.EndBegin();
  int first = 0, size = 0;
  if (kOneRow && LaneId() < num_groups) {
    first = job.routing.group_first[LaneId()];
    size = job.routing.group_size[LaneId()];
  }
  GridDependencyWait();

  int turn = 0;
  for (; tile < job.shapes[0].row_tiles; tile += static_cast<int>(gridDim.x) * job.tiles) {
    float* own = sums + turn * buffer + warp * job.sum_rows * kStride;
    if (tile + own_tile < job.shapes[0].row_tiles) {
      if constexpr (kOneRow) {
        const float2 sum = SumRow<kType>(job, ring, block, num_groups, first, size, tables);
        if (LaneId() % 4 == 0) {
          own[LaneId() / 4] = sum.x;
          own[LaneId() / 4 + 8] = sum.y;
        }
      } else {
        SumGroups<kType>(job, ring, block, first_row, num_rows, num_groups, tables, own);
      }
    }
    __syncthreads();
    StoreRoots(job, tile, first_row, num_rows, sums + turn * buffer, kStride);
    if constexpr (kOneRow) {
      turn ^= 1;  // the next sums go to the other buffer
    } else {
      __syncthreads();
    }
  }
}

using DownKernel = void (*)(DownKernelJob);

template <DType kType>
DownKernel FastKernel(bool one_row) {
  return one_row ? FastDownKernel<kType, true> : FastDownKernel<kType, false>;
}
// nullptr: the combination has no kernel of its own. It may not depend on the number of rows: the
// two paths add in different orders.
DownKernel ChooseFast(const DownKernelJob& k, bool one_row) {
  if (k.shapes[1].dtype != DType::kQ8_0 || k.shapes[0].blocks != 1 || k.lanes > kFastWarps) {
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

void LaunchFast(const LaunchContext& launch, DownKernelJob& k, DownKernel kernel, bool one_row) {
  k.tiles = kFastWarps / k.lanes;
  const int warps = k.lanes * k.tiles;
  if (one_row) k.sum_rows = 1;
  const int row_floats = one_row ? 2 * kTileRows : kSumStride;
  const int sum_bytes = warps * k.sum_rows * row_floats * 4;
  k.fixed_bytes = (sum_bytes + kRingGrain - 1) / kRingGrain * kRingGrain;
  k.ring_bytes = (one_row ? kSlots<true> : kSlots<false>)*SlotBytesOf(k.shapes[0].dtype, 1);
  const int tile_sets = (k.shapes[0].row_tiles + k.tiles - 1) / k.tiles;
  const int shared = k.fixed_bytes + warps * k.ring_bytes;
  const int blocks = launch.num_sms * BlocksAnSm(shared);
  const dim3 grid(std::min(blocks, tile_sets), (k.rows + k.sum_rows - 1) / k.sum_rows);
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
    LaunchFast(launch, k, fast, rows == 1);
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
