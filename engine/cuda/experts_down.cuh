// The fast path of LaunchExpertsDown: lanes of at most 256 columns in the formats that models come
// in. Blocks of 8 warps stay on their SMs and take one set of row tiles after the other while their
// rings go on filling; a warp has one lane and kWidth row tiles of each set.
//
// They read the routing before they wait for the kernel ahead of them: that is ExpertsUp, which
// lets this one start only when it has seen the routing itself.
#pragma once

#include <type_traits>

#include "engine/cuda/experts_tiles.cuh"

namespace ds4::cuda {

inline constexpr int kMaxSubtrees = 8;

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
  // Only on the fast path.
  int lists_at;      // shared memory: sums, routing, rings
  int expert_bytes;  // from a lane of an expert to the same of the next
  int set_bits;      // warp w has lane w >> set_bits, 2^set_bits warps a lane
  int output_bits;   // a block has 2^output_bits outputs
  float* roots;
  int num_subtrees;
  int subtree_begin[kMaxSubtrees];  // first lane, of this rank's
  int subtree_size[kMaxSubtrees];
};

// Rows first_row.. of the shared product begin the sums.
template <int kStride>
__device__ __forceinline__ void StoreSums(const float (&total)[4], int row, float* sums) {
  const int lane = LaneId();
  float* to = sums + (row + lane % 4 * 2) * kStride + lane / 4;
  to[0] = total[0];
  to[kStride] = total[1];
  to[8] = total[2];
  to[kStride + 8] = total[3];
}

// Adds column j of the group to the sums of row x_row[j] (-1: not of this block). A table of ids
// may name an expert twice for one row; `twice` then adds column after column.
template <int kStride>
__device__ __forceinline__ void AddSums(const float (&total)[4], const int (&x_row)[2], bool twice,
                                        float* sums) {
  const int lane = LaneId();
  const int turns = twice ? 4 : 1;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (!twice || lane % 4 == turn) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (x_row[i] < 0) continue;
        float* to = sums + x_row[i] * kStride + lane / 4;
        to[0] += total[i];
        to[8] += total[2 + i];
      }
    }
    __syncwarp();
  }
}

inline constexpr int kFastWarps = 8;
inline constexpr int kWidth = 2;  // row tiles of a warp
// Bytes of a warp's ring; a block has an SM for itself. With one row of x a warp's part is short:
// all of it is asked for before the wait.
template <bool kOneRow>
inline constexpr int kRingRoom = kOneRow ? 25 * 1088 : 18 * 1024;
template <DType kType, bool kOneRow>
inline constexpr int kSlots = kRingRoom<kOneRow> / kTileSlot<kType, kWidth>;
// Floats between a warp's sums of one row and the next one's.
inline constexpr int kRowSums = kWidth * kTileRows + 4;

// A group: expert, then the place of its first pair times 16 + its size.
struct GroupEntry {
  int expert;
  int place;
};
// Past L1, which may hold an earlier layer's.
__device__ __forceinline__ GroupEntry LoadEntry(const Routing& routing, int group) {
  return {__ldcg(routing.group_expert + group),
          __ldcg(routing.group_first + group) * 16 + __ldcg(routing.group_size + group)};
}

// The stages of one warp: for each set of its row tiles the shared expert for each 8 rows, then the
// groups. Experts: `int operator()(int group)`, the same in all lanes.
template <DType kType, class Experts>
struct TileSource {
  const DownKernelJob& job;
  const Experts& expert;
  int shared_stages;
  int row_tile;
  int stage = 0;
  const std::byte* shared;  // of the lane and row_tile
  const std::byte* routed;  // the same of expert 0
  int stages = 0;           // of a set of row tiles

  __device__ __forceinline__ TileSource(const DownKernelJob& own_job, const Experts& experts,
                                        int lane, int first_tile, int num_shared_stages)
      : job(own_job),
        expert(experts),
        shared_stages(num_shared_stages),
        row_tile(first_tile),
        shared(At(job.shapes[1], lane)),
        routed(At(job.shapes[0], lane)) {}

  __device__ __forceinline__ void SetGroups(int num_groups) {
    stages = shared_stages + num_groups * kUnitStages<kType, kWidth>;
  }
  template <class Copy>
  __device__ __forceinline__ bool NextShared(const Copy& copy) {
    if (row_tile >= job.shapes[0].row_tiles || stage >= shared_stages) return false;
    Shared(copy);
    return true;
  }
  template <class Copy>
  __device__ __forceinline__ bool Next(const Copy& copy) {
    if (row_tile >= job.shapes[0].row_tiles) return false;
    if (stage < shared_stages) {
      Shared(copy);
      return true;
    }
    const int group = (stage - shared_stages) / kUnitStages<kType, kWidth>;
    const std::byte* at = routed + int64_t{expert(group)} * job.expert_bytes;
    if constexpr (kType == DType::kQ8_0) {
      Half(copy, at, NextTile(job.shapes[0]));
    } else {
      copy.Chunk(at, NextTile(job.shapes[0]));
    }
    if (++stage == stages) {
      stage = 0;
      const int step = static_cast<int>(gridDim.x) * job.tiles;
      row_tile += step;
      shared += int64_t{step} * job.shapes[1].tile_bytes;
      routed += int64_t{step} * job.shapes[0].tile_bytes;
    }
    return true;
  }

 private:
  template <class Copy>
  __device__ __forceinline__ void Shared(const Copy& copy) {
    Half(copy, shared, NextTile(job.shapes[1]));
    ++stage;
  }
  // For a tile that is not there, the one before stands.
  __device__ __forceinline__ int NextTile(const MatrixShape& w) const {
    return row_tile + kWidth <= job.shapes[0].row_tiles ? w.tile_bytes : 0;
  }
  // The next half of a chunk of Q8_0, tile after tile.
  template <class Copy>
  __device__ __forceinline__ void Half(const Copy& copy, const std::byte* at, int next_tile) const {
    copy.Half(at + stage / 2 % kWidth * next_tile, stage % 2);
  }
  __device__ __forceinline__ const std::byte* At(const MatrixShape& w, int lane) const {
    return w.data + (lane * w.matrix_bytes + int64_t{row_tile} * w.tile_bytes);
  }
};

// What thread i knows of group i where one row of x has no more than kMaxExpertsUsed of them.
struct OwnGroup {
  GroupEntry entry;

  __device__ __forceinline__ int operator()(int group) const {
    return __shfl_sync(kFullMask, entry.expert, group);
  }
  __device__ __forceinline__ int Place(int group) const {
    return __shfl_sync(kFullMask, entry.place, group);
  }
};

// What one row of x needs first: of the shared expert, and of group 0.
template <DType kType>
struct OneRowX {
  RowFinder<DType::kQ8_0> shared_rows;
  RowFinder<kType> rows;
  int place;  // of group 0
  OwnRows<1, 2> shared;
  OwnRows<1, 2> first;

  __device__ __forceinline__ OneRowX(const DownKernelJob& job, const OwnGroup& own, int block)
      : shared_rows(job.shared_hidden, block), rows(job.hidden, block), place(own.Place(0)) {}

  __device__ __forceinline__ void Load() {
    shared_rows.Load({0}, shared);
    rows.Load({place / 16}, first);
  }
};

// One set of row tiles for one row of x: the shared product, then the groups'. Which output it is:
// FourSums.
template <DType kType, class Ring>
__device__ __forceinline__ float SumRow(Ring& ring, int num_groups, const OwnGroup& own,
                                        const OneRowX<kType>& x, const HalvesMask& mask,
                                        const LaneTables& tables) {
  float part[kWidth][1][2];
  DotTiles<DType::kQ8_0, kWidth>(ring, SpreadX<DType::kQ8_0, 1>(x.shared, mask), tables, part);
  ring.Release();
  float sum = FourSums(part, 0).Total();
  OwnRows<1, 2> next = x.first;
  int place = x.place;
#pragma unroll 1
  for (int group = 0; group < num_groups; ++group) {
    const SpreadX<kType, 1> spread(next, mask);
    const int times = place % 16;
    place = own.Place(min(group + 1, num_groups - 1));
    x.rows.Load({place / 16}, next);
    DotTiles<kType, kWidth>(ring, spread, tables, part);
    const FourSums four(part, 0);
    ring.Release();
    const float product = four.Total();
    sum += product;
    // A table of ids may name an expert twice.
#pragma unroll 1
    for (int i = 1; i < times; ++i) sum += product;
  }
  return sum;
}

// x of a group whose rows stand together: `first` and the next, count of them.
__device__ __forceinline__ void LoadTogether(const ActivationView& x, int block, int first,
                                             int count, BlockX<2>& to) {
  const int lane = LaneId();
  const int tiles = TilesOf(x);
  const int row = first + min(lane / 4, count - 1);
  const int even = first + min(lane % 4 * 2, count - 1);
  const int odd = first + min(lane % 4 * 2 + 1, count - 1);
  const uint64_t* q = x.q + (block * tiles * 32 + row * 4 + lane % 4);
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

// The routing of a block's rows, in shared memory.
struct Lists {
  const GroupEntry* groups;
  const int16_t* rows;  // of pairs, by place; -1: not of this block
  int num_groups;

  __device__ __forceinline__ int operator()(int group) const { return groups[group].expert; }
};

// Copies the routing for rows first_row .. . All threads call it, and meet before they use the
// lists.
__device__ __forceinline__ void LoadLists(const DownKernelJob& job, int first_row, int num_rows,
                                          GroupEntry* groups, int16_t* rows) {
  const Routing& routing = job.routing;
  const int threads = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < job.max_groups; i += threads) {
    groups[i] = LoadEntry(routing, i);
  }
  for (int i = static_cast<int>(threadIdx.x); i < job.rows * job.used; i += threads) {
    const int row = __ldcg(routing.pairs + i) / job.used - first_row;
    rows[i] = static_cast<int16_t>(row >= 0 && row < num_rows ? row : -1);
  }
}

// What a group needs of x, asked for one group ahead.
template <DType kType>
struct NextX {
  const DownKernelJob& job;
  const Lists& lists;
  const RowFinder<kType>& hidden;
  int block;
  int first = 0;
  int count = 0;
  OwnRows<2, 2> few = {};  // of one row or two
  // Of more; of Q2_K, the first four.
  std::conditional_t<kType == DType::kQ2_K, FourRows, BlockX<2>> many = {};

  // The last group again, past the end.
  __device__ __forceinline__ void Ask(int group) {
    const int place = lists.groups[min(group, lists.num_groups - 1)].place;
    first = place / 16;
    count = place % 16;
    if (count <= 2) {
      hidden.Load({first, first + count - 1}, few);
    } else if constexpr (kType == DType::kQ2_K) {
      many.Load(job.hidden, block, first, count);
    } else {
      LoadTogether(job.hidden, block, first, count, many);
    }
  }
};

// The shared expert's products begin the sums.
template <class Ring>
__device__ __forceinline__ void SumShared(const DownKernelJob& job, Ring& ring, int block,
                                          int first_row, int num_rows, float* sums) {
  BlockX<2> next;
  const auto ask = [&](int begin) {
    LoadTogether(job.shared_hidden, block, first_row + begin, min(kGroupPairs, num_rows - begin),
                 next);
  };
  ask(0);
#pragma unroll 1
  for (int begin = 0; begin < num_rows; begin += kGroupPairs) {
    const BlockX<2> x = next;
    if (begin + kGroupPairs < num_rows) ask(begin + kGroupPairs);
    float total[kWidth][4];
    DotTilesGroup<DType::kQ8_0, kWidth>(ring, x, total);
#pragma unroll
    for (int tile = 0; tile < kWidth; ++tile) {
      StoreSums<kRowSums>(total[tile], begin, sums + tile * kTileRows);
    }
  }
}

// Adds a group of one row or two.
template <DType kType, class Ring>
__device__ __forceinline__ void AddFew(Ring& ring, NextX<kType>& next, int group,
                                       const HalvesMask& mask, const LaneTables& tables,
                                       float* sums) {
  const OwnRows<2, 2> x = next.few;
  const int16_t* rows = next.lists.rows + next.first;
  const bool one = next.count == 1;
  const int row[2] = {rows[0], rows[one ? 0 : 1]};
  next.Ask(group + 1);
  // Each lane adds to outputs of its own, one row after the other: they may be the same.
  float* own = sums + LaneId() % 4 * 8 + LaneId() / 4;  // see FourSums
  const auto add = [&](float product, int to) {
    if (to >= 0) own[to * kRowSums] += product;
  };
  if (one) {
    float part[kWidth][1][2];
    DotTiles<kType, kWidth>(ring, SpreadX<kType, 1>(x.First(), mask), tables, part);
    const FourSums four(part, 0);
    ring.Release();
    add(four.Total(), row[0]);
  } else {
    float part[kWidth][2][2];
    DotTiles<kType, kWidth>(ring, SpreadX<kType, 2>(x, mask), tables, part);
    const FourSums four[2] = {{part, 0}, {part, 1}};
    ring.Release();
    add(four[0].Total(), row[0]);
    add(four[1].Total(), row[1]);
  }
}

// Adds a group of more rows.
template <DType kType, class Ring>
__device__ __forceinline__ void AddMany(Ring& ring, NextX<kType>& next, int group, float* sums) {
  const BlockX<2> x = next.many;
  const int column = LaneId() % kGroupPairs;
  const int row = column < next.count ? next.lists.rows[next.first + column] : -1;
  next.Ask(group + 1);
  float total[kWidth][4];
  DotTilesGroup<kType, kWidth>(ring, x, total);
  const int left = __shfl_sync(kFullMask, row, max(column - 1, 0));
  const bool twice = __ballot_sync(kFullMask, column > 0 && row >= 0 && left == row) != 0;
  const int x_row[2] = {__shfl_sync(kFullMask, row, LaneId() % 4 * 2),
                        __shfl_sync(kFullMask, row, LaneId() % 4 * 2 + 1)};
#pragma unroll
  for (int tile = 0; tile < kWidth; ++tile) {
    AddSums<kRowSums>(total[tile], x_row, twice, sums + tile * kTileRows);
  }
}

// The same of Q2_K, four rows at a time.
template <class Ring>
__device__ __forceinline__ void AddFours(Ring& ring, NextX<DType::kQ2_K>& next, int group,
                                         const HalvesMask& mask, float* sums) {
  const int t = LaneId() % 4;
  const int first = next.first, count = next.count;
  FourRows own = next.many;
  next.Ask(group + 1);
  const std::byte* chunks = ring.Wait();
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 4) {
    if (begin > 0) own.Load(next.job.hidden, next.block, first + begin, count - begin);
    const int row = begin + t < count ? next.lists.rows[first + begin + t] : -1;
    float sum[kWidth][2];
    DotFourHalves<kWidth, kChunkBytes<DType::kQ2_K>>(chunks, FourHalvesX(own, mask), sum);
    const int left = __shfl_sync(kFullMask, row, max(LaneId() - 1, 0));
    const bool twice = __ballot_sync(kFullMask, t > 0 && row >= 0 && left == row) != 0;
    const int turns = twice ? 4 : 1;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      if (row >= 0 && (!twice || t == turn)) {
        float* to = sums + row * kRowSums + LaneId() / 4;
#pragma unroll
        for (int i = 0; i < 2 * kWidth; ++i) to[8 * i] += sum[i / 2][i % 2];
      }
      __syncwarp();
    }
  }
  ring.Release();
}

// One set of row tiles for the rows of a block: `sums` [rows][kRowSums] of the warp.
template <DType kType, class Ring>
__device__ __forceinline__ void SumGroups(const DownKernelJob& job, Ring& ring, int block,
                                          int first_row, int num_rows, const Lists& lists,
                                          const RowFinder<kType>& hidden, const HalvesMask& mask,
                                          const LaneTables& tables, float* sums) {
  NextX<kType> next = {job, lists, hidden, block};
  next.Ask(0);
  SumShared(job, ring, block, first_row, num_rows, sums);
  // A loop in the loop: else each group, however small, would move next.many.
  int group = 0;
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (; group < lists.num_groups && next.count <= 2; ++group) {
      AddFew(ring, next, group, mask, tables, sums);
    }
    if (group == lists.num_groups) break;
    if constexpr (kType == DType::kQ2_K) {
      AddFours(ring, next, group, mask, sums);
    } else {
      AddMany(ring, next, group, sums);
    }
    ++group;
  }
}

// Subtree roots of the block's row tiles from the sums of its warps, [rows][kRowSums] each. Eight
// threads add the lanes of one output, neighbours first: the order of the tree.
__device__ __forceinline__ void StoreRoots(const DownKernelJob& job, int first_tile, int first_row,
                                           int num_rows, const float* sums) {
  static_assert(kFastWarps == 8 && kTileRows == 16);
  const int warp_sums = job.sum_rows * kRowSums;
  const int own = static_cast<int>(threadIdx.x) % 8;
  const int threads = num_rows * 8 << job.output_bits;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < threads; i += static_cast<int>(blockDim.x)) {
    const int row = i / 8 >> job.output_bits;
    const int output = i / 8 - (row << job.output_bits);
    constexpr int kOutputs = kWidth * kTileRows;
    const float* lanes = sums + output / kOutputs * warp_sums + row * kRowSums + output % kOutputs;
    const int to = first_tile * kTileRows + output;
#pragma unroll 1
    for (int s = 0; s < job.num_subtrees; ++s) {
      const int size = job.subtree_size[s];
      float value =
          own < size ? lanes[((job.subtree_begin[s] + own) << job.set_bits) * warp_sums] : 0.0f;
#pragma unroll
      for (int step = 1; step < kFastWarps; step *= 2) {
        const float other = __shfl_xor_sync(kFullMask, value, step);
        if (step < size) value += other;
      }
      if (own == 0 && to < job.cols) {
        job.roots[(int64_t{s} * job.rows + first_row + row) * job.cols + to] = value;
      }
    }
  }
}

// kType: of the routed experts; the shared one has Q8_0.
template <DType kType, bool kOneRow>
__global__ void __launch_bounds__(kFastWarps* kWarpSize, kOneRow ? kBlocksAnSm : 1)
    FastDownKernel(const __grid_constant__ DownKernelJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  const LaneTables tables(memory);  // none of the types here looks anything up
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = warp >> job.set_bits;
  const int first_row = static_cast<int>(blockIdx.y) * job.sum_rows;
  const int num_rows = min(job.sum_rows, job.rows - first_row);
  const int shared_stages =
      (num_rows + kGroupPairs - 1) / kGroupPairs * kUnitStages<DType::kQ8_0, kWidth>;
  const int block = lane * (kColumnGrain / 32);
  int tile = static_cast<int>(blockIdx.x) * job.tiles;
  const int own_tile = (warp - (lane << job.set_bits)) * kWidth;
  // Before the wait: see above. Past L1 as well.
  const int num_groups = __ldcg(job.routing.num_groups);
  float* sums = reinterpret_cast<float*>(memory);

  using Experts = std::conditional_t<kOneRow, OwnGroup, Lists>;
  Experts experts;
  if constexpr (kOneRow) {
    experts = {LoadEntry(job.routing, min(LaneId(), job.max_groups - 1))};
  } else {
    auto* groups = reinterpret_cast<GroupEntry*>(memory + job.lists_at);
    auto* rows = reinterpret_cast<int16_t*>(groups + job.max_groups);
    experts = {groups, rows, num_groups};
    LoadLists(job, first_row, num_rows, groups, rows);
  }
  TileRing<kType, kWidth, kSlots<kType, kOneRow>, TileSource<kType, Experts>> ring = {
      memory + job.fixed_bytes + warp * job.ring_bytes,
      {job, experts, lane, tile + own_tile, shared_stages}};
  ring.BeginShared();
  if constexpr (!kOneRow) __syncthreads();  // the lists are there
  ring.source.SetGroups(num_groups);
  ring.Begin();
  const HalvesMask mask;
  using X = std::conditional_t<kOneRow, OneRowX<kType>, RowFinder<kType>>;
  X x = [&] {
    if constexpr (kOneRow) {
      return X(job, experts, block);
    } else {
      return X(job.hidden, block);
    }
  }();
  GridDependencyWait();
  if constexpr (kOneRow) x.Load();

  const int buffer = static_cast<int>(blockDim.x) / kWarpSize * job.sum_rows * kRowSums;
  int turn = 0;
  for (; tile < job.shapes[0].row_tiles; tile += static_cast<int>(gridDim.x) * job.tiles) {
    float* own = sums + turn * buffer + warp * job.sum_rows * kRowSums;
    if (tile + own_tile < job.shapes[0].row_tiles) {
      if constexpr (kOneRow) {
        const float sum = SumRow<kType>(ring, num_groups, experts, x, mask, tables);
        own[LaneId() % 4 * 8 + LaneId() / 4] = sum;
      } else {
        SumGroups<kType>(job, ring, block, first_row, num_rows, experts, x, mask, tables, own);
      }
    }
    __syncthreads();
    StoreRoots(job, tile, first_row, num_rows, sums + turn * buffer);
    if constexpr (kOneRow) {
      // Found anew, not kept: registers are short while groups are multiplied.
      x = X(job, experts, block);
      x.Load();
      turn ^= 1;  // the next sums go to the other buffer
    } else {
      __syncthreads();
    }
  }
}

}  // namespace ds4::cuda
