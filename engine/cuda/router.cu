// LaunchRouter: the router of a layer for few rows, from x to the lists of work, in one launch.
//
// Rows go in groups. For a group there is a block for each row tile of the weights and slice of 512
// columns; its warps keep their part of the weights (a piece: 16 rows, 64 columns) in registers,
// loaded before x is there. Each block posts its slice's sums; the last one to arrive adds the
// slices and chooses the group's experts, and the last group to arrive sorts the pairs. No block
// ever waits for one that has not come yet.
//
// Blocks that come early enough rehearse the whole way, on weights in place of what others give
// them and without a trace in memory: most of the time of few rows would otherwise go into fetching
// code that nobody has run since the layer before.
//
// Order of additions for one (weight row, x row): lane t = 0..3 adds its columns of a piece (F16,
// BF16: c mod 16 in 4t..4t+3; F32: c mod 8 in 2t, 2t+1) in rising order, one fma each; then the
// slice's pieces in rising order; then the lanes, (p0 + p1) + (p2 + p3); then slices in rising
// order.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/dot.cuh"
#include "engine/cuda/experts.h"
#include "engine/cuda/experts_groups.h"
#include "engine/cuda/router.cuh"
#include "engine/cuda/simt.h"
#include "engine/cuda/sinkhorn.cuh"

namespace ds4::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPieceCols = kSliceCols / kWarps;
static_assert(kColumnGrain % kPieceCols == 0);
constexpr int kMaxGroupRows = kWarps;       // each warp chooses for one
constexpr int kPartFloats = 2 * kWarpSize;  // what the lanes of a warp hold of a row's sums
static_assert(kPartFloats == kPieceCols, "x of a piece and its sums take the same room");
constexpr int kListSlots = kMaxExpertsUsed;  // of a row, in the lists to sort

struct RouterJob {
  const std::byte* w;
  const float* x;
  int x_cols;
  int pieces;  // of a row tile
  int rows;
  int group_rows;  // of all groups but the last
  int tiles;
  int slices;
  float* partial;      // [slice][row][tiles * 16], 0 between launches
  int rehearsals;      // 0 or 1
  uint32_t* arrivals;  // [groups + 1]: blocks of a group; groups. All 0 between launches
  const int32_t* tokens;
  RouterParams params;
  Routing routing;
  SinkhornJob balance;
};

// A warp's part of the weights: 16 rows, kPieceCols columns, in lanes as in layout.h.
template <DType kType>
struct Piece {
  static constexpr int kCols = kLaneCols<kType>;
  static constexpr int kUnits = kPieceCols / (4 * kCols);
  static constexpr int kBytes = 512 * kUnits;
  float w[kUnits][2][kCols];

  __device__ __forceinline__ void Load(const std::byte* at) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      DecodeFloats<kType>(LoadStream16(at + 512 * u + 16 * LaneId()), w[u]);
    }
  }
  // The lane's sums for its two weight rows. x: of the piece's first column.
  __device__ __forceinline__ float2 Dot(const float* x) const {
    float v[kUnits][kCols];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const float* at = x + 4 * kCols * u + kCols * (LaneId() % 4);
      LoadNeighbours<kCols>(at, v[u]);
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int k = 0; k < kCols; ++k) {
        sum.x = fmaf(w[u][0][k], v[u][k], sum.x);
        sum.y = fmaf(w[u][1][k], v[u][k], sum.y);
      }
    }
    return sum;
  }
};

// One warp adds a row's pieces and posts the slice's sums for a tile's first `experts` experts.
// parts: [kWarps] pieces.
//
// A word that is 0 has not been posted: a sum of 0 goes as -0, which makes no other score. So
// blocks need no fence between posting and arriving, which would cost a trip to memory.
__device__ __forceinline__ void PostSlice(const float* parts, int experts, float* to) {
  float2 sum = make_float2(-0.0f, -0.0f);  // changes no value that is added to it
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float2 part = *reinterpret_cast<const float2*>(parts + kPartFloats * i + 2 * LaneId());
    sum.x += part.x;
    sum.y += part.y;
  }
  // An even lane adds up row g, an odd one row g + 8.
  const bool odd = LaneId() % 2 != 0;
  float value = odd ? sum.y : sum.x;
  value += __shfl_xor_sync(kFullMask, odd ? sum.x : sum.y, 1);
  value += __shfl_xor_sync(kFullMask, value, 2);
  const int expert = LaneId() / 4 + 8 * (LaneId() % 4);
  if (LaneId() % 4 < 2 && expert < experts) {
    StoreRelaxedDevice(to + expert, value == 0.0f ? -0.0f : value);
  }
}

// Logits of kRows rows from the sums of their slices, all loads of 8 slices on their way at once.
// posts: not a rehearsal. Rows past the last one repeat it.
template <int kRows>
__device__ __forceinline__ void AddSlices(const RouterJob& job, const float* sums, bool posts,
                                          int last_row, float (&logits)[kRows]) {
  const int pitch = job.tiles * kTileRows;
  const int slice_pitch = job.rows * pitch;
#pragma unroll
  for (int r = 0; r < kRows; ++r) logits[r] = -0.0f;
#pragma unroll 1
  for (int first = 0; first < job.slices; first += 8) {
    float sum[kRows][8];
    bool posted;
    do {  // all blocks have arrived: their words are here or on their way
      const float* from = sums;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          sum[r][i] =
              first + i < job.slices ? LoadRelaxedDevice(from + min(r, last_row) * pitch) : -0.0f;
        }
        from += slice_pitch;
      }
      posted = true;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) posted = posted && __float_as_uint(sum[r][i]) != 0;
      }
    } while (posts && !posted);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) logits[r] += sum[r][i];
    }
    sums += 8 * slice_pitch;
  }
}

// `threads` threads, of which this is number `thread`, take away what was posted of some rows.
__device__ __forceinline__ void ClearPosts(const RouterJob& job, int first_row, int rows,
                                           int thread, int threads) {
  const int pitch = job.tiles * kTileRows;
#pragma unroll 1
  for (int slice = 0; slice < job.slices; ++slice) {
    auto* posts = reinterpret_cast<float4*>(job.partial + (slice * job.rows + first_row) * pitch);
#pragma unroll 1
    for (int i = thread; i < rows * pitch / 4; i += threads) {
      posts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

// The lists of work of the only row, by its warp.
__device__ __forceinline__ void ListRow(const Routing& routing, int used, const Choice& choice) {
  const int k = LaneId();
  if (k >= used) return;
  routing.pairs[choice.place] = k;
  routing.pair_place[k] = choice.place;
  routing.place_weight[choice.place] = choice.weight;
  routing.group_expert[choice.place] = choice.expert;
  routing.group_first[choice.place] = choice.place;
  routing.group_size[choice.place] = 1;
  if (k == 0) *routing.num_groups = used;
}

// Pairs to sort: [rows][kListSlots], id -1 where there is none.
struct PairList {
  int* ids;
  float* weights;

  __device__ __forceinline__ PairList(std::byte* memory, int rows)
      : ids(reinterpret_cast<int*>(memory)),
        weights(reinterpret_cast<float*>(ids + rows * kListSlots)) {}
};
constexpr int kSlotBytes = 8;

// What sorting needs of each expert, in shared memory: one array after the other.
struct ExpertTables {
  uint32_t* low;   // which of rows 0..31 use it
  uint32_t* high;  // rows 32..63
  int* count;      // its pairs
  int* first;      // place of the first one

  __device__ __forceinline__ ExpertTables(std::byte* memory, int num_experts)
      : low(reinterpret_cast<uint32_t*>(memory)),
        high(low + num_experts),
        count(reinterpret_cast<int*>(high + num_experts)),
        first(count + num_experts) {}
};
constexpr int kExpertTableBytes = 16;

// First places and groups of all experts; each thread has some neighbours. Groups go to memory when
// this is `real`.
__device__ __forceinline__ void PlaceExperts(const Routing& routing, int num_experts,
                                             const ExpertTables& experts, bool real) {
  constexpr int kGroupShift = 16;  // groups are counted in the upper half of a word, pairs below
  __shared__ int totals[kWarps];
  const auto counts_of = [](int count) {
    return count | ((count + kGroupPairs - 1) / kGroupPairs << kGroupShift);
  };
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (num_experts + kThreads - 1) / kThreads;
  const int begin = thread * per_thread;
  const int end = min(begin + per_thread, num_experts);
  int own = 0;
#pragma unroll 1
  for (int e = begin; e < end; ++e) own += counts_of(experts.count[e]);
  int before = own;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int other = __shfl_sync(kFullMask, before, max(LaneId() - offset, 0));
    if (LaneId() >= offset) before += other;
  }
  if (LaneId() == kWarpSize - 1) totals[thread / kWarpSize] = before;
  __syncthreads();
  before -= own;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) before += w < thread / kWarpSize ? totals[w] : 0;
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    const int count = experts.count[e];
    int first = before & ((1 << kGroupShift) - 1);
    int group = before >> kGroupShift;
    before += counts_of(count);
    experts.first[e] = first;
#pragma unroll 1
    for (int left = real ? count : 0; left > 0; left -= kGroupPairs) {
      routing.group_expert[group] = e;
      routing.group_first[group] = first;
      routing.group_size[group] = min(kGroupPairs, left);
      first += kGroupPairs;
      ++group;
    }
  }
  if (real && thread == kThreads - 1) *routing.num_groups = before >> kGroupShift;
}

// One block: the lists of work of all rows. memory: for the expert tables. They go to memory when
// this is `real`.
__device__ __forceinline__ void SortPairs(const RouterJob& job, int rows, const PairList& list,
                                          std::byte* memory, bool real) {
  const int num_experts = job.params.num_experts, used = job.params.used;
  const ExpertTables experts(memory, num_experts);
  const int thread = static_cast<int>(threadIdx.x);
  const int k = thread % kListSlots;
#pragma unroll 1
  for (int i = thread; i < 3 * num_experts; i += kThreads) experts.low[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int row = thread / kListSlots; row < rows; row += kThreads / kListSlots) {
    const int id = list.ids[row * kListSlots + k];
    if (id < 0) continue;
    atomicOr((row < 32 ? experts.low : experts.high) + id, 1u << row % 32);
    atomicAdd(experts.count + id, 1);
  }
  __syncthreads();
  PlaceExperts(job.routing, num_experts, experts, real);
  __syncthreads();
#pragma unroll 1
  for (int row = thread / kListSlots; row < rows; row += kThreads / kListSlots) {
    const int slot = row * kListSlots + k;
    const int id = list.ids[slot];
    if (id < 0) continue;
    const uint32_t low = experts.low[id], high = experts.high[id];
    const uint32_t below = (1u << row % 32) - 1;
    int rank = row < 32 ? __popc(low & below) : __popc(low) + __popc(high & below);
    if (__popc(low) + __popc(high) != experts.count[id]) {  // a table names it twice for a token
      rank = 0;
      for (int i = 0; i < slot; ++i) rank += list.ids[i] == id ? 1 : 0;
    }
    const int place = experts.first[id] + rank;
    const int pair = row * used + k;
    if (!real) continue;
    job.routing.pairs[place] = pair;
    job.routing.pair_place[pair] = place;
    job.routing.place_weight[place] = list.weights[slot];
  }
}

__device__ __forceinline__ void StoreChoice(const RouterJob& job, int row, const Choice& choice) {
  if (LaneId() >= job.params.used) return;
  const int pair = row * job.params.used + LaneId();
  job.routing.ids[pair] = choice.expert;
  job.routing.weights[pair] = choice.weight;
}

// Where a block is, and each of its warps. Grid: slices, row tiles, groups of rows; behind the row
// tiles the blocks that balance.
struct Position {
  int slice = static_cast<int>(blockIdx.x);
  int tile = static_cast<int>(blockIdx.y);
  int group = static_cast<int>(blockIdx.z);
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int piece = slice * kWarps + warp;
};

// Where the piece's weights are; nullptr: past the last column.
template <DType kType>
__device__ __forceinline__ const std::byte* PieceAt(const RouterJob& job, const Position& at) {
  if (at.piece >= job.pieces) return nullptr;
  return job.w + int64_t{at.tile * job.pieces + at.piece} * Piece<kType>::kBytes;
}
__device__ __forceinline__ float BiasOf(const RouterParams& params, int expert) {
  return params.bias != nullptr && expert < params.num_experts ? params.bias[expert] : 0.0f;
}

// One row. Few registers and little shared memory, so that the next kernel's blocks find room
// beside.
template <DType kType>
__global__ void __launch_bounds__(kThreads, 4) OneRowKernel(const __grid_constant__ RouterJob job) {
  LaunchDependents();
  const Position at;
  if (at.tile == job.tiles) return BalanceRows(job.balance, at.slice);
  DS4_DYNAMIC_SHARED(memory);
  __shared__ bool last;
  const std::byte* piece = PieceAt<kType>(job, at);
  if (piece != nullptr && LaneId() == 0) PrefetchL2(piece, Piece<kType>::kBytes);
  const int num_experts = job.params.num_experts;
  const int thread = static_cast<int>(threadIdx.x);
  const float first_bias = BiasOf(job.params, thread);
  const RowScores scores(memory, num_experts);
  float* parts = reinterpret_cast<float*>(memory);
  const int pitch = job.tiles * kTileRows;
  const int first_expert = at.tile * kTileRows;
  const unsigned last_arrival = static_cast<unsigned>(job.tiles * job.slices) - 1;
#pragma unroll 1
  for (int rehearsals = job.rehearsals;; --rehearsals) {
    const bool real = rehearsals == 0;
    Piece<kType> w = {};
    if (real) {
      if (piece != nullptr) w.Load(piece);
      GridDependencyWait();
    }
    const auto* weights = reinterpret_cast<const float*>(job.w);
    const float* x = real ? job.x : weights;
    const float* sums = real ? job.partial : weights;
    // Far away, and needed by the last block alone: on its way meanwhile.
    const int listed = real && at.warp == 0 ? ListedExpert(job.params, job.tokens, 0) : 0;
    float2 part = make_float2(-0.0f, -0.0f);
    if (piece != nullptr) part = w.Dot(x + at.piece * kPieceCols);
    *reinterpret_cast<float2*>(parts + at.warp * kPartFloats + 2 * LaneId()) = part;
    __syncthreads();
    if (at.warp == 0) {
      PostSlice(parts, real ? num_experts - first_expert : 0,
                job.partial + at.slice * pitch + first_expert);
      __syncwarp();  // all have read the parts
      if (thread == 0) last = !real || atomicInc(job.arrivals, last_arrival) == last_arrival;
    }
    __syncthreads();
    if (!last) return;
    float bias = first_bias;
#pragma unroll 1
    for (int expert = thread; expert < RowExperts(num_experts); expert += kThreads) {
      float logit[1] = {};
      if (expert < num_experts) AddSlices(job, sums + expert, real, 0, logit);
      if (expert != thread) bias = BiasOf(job.params, expert);
      PlaceScore(job.params, scores, expert, RouterScore(logit[0]), bias);
    }
    __syncthreads();
    if (at.warp == 0) {
      const Choice choice = ChooseRow(job.params, listed, scores);
      if (real) {
        StoreChoice(job, 0, choice);
        ListRow(job.routing, job.params.used, choice);
      }
    } else if (real) {
      ClearPosts(job, 0, 1, thread - kWarpSize, kThreads - kWarpSize);
    }
    if (real) return;
    __syncthreads();  // the scores make room for sums
  }
}

// ---- Several rows.

// Dynamic shared memory: the list of pairs, then what changes from step to step: x and the sums of
// pieces; scores; tables of experts.
__host__ __device__ constexpr int ListBytes(int rows) { return rows * kListSlots * kSlotBytes; }

// Scores of a group's rows, in shared memory. sums: what was posted, or no posts (a rehearsal).
__device__ __forceinline__ void ScoreRows(const RouterJob& job, const float* sums, bool posts,
                                          int group_rows, std::byte* memory) {
  constexpr int kAhead = 2;
  const int num_experts = job.params.num_experts;
  const int pitch = job.tiles * kTileRows;
  const int row_bytes = RowScoresBytes(num_experts);
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < RowExperts(num_experts);
       expert += kThreads) {
    const float bias = BiasOf(job.params, expert);
#pragma unroll 1
    for (int first = 0; first < group_rows; first += kAhead) {
      float logits[kAhead] = {};
      if (expert < num_experts) {
        AddSlices(job, sums + first * pitch + expert, posts, group_rows - 1 - first, logits);
      }
#pragma unroll 1
      for (int i = 0; i < min(kAhead, group_rows - first); ++i) {
        const RowScores scores(memory + (first + i) * row_bytes, num_experts);
        PlaceScore(job.params, scores, expert, RouterScore(logits[0]), bias);
        logits[0] = logits[1];
      }
    }
  }
}

// The pairs of all rows, from memory; any at all in a rehearsal.
__device__ __forceinline__ void CollectPairs(const RouterJob& job, int rows, const PairList& list,
                                             bool real) {
  const int used = job.params.used;
  const int k = static_cast<int>(threadIdx.x) % kListSlots;
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x) / kListSlots; row < rows;
       row += kThreads / kListSlots) {
    const int slot = row * kListSlots + k;
    const int pair = row * used + k;
    list.ids[slot] = k >= used ? -1 : real ? job.routing.ids[pair] : 0;
    list.weights[slot] = k < used && real ? job.routing.weights[pair] : 0.0f;
  }
}

// What the last block of a group does: a warp for each row. Its part of job.partial: sums.
__device__ __forceinline__ void RouteGroup(const RouterJob& job, const float* sums, int first_row,
                                           int group_rows, int listed, bool real,
                                           std::byte* memory) {
  __shared__ bool last;
  std::byte* tables = memory + ListBytes(job.rows);
  ScoreRows(job, sums, real, group_rows, tables);
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (warp < group_rows) {
    const int num_experts = job.params.num_experts;
    const RowScores scores(tables + warp * RowScoresBytes(num_experts), num_experts);
    const Choice choice = ChooseRow(job.params, listed, scores);
    if (real) StoreChoice(job, first_row + warp, choice);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    last = !real || gridDim.z == 1 || ArriveLast(job.arrivals + gridDim.z, gridDim.z);
  }
  if (real) ClearPosts(job, first_row, group_rows, static_cast<int>(threadIdx.x), kThreads);
  __syncthreads();
  if (!last) return;
  const PairList list(memory, job.rows);
  const int rows = real ? job.rows : 1;
  CollectPairs(job, rows, list, real);
  SortPairs(job, rows, list, tables, real);
}

// The blocks of the first group are on almost all multiprocessors: they rehearse, with one row.
template <DType kType>
__global__ void __launch_bounds__(kThreads, 3)
    SomeRowsKernel(const __grid_constant__ RouterJob job) {
  LaunchDependents();
  const Position at;
  if (at.tile == job.tiles) return BalanceRows(job.balance, at.group * job.slices + at.slice);
  DS4_DYNAMIC_SHARED(memory);
  __shared__ bool last;
  const std::byte* piece = PieceAt<kType>(job, at);
  if (piece != nullptr && LaneId() == 0) PrefetchL2(piece, Piece<kType>::kBytes);
  const int first_row = at.group * job.group_rows;
  const int pitch = job.tiles * kTileRows, first_expert = at.tile * kTileRows;
  const unsigned last_arrival = static_cast<unsigned>(job.tiles * job.slices) - 1;
  float* room = reinterpret_cast<float*>(memory + ListBytes(job.rows));
#pragma unroll 1
  for (int rehearsals = at.group == 0 ? job.rehearsals : 0;; --rehearsals) {
    const bool real = rehearsals == 0;
    Piece<kType> w = {};
    if (real) {
      if (piece != nullptr) w.Load(piece);
      GridDependencyWait();
    }
    const auto* weights = reinterpret_cast<const float*>(job.w);
    const float* x = (real ? job.x + first_row * job.x_cols : weights) + at.piece * kPieceCols;
    const float* sums = real ? job.partial + first_row * pitch : weights;
    const int group_rows = real ? min(job.group_rows, job.rows - first_row) : 1;
    const int listed = real && at.warp < group_rows
                           ? ListedExpert(job.params, job.tokens, first_row + at.warp)
                           : 0;
    float* parts = room + at.warp * kPartFloats;
    if (piece != nullptr) {
      for (int r = LaneId() / 16; r < group_rows; r += 2) {
        CopyAsync16(parts + r * kWarps * kPartFloats + LaneId() % 16 * 4,
                    x + r * job.x_cols + LaneId() % 16 * 4);
      }
    }
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncwarp();
    float2 part = make_float2(-0.0f, -0.0f);
#pragma unroll 1
    for (int r = 0; r < group_rows; ++r) {
      if (piece != nullptr) part = w.Dot(parts);
      __syncwarp();  // x of the row makes room for the sums
      *reinterpret_cast<float2*>(parts + 2 * LaneId()) = part;
      parts += kWarps * kPartFloats;
    }
    __syncthreads();
    if (at.warp < group_rows) {
      const int row = at.slice * job.rows + first_row + at.warp;
      PostSlice(room + at.warp * kWarps * kPartFloats,
                real ? job.params.num_experts - first_expert : 0,
                job.partial + row * pitch + first_expert);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      last = !real || atomicInc(job.arrivals + at.group, last_arrival) == last_arrival;
    }
    __syncthreads();
    if (!last) return;
    RouteGroup(job, sums, first_row, group_rows, listed, real, memory);
    if (real) return;
    __syncthreads();  // the tables make room for x
  }
}

// ---- Host side.

// Rows of a group: one group as long as a warp can have each row; then enough groups to fill the
// device, but few enough that the weights are not read too often.
int GroupRows(int rows) { return rows <= kMaxGroupRows ? rows : rows <= 16 ? 4 : kMaxGroupRows; }

int64_t Slices(int64_t cols) { return (PaddedCols(cols) + kSliceCols - 1) / kSliceCols; }
constexpr int64_t kArrivalBytes = (kMaxRouterRows + 1) * 4 / 256 * 256 + 256;

}  // namespace

int64_t RouterScratchBytes(int64_t max_rows, int64_t num_experts, int64_t cols) {
  return kArrivalBytes + Slices(cols) * max_rows * PaddedRows(num_experts) * 4;
}

bool IsRouterType(DType dtype) { return IsFloatType(dtype); }

void LaunchRouter(const LaunchContext& launch, const RouterParams& params, const PackedMatrix& w,
                  const ActivationView& x, const int32_t* tokens, const Routing& routing,
                  std::byte* scratch, const SinkhornJob& balance) {
  CheckRouter(params);
  CHECK(w.rows == params.num_experts && x.rows <= kMaxRouterRows && IsRouterType(w.dtype))
      << "a router of " << w.rows << " rows for " << params.num_experts << " experts, " << x.rows
      << " rows of x";
  if (x.rows == 0) return;
  RouterJob job = {};
  job.w = w.data;
  job.x = x.f32;
  job.x_cols = static_cast<int>(x.cols);
  job.pieces = static_cast<int>(w.padded_cols() / kPieceCols);
  job.rows = x.rows;
  job.group_rows = GroupRows(x.rows);
  job.tiles = static_cast<int>(PaddedRows(w.rows) / kTileRows);
  job.slices = static_cast<int>(Slices(w.cols));
  job.rehearsals = launch.overlap ? 1 : 0;
  job.arrivals = reinterpret_cast<uint32_t*>(scratch);
  job.partial = reinterpret_cast<float*>(scratch + kArrivalBytes);
  job.tokens = tokens;
  job.params = params;
  job.routing = routing;
  job.balance = balance;
  const int groups = (x.rows + job.group_rows - 1) / job.group_rows;
  int bytes = job.group_rows * std::max<int>(kWarps * kPartFloats * sizeof(float),
                                             RowScoresBytes(params.num_experts));
  if (x.rows > 1) {
    bytes = ListBytes(x.rows) + std::max(bytes, params.num_experts * kExpertTableBytes);
  }
  const dim3 grid(static_cast<unsigned>(job.slices),
                  static_cast<unsigned>(job.tiles + (balance.rows > 0 ? 1 : 0)),
                  static_cast<unsigned>(groups));
  const auto launch_kernel = [&](auto one_row, auto some_rows) {
    Launch(launch, grid, dim3(kThreads), static_cast<size_t>(bytes),
           x.rows == 1 ? one_row : some_rows, job);
  };
  if (w.dtype == DType::kF16) {
    launch_kernel(OneRowKernel<DType::kF16>, SomeRowsKernel<DType::kF16>);
  } else if (w.dtype == DType::kBF16) {
    launch_kernel(OneRowKernel<DType::kBF16>, SomeRowsKernel<DType::kBF16>);
  } else {
    launch_kernel(OneRowKernel<DType::kF32>, SomeRowsKernel<DType::kF32>);
  }
}

}  // namespace ds4::cuda
