// Packing on the device, and random contents. A block of threads makes one chunk, a thread 16 bytes
// of it at a time: writes are coalesced, the scattered reads of a few raw blocks hit the caches.
#include <type_traits>

#include "engine/base/check.h"
#include "engine/cuda/layout.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

int64_t TileBytes(DType dtype, int64_t cols) {
  CHECK(IsDeviceMatrixType(dtype)) << Info(dtype).name << " has no packed form";
  return PaddedCols(cols) / ChunkCols(dtype) * ChunkBytes(dtype);
}

int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols) {
  return PaddedRows(rows) / kTileRows * TileBytes(dtype, cols);
}

namespace {

constexpr int kThreads = 128;

// Bytes of the codes of a chunk; scales come after them.
template <DType kType>
inline constexpr int kCodePieces = kType == DType::kQ8_0                               ? 256
                                   : kType == DType::kMXFP4 || kType == DType::kQ4_K   ? 128
                                   : kType == DType::kQ2_K || kType == DType::kIQ2_XXS ? 64
                                                                                       : 256;

struct Piece {
  uint32_t word[4];
};

// ---- Packing.

__device__ __forceinline__ uint32_t Half(const uint8_t* at) {
  return *reinterpret_cast<const uint16_t*>(at);
}
__device__ __forceinline__ uint32_t Load32(const uint8_t* at) {
  return Half(at) | Half(at + 2) << 16;
}
__device__ __forceinline__ uint32_t Load32Bytes(const uint8_t* at) {
  return at[0] | static_cast<uint32_t>(at[1]) << 8 | static_cast<uint32_t>(at[2]) << 16 |
         static_cast<uint32_t>(at[3]) << 24;
}

// The raw blocks that one chunk is made of.
struct RawChunk {
  const uint8_t* tile;  // row 0 of the tile
  int64_t stride;
  int rows;  // that exist, 1..16
  int64_t first_block;
  int64_t num_blocks;  // of a row
  int block_bytes;

  // Block i of the chunk in row `row`, nullptr where the matrix has ended.
  __device__ __forceinline__ const uint8_t* Block(int row, int i) const {
    if (row >= rows || first_block + i >= num_blocks) return nullptr;
    return tile + row * stride + (first_block + i) * block_bytes;
  }
};

template <DType kType>
__device__ __forceinline__ void PackPiece(const RawChunk& raw, int piece, Piece& out);

template <>
__device__ __forceinline__ void PackPiece<DType::kQ8_0>(const RawChunk& raw, int piece,
                                                        Piece& out) {
  if (piece < kCodePieces<DType::kQ8_0>) {
    const int lane = piece % 32;
    for (int i = 0; i < 4; ++i) {
      const uint8_t* block = raw.Block(lane / 4 + i % 2 * 8, piece / 32);
      out.word[i] = block == nullptr ? 0 : Load32(block + 2 + 8 * (lane % 4) + i / 2 * 4);
    }
    return;
  }
  const int scale = piece - kCodePieces<DType::kQ8_0>;
  for (int t = 0; t < 4; ++t) {
    const uint8_t* low = raw.Block(scale % 8, scale / 8 * 4 + t);
    const uint8_t* high = raw.Block(scale % 8 + 8, scale / 8 * 4 + t);
    out.word[t] = (low == nullptr ? 0 : Half(low)) | (high == nullptr ? 0 : Half(high) << 16);
  }
}

template <>
__device__ __forceinline__ void PackPiece<DType::kMXFP4>(const RawChunk& raw, int piece,
                                                         Piece& out) {
  if (piece < kCodePieces<DType::kMXFP4>) {
    const int lane = piece % 32;
    const int t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const uint8_t* block = raw.Block(lane / 4 + i % 2 * 8, piece / 32 * 2 + i / 2);
      out.word[i] = 0;
      if (block == nullptr) continue;
      // Columns 0-15 are the low nibbles of the 16 bytes, columns 16-31 the high ones.
      const uint32_t low = Load32Bytes(block + 1 + t % 2 * 8) >> (t / 2 * 4) & 0x0f0f0f0fu;
      const uint32_t high = Load32Bytes(block + 5 + t % 2 * 8) >> (t / 2 * 4) & 0x0f0f0f0fu;
      out.word[i] = low | high << 4;
    }
    return;
  }
  const int g = piece - kCodePieces<DType::kMXFP4>;
  for (int t = 0; t < 4; ++t) {
    out.word[t] = 0;
    for (int i = 0; i < 4; ++i) {
      const uint8_t* block = raw.Block(g + i % 2 * 8, t + i / 2 * 4);
      if (block != nullptr) out.word[t] |= static_cast<uint32_t>(block[0]) << (8 * i);
    }
  }
}

template <>
__device__ __forceinline__ void PackPiece<DType::kQ4_K>(const RawChunk& raw, int piece,
                                                        Piece& out) {
  if (piece < kCodePieces<DType::kQ4_K>) {
    const int lane = piece % 32;
    for (int i = 0; i < 4; ++i) {
      const uint8_t* block = raw.Block(lane / 4 + i % 2 * 8, 0);
      out.word[i] = 0;
      if (block == nullptr) continue;
      const uint8_t* codes = block + 16 + 32 * (piece / 32) + 8 * (lane % 4);
      const uint32_t low = Load32(codes) >> (i / 2 * 4) & 0x0f0f0f0fu;
      const uint32_t high = Load32(codes + 4) >> (i / 2 * 4) & 0x0f0f0f0fu;
      out.word[i] = low | high << 4;
    }
    return;
  }
  const uint8_t* block = raw.Block(piece - kCodePieces<DType::kQ4_K>, 0);
  for (int i = 0; i < 4; ++i) out.word[i] = block == nullptr ? 0 : Load32(block + 4 * i);
}

template <>
__device__ __forceinline__ void PackPiece<DType::kQ2_K>(const RawChunk& raw, int piece,
                                                        Piece& out) {
  constexpr int kCodes = kCodePieces<DType::kQ2_K>;
  if (piece < kCodes) {
    const int lane = piece % 32;
    for (int i = 0; i < 4; ++i) {
      out.word[i] = 0;
      for (int part = 0; part < 4; ++part) {  // rows g, g + 8; columns 0-3, 4-7
        const uint8_t* block = raw.Block(lane / 4 + part / 2 * 8, 0);
        if (block == nullptr) continue;
        const uint8_t* codes = block + 16 + 32 * (piece / 32) + 8 * (lane % 4) + part % 2 * 4;
        out.word[i] |= (Load32(codes) >> (2 * i) & 0x03030303u) << (2 * part);
      }
    }
  } else if (piece < kCodes + 16) {
    const uint8_t* block = raw.Block(piece - kCodes, 0);
    for (int i = 0; i < 4; ++i) out.word[i] = block == nullptr ? 0 : Load32(block + 4 * i);
  } else {
    for (int i = 0; i < 4; ++i) {
      const uint8_t* block = raw.Block(4 * (piece - kCodes - 16) + i, 0);
      out.word[i] = block == nullptr ? 0 : Load32(block + 80);
    }
  }
}

// The eight signs of an octet, four bits apart, from its seven in bits 0-6: the number of negative
// columns is even.
__device__ __forceinline__ uint32_t Iq2Signs(uint32_t code) {
  uint32_t signs = 0, parity = 0;
  for (int j = 0; j < 8; ++j) {
    const uint32_t negative = j < 7 ? code >> j & 1 : parity;
    parity ^= negative;
    signs |= negative << (4 * j);
  }
  return signs;
}

template <>
__device__ __forceinline__ void PackPiece<DType::kIQ2_XXS>(const RawChunk& raw, int piece,
                                                           Piece& out) {
  constexpr int kCodes = kCodePieces<DType::kIQ2_XXS>;
  for (int i = 0; i < 4; ++i) out.word[i] = 0;
  if (piece < kCodes) {
    const int lane = piece % 32;
    for (int step = 0; step < 4; ++step) {
      for (int r = 0; r < 2; ++r) {
        const uint8_t* block = raw.Block(lane / 4 + 8 * r, 0);
        if (block == nullptr) continue;
        const uint8_t* group = block + 2 + 32 * (piece / 32) + 8 * step;
        const int octet = step % 2 * 2 + r;
        out.word[step / 2 * 2] |= static_cast<uint32_t>(group[lane % 4]) << (8 * octet);
        out.word[step / 2 * 2 + 1] |= Iq2Signs(Load32(group + 4) >> (7 * (lane % 4))) << octet;
      }
    }
  } else if (piece < kCodes + 4) {
    for (int i = 0; i < 16; ++i) {  // two lanes a word, four scales a lane
      const int lane = 8 * (piece - kCodes) + i / 2 % 2 + i / 4 * 2;
      const int unit = i % 2;
      for (int r = 0; r < 2; ++r) {
        const uint8_t* block = raw.Block(lane / 4 + 8 * r, 0);
        if (block == nullptr) continue;
        const uint32_t scale = Load32(block + 2 + 32 * unit + 8 * (lane % 4) + 4) >> 28;
        out.word[i / 4] |= scale << (16 * (i / 2 % 2) + 8 * unit + 4 * r);
      }
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const int g = 4 * (piece - kCodes - 4) + i;
      const uint8_t* low = raw.Block(g, 0);
      const uint8_t* high = raw.Block(g + 8, 0);
      out.word[i] = (low == nullptr ? 0 : Half(low)) | (high == nullptr ? 0 : Half(high) << 16);
    }
  }
}

__device__ __forceinline__ void PackHalfPiece(const RawChunk& raw, int piece, Piece& out) {
  const int lane = piece % 32;
  for (int i = 0; i < 4; ++i) {
    const int col = 16 * (piece / 32) + 4 * (lane % 4) + i / 2 * 2;
    const uint8_t* low = raw.Block(lane / 4 + i % 2 * 8, col);
    const uint8_t* high = raw.Block(lane / 4 + i % 2 * 8, col + 1);
    out.word[i] = (low == nullptr ? 0 : Half(low)) | (high == nullptr ? 0 : Half(high) << 16);
  }
}
template <>
__device__ __forceinline__ void PackPiece<DType::kF16>(const RawChunk& raw, int piece, Piece& out) {
  PackHalfPiece(raw, piece, out);
}
template <>
__device__ __forceinline__ void PackPiece<DType::kBF16>(const RawChunk& raw, int piece,
                                                        Piece& out) {
  PackHalfPiece(raw, piece, out);
}

template <>
__device__ __forceinline__ void PackPiece<DType::kF32>(const RawChunk& raw, int piece, Piece& out) {
  const int lane = piece % 32;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* value =
        raw.Block(lane / 4 + i % 2 * 8, 8 * (piece / 32) + 2 * (lane % 4) + i / 2);
    out.word[i] = value == nullptr ? 0 : Load32(value);
  }
}

__device__ __forceinline__ void StorePiece(std::byte* chunk, int piece, const Piece& value) {
  reinterpret_cast<uint4*>(chunk)[piece] =
      make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}

struct PackParams {
  const uint8_t* src;
  int64_t src_stride;
  int64_t num_rows;
  int64_t num_blocks;  // of a row
  int64_t chunks;      // of a tile
  int block_bytes;
  int blocks_per_chunk;
  std::byte* out;  // first tile
};

template <DType kType>
__global__ void __launch_bounds__(kThreads) PackKernel(PackParams params) {
  LaunchDependents();
  GridDependencyWait();
  const int64_t index = blockIdx.x;
  const int64_t tile = index / params.chunks;
  const int64_t chunk = index % params.chunks;
  RawChunk raw;
  raw.tile = params.src + tile * kTileRows * params.src_stride;
  raw.stride = params.src_stride;
  raw.rows = static_cast<int>(min(params.num_rows - tile * kTileRows, int64_t{kTileRows}));
  raw.first_block = chunk * params.blocks_per_chunk;
  raw.num_blocks = params.num_blocks;
  raw.block_bytes = params.block_bytes;
  constexpr int kBytes = kChunkBytes<kType>;
  std::byte* out = params.out + index * kBytes;
  for (int piece = static_cast<int>(threadIdx.x); piece < kBytes / 16; piece += kThreads) {
    Piece value;
    PackPiece<kType>(raw, piece, value);
    StorePiece(out, piece, value);
  }
}

// ---- Random contents.

// 16 random bytes for every 16 bytes of the matrix (two rounds of the splitmix64 finaliser).
__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}
__device__ __forceinline__ Piece RandomPiece(uint64_t seed, uint64_t index) {
  const uint64_t low = Mix(Mix(seed + 0x9e3779b97f4a7c15u) + 2 * index);
  const uint64_t high = Mix(low + 0x9e3779b97f4a7c15u);
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
           static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}

// What of a chunk lies inside the matrix.
struct Bounds {
  int rows;
  int cols;
};

// Uniform in +-0.0346: standard deviation 0.02.
__device__ __forceinline__ float RandomWeight(uint32_t bits16) {
  return (static_cast<float>(bits16) - 32767.5f) * (0.034641f / 32767.5f);
}
// Q8_0 codes are uniform bytes, of standard deviation 73.9; scales vary by a quarter both ways.
__device__ __forceinline__ uint32_t RandomQ8Scale(uint32_t bits16) {
  return FloatToHalf(0.02f / 73.9f * (0.75f + static_cast<float>(bits16) * (0.5f / 65536.0f)));
}

// Turns random bytes into a valid piece. Padding gets zeros, or zero scales.
template <DType kType>
__device__ __forceinline__ void FillPiece(const Bounds& bounds, int piece, Piece& p) {
  const int lane = piece % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int rest = piece - kCodePieces<kType>;  // among the scales when >= 0
  for (int i = 0; i < 4; ++i) {
    uint32_t& word = p.word[i];
    const uint32_t low = word & 0xffffu;
    const uint32_t high = word >> 16;
    if constexpr (kType == DType::kF32) {
      const bool inside =
          g + i % 2 * 8 < bounds.rows && 8 * (piece / 32) + 2 * t + i / 2 < bounds.cols;
      word = inside ? __float_as_uint(RandomWeight(low)) : 0;
    } else if constexpr (kType == DType::kF16 || kType == DType::kBF16) {
      const int col = 16 * (piece / 32) + 4 * t + i / 2 * 2;
      const float w[2] = {RandomWeight(low), RandomWeight(high)};
      word = 0;
      for (int k = 0; k < 2; ++k) {
        if (g + i % 2 * 8 >= bounds.rows || col + k >= bounds.cols) continue;
        const uint32_t bits = kType == DType::kF16 ? FloatToHalf(w[k]) : FloatToBf16(w[k]);
        word |= bits << (16 * k);
      }
    } else if constexpr (kType == DType::kQ8_0) {
      if (rest < 0) continue;
      const bool inside = 32 * (rest / 8 * 4 + i) < bounds.cols;
      const bool inside_low = inside && rest % 8 < bounds.rows;
      const bool inside_high = inside && rest % 8 + 8 < bounds.rows;
      word = (inside_low ? RandomQ8Scale(low) : 0) | (inside_high ? RandomQ8Scale(high) << 16 : 0);
    } else if constexpr (kType == DType::kMXFP4) {
      if (rest >= 0) {
        word = 0x77777777u + (word & 0x01010101u);  // exponents 119, 120; codes have 2.93
      } else if (g + i % 2 * 8 >= bounds.rows || 32 * (piece / 32 * 2 + i / 2) >= bounds.cols) {
        word = 0;
      }
    }
  }
  if (rest < 0) return;
  if constexpr (kType == DType::kQ4_K) {
    // w = d sc (code - 7.5): d = 2^-13, dmin = 7.5 d, both scales the same 20..51.
    const uint32_t first = (p.word[1] & 0x1f1f1f1fu) + 0x14141414u;   // steps 0-3
    const uint32_t second = (p.word[2] & 0x1f1f1f1fu) + 0x14141414u;  // steps 4-7
    p.word[0] = rest < bounds.rows ? 0x13800800u : 0;
    p.word[1] = first | (second & 0x30303030u) << 2;
    p.word[2] = p.word[1];
    p.word[3] = (second & 0x0f0f0f0fu) * 17u;
  } else if constexpr (kType == DType::kQ2_K) {
    // w = d s (code - 1.5): d = 3 * 2^-11, dmin = 1.5 d, both scales the same 8..15.
    for (int i = 0; i < 4; ++i) {
      if (rest < 16) {
        p.word[i] = ((p.word[i] & 0x07070707u) + 0x08080808u) * 17u;
      } else {
        p.word[i] = 4 * (rest - 16) + i < bounds.rows ? 0x18801600u : 0;
      }
    }
  } else if constexpr (kType == DType::kIQ2_XXS) {
    // Magnitudes have a root mean square of 23.1 (over all patterns), scales / 4 one of 2.31.
    const uint32_t d = FloatToHalf(0.02f / (23.1f * 2.31f));
    for (int i = 0; rest >= 4 && i < 4; ++i) {
      const int row = 4 * (rest - 4) + i;
      p.word[i] = (row < bounds.rows ? d : 0) | (row + 8 < bounds.rows ? d << 16 : 0);
    }
  }
}

struct FillParams {
  int64_t rows;
  int64_t cols;
  int64_t tiles;   // of a matrix
  int64_t chunks;  // of a tile
  uint64_t seed;
  std::byte* out;
};

template <DType kType>
__global__ void __launch_bounds__(kThreads) FillKernel(FillParams params) {
  LaunchDependents();
  GridDependencyWait();
  const int64_t index = blockIdx.x;
  const int64_t tile = index / params.chunks % params.tiles;
  const int64_t chunk = index % params.chunks;
  constexpr int kBytes = kChunkBytes<kType>;
  constexpr int kCols = kChunkCols<kType>;
  const Bounds bounds{static_cast<int>(min(params.rows - tile * kTileRows, int64_t{kTileRows})),
                      static_cast<int>(min(params.cols - chunk * kCols, int64_t{kCols}))};
  std::byte* out = params.out + index * kBytes;
  for (int piece = static_cast<int>(threadIdx.x); piece < kBytes / 16; piece += kThreads) {
    Piece value = RandomPiece(params.seed, static_cast<uint64_t>(index * (kBytes / 16) + piece));
    FillPiece<kType>(bounds, piece, value);
    StorePiece(out, piece, value);
  }
}

// Calls body(std::integral_constant<DType, ...>) for the type.
template <class Body>
void WithType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32:
      return body(std::integral_constant<DType, DType::kF32>());
    case DType::kF16:
      return body(std::integral_constant<DType, DType::kF16>());
    case DType::kBF16:
      return body(std::integral_constant<DType, DType::kBF16>());
    case DType::kQ8_0:
      return body(std::integral_constant<DType, DType::kQ8_0>());
    case DType::kMXFP4:
      return body(std::integral_constant<DType, DType::kMXFP4>());
    case DType::kQ4_K:
      return body(std::integral_constant<DType, DType::kQ4_K>());
    case DType::kQ2_K:
      return body(std::integral_constant<DType, DType::kQ2_K>());
    case DType::kIQ2_XXS:
      return body(std::integral_constant<DType, DType::kIQ2_XXS>());
    default:
      CHECK(false) << Info(dtype).name << " has no packed form";
  }
}

constexpr int64_t kMaxGrid = 0x7fffffff;

}  // namespace

void LaunchPack(const LaunchContext& launch, DType dtype, int64_t rows, int64_t cols,
                int64_t row_begin, int64_t num_rows, const std::byte* src, int64_t src_stride,
                std::byte* out) {
  const DTypeInfo& info = Info(dtype);
  CHECK(cols % info.block_elems == 0) << cols << " columns of " << info.name;
  CHECK(row_begin >= 0 && num_rows >= 0 && row_begin % kTileRows == 0 &&
        row_begin + num_rows <= rows && (num_rows % kTileRows == 0 || row_begin + num_rows == rows))
      << "rows [" << row_begin << ", " << row_begin + num_rows << ") of " << rows;
  if (num_rows == 0) return;
  PackParams params;
  params.src = reinterpret_cast<const uint8_t*>(src);
  params.src_stride = src_stride;
  params.num_rows = num_rows;
  params.num_blocks = cols / info.block_elems;
  params.chunks = PaddedCols(cols) / ChunkCols(dtype);
  params.block_bytes = static_cast<int>(info.block_bytes);
  params.blocks_per_chunk = static_cast<int>(ChunkCols(dtype) / info.block_elems);
  params.out = out + row_begin / kTileRows * TileBytes(dtype, cols);
  const int64_t grid = PaddedRows(num_rows) / kTileRows * params.chunks;
  CHECK(grid <= kMaxGrid) << rows << " x " << cols << " " << info.name;
  WithType(dtype, [&](auto type) {
    Launch(launch, dim3(static_cast<unsigned>(grid)), dim3(kThreads), 0, PackKernel<type()>,
           params);
  });
}

void LaunchFillRandom(const LaunchContext& launch, const PackedMatrix& matrix, uint64_t seed) {
  FillParams params;
  params.rows = matrix.rows;
  params.cols = matrix.cols;
  params.tiles = PaddedRows(matrix.rows) / kTileRows;
  params.chunks = matrix.padded_cols() / ChunkCols(matrix.dtype);
  params.seed = seed;
  params.out = const_cast<std::byte*>(matrix.data);
  const int64_t grid = matrix.count * params.tiles * params.chunks;
  if (grid == 0) return;
  CHECK(grid <= kMaxGrid) << matrix.count << " x " << matrix.rows << " x " << matrix.cols;
  WithType(matrix.dtype, [&](auto type) {
    Launch(launch, dim3(static_cast<unsigned>(grid)), dim3(kThreads), 0, FillKernel<type()>,
           params);
  });
}

}  // namespace ds4::cuda
