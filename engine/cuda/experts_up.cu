// LaunchExpertsUp: gate and up products of the chosen experts and the shared one, SwiGLU, and the
// hidden rows in the forms that the down products read.
//
// One block an SM. A work item is 32 hidden rows (32 rows of gate, the same 32 of up) of one group of
// at most 8 rows of x. Warps 0-7 read gate, 8-15 up; within each, warp k takes slices k, k + 8, ... of
// 512 columns. The slices' sums meet in shared memory and are added in rising order. Which block
// takes which item changes no bits.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/experts_stream.cuh"

namespace ds4::cuda {
namespace {

constexpr int kSliceWarps = 8;
constexpr int kUpWarps = 2 * kSliceWarps;
constexpr int kUpThreads = kUpWarps * kWarpSize;
constexpr int kItemRows = 32;
constexpr int kItemTiles = kItemRows / kTileRows;
// Floats between the rows of x in the partial sums: keeps writes and reads free of bank conflicts.
constexpr int kPartialStride = 36;
constexpr int kPartialFloats = kGroupPairs * kPartialStride;

struct UpKernelJob {
  MatrixShape routed[2], shared[2];  // gate, up
  ActivationView x, out, shared_out;
  Routing routing;
  int used;
  int ffn;
  int lane_cols;
  float limit, shared_limit;
  int row_blocks;    // of kItemRows
  int num_slices;
  int shared_items;  // row_blocks * x tiles
  int shared_cost;   // of one item each, in any unit
  int routed_cost;
  int ring_bytes;    // of one warp
};

// The items of a block: every gridDim-th shared item, then a range of the routed ones, so that all
// blocks have about the same to do.
__device__ int SharedItemsOf(const UpKernelJob& job, int block) {
  const int grid = static_cast<int>(gridDim.x);
  return block < job.shared_items ? (job.shared_items - block - 1) / grid + 1 : 0;
}

// End of the routed items of blocks 0..block - 1. The first `heavy` blocks have one shared item more
// than the others, and so many routed items fewer.
__device__ int RoutedBegin(const UpKernelJob& job, int routed_items, int block) {
  const int grid = static_cast<int>(gridDim.x);
  if (block >= grid) return routed_items;
  const int heavy = job.shared_items % grid;
  const double ratio = static_cast<double>(job.shared_cost) / job.routed_cost;
  double light_share = (routed_items + heavy * ratio) / grid;
  double heavy_share = light_share - ratio;
  if (heavy_share < 0) {
    heavy_share = 0;
    light_share = static_cast<double>(routed_items) / (grid - heavy);
  }
  const double end = min(block, heavy) * heavy_share + max(block - heavy, 0) * light_share;
  return min(static_cast<int>(end), routed_items);
}

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

  // routed_begin: needed once the shared items are done.
  __device__ __forceinline__ void Next(int routed_begin) {
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
    expert = job.routing.group_expert[group];
    first = job.routing.group_first[group];
    count = job.routing.group_size[group];
  }
};

__device__ __forceinline__ int SliceBlocks(int slice, int blocks) {
  return min(kSliceBlocks, blocks - slice * kSliceBlocks);
}

// The chunks of one warp: for each item its slices, for each slice the item's row tiles.
struct UpSource {
  UpCursor cursor;
  int matrix;  // 0 gate, 1 up
  int first_slice;
  int end = 0;  // items known so far
  int routed_begin = 0;
  int slice;
  int tile = 0;
  int chunks_left = 0;
  const std::byte* chunk = nullptr;
  int bytes = 0;

  __device__ UpSource(const UpCursor& start, int which, int first)
      : cursor(start), matrix(which), first_slice(first), slice(start.job.num_slices) {}

  __device__ __forceinline__ bool Peek(const std::byte*& at, int& size) {
    while (chunks_left == 0) {
      if (!OpenSlice()) return false;
    }
    at = chunk;
    size = bytes;
    return true;
  }
  __device__ __forceinline__ void Advance() {
    chunk += bytes;
    --chunks_left;
  }

 private:
  // The chunks of the next slice of a row tile; false when the items end.
  __device__ __forceinline__ bool OpenSlice() {
    const UpKernelJob& job = cursor.job;
    if (slice >= job.num_slices) {
      if (cursor.index + 1 >= end || first_slice >= job.num_slices) return false;
      cursor.Next(routed_begin);
      slice = first_slice;
    }
    const MatrixShape& w = cursor.shared ? job.shared[matrix] : job.routed[matrix];
    const int row_tile = cursor.row_block * kItemTiles + tile;
    if (row_tile < w.row_tiles) {
      bytes = w.chunk_bytes;
      chunks_left = SliceBlocks(slice, w.blocks) * w.chunks_per_block;
      chunk = w.data + cursor.expert * w.matrix_bytes + row_tile * w.tile_bytes +
              slice * (kSliceBlocks * w.chunks_per_block * w.chunk_bytes);
    }
    if (++tile == kItemTiles) {
      tile = 0;
      slice += kSliceWarps;
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

// One warp's products for one item, into partial[matrix][slice][x row][hidden row].
template <bool kFloats, class Stream>
__device__ __forceinline__ void MultiplyItem(const UpKernelJob& job, const UpCursor& item,
                                             Stream& stream, int* x_rows, const uint32_t* grid,
                                             float* partial) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = LaneId();
  const int matrix = warp / kSliceWarps;
  const MatrixShape& w = item.shared ? job.shared[matrix] : job.routed[matrix];
  if (item.new_rows) {
    __syncwarp();  // nobody reads the last item's rows any more
    if (lane < kGroupPairs) {
      const int place = item.first + min(lane, item.count - 1);
      x_rows[lane] = item.shared ? place : job.routing.pairs[place] / job.used;
    }
    __syncwarp();
  }
  const GroupX x(job.x, x_rows);
  for (int slice = warp % kSliceWarps; slice < job.num_slices; slice += kSliceWarps) {
    float* sums = partial + (matrix * job.num_slices + slice) * kPartialFloats;
    for (int tile = 0; tile < kItemTiles; ++tile) {
      if (item.row_block * kItemTiles + tile >= w.row_tiles) break;
      float acc[1][4];
      DotSliceOf<kFloats>(w, stream, x, slice * kSliceCols, SliceBlocks(slice, w.blocks),
                          item.count, grid, acc);
      float* to = sums + lane % 4 * 2 * kPartialStride + tile * kTileRows + lane / 4;
      to[0] = acc[0][0];
      to[kPartialStride] = acc[0][1];
      to[8] = acc[0][2];
      to[kPartialStride + 8] = acc[0][3];
    }
  }
}

// A NaN goes through the clamps: it must show, not become the limit.
__device__ __forceinline__ float SwiGlu(float gate, float up, float limit, float weight) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g / (1.0f + expf(-g)) * u * weight;
}

// One warp ends x row j of an item: lane r has hidden row r of the 32.
__device__ __forceinline__ void FinishRow(const UpKernelJob& job, const UpCursor& item, int j,
                                          const float* partial) {
  const int lane = LaneId();
  const float* sums = partial + j * kPartialStride + lane;
  float gate = 0.0f, up = 0.0f;
  for (int slice = 0; slice < job.num_slices; ++slice) {
    gate += sums[slice * kPartialFloats];
    up += sums[(job.num_slices + slice) * kPartialFloats];
  }
  const int row = item.first + j;
  const float weight = item.shared ? 1.0f : job.routing.weights[job.routing.pairs[row]];
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
  const int warp = static_cast<int>(blockIdx.x) * kUpWarps +
                   static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(gridDim.x) * kUpWarps;
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

// kFloats: some weights are of a float type.
template <bool kFloats>
__global__ void __launch_bounds__(kUpThreads, 1)
    ExpertsUpKernel(const __grid_constant__ UpKernelJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int block = static_cast<int>(blockIdx.x);
  uint32_t* grid = reinterpret_cast<uint32_t*>(memory);
  int* x_rows = reinterpret_cast<int*>(memory + kIq2GridBytes) + warp * kGroupPairs;
  std::byte* ring = memory + kIq2GridBytes + kUpWarps * kGroupPairs * 4;
  float* partial = reinterpret_cast<float*>(ring + kUpWarps * job.ring_bytes);
  const int partial_floats = 2 * job.num_slices * kPartialFloats;

  const int num_shared = SharedItemsOf(job, block);
  UpCursor item(job, num_shared);
  MixedStream<UpSource> stream = {ring + warp * job.ring_bytes, job.ring_bytes,
                                  UpSource(item, warp / kSliceWarps, warp % kSliceWarps)};
  stream.source.end = num_shared;
  stream.Fill();
  PrefetchShared(job.shared[0]);
  PrefetchShared(job.shared[1]);
  LoadIq2Grid(grid);
  GridDependencyWait();
  const int routed_items = *job.routing.num_groups * job.row_blocks;
  const int routed_begin = RoutedBegin(job, routed_items, block);
  const int num_items = num_shared + RoutedBegin(job, routed_items, block + 1) - routed_begin;
  stream.source.routed_begin = routed_begin;
  stream.source.end = num_items;
  stream.Fill();
  __syncthreads();

  for (int i = 0; i < num_items; ++i) {
    item.Next(routed_begin);
    float* sums = partial + i % 2 * partial_floats;
    MultiplyItem<kFloats>(job, item, stream, x_rows, grid, sums);
    // One barrier an item is enough: the next item's sums go to the other half.
    __syncthreads();
    const int j = (warp + i) % kUpWarps;
    if (j < item.count) FinishRow(job, item, j, sums);
  }
  ClearPadding(job, job.out);
  ClearPadding(job, job.shared_out);
}

// About the time of 16 rows x 256 columns on one SM, in ten cycles: what memory gives an SM, or for
// formats that are longer to decode, that. The shared expert's weights come from L2.
int BlockCost(DType dtype, bool from_l2) {
  if (dtype == DType::kIQ2_XXS) return 12;
  if (dtype == DType::kQ2_K) return 9;
  const int bytes = ChunkBytes(dtype) * kColumnGrain / ChunkCols(dtype);
  return std::max(9, bytes / (from_l2 ? 350 : 200));
}

void CheckUp(const ExpertsUp& job, const UpKernelJob& k) {
  for (const PackedMatrix* w : {&job.gate, &job.up, &job.shared_gate, &job.shared_up}) {
    CHECK(IsDeviceMatrixType(w->dtype) && w->rows == job.gate.rows && w->cols == job.gate.cols)
        << "gate and up of experts are [" << job.gate.rows << ", " << job.gate.cols << "], one is ["
        << w->rows << ", " << w->cols << "]";
    CHECK(IsFloatType(w->dtype) ? job.x.f32 != nullptr : job.x.q != nullptr)
        << "x lacks the form that weights of " << Info(w->dtype).name << " read";
  }
  CHECK(job.x.cols == job.gate.padded_cols()) << job.x.cols << " columns of x, the weights have "
                                              << job.gate.padded_cols();
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
  k.routed[0] = ShapeOf(job.gate);
  k.routed[1] = ShapeOf(job.up);
  k.shared[0] = ShapeOf(job.shared_gate);
  k.shared[1] = ShapeOf(job.shared_up);
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
  k.num_slices = (k.routed[0].blocks + kSliceBlocks - 1) / kSliceBlocks;
  k.shared_items = k.row_blocks * job.x.tiles();
  k.shared_cost = BlockCost(job.shared_gate.dtype, true) + BlockCost(job.shared_up.dtype, true);
  k.routed_cost = BlockCost(job.gate.dtype, false) + BlockCost(job.up.dtype, false);

  const int fixed_bytes = kIq2GridBytes + kUpWarps * kGroupPairs * 4;
  const int partial_bytes = 2 * 2 * k.num_slices * kPartialFloats * 4;
  k.ring_bytes = (kMaxSharedBytes - fixed_bytes - partial_bytes) / kUpWarps / kRingGrain * kRingGrain;
  CHECK(k.ring_bytes >= kMinRingBytes) << "rows of " << job.x.cols << " columns are too long";
  const int shared_bytes = fixed_bytes + kUpWarps * k.ring_bytes + partial_bytes;
  bool floats = false;
  for (int i = 0; i < 2; ++i) {
    floats = floats || IsFloatType(k.routed[i].dtype) || IsFloatType(k.shared[i].dtype);
  }
  Launch(launch, dim3(launch.num_sms), dim3(kUpThreads), shared_bytes,
         floats ? ExpertsUpKernel<true> : ExpertsUpKernel<false>, k);
}

}  // namespace ds4::cuda
