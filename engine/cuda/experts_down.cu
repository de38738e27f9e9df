// LaunchExpertsDown: products of the hidden rows with the down matrices, added up per lane in the
// one order (shared expert, then rising expert id), then the lanes' subtree roots.
//
// A block has kDownTiles row tiles of 16 outputs; a warp has one lane and one of these tiles. It
// streams the shared expert's weights, then those of every group of routed pairs: the groups stand by
// rising expert, so each row meets its experts in the right order. Sums of (lane, row, output) stay in
// shared memory, which holds kDownRows rows; more rows are more blocks.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/comm/lane_tree.h"
#include "engine/cuda/experts_stream.cuh"

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
  MatrixShape routed, shared;
  ActivationView hidden, shared_hidden;
  Routing routing;
  int used;
  int rows;
  int cols;       // outputs, D
  int lanes;
  int tiles;      // row tiles of a block
  int sum_rows;   // rows of a block, a multiple of 8
  int ring_bytes; // of one warp
  float* roots;
  int num_subtrees;
  int subtree_begin[kMaxSubtrees];  // first lane, of this rank's
  int subtree_size[kMaxSubtrees];
};

// What a warp multiplies in turn: the shared expert for each 8 rows, then the groups.
struct DownSource {
  const DownKernelJob& job;
  int lane;      // of the model's lanes
  int row_tile;  // -1: this warp has none
  int shared_units;
  int units;  // known so far
  int unit = 0;
  int chunks_left = 0;
  int next_expert = 0;
  const std::byte* chunk = nullptr;
  int bytes = 0;

  __device__ __forceinline__ bool Peek(const std::byte*& at, int& size) {
    if (chunks_left == 0) {
      if (unit >= units || row_tile < 0) return false;
      OpenUnit();
    }
    at = chunk;
    size = bytes;
    return true;
  }
  __device__ __forceinline__ void Advance() {
    chunk += bytes;
    --chunks_left;
  }
  // The groups are known now.
  __device__ __forceinline__ void AddGroups(int num_groups) {
    units = shared_units + num_groups;
    if (num_groups > 0) next_expert = job.routing.group_expert[0];
  }

 private:
  __device__ __forceinline__ void OpenUnit() {
    const bool shared = unit < shared_units;
    const MatrixShape& w = shared ? job.shared : job.routed;
    const int64_t matrix = shared ? lane : int64_t{next_expert} * job.lanes + lane;
    bytes = w.chunk_bytes;
    chunks_left = w.blocks * w.chunks_per_block;
    chunk = w.data + matrix * w.matrix_bytes + row_tile * w.tile_bytes;
    ++unit;
    // Loaded one unit ahead of its use.
    if (unit > shared_units && unit < units) {
      next_expert = job.routing.group_expert[unit - shared_units];
    }
  }
};

// The whole product of one unit: slices of the lane's columns added in rising order.
template <bool kFloats, class Stream>
__device__ __forceinline__ void MultiplyUnit(const MatrixShape& w, Stream& stream,
                                             const ActivationView& hidden, int64_t lane_col,
                                             const int* x_rows, int count, const uint32_t* grid,
                                             float (&total)[4]) {
  const GroupX x(hidden, x_rows);
  for (int block = 0; block < w.blocks; block += kSliceBlocks) {
    float acc[1][4];
    DotSliceOf<kFloats>(w, stream, x, lane_col + block * kColumnGrain,
                        min(kSliceBlocks, w.blocks - block), count, grid, acc);
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

// Adds column j of the group to the sums of row x_row[j] (-1: not of this block). A table of ids may
// name an expert twice for one row; `twice` then adds column after column.
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

template <bool kFloats>
__global__ void __launch_bounds__(kMaxDownWarps* kWarpSize, 1)
    ExpertsDownKernel(const __grid_constant__ DownKernelJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpSize;
  const int lane = LaneId();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  uint32_t* grid = reinterpret_cast<uint32_t*>(memory);
  int* x_rows = reinterpret_cast<int*>(memory + kIq2GridBytes) + warp * kGroupPairs;
  std::byte* ring = memory + kIq2GridBytes + num_warps * kGroupPairs * 4;
  float* sums = reinterpret_cast<float*>(ring + num_warps * job.ring_bytes);
  const int warp_sums = job.sum_rows * kSumStride;

  const int model_lane = warp % job.lanes;
  const int row_tile = static_cast<int>(blockIdx.x) * job.tiles + warp / job.lanes;
  const bool busy = row_tile < job.routed.row_tiles;
  const int first_row = static_cast<int>(blockIdx.y) * job.sum_rows;
  const int num_rows = min(job.sum_rows, job.rows - first_row);
  const int shared_units = (num_rows + kGroupPairs - 1) / kGroupPairs;

  MixedStream<DownSource> stream = {
      ring + warp * job.ring_bytes, job.ring_bytes,
      DownSource{job, model_lane, busy ? row_tile : -1, shared_units, shared_units}};
  stream.Fill();
  LoadIq2Grid(grid);
  GridDependencyWait();
  const int num_groups = *job.routing.num_groups;
  stream.source.AddGroups(num_groups);
  stream.Fill();
  __syncthreads();  // the grid is there

  float* own = sums + warp * warp_sums;
  if (busy) {
    float total[4];
    const int64_t shared_col = int64_t{model_lane} * job.shared.blocks * kColumnGrain;
    for (int unit = 0; unit < shared_units; ++unit) {
      const int begin = unit * kGroupPairs;
      const int count = min(kGroupPairs, num_rows - begin);
      __syncwarp();
      if (lane < kGroupPairs) x_rows[lane] = first_row + begin + min(lane, count - 1);
      __syncwarp();
      MultiplyUnit<kFloats>(job.shared, stream, job.shared_hidden, shared_col, x_rows, count, grid,
                            total);
      StoreSums(total, begin, own);
    }
    __syncwarp();
    const int64_t col = int64_t{model_lane} * job.routed.blocks * kColumnGrain;
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
      const int model_row = this_pair / job.used - first_row;
      const bool mine = column < this_count && model_row >= 0 && model_row < num_rows;
      const int left = __shfl_sync(kFullMask, model_row, max(column - 1, 0));
      const bool twice =
          __ballot_sync(kFullMask, column > 0 && column < this_count && left == model_row) != 0;
      const int row_or_none = mine ? model_row : -1;
      const int x_row[2] = {__shfl_sync(kFullMask, row_or_none, lane % 4 * 2),
                            __shfl_sync(kFullMask, row_or_none, lane % 4 * 2 + 1)};
      __syncwarp();
      if (lane < kGroupPairs) x_rows[lane] = this_first + min(lane, this_count - 1);
      __syncwarp();
      MultiplyUnit<kFloats>(job.routed, stream, job.hidden, col, x_rows, this_count, grid, total);
      AddSums(total, x_row, twice, own);
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
      const float root = SubtreeSum(lanes + job.subtree_begin[s] * warp_sums, warp_sums,
                                    job.subtree_size[s]);
      job.roots[(int64_t{s} * job.rows + first_row + row) * job.cols + output] = root;
    }
  }
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
  k.routed = ShapeOf(job.down);
  k.shared = ShapeOf(job.shared_down);
  k.hidden = job.hidden;
  k.shared_hidden = job.shared_hidden;
  k.routing = routing;
  k.used = used;
  k.rows = rows;
  k.cols = static_cast<int>(job.down.rows);
  k.lanes = job.lanes;
  k.tiles = job.lanes > kMaxDownLanes / 2 ? 1 : 2;
  k.sum_rows = std::min(kDownRows, (rows + kGroupPairs - 1) / kGroupPairs * kGroupPairs);
  k.roots = job.roots;
  const std::vector<LaneSubtree> subtrees =
      SubtreesOf(job.lane_begin, job.lane_begin + job.lanes);
  CHECK(subtrees.size() <= kMaxSubtrees) << subtrees.size() << " subtrees";
  k.num_subtrees = static_cast<int>(subtrees.size());
  for (int i = 0; i < k.num_subtrees; ++i) {
    k.subtree_begin[i] = subtrees[i].begin - job.lane_begin;
    k.subtree_size[i] = subtrees[i].size;
  }

  const int warps = k.lanes * k.tiles;
  const int fixed_bytes = kIq2GridBytes + warps * kGroupPairs * 4;
  const int sum_bytes = warps * k.sum_rows * kSumStride * 4;
  const int ring = (kMaxSharedBytes - fixed_bytes - sum_bytes) / warps / kRingGrain * kRingGrain;
  k.ring_bytes = std::min(kMaxDownRing, ring);
  CHECK(k.ring_bytes >= kMinRingBytes) << k.ring_bytes << " bytes of ring for " << warps << " warps";
  const dim3 grid((k.routed.row_tiles + k.tiles - 1) / k.tiles,
                  (rows + k.sum_rows - 1) / k.sum_rows);
  const int shared_bytes = fixed_bytes + warps * k.ring_bytes + sum_bytes;
  const bool floats = IsFloatType(job.down.dtype) || IsFloatType(job.shared_down.dtype);
  Launch(launch, grid, dim3(warps * kWarpSize), shared_bytes,
         floats ? ExpertsDownKernel<true> : ExpertsDownKernel<false>, k);
}

}  // namespace ds4::cuda
