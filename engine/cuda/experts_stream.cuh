// What the two kernels of routed experts share: products whose weight type is known at run time
// only, on a ring of chunks of several sizes.
#pragma once

#include "engine/cuda/dot.cuh"
#include "engine/cuda/experts.h"
#include "engine/cuda/experts_dot.cuh"
#include "engine/cuda/experts_groups.h"

namespace ds4::cuda {

// Dynamic shared memory that a block may have on sm_90.
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kRingGrain = 128;

// At most kMaxPending - 1: until `pending` committed copies are unfinished.
inline constexpr int kMaxPending = 8;
__device__ __forceinline__ void WaitForCopies(int pending) {
  switch (pending) {
    case 0:
      return CopyAsyncWait<0>();
    case 1:
      return CopyAsyncWait<1>();
    case 2:
      return CopyAsyncWait<2>();
    case 3:
      return CopyAsyncWait<3>();
    case 4:
      return CopyAsyncWait<4>();
    case 5:
      return CopyAsyncWait<5>();
    case 6:
      return CopyAsyncWait<6>();
    default:
      return CopyAsyncWait<7>();
  }
}

// What a warp copies and multiplies at a time: one chunk, or the chunks of the same columns in two
// neighbouring row tiles.
struct Stage {
  const std::byte* chunk = nullptr;
  int chunk_bytes = 0;
  int bytes = 0;      // in the ring, with or without the second chunk
  int next_tile = 0;  // bytes to the second chunk; 0: it is not there
};

// A warp's stages in the order of `source`, in a ring of bytes: as WeightStream (dot.cuh), but each
// stage has the size of its own type, and the source may get more later.
// Source: `bool Peek(Stage& stage)` the next one, false while there is none; `void Advance()` steps
// over it. Every lane gets the same answers.
template <class Source>
struct MixedStream {
  std::byte* ring;  // ring_bytes of shared memory, 16-byte aligned
  int ring_bytes;   // at least twice the largest stage
  Source source;
  int front_bytes = 0;  // size of the stage that Wait gives next: the reader knows its type
  int head = 0;         // end of the newest stage
  int tail = 0;         // end of the last stage released
  int used = 0;
  int pending = 0;

  // Asks for stages as long as they fit.
  __device__ __forceinline__ void Fill() {
    Stage stage;
    while (pending < kMaxPending && source.Peek(stage)) {
      const bool wrap = head + stage.bytes > ring_bytes;
      const int cost = wrap ? ring_bytes - head + stage.bytes : stage.bytes;
      if (used + cost > ring_bytes) return;
      if (wrap) head = 0;
      Copy(stage.chunk, ring + head, stage.chunk_bytes);
      if (stage.next_tile != 0) {
        Copy(stage.chunk + stage.next_tile, ring + head + stage.chunk_bytes, stage.chunk_bytes);
      }
      CopyAsyncCommit();
      head += stage.bytes;
      used += cost;
      ++pending;
      source.Advance();
    }
  }
  // The oldest stage, in shared memory; the warp may write there.
  __device__ __forceinline__ std::byte* Wait() {
    WaitForCopies(pending - 1);
    __syncwarp();
    // A stage is never cut in two: what was left at the end of the ring is passed over.
    if (tail + front_bytes > ring_bytes) {
      used -= ring_bytes - tail;
      tail = 0;
    }
    return ring + tail;
  }
  // The warp is done with it: the next ones take its place.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    used -= front_bytes;
    tail += front_bytes;
    --pending;
    Fill();
  }

 private:
  __device__ __forceinline__ static void Copy(const std::byte* from, std::byte* to, int bytes) {
#pragma unroll 2
    for (int i = 16 * LaneId(); i < bytes; i += 16 * kWarpSize) CopyAsync16(to + i, from + i);
  }
};

// What a kernel needs of a packed matrix.
struct MatrixShape {
  DType dtype;
  bool is_float;
  bool paired;  // its stages have two row tiles
  int chunk_bytes;
  int chunks_per_block;  // of 256 columns
  int blocks;            // of 256 columns
  int row_tiles;
  int tile_bytes;
  int64_t matrix_bytes;
  const std::byte* data;
};

// Chunks so small that two of them make a stage where a warp has two row tiles.
constexpr bool IsSmallChunk(DType dtype) { return ChunkBytes(dtype) <= 2304; }

inline MatrixShape ShapeOf(const PackedMatrix& w, bool may_pair) {
  MatrixShape shape;
  shape.dtype = w.dtype;
  shape.is_float = IsFloatType(w.dtype);
  shape.paired = may_pair && IsSmallChunk(w.dtype);
  shape.chunk_bytes = ChunkBytes(w.dtype);
  shape.chunks_per_block = kColumnGrain / ChunkCols(w.dtype);
  shape.blocks = static_cast<int>(w.padded_cols() / kColumnGrain);
  shape.row_tiles = static_cast<int>(PaddedRows(w.rows) / kTileRows);
  shape.tile_bytes = shape.chunk_bytes * shape.chunks_per_block * shape.blocks;
  shape.matrix_bytes = int64_t{shape.tile_bytes} * shape.row_tiles;
  shape.data = w.data;
  return shape;
}
inline int StageBytes(const MatrixShape& w) { return w.chunk_bytes * (w.paired ? 2 : 1); }

// One tile of 8 rows picked from a view, with offsets in place of pointers:
// registers are short here. rows[j], in shared memory: x row j of the tile, all 8 valid.
struct GroupX {
  const ActivationView& x;
  const int* rows;
  int tiles;
  int q_at;
  int scale_at[2];

  __device__ __forceinline__ GroupX(const ActivationView& view, const int* rows_of_tile)
      : x(view), rows(rows_of_tile), tiles(TilesOf(view)) {
    const int lane = LaneId();
    const int row = rows[lane / 4];
    q_at = row / 8 * 32 + row % 8 * 4 + lane % 4;
    scale_at[0] = rows[lane % 4 * 2];
    scale_at[1] = rows[lane % 4 * 2 + 1];
  }
  // The 8 blocks of 32 columns from `block` on. kCols == 1: the view has one row.
  template <int kCols>
  __device__ __forceinline__ void Load(int block, BlockX<kCols>& to) const {
    const int num_tiles = kCols == 1 ? 1 : tiles;
    const uint64_t* q = x.q + (block * (32 * num_tiles) + q_at);
    const float* scale = x.scale + block * (8 * num_tiles);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      to.q[s] = *q;
      q += 32 * num_tiles;
#pragma unroll
      for (int i = 0; i < kCols; ++i) to.scale[s][i] = scale[scale_at[i]];
      scale += 8 * num_tiles;
    }
  }
  // Columns 0, 1, ... of row j of the tile.
  __device__ __forceinline__ const float* Row(int j) const { return x.f32 + rows[j] * x.cols; }
};

inline constexpr int kSliceBlocks = kSliceCols / kColumnGrain;

template <int kTiles>
__device__ __forceinline__ void Clear(float (&acc)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[tile][i] = 0.0f;
  }
}

// The next stage, quantised, times x. kTiles: 2 where small chunks come in pairs.
template <int kTiles, int kCols, class Stream>
__device__ __forceinline__ void MultiplyStage(const MatrixShape& w, Stream& stream,
                                              const BlockX<kCols>& x, const LaneTables& tables,
                                              float (&acc)[kTiles][4]) {
  stream.front_bytes = kTiles == 2 && w.paired ? 2 * w.chunk_bytes : w.chunk_bytes;
  std::byte* stage = stream.Wait();
  switch (w.dtype) {
    case DType::kMXFP4:
      DotStage<DType::kMXFP4, kTiles, kCols>(stage, x, tables, acc);
      break;
    case DType::kQ4_K:
      DotStage<DType::kQ4_K, kTiles, kCols>(stage, x, tables, acc);
      break;
    case DType::kQ2_K:
      DotStage<DType::kQ2_K, kTiles, kCols>(stage, x, tables, acc);
      break;
    case DType::kIQ2_XXS:
      DotStage<DType::kIQ2_XXS, kTiles, kCols>(stage, x, tables, acc);
      break;
    default:
      DotStage<DType::kQ8_0, 1, kCols>(stage, x, tables, acc);
      break;
  }
  stream.Release();
}

// One slice, quantised: `blocks` of 256 columns from x block `block` of 32.
template <int kTiles, int kCols, class Stream>
__device__ __forceinline__ void DotBlocks(const MatrixShape& w, Stream& stream, const GroupX& x,
                                          int block, int blocks, const LaneTables& tables,
                                          float (&acc)[kTiles][4]) {
  Clear(acc);
  for (int i = 0; i < blocks; ++i) {
    BlockX<kCols> columns;
    x.Load(block + i * (kColumnGrain / 32), columns);
    MultiplyStage<kTiles, kCols>(w, stream, columns, tables, acc);
  }
}

// One slice of one row tile, of a float type. count: how many of the 8 x rows matter.
template <class Stream>
__device__ __forceinline__ void DotFloats(const MatrixShape& w, Stream& stream, const GroupX& x,
                                          int block, int blocks, int count, float (&acc)[1][4]) {
  const int chunks = blocks * w.chunks_per_block;
  const int64_t col = int64_t{block} * 32;
  stream.front_bytes = w.chunk_bytes;
  // One row alone, as in decoding, is an eighth of the work.
  switch (w.dtype) {
    case DType::kF32:
      return count == 1 ? DotSlice<DType::kF32, 1, 1>(stream, x, col, chunks, nullptr, acc)
                        : DotSlice<DType::kF32, 1, 8>(stream, x, col, chunks, nullptr, acc);
    case DType::kF16:
      return count == 1 ? DotSlice<DType::kF16, 1, 1>(stream, x, col, chunks, nullptr, acc)
                        : DotSlice<DType::kF16, 1, 8>(stream, x, col, chunks, nullptr, acc);
    default:
      return count == 1 ? DotSlice<DType::kBF16, 1, 1>(stream, x, col, chunks, nullptr, acc)
                        : DotSlice<DType::kBF16, 1, 8>(stream, x, col, chunks, nullptr, acc);
  }
}

}  // namespace ds4::cuda
