// Products of one lane of 256 columns with kTiles neighbouring row tiles at once: what a row of x
// costs besides (loading, spreading over the lanes, looking its group up) is paid once for all of
// them, and their sums do not wait for each other.
//
// Order of additions within a product: experts_halves.cuh for Q2_K, experts_ring.cuh for others.
#pragma once

#include "engine/cuda/experts_halves.cuh"

namespace ds4::cuda {

// ---- Stages: of each tile half a chunk of Q8_0 (its codes, then its scales), or a chunk.

template <DType kType>
inline constexpr int kUnitStages = kType == DType::kQ8_0 ? 2 : 1;
// Bytes of one tile's part of a stage.
constexpr int TileBytesOf(DType dtype) {
  return dtype == DType::kQ8_0 ? kHalfCodes + kHalfScales : ChunkBytes(dtype);
}
constexpr int TileSlotOf(DType dtype, int tiles) {
  return tiles * MaxOf(TileBytesOf(dtype), TileBytesOf(DType::kQ8_0));
}
template <DType kType>
inline constexpr int kTileBytes = TileBytesOf(kType);

struct TilePart {
  const std::byte* at = nullptr;  // the first tile's chunk
  int next_tile = 0;              // bytes from tile to tile
  bool halved = false;            // half a chunk of Q8_0, not a chunk of the routed type
  int half = 0;
};

// A warp's stages in the order of `source`, each in a slot of its own size. Source: `bool
// Next(TilePart& part)`, false while there is none.
template <DType kType, int kTiles, int kSlots, class Source>
struct TileRing {
  static constexpr int kSlot = kTiles * MaxOf(kTileBytes<kType>, kTileBytes<DType::kQ8_0>);
  std::byte* ring;  // kSlots * kSlot bytes, private to the warp
  Source source;
  int slot = 0;   // of the oldest stage
  int begun = 0;  // slots that Begin has filled

  // Asks for the first stages as far as the source knows them; may be called again.
  __device__ __forceinline__ void Begin() {
#pragma unroll 1
    while (begun < kSlots && Put(ring + begun * kSlot)) ++begun;
  }
  // Once, after the last Begin: an empty slot counts as a copy.
  __device__ __forceinline__ void EndBegin() {
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
    if (!Put(ring + slot)) CopyAsyncCommit();
    slot = slot == (kSlots - 1) * kSlot ? 0 : slot + kSlot;
  }

 private:
  __device__ __forceinline__ bool Put(std::byte* place) {
    TilePart part;
    if (!source.Next(part)) return false;
    std::byte* to = place + 16 * LaneId();
    const std::byte* from = part.at + 16 * LaneId();
    if (kType == DType::kQ8_0 || part.halved) {
      // In memory both halves' codes come first, then the scales of both.
      from += part.half * kHalfCodes;
      const std::byte* scales = from + (2 - part.half) * kHalfCodes + part.half * kHalfScales;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        std::byte* tile_to = to + tile * kTileBytes<DType::kQ8_0>;
        const int next = tile * part.next_tile;
#pragma unroll
        for (int i = 0; i < kHalfCodes; i += 512) CopyAsync16(tile_to + i, from + next + i);
        CopyAsync16If(LaneId() < kHalfScales / 16, tile_to + kHalfCodes, scales + next);
      }
    } else {
      constexpr int kBytes = kTileBytes<kType>;
      constexpr int kWhole = kBytes / 512 * 512;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        std::byte* tile_to = to + tile * kBytes;
        const std::byte* tile_from = from + tile * part.next_tile;
#pragma unroll
        for (int i = 0; i < kWhole; i += 512) CopyAsync16(tile_to + i, tile_from + i);
        if constexpr (kWhole < kBytes) {
          CopyAsync16If(LaneId() < (kBytes - kWhole) / 16, tile_to + kWhole, tile_from + kWhole);
        }
      }
    }
    CopyAsyncCommit();
    return true;
  }
};

// ---- x.

// Where a lane finds its share of any row of a view, as products with kType take it: of two blocks
// of 32 columns the row's quarter t, and two scales.
template <DType kType>
struct RowFinder {
  const uint64_t* q;
  const float* scale;
  int q_step;  // to the second block
  int scale_step;

  // block: the first of the lane's 8.
  __device__ __forceinline__ RowFinder(const ActivationView& x, int block) {
    // Q2_K: blocks 2 (g / 2), + 1; scales 2t, + 1. Others: blocks g / 2, + 4; scales t, t + 4.
    constexpr bool kPairs = kType == DType::kQ2_K;
    const int tiles = TilesOf(x);
    const int g = LaneId() / 4;
    const int t = LaneId() % 4;
    q = x.q + ((block + g / 2 * (kPairs ? 2 : 1)) * tiles * 32 + t);
    scale = x.scale + (block + t * (kPairs ? 2 : 1)) * (8 * tiles);
    q_step = (kPairs ? 32 : 4 * 32) * tiles;
    scale_step = (kPairs ? 8 : 4 * 8) * tiles;
  }
  template <int kRows>
  __device__ __forceinline__ void Load(const int (&rows)[kRows], OwnRows<kRows, 2>& to) const {
    // Four words a row, whatever tile it lies in.
    const uint64_t* own = q + (LaneId() / 4 % 2 == 0 ? rows[0] : rows[kRows - 1]) * 4;
    to.q[0] = *own;
    to.q[1] = own[q_step];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* own_scale = scale + rows[r];
      to.scale[0][r] = *own_scale;
      to.scale[1][r] = own_scale[scale_step];
    }
  }
};

// ---- Products of the next unit, routed of kType or shared of Q8_0: kTiles chunks.

// With one or two rows. sum[tile][r]: sums t, of lane 4g + t, of weight rows g, g + 8.
template <DType kType, int kTiles, int kRows, class Ring>
__device__ __forceinline__ void DotTiles(Ring& ring, const OwnRows<kRows, 2>& own,
                                         const LaneTables& tables, float (&sum)[kTiles][kRows][2]) {
  constexpr int kApart = kTileBytes<kType>;
  if constexpr (kType == DType::kQ2_K) {
    const HalvesX<kRows> x(own);
    DotHalves<kTiles, kApart>(ring.Wait(), x, sum);
    ring.Release();
  } else {
    RowsX<kRows> x = {};
    own.SpreadTo(x);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[tile][r][0] = sum[tile][r][1] = 0.0f;
    }
#pragma unroll
    for (int stage = 0; stage < kUnitStages<kType>; ++stage) {
      const std::byte* at = ring.Wait();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if constexpr (kType == DType::kQ8_0) {
          HalfDecoder decoder(at + tile * kApart);
          AddUnits<1>(decoder, x, stage, sum[tile]);
        } else {
          RowDecoder<kType> decoder(at + tile * kApart, tables);
          AddUnits<2>(decoder, x, 0, sum[tile]);
        }
      }
      ring.Release();
    }
  }
}

// With up to 8 rows. total[tile]: laid out as in dot.cuh.
template <DType kType, int kTiles, class Ring>
__device__ __forceinline__ void DotTilesGroup(Ring& ring, const BlockX<2>& x,
                                              float (&total)[kTiles][4]) {
  constexpr int kApart = kTileBytes<kType>;
  if constexpr (kType == DType::kQ2_K) {
    const std::byte* at = ring.Wait();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) DotHalvesGroup(at + tile * kApart, x, total[tile]);
    ring.Release();
  } else {
    float sum[kTiles][4][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) Clear(sum[tile]);
#pragma unroll
    for (int stage = 0; stage < kUnitStages<kType>; ++stage) {
      const std::byte* at = ring.Wait();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if constexpr (kType == DType::kQ8_0) {
          HalfDecoder decoder(at + tile * kApart);
          AddSteps<4>(decoder, x, 4 * stage, sum[tile]);
        } else {
          ChunkDecoder<kType> decoder(at + tile * kApart, nullptr);
          AddSteps<8>(decoder, x, 0, sum[tile]);
        }
      }
      ring.Release();
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&four)[4][4] = sum[tile];
        total[tile][j] = (four[0][j] + four[1][j]) + (four[2][j] + four[3][j]);
      }
    }
  }
}

// One row's four sums added, (0 + 1) + (2 + 3): of tile t / 2 (of one tile: in both halves) and
// weight row g + 8 (t % 2) in lane 4g + t. Each exchange halves what a lane still holds.
template <int kTiles, int kRows>
__device__ __forceinline__ float AddFour(const float (&sum)[kTiles][kRows][2], int r) {
  static_assert(kTiles <= 2);
  const bool odd = LaneId() % 2 != 0;
  float pair[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float* both = sum[tile][r];
    const float other = __shfl_xor_sync(kFullMask, odd ? both[0] : both[1], 1);
    pair[tile] = (odd ? both[1] : both[0]) + other;
  }
  if constexpr (kTiles == 1) {
    return pair[0] + __shfl_xor_sync(kFullMask, pair[0], 2);
  } else {
    const bool upper = LaneId() % 4 >= 2;
    const float other = __shfl_xor_sync(kFullMask, upper ? pair[0] : pair[1], 2);
    return (upper ? pair[1] : pair[0]) + other;
  }
}

}  // namespace ds4::cuda
