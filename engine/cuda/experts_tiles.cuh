// Products of one lane of 256 columns with kTiles neighbouring row tiles at once: what a row of x
// costs besides (loading, spreading over the lanes, looking its group up) is paid once for all of
// them, and their sums do not wait for each other.
//
// Order of additions within a product: experts_halves.cuh for Q2_K, experts_ring.cuh for others.
#pragma once

#include "engine/cuda/experts_halves.cuh"

namespace ds4::cuda {

// ---- Stages: a chunk of each tile, or of Q8_0 half a chunk of one tile (its codes, then its
// scales).

constexpr int TileSlotOf(DType dtype, int tiles) {
  const int half = kHalfCodes + kHalfScales;
  return dtype == DType::kQ8_0 ? half : MaxOf(half, tiles * ChunkBytes(dtype));
}
template <DType kType, int kTiles>
inline constexpr int kTileSlot = TileSlotOf(kType, kTiles);
template <DType kType, int kTiles>
inline constexpr int kUnitStages = kType == DType::kQ8_0 ? 2 * kTiles : 1;

// A warp's stages in the order of `source`, each in a slot of its own. Source: `bool Next(copy)`
// begins one copy, copy.Half(..) or copy.Chunk(..), and returns true, or false where there is none;
// `bool NextShared(copy)` the same where the next one is the shared expert's.
template <DType kType, int kTiles, int kSlots, class Source>
struct TileRing {
  static constexpr int kSlot = kTileSlot<kType, kTiles>;
  std::byte* ring;  // kSlots * kSlot bytes, private to the warp
  Source source;
  int slot = 0;   // of the oldest stage, in bytes
  int begun = 0;  // slots that are filled at the start

  // Asks for the shared expert's stages among the first ones.
  __device__ __forceinline__ void BeginShared() {
#pragma unroll 1
    while (begun < kSlots && source.NextShared(Copier{ring + begun * kSlot})) {
      CopyAsyncCommit();
      ++begun;
    }
  }
  // Then for the others.
  __device__ __forceinline__ void Begin() {
#pragma unroll 1
    while (begun < kSlots && source.Next(Copier{ring + begun * kSlot})) {
      CopyAsyncCommit();
      ++begun;
    }
    // An empty slot counts as a copy.
#pragma unroll 1
    for (; begun < kSlots; ++begun) CopyAsyncCommit();
  }
  // The oldest stage.
  __device__ __forceinline__ const std::byte* Wait() {
    CopyAsyncWait<kSlots - 1>();
    __syncwarp();
    return ring + slot;
  }
  __device__ __forceinline__ void Release() {
    __syncwarp();
    source.Next(Copier{ring + slot});
    CopyAsyncCommit();
    slot = slot == (kSlots - 1) * kSlot ? 0 : slot + kSlot;
  }

 private:
  struct Copier {
    std::byte* to;

    // Half `half` of a chunk of Q8_0. In memory both halves' codes come first, then the scales of
    // both.
    __device__ __forceinline__ void Half(const std::byte* from, int half) const {
      const int lane = 16 * LaneId();
      const std::byte* codes = from + (half * kHalfCodes + lane);
#pragma unroll
      for (int i = 0; i < kHalfCodes; i += 512) CopyAsync16(to + lane + i, codes + i);
      CopyAsync16If(LaneId() < kHalfScales / 16, to + kHalfCodes + lane,
                    from + (2 * kHalfCodes + half * kHalfScales + lane));
    }
    // A chunk of kType of each tile, the first at `from`, others next_tile bytes apart.
    __device__ __forceinline__ void Chunk(const std::byte* from, int next_tile) const {
      constexpr int kBytes = kChunkBytes<kType>;
      constexpr int kWhole = kBytes / 512 * 512;
      constexpr int kRest = (kBytes - kWhole) / 16;
      static_assert(kRest > 0);
      const int lane = 16 * LaneId();
      const std::byte* first = from + lane;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        std::byte* tile_to = to + tile * kBytes;
#pragma unroll
        for (int i = 0; i < kWhole; i += 512) CopyAsync16(tile_to + lane + i, first + i);
        CopyAsync16If(LaneId() < kRest, tile_to + kWhole + lane, first + kWhole);
        first += next_tile;
      }
    }
  };
};

// ---- x.

// Where a lane finds its share of any row of a view, as products with kType take it: of two blocks
// of 32 columns the row's quarter t, and two scales.
template <DType kType>
struct RowFinder {
  const uint64_t* q[2];
  const float* scale[2];

  // block: the first of the lane's 8.
  __device__ __forceinline__ RowFinder(const ActivationView& x, int block) {
    // Q2_K: blocks 2 (g / 2), + 1; scales 2t, + 1. Others: blocks g / 2, + 4; scales t, t + 4.
    constexpr int kFirst = kType == DType::kQ2_K ? 2 : 1;
    constexpr int kApart = kType == DType::kQ2_K ? 1 : 4;
    const int tiles = TilesOf(x);
    const int g = LaneId() / 4;
    const int t = LaneId() % 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      q[u] = Kept(x.q + ((block + g / 2 * kFirst + u * kApart) * (32 * tiles) + t));
      scale[u] = Kept(x.scale + (block + t * kFirst + u * kApart) * (8 * tiles));
    }
  }
  template <int kRows>
  __device__ __forceinline__ void Load(const int (&rows)[kRows], OwnRows<kRows, 2>& to) const {
    // Four words a row, whatever tile it lies in.
    const int own = (LaneId() / 4 % 2 == 0 ? rows[0] : rows[kRows - 1]) * 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      to.q[u] = __ldcg(q[u] + own);
#pragma unroll
      for (int r = 0; r < kRows; ++r) to.scale[u][r] = __ldcg(scale[u] + rows[r]);
    }
  }
};

// x as products with kType take it.
template <DType kType, int kRows>
struct SpreadX : RowsX<kRows> {
  __device__ __forceinline__ SpreadX(const OwnRows<kRows, 2>& own, const HalvesMask&)
      : RowsX<kRows>{} {
    own.SpreadTo(*this);
  }
};
template <int kRows>
struct SpreadX<DType::kQ2_K, kRows> : HalvesX<kRows> {
  using HalvesX<kRows>::HalvesX;
};

// ---- Products of the next unit, routed of kType or shared of Q8_0: a chunk of each tile.

template <int kRows>
__device__ __forceinline__ void ClearFew(float (&sum)[kRows][2]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = 0.0f;
}
template <int kRows>
__device__ __forceinline__ void CopyFew(const float (&from)[kRows][2], float (&to)[kRows][2]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    to[r][0] = from[r][0];
    to[r][1] = from[r][1];
  }
}

// With one or two rows. The caller releases the last stage. sum[tile][r]: sums t, of lane 4g + t,
// of weight rows g, g + 8.
template <DType kType, int kTiles, int kRows, class Ring>
__device__ __forceinline__ void DotTiles(Ring& ring, const SpreadX<kType, kRows>& x,
                                         const LaneTables& tables, float (&sum)[kTiles][kRows][2]) {
  if constexpr (kType == DType::kQ2_K) {
    DotHalves<kTiles, kChunkBytes<kType>>(ring.Wait(), x, sum);
  } else if constexpr (kType == DType::kQ8_0) {
    // One tile's code, for all of them: the code is loaded anew in each layer.
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i + 1 < kTiles; ++i) CopyFew(sum[i + 1], sum[i]);
      ClearFew(sum[kTiles - 1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        HalfDecoder decoder(ring.Wait());
        AddUnits<1>(decoder, x, half, sum[kTiles - 1]);
        if (half == 0 || tile + 1 < kTiles) ring.Release();
      }
    }
  } else {
    const std::byte* at = ring.Wait();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      ClearFew(sum[tile]);
      RowDecoder<kType> decoder(at + tile * kChunkBytes<kType>, tables);
      AddUnits<2>(decoder, x, 0, sum[tile]);
    }
  }
}

// With up to 8 rows; not of Q2_K. total[tile]: laid out as in dot.cuh.
template <DType kType, int kTiles, class Ring>
__device__ __forceinline__ void DotTilesGroup(Ring& ring, const BlockX<2>& x,
                                              float (&total)[kTiles][4]) {
  static_assert(kType != DType::kQ2_K);
  if constexpr (kType == DType::kQ8_0) {
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      float sum[4][4];
      Clear(sum);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        HalfDecoder decoder(ring.Wait());
        AddSteps<4>(decoder, x, 4 * half, sum);
        ring.Release();
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i + 1 < kTiles; ++i) total[i][j] = total[i + 1][j];
        total[kTiles - 1][j] = (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
      }
    }
  } else {
    const std::byte* at = ring.Wait();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sum[4][4];
      Clear(sum);
      ChunkDecoder<kType> decoder(at + tile * kChunkBytes<kType>, nullptr);
      AddSteps<8>(decoder, x, 0, sum);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[tile][j] = (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
      }
    }
    ring.Release();
  }
}

// One row's four sums added, (0 + 1) + (2 + 3), in two steps, so that something else can be done
// while lanes exchange values; each exchange halves what a lane still holds. Total: of tile t / 2
// and weight row g + 8 (t % 2) in lane 4g + t.
struct FourSums {
  float own[2];
  float other[2];

  template <int kRows>
  __device__ __forceinline__ FourSums(const float (&sum)[2][kRows][2], int r) {
    const bool odd = LaneId() % 2 != 0;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float* both = sum[tile][r];
      own[tile] = odd ? both[1] : both[0];
      other[tile] = __shfl_xor_sync(kFullMask, odd ? both[0] : both[1], 1);
    }
  }
  __device__ __forceinline__ float Total() const {
    const bool upper = LaneId() % 4 >= 2;
    const float pair[2] = {own[0] + other[0], own[1] + other[1]};
    const float across = __shfl_xor_sync(kFullMask, upper ? pair[0] : pair[1], 2);
    return (upper ? pair[1] : pair[0]) + across;
  }
};

}  // namespace ds4::cuda
