// The kernels of LaunchExpertsUp for routed experts in the formats that models come in, beside a
// shared one in Q8_0. Included by experts_up.cu only.
//
// A team of eight warps has items of its own; two teams on an SM hide each other's latencies. A
// team is a block, but for IQ2_XXS: there two make a block and share the table of patterns (rows
// too long for that have blocks of one).
#pragma once

#include <type_traits>

#include "engine/cuda/experts_up.cuh"

namespace ds4::cuda {

inline constexpr int kTeamThreads = kSliceWarps * kWarpSize;
inline constexpr int kTeamsAnSm = kBlocksAnSm;
constexpr int TeamsOf(DType dtype) { return dtype == DType::kIQ2_XXS ? kTeamsAnSm : 1; }
inline constexpr int kRingHeadBytes = 32;  // a barrier for each slot
static_assert(kRingSlots * sizeof(BulkBarrier) <= kRingHeadBytes);
constexpr int RingBytesOf(DType dtype) { return kRingHeadBytes + kRingSlots * SlotBytesOf(dtype); }
template <DType kType>
inline constexpr int kTeams = TeamsOf(kType);
template <DType kType>
inline constexpr int kRingBytes = RingBytesOf(kType);

// How a block's shared memory is cut: rings, then partial sums and rows of x. The table of IQ2_XXS
// lies at a multiple of its size; as many rings as fit stand before it.
template <DType kType>
struct FastRoom {
  std::byte* ring;  // of this warp
  std::byte* table = nullptr;
  std::byte* rest;

  __device__ __forceinline__ FastRoom(std::byte* memory, int warp, int teams) {
    constexpr int kRing = kRingBytes<kType>;
    const int warps = teams * kSliceWarps;
    if constexpr (kType == DType::kIQ2_XXS) {
      const uint32_t address = static_cast<uint32_t>(AddressOfShared(memory));
      const int before = static_cast<int>((0u - address) % kIq2TableBytes);
      const int rings_before = min(before / kRing, warps);
      table = memory + before;
      std::byte* after = table + kIq2TableBytes - rings_before * kRing;
      ring = (warp < rings_before ? memory : after) + warp * kRing;
      rest = after + warps * kRing;
    } else {
      ring = memory + warp * kRing;
      rest = memory + warps * kRing;
    }
  }
};

// A warp's stages: for each item its slices, for each slice gate and up of one row tile, then of
// the other. It knows the item in hand and the one after it. That is enough: an item has no fewer
// stages than the ring has slots, so that the ring is never more than one item ahead of the reader.
template <DType kType>
struct UpRing {
  static constexpr int kSlot = kSlotBytes<kType>;
  const UpKernelJob& job;
  std::byte* ring;  // kRingBytes<kType>, private to the warp
  int own_slice;    // the first of the warp's

  const std::byte* part = nullptr;  // gate or up of one row tile in the slice in hand
  const std::byte* from = nullptr;  // its next stage
  int slice = 1 << 20;
  int parts_left = 0;
  int stages_left = 0;  // of the part
  int columns = 0;      // blocks of 256 columns, 1 or 2
  bool shared = false;
  const std::byte* next = nullptr;  // first part of the item after this one
  bool next_shared = false;
  bool has_next = false;
  int slot = 0;  // of the oldest stage
  uint32_t parity = 0;
  int begun = 0;  // slots that Begin has filled

  // Before all else.
  __device__ __forceinline__ void Init() {
    if (LaneId() == 0) {
      for (int i = 0; i < kRingSlots; ++i) InitBulk(Full(i));
      FenceBulk();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void SetNext(const UpCursor& item) {
    next_shared = item.shared;
    has_next = own_slice < job.num_slices;
    const MatrixShape& w = job.shapes[item.shared ? 1 : 0][0];
    next = w.data + item.expert * w.matrix_bytes +
           int64_t{item.row_block} * (kItemTiles * w.tile_bytes) +
           own_slice * (kSliceBlocks * w.chunk_bytes);
  }
  // Asks for the first stages as far as items are known; may be called again.
  __device__ __forceinline__ void Begin() {
#pragma unroll 1
    while (begun < kRingSlots && Put<true>(begun)) ++begun;
  }
  // The oldest stage; the warp may write there.
  __device__ __forceinline__ std::byte* Wait() {
    WaitBulk(Full(slot), parity);
    return Slot(slot);
  }
  // kShared: the stages that take the place may be the shared expert's.
  template <bool kShared>
  __device__ __forceinline__ void Release() {
    __syncwarp();
    Put<kShared>(slot);
    const bool wraps = slot + 1 == kRingSlots;
    slot = wraps ? 0 : slot + 1;
    parity ^= wraps ? 1 : 0;
  }

 private:
  __device__ __forceinline__ BulkBarrier* Full(int place) {
    return reinterpret_cast<BulkBarrier*>(ring) + place;
  }
  __device__ __forceinline__ std::byte* Slot(int place) {
    return ring + (kRingHeadBytes + place * kSlot);
  }
  // A part of routed weights that is one stage needs no count of stages.
  static constexpr bool kOneStage = kType != DType::kQ8_0 && kStages<kType> == 1;

  template <bool kShared>
  __device__ __forceinline__ bool Put(int place) {
    if ((kOneStage && !kShared) || stages_left == 0) {
      if (!NextPart<kShared>()) return false;
      from = part;
      stages_left = kType == DType::kQ8_0 || (kShared && shared) ? 2 * columns
                    : kOneStage                                  ? 1
                                                                 : columns;
    }
    --stages_left;
    if (kType == DType::kQ8_0 || (kShared && shared)) {
      // The first half of a chunk is followed by the second half's codes, then by the scales of
      // both.
      const bool first = stages_left % 2 != 0;
      if (LaneId() == 0) {
        ExpectBulk(Full(place), kHalfCodes + kHalfScales);
        CopyBulk(Slot(place), from, kHalfCodes, Full(place));
        CopyBulk(Slot(place) + kHalfCodes,
                 from + (first ? 2 * kHalfCodes : kHalfCodes + kHalfScales), kHalfScales,
                 Full(place));
      }
      from += first ? kHalfCodes : kHalfCodes + 2 * kHalfScales;
    } else {
      constexpr uint32_t kBytes = kStageBytes<kType>;
      if (LaneId() == 0) {
        const uint32_t bytes = kOneStage && columns == 1 ? kBytes / 2 : kBytes;
        ExpectBulk(Full(place), bytes);
        CopyBulk(Slot(place), from, bytes, Full(place));
      }
      if constexpr (!kOneStage) from += kBytes;
    }
    return true;
  }
  // The matrices in hand: 0 routed, 1 shared.
  template <bool kShared>
  __device__ __forceinline__ int Kind() const {
    return kShared && shared ? 1 : 0;
  }
  // From gate to up of a row tile, then to gate of the next one.
  template <bool kShared>
  __device__ __forceinline__ bool NextPart() {
    if (parts_left == 0) {
      if (!NextSlice<kShared>()) return false;
      parts_left = 2 * kItemTiles;
    } else {
      const int64_t to_up = job.up_offset[Kind<kShared>()];
      part += parts_left % 2 != 0 ? to_up : job.shapes[Kind<kShared>()][0].tile_bytes - to_up;
    }
    --parts_left;
    return true;
  }
  template <bool kShared>
  __device__ __forceinline__ bool NextSlice() {
    if (slice + kSliceWarps < job.num_slices) {
      const MatrixShape& w = job.shapes[Kind<kShared>()][0];
      slice += kSliceWarps;
      part += kSliceWarps * kSliceBlocks * w.chunk_bytes - w.tile_bytes -
              job.up_offset[Kind<kShared>()];
    } else {
      if (!has_next) return false;
      has_next = false;
      shared = kShared && next_shared;
      part = next;
      slice = own_slice;
    }
    columns = SliceBlocks(slice, job.shapes[0][0].blocks);
    return true;
  }
};

// What products see of the ring. kWritten: they write to stages.
template <class Ring, bool kShared, bool kWritten>
struct RingView {
  Ring& ring;
  __device__ __forceinline__ std::byte* Wait() { return ring.Wait(); }
  __device__ __forceinline__ void Release() {
    if constexpr (kWritten) FenceBulk();
    ring.template Release<kShared>();
  }
};

// The view of the only row: that it is the only one makes addresses simple.
__device__ __forceinline__ ActivationView OnlyRow(const ActivationView& x) {
  ActivationView view = x;
  view.rows = 1;
  return view;
}

// Sums of one slice of part `unit` of an item. kSliceFloats: between slices.
template <int kSliceFloats, int kRows>
__device__ __forceinline__ void StoreRows(const UpKernelJob& job, const float (&sum)[kRows][2],
                                          int unit, int slice, float* partial) {
  const int lane = LaneId();
  float* to = partial + (unit % 2 * job.num_slices + slice) * kSliceFloats + unit / 2 * kTileRows +
              lane / 4;
  if (lane % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    to[r * kPartialStride] = sum[r][0];
    to[r * kPartialStride + 8] = sum[r][1];
  }
}

// One warp's products for one routed item with few rows of x, given by number. x: of the warp's
// slice, where it has no other; `load` it first.
template <DType kType, int kSliceFloats, class X, class Ring, class Tables>
__device__ __forceinline__ void MultiplyRows(const UpKernelJob& job, Ring& ring,
                                             const int (&rows)[X::kCount], bool load, X& x,
                                             const Tables& tables, float* partial) {
  RingView<Ring, false, false> view{ring};
#pragma unroll 1
  for (int slice = ring.own_slice; slice < job.num_slices; slice += kSliceWarps) {
    const int columns = SliceBlocks(slice, job.shapes[0][0].blocks);
    if (load || job.num_slices > kSliceWarps) {
      LoadSlice(job.x, rows, slice * (kSliceCols / 32), columns, x);
    }
#pragma unroll 1
    for (int unit = 0; unit < 2 * kItemTiles; ++unit) {
      float sum[X::kCount][2];
      DotPart<kType>(view, x, columns, tables, sum);
      StoreRows<kSliceFloats>(job, sum, unit, slice, partial);
    }
  }
}

// The same for an item of the shared expert when x has one row. Halves of chunks take turns in one
// piece of code.
template <class Ring>
__device__ __forceinline__ void MultiplySharedRow(const UpKernelJob& job, Ring& ring,
                                                  OwnRows<1, 4>& own, float* partial) {
#pragma unroll 1
  for (int slice = ring.own_slice; slice < job.num_slices; slice += kSliceWarps) {
    const int columns = SliceBlocks(slice, job.shapes[0][0].blocks);
    if (job.num_slices > kSliceWarps)
      own.Load(OnlyRow(job.x), {0}, slice * (kSliceCols / 32), columns);
#pragma unroll 1
    for (int unit = 0; unit < 2 * kItemTiles; ++unit) {
      float sum[1][2] = {};
#pragma unroll 1
      for (int half = 0; half < 2 * columns; ++half) {
        HalfDecoder decoder(ring.Wait());
        RowsX<1> x;
        x.Spread(0,
                 half < 2 ? (half == 0 ? own.q[0] : own.q[1]) : (half == 2 ? own.q[2] : own.q[3]));
        x.scale[0][0] = half < 2 ? (half == 0 ? own.scale[0][0] : own.scale[1][0])
                                 : (half == 2 ? own.scale[2][0] : own.scale[3][0]);
        AddUnits<1>(decoder, x, 0, sum);
        ring.template Release<true>();
      }
      SumOverLanes(sum);
      StoreRows<kPartialStride>(job, sum, unit, slice, partial);
    }
  }
}

// One warp's products for one item of up to 8 rows. kType: of its weights.
template <DType kType, bool kShared, class Ring, class Tables>
__device__ __forceinline__ void MultiplyGroup(const UpKernelJob& job, Ring& ring,
                                              const GroupX& rows, const Tables& tables,
                                              float* partial) {
  RingView<Ring, kShared, kType == DType::kIQ2_XXS> view{ring};
#pragma unroll 1
  for (int slice = ring.own_slice; slice < job.num_slices; slice += kSliceWarps) {
    const int columns = SliceBlocks(slice, job.shapes[0][0].blocks);
    const int first = slice * (kSliceCols / 32);
    const auto load = [&](int block, BlockX<2>& x) {
      rows.Load(first + block * (kColumnGrain / 32), x);
    };
#pragma unroll 1
    for (int unit = 0; unit < 2 * kItemTiles; ++unit) {
      float total[4];
      DotGroup<kType>(view, load, columns, tables, total);
      StorePartial(total, unit / 2, partial + (unit % 2 * job.num_slices + slice) * kPartialFloats);
    }
  }
}

// A routed item whose warps write the sums of at most two rows.
__device__ __forceinline__ bool IsFew(const UpCursor& item) {
  return !item.shared && item.count <= 2;
}

// A team's way through its items, as one of its warps goes it.
template <DType kType, bool kOneRow>
struct UpTeam {
  using Tables = std::conditional_t<kType == DType::kIQ2_XXS, AlignedTables, LaneTables>;
  const UpKernelJob& job;
  const Tables& tables;
  const FirstGroups& groups;
  UpRing<kType>& ring;
  UpCursor& next;
  float* partial;
  int* x_rows;  // of this warp
  int barrier;  // where two teams make a block
  int routed_begin;
  int num_items;
  int index = 0;

  __device__ __forceinline__ void Meet() const {
    if constexpr (kTeams<kType> == 1) {
      __syncthreads();
    } else {
      SyncThreads(barrier, kTeamThreads);
    }
  }
  // One item: multiply(item, sums) leaves the sums of the warp's slices. weight: lane j has that of
  // row j.
  template <class Multiply>
  __device__ __forceinline__ void Step(const float& weight, const Multiply& multiply) {
    const UpCursor item = next;
    const bool last = index + 1 == num_items;
    if (!last) {
      next.Next(routed_begin, groups);
      ring.SetNext(next);
    }
    constexpr int kSliceFloats = kOneRow ? kPartialStride : kPartialFloats;
    // Items of one or two rows leave so much of a buffer empty that they take turns within it.
    const bool few = !kOneRow && IsFew(item);
    const bool next_few = !kOneRow && (last || IsFew(next));
    float* sums = partial + index % job.partials * (2 * job.num_slices * kSliceFloats) +
                  (few ? index % 2 * (2 * kPartialStride) : 0);
    multiply(item, sums);
    Meet();
    const int j = (ring.own_slice + index) % kSliceWarps;
    if (j < item.count) FinishRow<kOneRow ? 1 : 2, true>(job, item, j, weight, sums);
    // With two buffers the next item's sums go to the other one.
    if (job.partials == 1 && !(few && next_few)) Meet();
    ++index;
  }
  // All items of the same rows of x from here on.
  template <class Multiply>
  __device__ __forceinline__ void Run(float weight, const Multiply& multiply) {
#pragma unroll 1
    do {
      Step(weight, multiply);
    } while (index < num_items && !next.new_rows);
  }
  // Items with few rows: x stays in registers.
  template <class X>
  __device__ __forceinline__ void RunRows(const int (&rows)[X::kCount], float weight) {
    X x = {};
    bool load = true;
    Run(weight, [&](const UpCursor&, float* sums) {
      MultiplyRows<kType, kPartialFloats>(job, ring, rows, load, x, tables, sums);
      load = false;
    });
  }
  template <DType kWeights, bool kShared>
  __device__ __forceinline__ void RunGroup(float weight) {
    const GroupX rows(job.x, x_rows);
    Run(weight, [&](const UpCursor&, float* sums) {
      MultiplyGroup<kWeights, kShared>(job, ring, rows, tables, sums);
    });
  }
  __device__ __forceinline__ void RunAll() {
    float weight = 0.0f;
#pragma unroll 1
    while (index < num_items) {
      LoadRows(job, next, x_rows, weight);
      if (next.shared) {
        RunGroup<DType::kQ8_0, true>(weight);
      } else if (next.count == 1) {
        RunRows<RowsX<1>>({x_rows[0]}, weight);
      } else if (next.count == 2) {
        RunRows<RowsX<2>>({x_rows[0], x_rows[1]}, weight);
      } else if (kType == DType::kIQ2_XXS && next.count <= PairsX::kCount) {
        if constexpr (kType == DType::kIQ2_XXS) {
          RunRows<PairsX>({x_rows[0], x_rows[1], x_rows[2], x_rows[3]}, weight);
        }
      } else {
        RunGroup<kType, false>(weight);
      }
    }
  }
  // x: the warp's first slice of the only row.
  __device__ __forceinline__ void RunOneRow(OwnRows<1, 4>& own) {
    RowsX<1> x = {};
    own.SpreadTo(x);
    float weight = 0.0f;
#pragma unroll 1
    while (index < num_items) {
      Step(weight, [&](const UpCursor& item, float* sums) {
        const int place = item.first + min(LaneId(), item.count - 1);
        weight = item.shared ? 1.0f : job.routing.place_weight[place];
        if (item.shared) {
          MultiplySharedRow(job, ring, own, sums);
        } else {
          MultiplyRows<kType, kPartialStride>(job, ring, {0}, false, x, tables, sums);
        }
      });
    }
  }
};

// kType: of the routed experts; the shared one has Q8_0. kOneRow: x has one row only.
template <DType kType, bool kOneRow>
__global__ void __launch_bounds__(kTeams<kType>* kTeamThreads, kTeamsAnSm / kTeams<kType>)
    FastUpKernel(const __grid_constant__ UpKernelJob job) {
  DS4_DYNAMIC_SHARED(memory);
  constexpr bool kHasTable = kType == DType::kIQ2_XXS;
  const int thread = static_cast<int>(threadIdx.x);
  // Asked for before anything else: it comes from memory.
  [[maybe_unused]] uint32_t pattern = 0;
  if constexpr (kHasTable) pattern = LoadIq2Pattern(thread);
  const int warp = Uniform(thread / kWarpSize);
  const int teams = kTeams<kType> == 1 ? 1 : static_cast<int>(blockDim.x) / kTeamThreads;
  const int place = kTeams<kType> == 1 ? 0 : warp / kSliceWarps;  // of the team in the block
  const Team team{static_cast<int>(blockIdx.x) + place * static_cast<int>(gridDim.x),
                  teams * static_cast<int>(gridDim.x)};
  const FastRoom<kType> room(memory, warp, teams);
  UpCursor next(job, team);
  FirstGroups groups;
  UpRing<kType> ring = {job, room.ring, kTeams<kType> == 1 ? warp : warp % kSliceWarps};
  ring.Init();
  if (next.num_shared > 0) {
    next.Next(0, groups);
    ring.SetNext(next);
    ring.Begin();
  }
  PrefetchShared(job);
  if constexpr (kHasTable) {
    static_assert(kIq2Halves == 2 * kTeamThreads);
    StoreIq2Pattern(room.table, thread, pattern);
    if (teams == 1) {
      const int other = thread + kTeamThreads;
      StoreIq2Pattern(room.table, other, LoadIq2Pattern(other));
    }
  }
  GridDependencyWait();
  LaunchDependents();  // not earlier: see experts_up.cu
  groups.Load(job);
  [[maybe_unused]] OwnRows<1, 4> own;
  if constexpr (kOneRow) {
    // Asked for before anything waits for the routing.
    const int slice = min(ring.own_slice, job.num_slices - 1);
    own.Load(OnlyRow(job.x), {0}, slice * (kSliceCols / 32),
             SliceBlocks(slice, job.shapes[0][0].blocks));
  }
  const int routed_items = Uniform(*job.routing.num_groups) * job.row_blocks;
  const int routed_begin = RoutedBegin(job, routed_items, team);
  const int routed_end = RoutedBegin(job, routed_items, {team.index + 1, team.count});
  const int num_items = next.num_shared + routed_end - routed_begin;
  if (next.num_shared == 0 && num_items > 0) {
    next.Next(routed_begin, groups);
    ring.SetNext(next);
    ring.Begin();
  }
  __syncthreads();  // the table is there

  float* partial = reinterpret_cast<float*>(room.rest);
  const int team_floats =
      job.partials * 2 * job.num_slices * (kOneRow ? kPartialStride : kPartialFloats);
  int* x_rows = reinterpret_cast<int*>(partial + teams * team_floats) + warp * kGroupPairs;
  const auto tables = [&] {
    if constexpr (kHasTable) {
      return AlignedTables(room.table, pattern);
    } else {
      return LaneTables(memory);
    }
  }();
  UpTeam<kType, kOneRow> items = {
      job,    tables,    groups,       ring,     next, partial + place * team_floats,
      x_rows, place + 1, routed_begin, num_items};
  if constexpr (kOneRow) {
    items.RunOneRow(own);
  } else {
    items.RunAll();
  }
  ClearPadding(job, job.out);
  ClearPadding(job, job.shared_out);
}

}  // namespace ds4::cuda
