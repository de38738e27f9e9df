// Weight matrices in device memory: the layout in which matrix instructions read them.
//
// A matrix is cut into tiles of 16 rows; a tile is a row of chunks, one after the other; a chunk is
// 16 rows x ChunkCols(dtype) columns. Rows are padded to 16, columns to 256 (kColumnGrain), with
// zeros. A packed chunk has as many bytes as its GGUF blocks (IQ2_XXS: 64 more). Within a chunk
// "lane" is 4g + t (g = 0..7, t = 0..3) of a warp; rows g and g+8 belong to it. "word" is a
// little-endian u32.
//
//  Q8_0, 256 columns, 4352 B. Step s = 0..7 (32 columns) at 512 s, lane's 16 B: word 0 = row g,
//    columns 32s+8t+0..3 as int8; word 1 = row g+8, the same; word 2 = row g, columns +4..7;
//    word 3 = row g+8, columns +4..7. At 4096 + 128 q + 4 lane (q = 0, 1): f16 scale of row g, f16
//    scale of row g+8, both of step 4q + t.
//  MXFP4, 256 columns, 2176 B. Unit u = 0..3 at 512 u, lane's 16 B: word 0 = row g of step 2u,
//    word 1 = row g+8 of step 2u, words 2, 3 = the same of step 2u+1. A word: byte j holds the code
//    of column 32s+8t+j in its low nibble and of column 32s+8t+4+j in its high one. At 2048 +
//    4 lane: scale bytes of (row g, step t), (row g+8, step t), (row g, step 4+t), (row g+8,
//    step 4+t).
//  Q4_K, 256 columns, 2304 B. Units as MXFP4 (codes 0..15, step = sub-block of 32). At 2048 + 16 r:
//    row r's f16 d, f16 dmin, 12 scale bytes, as in the file.
//  Q2_K, 256 columns, 1344 B. Unit u = 0, 1 (128 columns) at 512 u, lane's 16 B: word i = step
//    s = 4u + i (32 columns, two sub-blocks of 16): byte j holds bits 0-1 row g column 32s+8t+j,
//    bits 2-3 row g column +4+j, bits 4-5 row g+8 column +j, bits 6-7 row g+8 column +4+j.
//    At 1024 + 16 r: row r's 16 scale bytes; at 1280 + 4 r: its f16 d, f16 dmin.
//  IQ2_XXS, 256 columns, 1120 B. Unit u = 0, 1 (128 columns) at 512 u, lane's 16 B: words 2h, 2h+1
//    (h = 0, 1) have four octets, k = 0..3: row g + 8 (k mod 2), step s = 4u + 2h + k / 2, columns
//    32s+8t..+7. Byte k of word 2h: the octet's grid index; bit 4j + k of word 2h+1: whether its
//    column j is negative (the eighth sign too, which the file leaves to parity). At 1024 + 2 lane:
//    four scales of 4 bits, the lowest first: (row g, step t), (row g+8, step t), (row g, step
//    4+t), (row g+8, step 4+t). At 1088 + 4 g: f16 d of row g, f16 d of row g+8.
//  F16, BF16, 128 columns, 4096 B. Unit u = 0..7 (16 columns) at 512 u, lane's 16 B: word 0 = row g
//    columns 16u+4t, +1; word 1 = row g+8, the same; word 2 = row g columns 16u+4t+2, +3; word 3 =
//    row g+8, the same.
//  F32, 64 columns, 4096 B. Unit u = 0..7 (8 columns) at 512 u, lane's 16 B: row g column 8u+2t;
//    row g+8, the same; row g column 8u+2t+1; row g+8, the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/base/status.h"
#include "engine/cuda/launch.h"
#include "engine/tensor/dtype.h"

namespace ds4::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kColumnGrain = 256;

inline int64_t PaddedRows(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }
inline int64_t PaddedCols(int64_t cols) {
  return (cols + kColumnGrain - 1) / kColumnGrain * kColumnGrain;
}

// Columns and bytes of one packed chunk; 0 for a type that has no packed form.
constexpr int ChunkCols(DType dtype) {
  switch (dtype) {
    case DType::kQ8_0:
    case DType::kMXFP4:
    case DType::kQ4_K:
    case DType::kQ2_K:
    case DType::kIQ2_XXS:
      return 256;
    case DType::kF16:
    case DType::kBF16:
      return 128;
    case DType::kF32:
      return 64;
    default:
      return 0;
  }
}
constexpr int ChunkBytes(DType dtype) {
  switch (dtype) {
    case DType::kQ8_0:
      return 4352;
    case DType::kMXFP4:
      return 2176;
    case DType::kQ4_K:
      return 2304;
    case DType::kQ2_K:
      return 1344;
    case DType::kIQ2_XXS:
      return 1120;
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
      return 4096;
    default:
      return 0;
  }
}

// The same for device code, which may read constants but not call host functions.
template <DType kType>
inline constexpr int kChunkCols = ChunkCols(kType);
template <DType kType>
inline constexpr int kChunkBytes = ChunkBytes(kType);

// True for the types above.
constexpr bool IsDeviceMatrixType(DType dtype) { return ChunkBytes(dtype) != 0; }
// Bytes of one packed tile (16 rows) of `cols` columns, and of a whole matrix. The type must have a
// packed form (CHECK).
int64_t TileBytes(DType dtype, int64_t cols);
int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols);

// `count` matrices [rows, cols] one after the other (experts, lanes); plain values, device pointer,
// 256-byte aligned.
struct PackedMatrix {
  DType dtype = DType::kF32;
  int64_t count = 1;
  int64_t rows = 0;
  int64_t cols = 0;
  const std::byte* data = nullptr;

  int64_t padded_cols() const { return PaddedCols(cols); }
  int64_t matrix_bytes() const { return PackedBytes(dtype, rows, cols); }
  PackedMatrix At(int64_t i) const { return {dtype, 1, rows, cols, data + i * matrix_bytes()}; }
};

// The plain form, on the host. `src`: row r's blocks at src + r * src_stride (file layout); out:
// PackedBytes(dtype, rows, cols).
void PackOnHost(DType dtype, int64_t rows, int64_t cols, const std::byte* src, int64_t src_stride,
                std::byte* out);

// Rows [row_begin, row_begin + num_rows) of a matrix of `rows` rows, from raw file rows in device
// memory (row i of the source at src + i * src_stride). row_begin: a multiple of 16; num_rows too,
// unless it reaches `rows`. Writes whole tiles of `out` (the packed matrix's start). The source is
// ordinary bytes: 2-byte aligned, but for MXFP4 any. Products may read weights before the kernels
// ahead of them have ended: synchronise between packing (or filling) and the first use.
void LaunchPack(const LaunchContext& launch, DType dtype, int64_t rows, int64_t cols,
                int64_t row_begin, int64_t num_rows, const std::byte* src, int64_t src_stride,
                std::byte* out);

// Random but valid contents (finite scales, weights of standard deviation about 0.02), a function
// of (seed, position in the matrix): for synthetic models.
void LaunchFillRandom(const LaunchContext& launch, const PackedMatrix& matrix, uint64_t seed);

}  // namespace ds4::cuda
