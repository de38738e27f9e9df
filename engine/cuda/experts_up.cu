// LaunchExpertsUp: gate and up products of the chosen experts and the shared one, SwiGLU, and the
// hidden rows in the forms that the down products read.
//
// One or two blocks an SM. A work item is 32 hidden rows (32 rows of gate, the same 32 of up) of
// one group of at most 8 rows of x. Warp k of eight takes slices k, k + 8, ... of 512 columns. The
// slices' sums meet in shared memory and are added in rising order. Which block takes which item
// changes no bits.
//
// Two forms of it. Routed experts in the formats of kFastTypes beside a shared one in Q8_0 have
// kernels of their own (experts_ring.cuh); all other combinations share one whose warps 0-7 read
// gate, 8-15 up.
//
// Every block calls LaunchDependents only when its own wait is over: once the next kernel
// (ExpertsDown) runs, the routing is there, and it may read it before it waits for this one.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/experts_ring.cuh"

namespace ds4::cuda {
namespace {

constexpr int kSliceWarps = 8;
constexpr int kUpWarps = 2 * kSliceWarps;
constexpr int kUpThreads = kUpWarps * kWarpSize;
constexpr int kItemRows = 32;
constexpr int kItemTiles = kItemRows / kTileRows;
// Floats between the rows of x in the partial sums: no more than two lanes of a write meet in a
// bank, and tables, sums and rings of all formats have room for rows of 4096 columns.
constexpr int kPartialStride = 34;
constexpr int kPartialFloats = kGroupPairs * kPartialStride;

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
  float heavy_items;  // blocks with one shared item more than the others
  float grid_inverse;
  float light_inverse;  // of the number of other blocks
  int partials;         // buffers of partial sums, 1 or 2
  int table_bytes;      // of IQ2_XXS, or 0
  int fixed_bytes;      // shared memory before the rings
  int ring_bytes;       // of one warp
};

// The items of a block: every gridDim-th shared item, then a range of the routed ones, so that all
// blocks have about the same to do.
__device__ int SharedItemsOf(const UpKernelJob& job, int block) {
  const int grid = static_cast<int>(gridDim.x);
  return block < job.shared_items ? (job.shared_items - block - 1) / grid + 1 : 0;
}

// End of the routed items of blocks 0..block - 1. The first `heavy` blocks have one shared item
// more than the others, and so many routed items fewer.
__device__ int RoutedBegin(const UpKernelJob& job, int routed_items, int block) {
  const int grid = static_cast<int>(gridDim.x);
  if (block >= grid) return routed_items;
  const float routed = static_cast<float>(routed_items);
  float light_share = fmaf(job.heavy_items, job.item_ratio, routed) * job.grid_inverse;
  float heavy_share = light_share - job.item_ratio;
  if (heavy_share < 0.0f) {
    heavy_share = 0.0f;
    light_share = routed * job.light_inverse;
  }
  const int heavy = static_cast<int>(job.heavy_items);
  // Never falls from one block to the next; what should be whole must not end just below.
  const float end = static_cast<float>(min(block, heavy)) * heavy_share +
                    static_cast<float>(max(block - heavy, 0)) * light_share + 0.01f;
  return min(static_cast<int>(end), routed_items);
}

// What this warp reads: gate (0) or up (1), from which slice on.
__device__ __forceinline__ int OwnMatrix() {
  return static_cast<int>(threadIdx.x) / (kSliceWarps * kWarpSize);
}
__device__ __forceinline__ int OwnSlice() {
  return static_cast<int>(threadIdx.x) / kWarpSize % kSliceWarps;
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

// Steps through the items of this block; the same for all of its threads.
struct UpCursor {
  const UpKernelJob& job;
  int num_shared;
  int index = -1;
  int row_block = 0;
  int group = 0;
  bool shared = true;
  bool new_rows = true;  // other rows of x than the last item
  int expert = 0;
  int first = 0;  // first place in `pairs`, or first row of x
  int count = 0;  // 1..8

  __device__ UpCursor(const UpKernelJob& j, int shared_items) : job(j), num_shared(shared_items) {}

  // routed_begin, groups: needed once the shared items are done.
  __device__ __forceinline__ void Next(int routed_begin, const FirstGroups& groups) {
    ++index;
    new_rows = true;
    if (index < num_shared) {
      const int item = static_cast<int>(blockIdx.x) + index * static_cast<int>(gridDim.x);
      const int x_tiles = TilesOf(job.x);
      row_block = item / x_tiles;
      first = item % x_tiles * kGroupPairs;
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
      expert = job.routing.group_expert[group];
      first = job.routing.group_first[group];
      count = job.routing.group_size[group];
    }
  }
};

__device__ __forceinline__ int SliceBlocks(int slice, int blocks) {
  return min(kSliceBlocks, blocks - slice * kSliceBlocks);
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

// Asks for this block's part of the shared expert's weights: they do not depend on the routing.
__device__ void PrefetchShared(const MatrixShape& w) {
  constexpr int kPiece = 4096;
  const int64_t pieces = w.matrix_bytes / kPiece;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x; i < pieces;
       i += threads) {
    PrefetchL2(w.data + i * kPiece, kPiece);
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

// A NaN goes through the clamps: it must show, not become the limit.
__device__ __forceinline__ float SwiGlu(float gate, float up, float limit, float weight) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g / (1.0f + expf(-g)) * u * weight;
}

// One warp ends x row j of an item: lane r has hidden row r of the 32. When x has one row only, all
// pairs have the sums of that one.
template <int kCols>
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
  if (job.lane_cols % kItemRows == 0) {
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
__device__ void ClearPadding(const UpKernelJob& job, const ActivationView& out) {
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

template <bool kFloats>
__global__ void __launch_bounds__(kUpThreads, 1)
    ExpertsUpKernel(const __grid_constant__ UpKernelJob job) {
  DS4_DYNAMIC_SHARED(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int block = static_cast<int>(blockIdx.x);
  const LaneTables tables(memory);
  float* partial = reinterpret_cast<float*>(memory + job.table_bytes);
  const int partial_floats = 2 * job.num_slices * kPartialFloats;
  int* x_rows =
      reinterpret_cast<int*>(partial + job.partials * partial_floats) + warp * kGroupPairs;
  std::byte* rings = memory + job.fixed_bytes;

  const int num_shared = SharedItemsOf(job, block);
  UpCursor item(job, num_shared);
  MixedStream<UpSource> stream = {rings + warp * job.ring_bytes, job.ring_bytes, UpSource(item)};
  stream.source.end = num_shared;
  stream.Fill();
  PrefetchShared(job.shapes[1][0]);
  PrefetchShared(job.shapes[1][1]);
  if (job.table_bytes != 0) LoadIq2Tables(reinterpret_cast<uint32_t*>(memory));
  GridDependencyWait();
  LaunchDependents();  // not earlier: see above
  FirstGroups groups;
  groups.Load(job);
  const int routed_items = *job.routing.num_groups * job.row_blocks;
  const int routed_begin = RoutedBegin(job, routed_items, block);
  const int num_items = num_shared + RoutedBegin(job, routed_items, block + 1) - routed_begin;
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
    if (j < item.count) FinishRow<2>(job, item, j, weight, sums);
    // With two buffers the next item's sums go to the other one.
    if (job.partials == 1) __syncthreads();
  }
  ClearPadding(job, job.out);
  ClearPadding(job, job.shared_out);
}

// ---- The fast path.

constexpr int kFastThreads = kSliceWarps * kWarpSize;

// The parts of one warp: for each item its slices, for each slice gate and up of both row tiles. It
// knows the item in hand and the one after it. That is enough: an item has no fewer stages than the
// ring has slots, so that the ring is never more than one item ahead of the reader.
struct FastSource {
  const UpKernelJob& job;
  const std::byte* gate = nullptr;  // of the slice in hand; up lies equally far in its matrices
  const std::byte* next_gate = nullptr;
  int slice = 1 << 20;
  int unit = 4;  // of the slice: row tile, then gate or up
  bool shared = false;
  bool next_shared = false;
  bool has_next = false;

  __device__ __forceinline__ void SetNext(const UpCursor& item) {
    next_shared = item.shared;
    has_next = OwnSlice() < job.num_slices;
    const MatrixShape& w = job.shapes[item.shared ? 1 : 0][0];
    next_gate = w.data + item.expert * w.matrix_bytes +
                int64_t{item.row_block} * (kItemTiles * w.tile_bytes) +
                OwnSlice() * (kSliceBlocks * w.chunk_bytes);
  }
  __device__ __forceinline__ bool Next(SlicePart& part) {
    const MatrixShape& now = job.shapes[shared ? 1 : 0][0];
    if (unit == 2 * kItemTiles) {
      if (slice + kSliceWarps < job.num_slices) {
        slice += kSliceWarps;
        gate += kSliceWarps * kSliceBlocks * now.chunk_bytes;
      } else {
        if (!has_next) return false;
        has_next = false;
        gate = next_gate;
        shared = next_shared;
        slice = OwnSlice();
      }
      unit = 0;
    }
    const MatrixShape& w = job.shapes[shared ? 1 : 0][0];
    part.at = gate + (unit < 2 ? 0 : w.tile_bytes);
    if (unit % 2 != 0) part.at += job.up_offset[shared ? 1 : 0];
    part.columns = SliceBlocks(slice, w.blocks);
    part.shared = shared;
    ++unit;
    return true;
  }
};

// A routed item whose warps write the sums of at most two rows.
__device__ __forceinline__ bool IsFew(const UpCursor& item) {
  return !item.shared && item.count <= 2;
}

// One warp's products for one item with at most kRows rows of x, given by number. x: of the warp's
// slice, where it has no other; `load` it first. kOneRow: of all items; only then may the item be
// the shared expert's.
template <DType kType, bool kOneRow, int kRows, class Ring>
__device__ __forceinline__ void MultiplyRows(const UpKernelJob& job, const UpCursor& item,
                                             Ring& ring, const int (&rows)[kRows], bool load,
                                             RowsX<kRows>& x, const LaneTables& tables,
                                             float* partial) {
  constexpr int kSliceFloats = kOneRow ? kPartialStride : kPartialFloats;
  const int lane = LaneId();
  for (int slice = OwnSlice(); slice < job.num_slices; slice += kSliceWarps) {
    const int columns = SliceBlocks(slice, job.shapes[0][0].blocks);
    if (load || job.num_slices > kSliceWarps) {
      OwnRows<kRows, 4> own;
      own.Load(job.x, rows, slice * (kSliceCols / 32), columns);
      own.SpreadTo(x);
    }
#pragma unroll 1
    for (int unit = 0; unit < 2 * kItemTiles; ++unit) {
      float sum[kRows][2];
      if (kOneRow && item.shared) {
        DotPart<DType::kQ8_0>(ring, x, columns, tables, sum);
      } else {
        DotPart<kType>(ring, x, columns, tables, sum);
      }
      float* to = partial + (unit % 2 * job.num_slices + slice) * kSliceFloats +
                  unit / 2 * kTileRows + lane / 4;
      if (lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          to[r * kPartialStride] = sum[r][0];
          to[r * kPartialStride + 8] = sum[r][1];
        }
      }
    }
  }
}

// The same for more rows, or the shared expert's.
template <DType kType, class Ring>
__device__ __forceinline__ void MultiplyGroup(const UpKernelJob& job, const UpCursor& item,
                                              Ring& ring, const int* x_rows,
                                              const LaneTables& tables, float* partial) {
  const GroupX rows(job.x, x_rows);
  for (int slice = OwnSlice(); slice < job.num_slices; slice += kSliceWarps) {
    const int columns = SliceBlocks(slice, job.shapes[0][0].blocks);
    const int first = slice * (kSliceCols / 32);
    const auto load = [&](int block, BlockX<2>& x) {
      rows.Load(first + block * (kColumnGrain / 32), x);
    };
#pragma unroll 1
    for (int unit = 0; unit < 2 * kItemTiles; ++unit) {
      float total[4];
      if (item.shared) {
        DotGroup<DType::kQ8_0>(ring, load, columns, tables, total);
      } else {
        DotGroup<kType>(ring, load, columns, tables, total);
      }
      StorePartial(total, unit / 2, partial + (unit % 2 * job.num_slices + slice) * kPartialFloats);
    }
  }
}

// kType: of the routed experts; the shared one has Q8_0. kOneRow: x has one row only.
template <DType kType, bool kOneRow>
__global__ void __launch_bounds__(kFastThreads, kBlocksAnSm)
    FastUpKernel(const __grid_constant__ UpKernelJob job) {
  DS4_DYNAMIC_SHARED(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int block = static_cast<int>(blockIdx.x);
  constexpr int kCols = kOneRow ? 1 : 2;
  const LaneTables tables(memory);
  float* partial = reinterpret_cast<float*>(memory + job.table_bytes);
  const int partial_floats = 2 * job.num_slices * (kOneRow ? kPartialStride : kPartialFloats);
  [[maybe_unused]] int* x_rows =
      reinterpret_cast<int*>(partial + job.partials * partial_floats) + warp * kGroupPairs;

  const int num_shared = SharedItemsOf(job, block);
  UpCursor next(job, num_shared);
  FirstGroups groups;
  ExpertRing<kType, kSliceBlocks, kRingSlots, FastSource> ring = {
      memory + job.fixed_bytes + warp * job.ring_bytes, FastSource{job}};
  if (num_shared > 0) {
    next.Next(0, groups);
    ring.source.SetNext(next);
    ring.Begin();
  }
  PrefetchShared(job.shapes[1][0]);
  PrefetchShared(job.shapes[1][1]);
  if constexpr (kType == DType::kIQ2_XXS) LoadIq2Tables(reinterpret_cast<uint32_t*>(memory));
  GridDependencyWait();
  LaunchDependents();  // not earlier: see above
  groups.Load(job);
  [[maybe_unused]] OwnRows<1, 4> own;
  if constexpr (kOneRow) {
    // Asked for before anything waits for the routing.
    const int slice = min(warp, job.num_slices - 1);
    own.Load(job.x, {0}, slice * (kSliceCols / 32), SliceBlocks(slice, job.shapes[0][0].blocks));
  }
  const int routed_items = *job.routing.num_groups * job.row_blocks;
  const int routed_begin = RoutedBegin(job, routed_items, block);
  const int num_items = num_shared + RoutedBegin(job, routed_items, block + 1) - routed_begin;
  if (num_shared == 0 && num_items > 0) {
    next.Next(routed_begin, groups);
    ring.source.SetNext(next);
    ring.Begin();
  }
  ring.EndBegin();

  [[maybe_unused]] RowsX<1> row = {};
  if constexpr (kOneRow) own.SpreadTo(row);
  __syncthreads();  // the tables are there
  float weight = 0.0f;
  for (int index = 0; index < num_items; ++index) {
    const UpCursor item = next;
    if (index + 1 < num_items) {
      next.Next(routed_begin, groups);
      ring.source.SetNext(next);
    }
    // Items of one or two rows leave so much of a buffer empty that they take turns within it.
    const bool few = !kOneRow && IsFew(item);
    const bool next_few = !kOneRow && (index + 1 >= num_items || IsFew(next));
    float* sums = partial + index % job.partials * partial_floats +
                  (few ? index % 2 * (2 * kPartialStride) : 0);
    if constexpr (kOneRow) {
      const int place = item.first + min(LaneId(), item.count - 1);
      weight = item.shared ? 1.0f : job.routing.place_weight[place];
      MultiplyRows<kType, true>(job, item, ring, {0}, false, row, tables, sums);
    } else {
      if (item.new_rows) LoadRows(job, item, x_rows, weight);
      if (item.shared || item.count > 2) {
        MultiplyGroup<kType>(job, item, ring, x_rows, tables, sums);
      } else if (item.count == 2) {
        RowsX<2> pair = {};
        MultiplyRows<kType, false>(job, item, ring, {x_rows[0], x_rows[1]}, true, pair, tables,
                                   sums);
      } else {
        RowsX<1> single = {};
        MultiplyRows<kType, false>(job, item, ring, {x_rows[0]}, true, single, tables, sums);
      }
    }
    __syncthreads();
    const int j = (warp + index) % kSliceWarps;
    if (j < item.count) FinishRow<kCols>(job, item, j, weight, sums);
    // With two buffers the next item's sums go to the other one.
    if (job.partials == 1 && !(few && next_few)) __syncthreads();
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

// Cuts the shared memory of a fast kernel: tables, partial sums, rows of x, rings.
void PlanFast(UpKernelJob& k, bool one_row) {
  const DType type = k.shapes[0][0].dtype;
  k.table_bytes = type == DType::kIQ2_XXS ? kIq2TableBytes : 0;
  k.ring_bytes = kRingSlots * SlotBytesOf(type, kSliceBlocks);
  const int buffer = 2 * k.num_slices * (one_row ? kPartialStride : kPartialFloats) * 4;
  for (const int limit : {kHalfSharedBytes, kMaxSharedBytes}) {
    for (k.partials = 2; k.partials >= 1; --k.partials) {
      k.fixed_bytes = k.table_bytes + k.partials * buffer + kSliceWarps * kGroupPairs * 4;
      if (k.fixed_bytes + kSliceWarps * k.ring_bytes <= limit) return;
    }
  }
  CHECK(false) << "rows of " << k.num_slices << " slices have no room in shared memory";
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
void PlanShares(UpKernelJob& k, int blocks) {
  const int heavy = k.shared_items % blocks;
  k.heavy_items = static_cast<float>(heavy);
  k.grid_inverse = 1.0f / static_cast<float>(blocks);
  k.light_inverse = 1.0f / static_cast<float>(blocks - heavy);
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
    PlanFast(k, one_row);
    const int shared = k.fixed_bytes + kSliceWarps * k.ring_bytes;
    const int blocks = launch.num_sms * BlocksAnSm(shared);
    PlanShares(k, blocks);
    Launch(launch, dim3(blocks), dim3(kFastThreads), shared, fast, k);
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
