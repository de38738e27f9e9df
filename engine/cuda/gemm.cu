// Products of many rows: tiles of 256 weight rows x 128 x rows by eight warps, each 32 x 128.
//
// A stage is 64 columns of K. x rows of four stages lie in shared memory, weights of four fetches
// (raw packed bytes, 128 columns each, 64 for 16-bit types); both come by asynchronous copies up to
// three stages ahead. No two warps share weights, so each weight is turned into bf16 once in a
// block; all warps read all x rows. A warp makes the fragments of the next step (32 columns) and
// loads x of the next group of 32 rows, also over the end of a stage, while the tensor cores work
// on those at hand. What bounds it: the tensor cores (128 matrix instructions a warp and stage, of
// 270 to 690), and shared memory, busy for most of that time.
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
constexpr int kWarpTiles = 2;                 // tiles of 16 weight rows of one warp
constexpr int kGroups = 4;                    // of 32 x rows: four n tiles of 8
constexpr int kStageCols = 64;
constexpr int kSlots = 4;  // stages of x, and fetches of weights
constexpr int kXStageBytes = kBlockX * kStageCols * 2;
constexpr int kXBytes = kSlots * kXStageBytes;

static_assert(kWarps * kWarpTiles == kBlockTiles && kGroups * 32 == kBlockX);

// One tile of the list.
struct Tile {
  const Job* job = nullptr;
  int row0 = 0;   // first weight row
  int x0 = 0;     // first x row, or place of a pair
  int num_x = 0;  // 0..128
  int expert = 0;
  bool routed = false;
};

// What one stage reads once lies in shared memory, for registers are full. Offsets count 16 bytes.
struct XOffsets {
  uint32_t groups[kGroups];  // this thread's 16 bytes of a row of each group of 32
};
struct WarpSource {
  const std::byte* tiles[2];  // the two that this warp fetches and multiplies
  uint32_t lane_step;         // from the end of a lane's columns to the next lane
  uint32_t lane_fetches;
  const std::byte* x;
};
struct Loader {
  uint32_t weights_at;    // from the tiles' start, in 16 bytes
  uint32_t fetches_left;  // of this lane
  int stages, groups;
};

struct Place {
  int lane, warp;
};

struct Shared {
  Place place;
  std::byte* x;
  std::byte* weights;  // fetches, then ready scales
  XOffsets* offsets;   // of this thread
  WarpSource* source;  // of this warp
  Tables tables;
  int* full_before;  // [num_experts + 1] full x blocks before each expert
  int* rests;        // [num_experts] experts with an x block that is not full, the longest first
};
static_assert(sizeof(XOffsets) == 16 && sizeof(WarpSource) == 32);
constexpr int kOffsetBytes =
    kThreads * static_cast<int>(sizeof(XOffsets)) + kWarps * static_cast<int>(sizeof(WarpSource));

__device__ void MakeTables(const Args& args, std::byte* memory) {
  uint2* grid = reinterpret_cast<uint2*>(memory);
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) {
    uint32_t picks[2] = {};
    for (int j = 0; j < 8; ++j) {
      const uint32_t code = static_cast<uint32_t>(args.iq2_codes[i] >> (2 * j)) & 3;
      picks[j / 4] |= (0x10 + 0x22 * code) << (8 * (j % 4));
    }
    for (int copy = 0; copy < args.grid_copies; ++copy) {
      grid[i * args.grid_copies + copy] = make_uint2(picks[0], picks[1]);
    }
  }
}

// Where this lane reads.
__device__ __forceinline__ Tables LaneTables(const Args& args, const std::byte* memory, int lane) {
  Tables tables;
  tables.iq2_grid = memory + lane % args.grid_copies * 8;
  tables.grid_step = static_cast<uint32_t>(args.grid_copies) * 8;
  return tables;
}

// Running sums of a value of each thread, itself included.
__device__ uint32_t RunningSum(uint32_t value, uint32_t* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = value;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const uint32_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  return sums[thread];
}

__device__ __forceinline__ int RowsOfExpert(const Args& args, int e) {
  return args.expert_first[e + 1] - args.expert_first[e];
}

// Lists the x blocks of all experts: full ones by expert, then each expert's rest by falling number
// of groups, so that blocks that take turns get about the same work. The number of x blocks.
__device__ int ListExpertTiles(const Args& args, const Shared& shared) {
  __shared__ uint32_t full_sums[kThreads], many_sums[kThreads], few_sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int run = (args.num_experts + kThreads - 1) / kThreads;
  const int begin = min(thread * run, args.num_experts);
  const int end = min(begin + run, args.num_experts);
  const auto groups = [&](int e) { return (RowsOfExpert(args, e) % kBlockX + 31) / 32; };
  // Rests of 4 and 3 groups, of 2 and 1: two counts of 16 bits in a word.
  uint32_t full = 0, many = 0, few = 0;
  for (int e = begin; e < end; ++e) {
    full += static_cast<uint32_t>(RowsOfExpert(args, e) / kBlockX);
    const int num = groups(e);
    many += num == 4 ? 1u : num == 3 ? 0x10000u : 0u;
    few += num == 2 ? 1u : num == 1 ? 0x10000u : 0u;
  }
  uint32_t at = RunningSum(full, full_sums) - full;
  many = RunningSum(many, many_sums) - many;
  few = RunningSum(few, few_sums) - few;
  const uint32_t all_many = many_sums[kThreads - 1], all_few = few_sums[kThreads - 1];
  const uint32_t num4 = all_many & 0xffff, num3 = all_many >> 16;
  const uint32_t num2 = all_few & 0xffff, num1 = all_few >> 16;
  uint32_t place[5] = {0, num4 + num3 + num2 + (few >> 16), num4 + num3 + (few & 0xffff),
                       num4 + (many >> 16), many & 0xffff};
  for (int e = begin; e < end; ++e) {
    shared.full_before[e] = static_cast<int>(at);
    at += static_cast<uint32_t>(RowsOfExpert(args, e) / kBlockX);
    const int num = groups(e);
#pragma unroll
    for (int i = 1; i <= kGroups; ++i) {
      if (num == i) shared.rests[place[i]++] = e;
    }
  }
  const uint32_t all_full = full_sums[kThreads - 1];
  if (thread == 0) shared.full_before[args.num_experts] = static_cast<int>(all_full);
  __syncthreads();
  return static_cast<int>(all_full + num4 + num3 + num2 + num1);
}

__device__ Tile RoutedTile(const Args& args, const Shared& shared, int index) {
  Tile tile;
  tile.job = &args.jobs[args.num_jobs];
  tile.routed = true;
  // All row blocks of one x block side by side: they share its rows.
  const int x_block = index / tile.job->row_blocks;
  tile.row0 =
      index % tile.job->row_blocks * (tile.job->up != nullptr ? kBlockRows / 2 : kBlockRows);
  const int num_full = shared.full_before[args.num_experts];
  if (x_block >= num_full) {
    tile.expert = shared.rests[x_block - num_full];
    const int rows = RowsOfExpert(args, tile.expert);
    tile.x0 = args.expert_first[tile.expert] + rows / kBlockX * kBlockX;
    tile.num_x = rows % kBlockX;
    return tile;
  }
  int low = 0, high = args.num_experts;  // the last expert with full_before[e] <= x_block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (shared.full_before[middle] <= x_block ? low : high) = middle;
  }
  tile.expert = low;
  tile.x0 = args.expert_first[low] + (x_block - shared.full_before[low]) * kBlockX;
  tile.num_x = kBlockX;
  return tile;
}

__device__ Tile TileAt(const Args& args, const Shared& shared, int index) {
  if (index >= args.num_tiles) return RoutedTile(args, shared, index - args.num_tiles);
  int part = 0, width = kBlockX;
  if (index >= args.num_whole) {
    part = (index - args.num_whole) % args.parts;
    index = args.num_whole + (index - args.num_whole) / args.parts;
    width = kBlockX / args.parts;
  }
  int j = 0;
  while (j + 1 < args.num_jobs && args.jobs[j + 1].first_tile <= index) ++j;
  Tile tile;
  tile.job = &args.jobs[j];
  // All x blocks of one row block side by side: each weight is read once from device memory.
  const int local = index - tile.job->first_tile;
  tile.row0 = local / tile.job->x_blocks * (tile.job->up != nullptr ? kBlockRows / 2 : kBlockRows);
  const int x0 = local % tile.job->x_blocks * kBlockX + part * width;
  // A part may have no row: then it multiplies the last one, and stores nothing.
  tile.num_x = max(min(width, tile.job->x_rows - x0), 0);
  tile.x0 = min(x0, tile.job->x_rows - 1);
  return tile;
}

// A warp's two slots of the block's sixteen are its own: neighbours, or in a SwiGLU job one tile of
// the gate and the same of up. Slots past the end repeat the last tile, as x rows do; nobody stores
// their results.
__device__ void PlaceWeights(const Shared& shared, const Tile& tile) {
  const Job& job = *tile.job;
  const int64_t matrix = static_cast<int64_t>(tile.expert) * job.lanes * job.matrix_bytes;
  const int last = (job.rows + 15) / 16 - 1, warp = shared.place.warp;
  if (job.up != nullptr) {
    const int64_t at = matrix + min(tile.row0 / 16 + warp, last) * job.tile_bytes;
    shared.source->tiles[0] = job.weights + at;
    shared.source->tiles[1] = job.up + at;
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const int slot = min(tile.row0 / 16 + 2 * warp + i, last);
    shared.source->tiles[i] = job.weights + matrix + slot * job.tile_bytes;
  }
}

template <typename F>
__device__ Loader MakeLoader(const Args& args, const Shared& shared, const Tile& tile) {
  const Job& job = *tile.job;
  Loader loader;
  loader.groups = max((tile.num_x + 31) / 32, 1);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = 0; i < kGroups; ++i) {
    const int64_t place = tile.x0 + max(min(32 * i + thread / 8, tile.num_x - 1), 0);
    const int64_t row = tile.routed && args.gather ? args.pairs[place] / args.used : place;
    shared.offsets->groups[i] =
        static_cast<uint32_t>(row * job.x_stride / 8) + static_cast<uint32_t>(thread % 8);
  }
  const uint32_t lane_fetches = static_cast<uint32_t>(job.lane_cols / F::kFetchCols);
  __syncwarp();  // all lanes have read the tile before
  if (shared.place.lane == 0) {
    PlaceWeights(shared, tile);
    shared.source->x = reinterpret_cast<const std::byte*>(job.x);
    shared.source->lane_step = static_cast<uint32_t>((job.matrix_bytes - job.tile_bytes) / 16);
    shared.source->lane_fetches = lane_fetches;
  }
  __syncwarp();
  loader.weights_at = 0;
  loader.fetches_left = lane_fetches;
  loader.stages = job.lane_cols / kStageCols * job.lanes;
  return loader;
}

__device__ __forceinline__ const std::byte* At16(const std::byte* base, uint32_t offset) {
  return base + static_cast<uint64_t>(offset) * 16;
}

template <typename F>
__device__ __forceinline__ std::byte* FetchSlot(const Shared& shared, int fetch) {
  return shared.weights + fetch % kSlots * (kBlockTiles * F::kTileBytes);
}

// Starts the copy of one of the warp's two tiles of a fetch. No branch: matrix instructions stand
// around it.
template <typename F>
__device__ __forceinline__ void IssueTile(const Loader& loader, const Shared& shared, int fetch,
                                          int i, bool wanted) {
  const int lane = shared.place.lane, part = fetch % 2;
  std::byte* to = FetchSlot<F>(shared, fetch) + (2 * shared.place.warp + i) * F::kTileBytes;
  const std::byte* chunk = At16(shared.source->tiles[i], loader.weights_at);
  const std::byte* main = chunk + part * F::kMainBytes + 16 * lane;
#pragma unroll
  for (int at = 0; at < F::kMainBytes; at += 512) {
    CopyAsync16If(wanted, to + 16 * lane + at, main + at);
  }
  if constexpr (F::kHeaderBytes > 0) {
    CopyAsync16If(wanted && 16 * lane < F::kHeaderBytes, to + F::kMainBytes + 16 * lane,
                  chunk + F::HeaderAt(part) + 16 * lane);
  }
}

// Steps past `fetch`, when both of its tiles have been issued.
template <typename F>
__device__ __forceinline__ void EndFetch(Loader& loader, const Shared& shared, int fetch,
                                         bool issued) {
  const uint2 lane = LoadWords2(reinterpret_cast<const std::byte*>(&shared.source->lane_step));
  const bool lane_ends = issued && loader.fetches_left == 1;
  loader.weights_at += issued && fetch % 2 == 1 ? F::kChunkBytes / 16 : 0;
  loader.weights_at += lane_ends ? lane.x : 0;
  loader.fetches_left = lane_ends ? lane.y : loader.fetches_left - (issued ? 1 : 0);
}

// The weights that come with a stage, in rising order: a fetch of 64 columns is its own stage's; of
// 128 columns, stages 2k and 2k + 1 bring one tile each of fetch k + 1.
template <typename F>
__device__ __forceinline__ void IssueWeights(Loader& loader, const Shared& shared, int stage) {
  if constexpr (F::kFetchCols == 128) {
    const int fetch = stage / 2 + 1;
    IssueTile<F>(loader, shared, fetch, stage % 2, 2 * fetch < loader.stages);
    EndFetch<F>(loader, shared, fetch, stage % 2 == 1);
  } else {
    for (int i = 0; i < 2; ++i) {
      IssueTile<F>(loader, shared, stage, i, stage < loader.stages);
    }
    EndFetch<F>(loader, shared, stage, true);
  }
}

// Stages come in rising order. Row r's 16-byte unit u (of 8) is kept at u ^ 4 (r % 2): then the 16
// bytes of eight lanes (two rows, four units) lie in different banks.
__device__ __forceinline__ void IssueX(const Loader& loader, const Shared& shared, int stage,
                                       int groups) {
  const int row = shared.place.warp * 4 + shared.place.lane / 8, unit = shared.place.lane % 8;
  std::byte* to =
      shared.x + stage % kSlots * kXStageBytes + row * 128 + ((unit ^ (row % 2 * 4)) * 16);
  const uint4 all = LoadWords4(reinterpret_cast<const std::byte*>(shared.offsets->groups));
  const uint32_t offsets[kGroups] = {all.x, all.y, all.z, all.w};
  const std::byte* x = shared.source->x + stage * (kStageCols * 2);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (i < groups) CopyAsync16If(stage < loader.stages, to + i * 32 * 128, At16(x, offsets[i]));
  }
}

template <typename F>
__device__ __forceinline__ float* ScaleSlot(const Shared& shared, int fetch) {
  return reinterpret_cast<float*>(shared.weights + kSlots * kBlockTiles * F::kTileBytes) +
         fetch % 2 * (F::kScaleFloats * kScaleStride);
}

// Floats of one ready scale: alone, or with an offset.
template <typename F>
constexpr int kRowFloats = F::kScaleFloats > 4 ? 2 : 1;

// Ready scales of one of the warp's two tiles, for its own lanes.
template <typename F>
__device__ __forceinline__ void MakeScales(const Shared& shared, int fetch, int i) {
  const int slot = 2 * shared.place.warp + i;
  F::MakeScales(FetchSlot<F>(shared, fetch) + slot * F::kTileBytes, fetch % 2, shared.place.lane,
                ScaleSlot<F>(shared, fetch) + 16 * slot * kRowFloats<F>);
}

// What fragments of the warp's tile i at one step of a stage are made from.
template <typename F>
__device__ __forceinline__ typename F::Raw LoadRaw(const Shared& shared, int stage, int step,
                                                   int i) {
  constexpr int kFetchStages = F::kFetchCols / kStageCols;
  const int fetch = stage / kFetchStages;
  const int slot = shared.place.warp * kWarpTiles + i;
  return F::Load(FetchSlot<F>(shared, fetch) + slot * F::kTileBytes,
                 ScaleSlot<F>(shared, fetch) + 16 * slot * kRowFloats<F>,
                 stage % kFetchStages * 2 + step, shared.place.lane);
}

using Sums = float[kWarpTiles][4 * kGroups][4];
using A = uint32_t[kWarpTiles][8];  // fragments of one step
using B = uint32_t[4][4];           // of one group of x rows and one step

// B fragments of a group: of lane 4g + t, row g's columns 8t..8t+7.
__device__ __forceinline__ void LoadX(const Shared& shared, int stage, int step, int group, B& b) {
  const int g = shared.place.lane / 4, t = shared.place.lane % 4;
  const std::byte* x = shared.x + stage % kSlots * kXStageBytes + (32 * group + g) * 128 +
                       (((4 * step + t) ^ (g % 2 * 4)) * 16);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint4 v = LoadWords4(x + 8 * n * 128);
    b[n][0] = v.x;
    b[n][1] = v.y;
    b[n][2] = v.z;
    b[n][3] = v.w;
  }
}

// One group, one step. Eight other instructions stand between two on the same sums.
__device__ __forceinline__ void MultiplyGroup(const A& a, const B& b, int group, Sums& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t columns[2] = {b[n][2 * half], b[n][2 * half + 1]};
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        const uint32_t rows[4] = {a[i][4 * half], a[i][4 * half + 1], a[i][4 * half + 2],
                                  a[i][4 * half + 3]};
        MmaBf16(sums[i][4 * group + n], rows, columns);
      }
    }
  }
}

// One step of a stage, for the first kNum groups of x rows. a[kStep] holds its fragments; those of
// the step after it are made meanwhile. b: two groups in turn, the first of this step is there.
// What else a stage does stands between the groups.
template <typename F, int kNum, int kStep>
__device__ __forceinline__ void MultiplyStep(Loader& loader, const Shared& shared, int stage,
                                             A (&a)[2], B (&b)[2], Sums& sums) {
#pragma unroll
  for (int group = 0; group < kNum; ++group) {
    const int turn = kStep * kNum + group;
    if (group + 1 < kNum) {
      LoadX(shared, stage, kStep, group + 1, b[(turn + 1) % 2]);
    } else {
      LoadX(shared, stage + kStep, 1 - kStep, 0, b[(turn + 1) % 2]);
    }
    typename F::Raw raw[kWarpTiles];
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      if (i * kNum / kWarpTiles == group) {
        raw[i] = LoadRaw<F>(shared, stage + kStep, 1 - kStep, i);
      }
    }
    MultiplyGroup(a[kStep], b[turn % 2], group, sums);
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      if (i * kNum / kWarpTiles == group) F::Fragments(raw[i], shared.tables, a[1 - kStep][i]);
    }
    if (kStep == 0 && group == 0) IssueX(loader, shared, stage + kSlots - 1, kNum);
    if (kStep == 0 && group == kNum / 2 && F::kScaleFloats > 0) {
      MakeScales<F>(shared, stage / 2 + 1, stage % 2);
    }
    if (kStep == 1 && group == 0) {
      IssueWeights<F>(loader, shared, stage + kSlots - 1);
      CopyAsyncCommit();
    }
    // Keeps the compiler from loading further ahead than there are registers for.
    __syncwarp();
  }
}

template <typename F>
__device__ __forceinline__ void Prologue(Loader& loader, const Shared& shared) {
  if constexpr (F::kFetchCols == 128) {
    for (int i = 0; i < 2; ++i) IssueTile<F>(loader, shared, 0, i, true);
    EndFetch<F>(loader, shared, 0, true);
  }
  for (int stage = 0; stage < kSlots - 1; ++stage) {
    IssueX(loader, shared, stage, loader.groups);
    IssueWeights<F>(loader, shared, stage);
    CopyAsyncCommit();
  }
}

// At the start of stage s, copies of stage s + 1 must be there too, for its first fragments are
// loaded and made at the end of stage s. Stages 2k and 2k + 1 make the scales of one tile each of
// fetch k + 1, which are read from the end of stage 2k + 1 on; past the last fetch they are of
// nothing, and nobody reads them.
constexpr int kPending = kSlots - 3;

template <typename F, int kNum>
__device__ __forceinline__ void MultiplyStages(Loader& loader, const Shared& shared, Sums& sums) {
  A a[2];
  B b[2];
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) {
    F::Fragments(LoadRaw<F>(shared, 0, 0, i), shared.tables, a[0][i]);
  }
  LoadX(shared, 0, 0, 0, b[0]);
#pragma unroll 1
  for (int stage = 0; stage < loader.stages; ++stage) {
    CopyAsyncWait<kPending>();
    __syncthreads();
    MultiplyStep<F, kNum, 0>(loader, shared, stage, a, b, sums);
    MultiplyStep<F, kNum, 1>(loader, shared, stage, a, b, sums);
  }
}

// The loop has no branch but its own, so that sums stay where they are and matrix instructions need
// no convergence: hence one loop for each number of groups. Formats that dense matrices use have
// none for three; groups without rows then cost time, but change nothing.
template <typename F>
__device__ __forceinline__ void Multiply(Loader& loader, const Shared& shared, Sums& sums) {
  CopyAsyncWait<kPending>();
  __syncthreads();
  if constexpr (F::kScaleFloats > 0) {
    for (int i = 0; i < 2; ++i) MakeScales<F>(shared, 0, i);
    __syncwarp();
  }
  // A ballot tells the compiler that the whole warp goes one way.
  const int groups = loader.groups;
  if (__ballot_sync(kFullMask, groups == 1) != 0) {
    return MultiplyStages<F, 1>(loader, shared, sums);
  }
  if constexpr (F::kForExperts) {
    if (__ballot_sync(kFullMask, groups == 3) != 0) {
      return MultiplyStages<F, 3>(loader, shared, sums);
    }
  }
  if (__ballot_sync(kFullMask, groups <= 2) != 0) {
    return MultiplyStages<F, 2>(loader, shared, sums);
  }
  MultiplyStages<F, 4>(loader, shared, sums);
}

// Made for each tile: kept over all, they would cost the other formats registers.
__device__ __forceinline__ Shared WithTables(const Args& args, const Shared& shared) {
  Shared with = shared;
  with.tables = LaneTables(args, shared.x + args.tables_at, shared.place.lane);
  return with;
}

__device__ __forceinline__ void MultiplyAny(const Args& args, DType dtype, Loader& loader,
                                            const Shared& shared, Sums& sums) {
  switch (dtype) {
    case DType::kQ8_0:
      return Multiply<Q8_0>(loader, shared, sums);
    case DType::kQ4_K:
      return Multiply<Q4_K>(loader, shared, sums);
    case DType::kQ2_K:
      return Multiply<Q2_K>(loader, shared, sums);
    case DType::kIQ2_XXS:
      return Multiply<Iq2Xxs>(loader, WithTables(args, shared), sums);
    case DType::kMXFP4:
      return Multiply<Mxfp4>(loader, shared, sums);
    case DType::kF16:
      return Multiply<Plain16<true>>(loader, shared, sums);
    default:
      return Multiply<Plain16<false>>(loader, shared, sums);
  }
}

template <typename F>
__device__ __forceinline__ Loader StartAs(const Args& args, const Shared& shared,
                                          const Tile& tile) {
  Loader loader = MakeLoader<F>(args, shared, tile);
  Prologue<F>(loader, shared);
  return loader;
}

__device__ Loader Start(const Args& args, const Shared& shared, int index) {
  const Tile tile = TileAt(args, shared, index);
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

// Tiles are looked up again where they are needed: kept over the loop, they would cost registers.
__device__ __forceinline__ void MultiplyTileAt(const Args& args, const Shared& shared, int index,
                                               Loader& loader, Sums& sums) {
  MultiplyAny(args, TileAt(args, shared, index).job->dtype, loader, shared, sums);
}

// Calls put(x, n, odd) for each x row of this thread's sums: sums[i][n][odd] is of weight row 16i +
// g of the warp's, sums[i][n][odd + 2] of 16i + g + 8.
template <typename Put>
__device__ __forceinline__ void ForEachX(const Shared& shared, const Tile& tile, const Put& put) {
#pragma unroll
  for (int n = 0; n < 4 * kGroups; ++n) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int x = 8 * n + 2 * (shared.place.lane % 4) + odd;
      if (x < tile.num_x) put(x, n, odd);
    }
  }
}

__device__ __forceinline__ void StorePlain(const Shared& shared, const Tile& tile,
                                           const Sums& sums) {
  const Job& job = *tile.job;
  const int row = tile.row0 + shared.place.warp * (16 * kWarpTiles) + shared.place.lane / 4;
  const int rows_left = job.rows - row;
  const auto for_each_row = [&](int n, int odd, const auto& put) {
#pragma unroll
    for (int i = 0; i < 2 * kWarpTiles; ++i) {
      if (8 * i < rows_left) put(8 * i, sums[i / 2][n][odd + i % 2 * 2]);
    }
  };
  if (job.y != nullptr && job.accumulate) {
    ForEachX(shared, tile, [&](int x, int n, int odd) {
      float* y = job.y + (tile.x0 + x) * job.y_stride + row;
      for_each_row(n, odd, [&](int r, float value) { y[r] += value; });
    });
  } else if (job.y != nullptr) {
    ForEachX(shared, tile, [&](int x, int n, int odd) {
      float* y = job.y + (tile.x0 + x) * job.y_stride + row;
      for_each_row(n, odd, [&](int r, float value) { y[r] = value; });
    });
  }
  if (job.out != nullptr) {
    ForEachX(shared, tile, [&](int x, int n, int odd) {
      uint16_t* out = job.out + (tile.x0 + x) * job.out_stride + row;
      for_each_row(n, odd, [&](int r, float value) { out[r] = FloatToBf16(value); });
    });
  }
}

__device__ __forceinline__ float SwiGlu(float gate, float up, float limit, float weight) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.0f + expf(-gate)) * up * weight;
}

__device__ __forceinline__ void StoreSwiGlu(const Args& args, const Shared& shared,
                                            const Tile& tile, const Sums& sums) {
  const Job& job = *tile.job;
  // Columns of `out` for the thread's two rows; -1 past the last.
  int columns[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = tile.row0 + shared.place.warp * 16 + 8 * i + shared.place.lane / 4;
    columns[i] =
        r < job.rows ? r / job.out_lane_cols * job.out_lane_stride + r % job.out_lane_cols : -1;
  }
  ForEachX(shared, tile, [&](int x, int n, int odd) {
    const float weight = tile.routed ? args.pair_weight[args.pairs[tile.x0 + x]] : 1.0f;
    uint16_t* out = job.out + (tile.x0 + x) * job.out_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = odd + i * 2;
      const float value = SwiGlu(sums[0][n][c], sums[1][n][c], job.limit, weight);
      if (columns[i] >= 0) out[columns[i]] = FloatToBf16(value);
    }
  });
}

__device__ __forceinline__ void Store(const Args& args, const Shared& shared, const Tile& tile,
                                      const Sums& sums) {
  if (tile.job->up != nullptr) {
    StoreSwiGlu(args, shared, tile, sums);
  } else {
    StorePlain(shared, tile, sums);
  }
}

__device__ Shared MakeShared(std::byte* memory, const Args& args) {
  Shared shared;
  const int thread = static_cast<int>(threadIdx.x);
  shared.place = {thread % 32, thread / 32};
  shared.x = memory;
  shared.offsets = reinterpret_cast<XOffsets*>(memory + kXBytes) + thread;
  shared.source =
      reinterpret_cast<WarpSource*>(memory + kXBytes + kThreads * sizeof(XOffsets)) + thread / 32;
  shared.weights = memory + kXBytes + kOffsetBytes;
  shared.full_before = reinterpret_cast<int*>(memory + args.experts_at);
  shared.rests = shared.full_before + args.num_experts + 1;
  return shared;
}

__global__ void __launch_bounds__(kThreads, 1) GemmKernel(const __grid_constant__ Args args) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  Shared shared = MakeShared(memory, args);
  if (args.uses_iq2) MakeTables(args, memory + args.tables_at);
  GridDependencyWait();
  int num_tiles = args.num_tiles;
  if (args.num_experts > 0) {
    num_tiles += ListExpertTiles(args, shared) * args.jobs[args.num_jobs].row_blocks;
  }
  int index = static_cast<int>(blockIdx.x);
  if (index >= num_tiles) return;
  Loader loader = Start(args, shared, index);
  while (index < num_tiles) {
    // Else the compiler keeps the addresses of all formats in registers over all tiles.
    shared.place.lane = __shfl_sync(kFullMask, shared.place.lane, shared.place.lane);
    shared.place.warp = __shfl_sync(kFullMask, shared.place.warp, shared.place.lane);
    Sums sums = {};
    MultiplyTileAt(args, shared, index, loader, sums);
    __syncthreads();
    const int done = index;
    index += static_cast<int>(gridDim.x);
    // The next tile's first copies travel while this one's results are stored.
    if (index < num_tiles) loader = Start(args, shared, index);
    Store(args, shared, TileAt(args, shared, done), sums);
  }
}

// Dynamic shared memory that a block may ask for beside its static part.
constexpr int kMaxSharedBytes = 227 * 1024 - 3 * kThreads * 4;
int TableBytes(int grid_copies) { return 256 * 8 * grid_copies; }

template <typename F>
int WeightBytes() {
  return kSlots * kBlockTiles * F::kTileBytes + 2 * F::kScaleFloats * kScaleStride * 4;
}

// Shared memory for fetches of this type and their scales.
int WeightBytes(DType dtype) {
  switch (dtype) {
    case DType::kQ8_0:
      return WeightBytes<Q8_0>();
    case DType::kQ4_K:
      return WeightBytes<Q4_K>();
    case DType::kQ2_K:
      return WeightBytes<Q2_K>();
    case DType::kIQ2_XXS:
      return WeightBytes<Iq2Xxs>();
    case DType::kMXFP4:
      return WeightBytes<Mxfp4>();
    case DType::kF16:
    case DType::kBF16:
      return WeightBytes<Plain16<true>>();
    default:
      CHECK(false) << "no product of many rows for weights of type " << Info(dtype).name
                   << ": use LaunchProducts";
      return 0;
  }
}

// The last round of tiles, when most blocks would have none: in parts of 64 or 32 x rows.
void SplitLastTiles(int num_sms, Args& args) {
  const int rest = args.num_tiles % num_sms;
  args.parts = rest * 4 <= num_sms ? 4 : rest * 2 <= num_sms ? 2 : 1;
  if (args.num_experts > 0) args.parts = 1;
  args.num_whole = args.num_tiles - rest;
  args.num_tiles = args.num_whole + rest * args.parts;
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
  int weight_bytes = 0;
  args.num_tiles = 0;
  for (int j = 0; j < all_jobs; ++j) {
    Job& job = args.jobs[j];
    weight_bytes = std::max(weight_bytes, WeightBytes(job.dtype));
    args.uses_iq2 = args.uses_iq2 || job.dtype == DType::kIQ2_XXS;
    const int rows = job.up != nullptr ? kBlockRows / 2 : kBlockRows;
    job.row_blocks = (job.rows + rows - 1) / rows;
    job.x_blocks = (job.x_rows + kBlockX - 1) / kBlockX;
    job.first_tile = args.num_tiles;
    if (j < args.num_jobs) args.num_tiles += job.row_blocks * job.x_blocks;
  }
  if (args.uses_iq2) std::copy(kIq2XxsCodes.begin(), kIq2XxsCodes.end(), args.iq2_codes);
  args.tables_at = kXBytes + kOffsetBytes + weight_bytes;
  const int expert_bytes = args.num_experts > 0 ? (2 * args.num_experts + 1) * 4 : 0;
  // A copy for each pair of banks, where they fit.
  const bool copies = args.tables_at + TableBytes(16) + expert_bytes <= kMaxSharedBytes;
  args.grid_copies = copies ? 16 : 1;
  args.experts_at = args.tables_at + (args.uses_iq2 ? TableBytes(args.grid_copies) : 0);
  const int shared_bytes = args.experts_at + expert_bytes;
  SplitLastTiles(launch.num_sms, args);
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
        CHECK(!from.accumulate) << "accumulate is for y alone";
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
