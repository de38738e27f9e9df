// What the two kernels of routed experts share: products whose weight type is known at run time
// only, on a ring of chunks of several sizes.
#pragma once

#include "engine/cuda/dot.cuh"
#include "engine/cuda/experts.h"

namespace ds4::cuda {

inline constexpr int kGroupPairs = 8;
// Dynamic shared memory that a block may have on sm_90.
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kRingGrain = 128;
inline constexpr int kMinRingBytes = 2 * ChunkBytes(DType::kQ8_0);

// At most kMaxPending - 1: until `pending` committed copies are unfinished.
inline constexpr int kMaxPending = 8;
__device__ __forceinline__ void WaitForCopies(int pending) {
  switch (pending) {
    case 0: return CopyAsyncWait<0>();
    case 1: return CopyAsyncWait<1>();
    case 2: return CopyAsyncWait<2>();
    case 3: return CopyAsyncWait<3>();
    case 4: return CopyAsyncWait<4>();
    case 5: return CopyAsyncWait<5>();
    case 6: return CopyAsyncWait<6>();
    default: return CopyAsyncWait<7>();
  }
}

// A warp's chunks in the order of `source`, in a ring of bytes: as WeightStream (dot.cuh), but each
// chunk has the size of its own type, and the source may get more chunks later.
// Source: `bool Peek(const std::byte*& chunk, int& bytes)` the next chunk, false while there is none;
// `void Advance()` steps over it. Every lane gets the same answers.
template <class Source>
struct MixedStream {
  std::byte* ring;  // ring_bytes of shared memory, 16-byte aligned
  int ring_bytes;   // at least twice the largest chunk
  Source source;
  int front_bytes = 0;  // size of the chunk that Wait gives next: the reader knows its type
  int head = 0;         // end of the newest chunk
  int tail = 0;         // end of the last chunk released
  int used = 0;
  int pending = 0;

  // Asks for chunks as long as they fit.
  __device__ __forceinline__ void Fill() {
    const std::byte* chunk = nullptr;
    int bytes = 0;
    while (pending < kMaxPending && source.Peek(chunk, bytes)) {
      const int at = PlaceAfter(head, bytes);
      const int cost = CostAfter(head, bytes);
      if (used + cost > ring_bytes) return;
      for (int i = 16 * LaneId(); i < bytes; i += 16 * kWarpSize) {
        CopyAsync16(ring + at + i, chunk + i);
      }
      CopyAsyncCommit();
      head = at + bytes;
      used += cost;
      ++pending;
      source.Advance();
    }
  }
  // The oldest chunk, in shared memory.
  __device__ __forceinline__ const std::byte* Wait() {
    WaitForCopies(pending - 1);
    __syncwarp();
    return ring + PlaceAfter(tail, front_bytes);
  }
  // The warp is done with it: the next ones take its place.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    used -= CostAfter(tail, front_bytes);
    tail = PlaceAfter(tail, front_bytes) + front_bytes;
    --pending;
    Fill();
  }

 private:
  // A chunk is never cut in two: what is left at the end of the ring is passed over.
  __device__ __forceinline__ int PlaceAfter(int end, int bytes) const {
    return end + bytes > ring_bytes ? 0 : end;
  }
  __device__ __forceinline__ int CostAfter(int end, int bytes) const {
    return end + bytes > ring_bytes ? ring_bytes - end + bytes : bytes;
  }
};

// What a kernel needs of a packed matrix.
struct MatrixShape {
  DType dtype;
  int chunk_bytes;
  int chunks_per_block;  // of 256 columns
  int blocks;            // of 256 columns
  int row_tiles;
  int64_t tile_bytes;
  int64_t matrix_bytes;
  const std::byte* data;
};

inline MatrixShape ShapeOf(const PackedMatrix& w) {
  MatrixShape shape;
  shape.dtype = w.dtype;
  shape.chunk_bytes = ChunkBytes(w.dtype);
  shape.chunks_per_block = kColumnGrain / ChunkCols(w.dtype);
  shape.blocks = static_cast<int>(w.padded_cols() / kColumnGrain);
  shape.row_tiles = static_cast<int>(PaddedRows(w.rows) / kTileRows);
  shape.tile_bytes = int64_t{shape.chunk_bytes} * shape.chunks_per_block * shape.blocks;
  shape.matrix_bytes = shape.tile_bytes * shape.row_tiles;
  shape.data = w.data;
  return shape;
}

// One tile of 8 rows picked from a view, as GatheredX (dot.cuh), with offsets in place of pointers:
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
  __device__ __forceinline__ uint64_t Q(int block, int) const {
    return x.q[block * (32 * tiles) + q_at];
  }
  __device__ __forceinline__ float2 Scales(int block, int) const {
    const float* scale = x.scale + block * (8 * tiles);
    return make_float2(scale[scale_at[0]], scale[scale_at[1]]);
  }
  __device__ __forceinline__ const float* Row(int j) const { return x.f32 + rows[j] * x.cols; }
};

inline constexpr int kSliceBlocks = kSliceCols / kColumnGrain;

// DotSlice for one tile of x of which `rows` rows count; `blocks` of 256 columns from x column `col`.
// kFloats: the type may be a float one (kernels without them need fewer registers).
template <bool kFloats, class Stream, class X>
__device__ __forceinline__ void DotSliceOf(const MatrixShape& w, Stream& stream, const X& x,
                                           int64_t col, int blocks, int rows, const uint32_t* grid,
                                           float (&acc)[1][4]) {
  const int chunks = blocks * w.chunks_per_block;
  stream.front_bytes = w.chunk_bytes;
  if constexpr (kFloats) {
    // One row alone, as in decoding, is an eighth of the work.
    switch (w.dtype) {
      case DType::kF32:
        return rows == 1 ? DotSlice<DType::kF32, 1, 1>(stream, x, col, chunks, grid, acc)
                         : DotSlice<DType::kF32, 1, 8>(stream, x, col, chunks, grid, acc);
      case DType::kF16:
        return rows == 1 ? DotSlice<DType::kF16, 1, 1>(stream, x, col, chunks, grid, acc)
                         : DotSlice<DType::kF16, 1, 8>(stream, x, col, chunks, grid, acc);
      case DType::kBF16:
        return rows == 1 ? DotSlice<DType::kBF16, 1, 1>(stream, x, col, chunks, grid, acc)
                         : DotSlice<DType::kBF16, 1, 8>(stream, x, col, chunks, grid, acc);
      default: break;
    }
  }
  switch (w.dtype) {
    case DType::kMXFP4: return DotSlice<DType::kMXFP4, 1, 1>(stream, x, col, chunks, grid, acc);
    case DType::kQ4_K: return DotSlice<DType::kQ4_K, 1, 1>(stream, x, col, chunks, grid, acc);
    case DType::kQ2_K: return DotSlice<DType::kQ2_K, 1, 1>(stream, x, col, chunks, grid, acc);
    case DType::kIQ2_XXS:
      return DotSlice<DType::kIQ2_XXS, 1, 1>(stream, x, col, chunks, grid, acc);
    default: return DotSlice<DType::kQ8_0, 1, 1>(stream, x, col, chunks, grid, acc);
  }
}

}  // namespace ds4::cuda
