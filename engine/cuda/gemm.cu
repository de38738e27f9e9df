// Products of many rows: tiles of 256 weight rows x 128 x rows by eight warps, each 64 x 64.
//
// A stage is 64 columns of K. x rows of four stages lie in shared memory, weights of four fetches
// (raw packed bytes, 128 columns each, 64 for 16-bit types); both come by asynchronous copies three
// stages ahead. Weights become bf16 fragments in registers one step (32 columns) before their
// use, a tile of 16 rows between every sixteen matrix instructions, so that the tensor cores do not
// wait for the arithmetic of the formats.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/gemm.cuh"
#include "engine/cuda/gemm.h"
#include "engine/cuda/gemm_formats.cuh"
#include "engine/tensor/iq2_xxs_grid.h"

namespace ds4::cuda {
namespace gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockRows = 16 * kBlockTiles;  // weight rows
constexpr int kBlockX = 128;                  // x rows
constexpr int kWarpTiles = 4;                 // tiles of 16 weight rows of one warp
constexpr int kGroups = 4;  // of 32 x rows: two n tiles of 8 for each column of warps
constexpr int kStageCols = 64;
constexpr int kSlots = 4;  // stages of x, and fetches of weights
constexpr int kXStageBytes = kBlockX * kStageCols * 2;
constexpr int kXBytes = kSlots * kXStageBytes;

static_assert(kWarps / 2 * kWarpTiles == kBlockTiles && kGroups * 32 == kBlockX);

// One tile of the list.
struct Tile {
  const Job* job = nullptr;
  int row0 = 0;   // first weight row
  int x0 = 0;     // first x row, or place of a pair
  int num_x = 0;  // 1..128
  int expert = 0;
  bool routed = false;
};

// This thread's share of the copies of one tile.
struct Loader {
  const std::byte* x[kGroups];  // 16 bytes of a row of each group of 32
  const std::byte* weights[2];  // chunk of two tiles that this warp fetches
  int64_t lane_step;            // from the end of a lane's columns to the next lane
  int lane_fetches;             // fetches of one lane
  int fetches_left;             // of this lane
  int fetches, stages, groups;
};

struct Shared {
  std::byte* x;
  std::byte* weights;
  float* scales;
  Tables tables;
  int* expert_tiles;  // [num_experts + 1] x blocks before each expert
};

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int WarpIdx() { return static_cast<int>(threadIdx.x) / 32; }
// Warps stand in four rows (64 weight rows each) and two columns.
__device__ __forceinline__ int WarpRow() { return WarpIdx() / 2; }
__device__ __forceinline__ int WarpColumn() { return WarpIdx() % 2; }

__device__ void MakeTables(const Args& args, const Shared& shared) {
  uint32_t* grid = const_cast<uint32_t*>(shared.tables.iq2_grid);
  uint32_t* signs = const_cast<uint32_t*>(shared.tables.iq2_signs);
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) {
    uint32_t nibbles = 0, minus = 0;
    const uint32_t bits = static_cast<uint32_t>(i) | static_cast<uint32_t>(__popc(i) & 1) << 7;
    for (int j = 0; j < 8; ++j) {
      nibbles |= static_cast<uint32_t>(args.iq2_codes[i] >> (2 * j) & 3) << (4 * j);
      minus |= (bits >> j & 1) << (4 * j + 2);
    }
    grid[i] = nibbles;
    if (i < 128) signs[i] = minus;
  }
}

// x blocks before each expert: an exclusive sum, each thread a run of experts. The number of all.
__device__ int CountExpertTiles(const Args& args, int* expert_tiles) {
  __shared__ int sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int run = (args.num_experts + kThreads - 1) / kThreads;
  const int begin = min(thread * run, args.num_experts);
  const int end = min(begin + run, args.num_experts);
  const auto blocks = [&](int e) {
    return (args.expert_first[e + 1] - args.expert_first[e] + kBlockX - 1) / kBlockX;
  };
  int own = 0;
  for (int e = begin; e < end; ++e) own += blocks(e);
  sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  int sum = sums[thread] - own;
  for (int e = begin; e < end; ++e) {
    expert_tiles[e] = sum;
    sum += blocks(e);
  }
  if (thread == 0) expert_tiles[args.num_experts] = sums[kThreads - 1];
  __syncthreads();
  return expert_tiles[args.num_experts];
}

__device__ Tile RoutedTile(const Args& args, const Shared& shared, int index) {
  Tile tile;
  tile.job = &args.jobs[args.num_jobs];
  tile.routed = true;
  // All row blocks of one x block side by side: they share its rows.
  const int x_block = index / tile.job->row_blocks;
  tile.row0 =
      index % tile.job->row_blocks * (tile.job->up != nullptr ? kBlockRows / 2 : kBlockRows);
  int low = 0, high = args.num_experts;  // the last expert with expert_tiles[e] <= x_block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (shared.expert_tiles[middle] <= x_block ? low : high) = middle;
  }
  tile.expert = low;
  tile.x0 = args.expert_first[low] + (x_block - shared.expert_tiles[low]) * kBlockX;
  tile.num_x = min(kBlockX, args.expert_first[low + 1] - tile.x0);
  return tile;
}

__device__ Tile TileAt(const Args& args, const Shared& shared, int index) {
  if (index >= args.num_tiles) return RoutedTile(args, shared, index - args.num_tiles);
  int j = 0;
  while (j + 1 < args.num_jobs && args.jobs[j + 1].first_tile <= index) ++j;
  Tile tile;
  tile.job = &args.jobs[j];
  // All x blocks of one row block side by side: each weight is read once from device memory.
  const int local = index - tile.job->first_tile;
  tile.row0 = local / tile.job->x_blocks * (tile.job->up != nullptr ? kBlockRows / 2 : kBlockRows);
  tile.x0 = local % tile.job->x_blocks * kBlockX;
  tile.num_x = min(kBlockX, tile.job->x_rows - tile.x0);
  return tile;
}

// Slot 0..15 of the block to the tile of 16 weight rows; a warp's tiles 0, 1 are of the gate and
// 2, 3 of up in a SwiGLU job. Slots past the end repeat the last tile; nobody stores their results.
__device__ const std::byte* WeightTile(const Tile& tile, int slot) {
  const Job& job = *tile.job;
  const int last = (job.rows + 15) / 16 - 1;
  const std::byte* matrix = job.weights;
  int index = slot;
  if (job.up != nullptr) {
    index = slot / 4 * 2 + slot % 2;
    if (slot % 4 >= 2) matrix = job.up;
  }
  matrix += static_cast<int64_t>(tile.expert) * job.lanes * job.matrix_bytes;
  return matrix + min(tile.row0 / 16 + index, last) * job.tile_bytes;
}

template <typename F>
__device__ Loader MakeLoader(const Args& args, const Tile& tile) {
  const Job& job = *tile.job;
  Loader loader;
  loader.groups = (tile.num_x + 31) / 32;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = 0; i < kGroups; ++i) {
    // Rows past the end repeat the last one; nobody stores their results.
    const int64_t place = tile.x0 + min(32 * i + thread / 8, tile.num_x - 1);
    const int64_t row = tile.routed && args.gather ? args.pairs[place] / args.used : place;
    loader.x[i] = reinterpret_cast<const std::byte*>(job.x + row * job.x_stride + 8 * (thread % 8));
  }
  for (int i = 0; i < 2; ++i) loader.weights[i] = WeightTile(tile, 2 * WarpIdx() + i);
  loader.lane_step = job.matrix_bytes - job.tile_bytes;
  loader.lane_fetches = job.lane_cols / F::kFetchCols;
  loader.fetches_left = loader.lane_fetches;
  loader.fetches = loader.lane_fetches * job.lanes;
  loader.stages = job.lane_cols / kStageCols * job.lanes;
  return loader;
}

template <typename F>
__device__ __forceinline__ std::byte* FetchSlot(const Shared& shared, int fetch) {
  return shared.weights + fetch % kSlots * (kBlockTiles * F::kTileBytes);
}

// Fetches are issued in rising order, each once.
template <typename F>
__device__ __forceinline__ void IssueFetch(Loader& loader, const Shared& shared, int fetch) {
  if (fetch >= loader.fetches) return;
  const int part = fetch % 2;
  constexpr int kMain = F::kMainBytes / 16, kUnits = F::kTileBytes / 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::byte* to = FetchSlot<F>(shared, fetch) + (2 * WarpIdx() + i) * F::kTileBytes;
#pragma unroll
    for (int first = 0; first < kUnits; first += 32) {
      const int unit = first + Lane();
      if (unit < kUnits) {
        const int from = unit < kMain ? part * F::kMainBytes + 16 * unit
                                      : F::HeaderAt(part) + 16 * (unit - kMain);
        CopyAsync16(to + 16 * unit, loader.weights[i] + from);
      }
    }
  }
  int64_t step = part == 1 ? F::kChunkBytes : 0;
  if (--loader.fetches_left == 0) {
    step += loader.lane_step;
    loader.fetches_left = loader.lane_fetches;
  }
  loader.weights[0] += step;
  loader.weights[1] += step;
}

// Stages come in rising order. Row r's 16-byte unit u (of 8) is kept at u ^ 4 (r % 2): then the 16
// bytes of eight lanes (two rows, four units) lie in different banks.
template <typename F>
__device__ __forceinline__ void IssueStage(Loader& loader, const Shared& shared, int stage) {
  if (stage < loader.stages) {
    const int row = static_cast<int>(threadIdx.x) / 8, unit = static_cast<int>(threadIdx.x) % 8;
    std::byte* to =
        shared.x + stage % kSlots * kXStageBytes + row * 128 + ((unit ^ (row % 2 * 4)) * 16);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i < loader.groups) CopyAsync16(to + i * 32 * 128, loader.x[i]);
      loader.x[i] += kStageCols * 2;
    }
    if constexpr (F::kFetchCols == 128) {
      if (stage % 2 == 0) IssueFetch<F>(loader, shared, stage / 2 + 1);
    } else {
      IssueFetch<F>(loader, shared, stage);
    }
  }
  CopyAsyncCommit();
}

template <typename F>
__device__ __forceinline__ float* ScaleSlot(const Shared& shared, int fetch) {
  return shared.scales + fetch % 2 * (F::kScaleFloats * kScaleStride);
}

// Ready scales of the two tiles that this warp fetched.
template <typename F>
__device__ __forceinline__ void MakeScales(const Shared& shared, int fetch) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int slot = 2 * WarpIdx() + i;
    constexpr int kRowFloats = F::kScaleFloats == 8 || F::kScaleFloats == 16 ? 2 : 1;
    F::MakeScales(FetchSlot<F>(shared, fetch) + slot * F::kTileBytes, fetch % 2, Lane(),
                  ScaleSlot<F>(shared, fetch) + 16 * slot * kRowFloats);
  }
}

template <typename F>
__device__ __forceinline__ void Dequant(const Shared& shared, int stage, int step, int i,
                                        uint32_t (&a)[8]) {
  constexpr int kFetchStages = F::kFetchCols / kStageCols;
  const int fetch = stage / kFetchStages;
  const int slot = WarpRow() * kWarpTiles + i;
  constexpr int kRowFloats = F::kScaleFloats == 8 || F::kScaleFloats == 16 ? 2 : 1;
  F::Dequant(FetchSlot<F>(shared, fetch) + slot * F::kTileBytes,
             ScaleSlot<F>(shared, fetch) + 16 * slot * kRowFloats, stage % kFetchStages * 2 + step,
             Lane(), shared.tables, a);
}

using Sums = float[kWarpTiles][2 * kGroups][4];

// B fragments of the two n tiles of a group: of lane 4g + t, row g's columns 8t..8t+7 of the step.
__device__ __forceinline__ void LoadX(const std::byte* x, int group, int step,
                                      uint32_t (&b)[2][4]) {
  const int g = Lane() / 4, t = Lane() % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 32 * group + 16 * WarpColumn() + 8 * i + g;
    const uint4 v = LoadWords4(x + row * 128 + (((4 * step + t) ^ (g % 2 * 4)) * 16));
    b[i][0] = v.x;
    b[i][1] = v.y;
    b[i][2] = v.z;
    b[i][3] = v.w;
  }
}

__device__ __forceinline__ void MultiplyGroup(const uint32_t (&a)[kWarpTiles][8],
                                              const uint32_t (&b)[2][4], Sums& sums, int group) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t columns[2] = {b[n][2 * half], b[n][2 * half + 1]};
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const uint32_t rows[4] = {a[i][4 * half], a[i][4 * half + 1], a[i][4 * half + 2],
                                  a[i][4 * half + 3]};
        MmaBf16(sums[i][2 * group + n], rows, columns);
      }
    }
  }
}

// One step of 32 columns with fragments `a`, while the next step's are made.
template <typename F>
__device__ __forceinline__ void Step(const Shared& shared, int stage, int step, int groups,
                                     const uint32_t (&a)[kWarpTiles][8],
                                     uint32_t (&next)[kWarpTiles][8], Sums& sums) {
  const std::byte* x = shared.x + stage % kSlots * kXStageBytes;
  uint32_t b[2][2][4];
  LoadX(x, 0, step, b[0]);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (group + 1 < kGroups) LoadX(x, group + 1, step, b[(group + 1) % 2]);
    if (group < groups) MultiplyGroup(a, b[group % 2], sums, group);
    Dequant<F>(shared, stage + step, 1 - step, group, next[group]);
  }
}

template <typename F>
__device__ __forceinline__ void Prologue(Loader& loader, const Shared& shared) {
  if constexpr (F::kFetchCols == 128) IssueFetch<F>(loader, shared, 0);
  for (int stage = 0; stage < kSlots - 1; ++stage) IssueStage<F>(loader, shared, stage);
}

// Stage s's fragments of step 1 are made in its step 0, those of stage s + 1's step 0 in its step
// 1: the weights must be there one stage before x. With 128 columns a fetch, group s (even) brings
// fetch s / 2 + 1, whose scales are made in stage s and read from stage s + 1's step 1 on. With 64,
// group s brings fetch s, so one group more must have come.
template <typename F>
__device__ __forceinline__ void Multiply(Loader& loader, const Shared& shared, bool active,
                                         Sums& sums) {
  constexpr int kPending = F::kFetchCols == 128 ? kSlots - 2 : kSlots - 3;
  uint32_t even[kWarpTiles][8], odd[kWarpTiles][8];
  CopyAsyncWait<kPending>();
  __syncthreads();
  if constexpr (F::kScaleFloats > 0) {
    MakeScales<F>(shared, 0);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) Dequant<F>(shared, 0, 0, i, even[i]);
#pragma unroll 1
  for (int stage = 0; stage < loader.stages; ++stage) {
    CopyAsyncWait<kPending>();
    __syncthreads();
    IssueStage<F>(loader, shared, stage + kSlots - 1);
    if constexpr (F::kScaleFloats > 0) {
      if (stage % 2 == 0 && stage / 2 + 1 < loader.fetches) MakeScales<F>(shared, stage / 2 + 1);
    }
    if (active) {
      Step<F>(shared, stage, 0, loader.groups, even, odd, sums);
      Step<F>(shared, stage, 1, loader.groups, odd, even, sums);
    }
  }
}

__device__ __forceinline__ void MultiplyAny(DType dtype, Loader& loader, const Shared& shared,
                                            bool active, Sums& sums) {
  switch (dtype) {
    case DType::kQ8_0:
      return Multiply<Q8_0>(loader, shared, active, sums);
    case DType::kQ4_K:
      return Multiply<Q4_K>(loader, shared, active, sums);
    case DType::kQ2_K:
      return Multiply<Q2_K>(loader, shared, active, sums);
    case DType::kIQ2_XXS:
      return Multiply<Iq2Xxs>(loader, shared, active, sums);
    case DType::kMXFP4:
      return Multiply<Mxfp4>(loader, shared, active, sums);
    case DType::kF16:
      return Multiply<Plain16<true>>(loader, shared, active, sums);
    default:
      return Multiply<Plain16<false>>(loader, shared, active, sums);
  }
}

template <typename F>
__device__ __forceinline__ Loader StartAs(const Args& args, const Shared& shared,
                                          const Tile& tile) {
  Loader loader = MakeLoader<F>(args, tile);
  Prologue<F>(loader, shared);
  return loader;
}

__device__ __forceinline__ Loader Start(const Args& args, const Shared& shared, const Tile& tile) {
  switch (tile.job->dtype) {
    case DType::kQ8_0:
      return StartAs<Q8_0>(args, shared, tile);
    case DType::kQ4_K:
      return StartAs<Q4_K>(args, shared, tile);
    case DType::kQ2_K:
      return StartAs<Q2_K>(args, shared, tile);
    case DType::kIQ2_XXS:
      return StartAs<Iq2Xxs>(args, shared, tile);
    case DType::kMXFP4:
      return StartAs<Mxfp4>(args, shared, tile);
    default:
      return StartAs<Plain16<true>>(args, shared, tile);  // BF16 is copied the same way
  }
}

// x row of the block of lane's sums [n][c].
__device__ __forceinline__ int XRow(int n, int c) {
  return n / 2 * 32 + 16 * WarpColumn() + n % 2 * 8 + 2 * (Lane() % 4) + c % 2;
}

__device__ __forceinline__ void StorePlain(const Tile& tile, const Sums& sums) {
  const Job& job = *tile.job;
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int x = XRow(n, c);
      if (x >= tile.num_x) continue;
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const int r = tile.row0 + (WarpRow() * kWarpTiles + i) * 16 + c / 2 * 8 + Lane() / 4;
        if (r >= job.rows) continue;
        float value = sums[i][n][c];
        if (job.y != nullptr) {
          float* y = job.y + (tile.x0 + x) * job.y_stride + r;
          if (job.accumulate) value += *y;
          *y = value;
        }
        if (job.out != nullptr) {
          job.out[(tile.x0 + x) * job.out_stride + r] = FloatToBf16(value);
        }
      }
    }
  }
}

__device__ __forceinline__ float SwiGlu(float gate, float up, float limit, float weight) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.0f + expf(-gate)) * up * weight;
}

__device__ __forceinline__ void StoreSwiGlu(const Args& args, const Tile& tile, const Sums& sums) {
  const Job& job = *tile.job;
#pragma unroll
  for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int x = XRow(n, c);
      if (x >= tile.num_x) continue;
      const float weight = tile.routed ? args.pair_weight[args.pairs[tile.x0 + x]] : 1.0f;
#pragma unroll
      for (int i = 0; i < kWarpTiles / 2; ++i) {
        const int r = tile.row0 + (WarpRow() * 2 + i) * 16 + c / 2 * 8 + Lane() / 4;
        if (r >= job.rows) continue;
        const float value = SwiGlu(sums[i][n][c], sums[i + 2][n][c], job.limit, weight);
        job.out[(tile.x0 + x) * job.out_stride + r / job.out_lane_cols * job.out_lane_stride +
                r % job.out_lane_cols] = FloatToBf16(value);
      }
    }
  }
}

__device__ Shared MakeShared(std::byte* memory, const Args& args) {
  Shared shared;
  shared.x = memory;
  shared.weights = memory + kXBytes;
  shared.scales = reinterpret_cast<float*>(memory + args.scales_at);
  const uint32_t* tables = reinterpret_cast<const uint32_t*>(memory + args.tables_at);
  shared.tables = {tables, tables + 256};
  shared.expert_tiles = reinterpret_cast<int*>(memory + args.experts_at);
  return shared;
}

__global__ void __launch_bounds__(kThreads, 1) GemmKernel(const __grid_constant__ Args args) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  const Shared shared = MakeShared(memory, args);
  if (args.uses_iq2) MakeTables(args, shared);
  GridDependencyWait();
  int num_tiles = args.num_tiles;
  if (args.num_experts > 0) {
    num_tiles += CountExpertTiles(args, shared.expert_tiles) * args.jobs[args.num_jobs].row_blocks;
  }
  int index = static_cast<int>(blockIdx.x);
  if (index >= num_tiles) return;
  Tile tile = TileAt(args, shared, index);
  Loader loader = Start(args, shared, tile);
  for (;;) {
    float sums[kWarpTiles][2 * kGroups][4] = {};
    const int rows_of_warp = tile.job->up != nullptr ? 32 : 64;
    const bool active = tile.row0 + WarpRow() * rows_of_warp < tile.job->rows;
    MultiplyAny(tile.job->dtype, loader, shared, active, sums);
    __syncthreads();
    // The next tile's first copies travel while this one's results are stored.
    const Tile done = tile;
    index += static_cast<int>(gridDim.x);
    if (index < num_tiles) {
      tile = TileAt(args, shared, index);
      loader = Start(args, shared, tile);
    }
    if (done.job->up != nullptr) {
      StoreSwiGlu(args, done, sums);
    } else {
      StorePlain(done, sums);
    }
    if (index >= num_tiles) return;
  }
}

template <typename F>
void Grow(int& weight_bytes, int& scale_bytes) {
  weight_bytes = std::max(weight_bytes, kSlots * kBlockTiles * F::kTileBytes);
  scale_bytes = std::max(scale_bytes, 2 * F::kScaleFloats * kScaleStride * 4);
}

void GrowFor(DType dtype, int& weight_bytes, int& scale_bytes) {
  switch (dtype) {
    case DType::kQ8_0:
      return Grow<Q8_0>(weight_bytes, scale_bytes);
    case DType::kQ4_K:
      return Grow<Q4_K>(weight_bytes, scale_bytes);
    case DType::kQ2_K:
      return Grow<Q2_K>(weight_bytes, scale_bytes);
    case DType::kIQ2_XXS:
      return Grow<Iq2Xxs>(weight_bytes, scale_bytes);
    case DType::kMXFP4:
      return Grow<Mxfp4>(weight_bytes, scale_bytes);
    case DType::kF16:
      return Grow<Plain16<true>>(weight_bytes, scale_bytes);
    case DType::kBF16:
      return Grow<Plain16<false>>(weight_bytes, scale_bytes);
    default:
      CHECK(false) << "no product of many rows for weights of type " << Info(dtype).name
                   << ": use LaunchProducts";
  }
}

}  // namespace

Job MakeJob(const PackedMatrix& w, int lanes, const ActivationView& x, int64_t x_col) {
  CHECK(x.bf16 != nullptr) << "products of many rows read x.bf16";
  CHECK(x_col % 8 == 0 && x_col + lanes * w.padded_cols() <= x.cols)
      << "columns " << x_col << " + " << lanes << " * " << w.padded_cols() << " of " << x.cols;
  Job job;
  job.dtype = w.dtype;
  job.weights = w.data;
  job.tile_bytes = TileBytes(w.dtype, w.cols);
  job.matrix_bytes = w.matrix_bytes();
  job.rows = static_cast<int>(w.rows);
  job.lane_cols = static_cast<int>(w.padded_cols());
  job.lanes = lanes;
  job.x = x.bf16 + x_col;
  job.x_stride = x.cols;
  job.x_rows = x.rows;
  return job;
}

void LaunchTiles(const LaunchContext& launch, Args& args) {
  const int all_jobs = args.num_jobs + (args.num_experts > 0 ? 1 : 0);
  int weight_bytes = 0, scale_bytes = 0;
  args.num_tiles = 0;
  for (int j = 0; j < all_jobs; ++j) {
    Job& job = args.jobs[j];
    GrowFor(job.dtype, weight_bytes, scale_bytes);
    args.uses_iq2 = args.uses_iq2 || job.dtype == DType::kIQ2_XXS;
    const int rows = job.up != nullptr ? kBlockRows / 2 : kBlockRows;
    job.row_blocks = (job.rows + rows - 1) / rows;
    job.x_blocks = (job.x_rows + kBlockX - 1) / kBlockX;
    job.first_tile = args.num_tiles;
    if (j < args.num_jobs) args.num_tiles += job.row_blocks * job.x_blocks;
  }
  if (args.uses_iq2) std::copy(kIq2XxsCodes.begin(), kIq2XxsCodes.end(), args.iq2_codes);
  args.scales_at = kXBytes + weight_bytes;
  args.tables_at = args.scales_at + scale_bytes;
  args.experts_at = args.tables_at + (args.uses_iq2 ? 384 * 4 : 0);
  const int shared_bytes =
      args.experts_at + (args.num_experts > 0 ? (args.num_experts + 1) * 4 : 0);
  // The routed job's tiles are counted on the device: blocks without one leave at once.
  const int blocks =
      args.num_experts > 0 ? launch.num_sms : std::min(launch.num_sms, args.num_tiles);
  if (blocks == 0) return;
  Launch(launch, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
         static_cast<size_t>(shared_bytes), GemmKernel, args);
}

}  // namespace gemm

void LaunchGemm(const LaunchContext& launch, std::span<const GemmJob> jobs) {
  for (size_t first = 0; first < jobs.size(); first += gemm::kMaxJobs) {
    gemm::Args args;
    for (const GemmJob& from :
         jobs.subspan(first, std::min<size_t>(gemm::kMaxJobs, jobs.size() - first))) {
      gemm::Job job = gemm::MakeJob(from.w, 1, from.x, from.x_col);
      job.y = from.y;
      job.y_stride = from.y_stride;
      job.accumulate = from.accumulate;
      if (from.out.bf16 != nullptr) {
        CHECK(from.out_col + from.w.rows <= from.out.cols)
            << "columns " << from.out_col << " + " << from.w.rows << " of " << from.out.cols;
        job.out = from.out.bf16 + from.out_col;
        job.out_stride = from.out.cols;
      }
      args.jobs[args.num_jobs++] = job;
    }
    gemm::LaunchTiles(launch, args);
  }
}

void LaunchLaneGemm(const LaunchContext& launch, const PackedMatrix& w, const ActivationView& x,
                    float* out, bool accumulate) {
  gemm::Args args;
  gemm::Job job = gemm::MakeJob(w, static_cast<int>(w.count), x, 0);
  job.y = out;
  job.y_stride = w.rows;
  job.accumulate = accumulate;
  args.jobs[args.num_jobs++] = job;
  gemm::LaunchTiles(launch, args);
}

}  // namespace ds4::cuda
