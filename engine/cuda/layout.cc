// The plain form of packing: walks the file's blocks and puts every value where layout.h says.
// Slow, and written apart from the device's, so that each tests the other.
#include "engine/cuda/layout.h"

#include <cstring>

#include "engine/base/byte_order.h"
#include "engine/base/check.h"

namespace ds4::cuda {
namespace {

// Where one row stands in its chunk.
struct Place {
  std::byte* chunk;
  int row;  // 0..15

  int g() const { return row % 8; }
  int high() const { return row / 8; }  // 1: the row is g + 8
  // The 16 bytes of lane 4g + t of a unit.
  std::byte* Lane(int unit, int t) const { return chunk + 512 * unit + 16 * (4 * g() + t); }
};

int Byte(const std::byte* at) { return std::to_integer<int>(*at); }
void Or(std::byte* at, int bits) { *at |= static_cast<std::byte>(bits); }

void PackQ8_0(const std::byte* block, int step, Place to) {
  for (int c = 0; c < 32; ++c) {
    to.Lane(step, c / 8)[4 * (to.high() + 2 * (c % 8 / 4)) + c % 4] = block[2 + c];
  }
  std::memcpy(to.chunk + 4096 + 128 * (step / 4) + 4 * (4 * to.g() + step % 4) + 2 * to.high(),
              block, 2);
}

// A 4-bit code at column c of a step (MXFP4, Q4_K).
void PutNibble(int step, int c, int code, Place to) {
  Or(to.Lane(step / 2, c / 8) + 4 * (2 * (step % 2) + to.high()) + c % 4,
     c % 8 < 4 ? code : code << 4);
}

void PackMXFP4(const std::byte* block, int step, Place to) {
  for (int c = 0; c < 32; ++c) {
    const int pair = Byte(block + 1 + c % 16);
    PutNibble(step, c, c < 16 ? pair & 15 : pair >> 4, to);
  }
  to.chunk[2048 + 4 * (4 * to.g() + step % 4) + to.high() + 2 * (step / 4)] = block[0];
}

void PackQ4_K(const std::byte* block, Place to) {
  for (int c = 0; c < 256; ++c) {
    const int step = c / 32;
    const int pair = Byte(block + 16 + 32 * (step / 2) + c % 32);
    PutNibble(step, c % 32, step % 2 == 0 ? pair & 15 : pair >> 4, to);
  }
  std::memcpy(to.chunk + 2048 + 16 * to.row, block, 16);
}

void PackQ2_K(const std::byte* block, Place to) {
  for (int c = 0; c < 256; ++c) {
    const int step = c / 32;
    const int code = Byte(block + 16 + 32 * (c / 128) + c % 32) >> (2 * (step % 4)) & 3;
    Or(to.Lane(step / 4, c % 32 / 8) + 4 * (step % 4) + c % 4,
       code << (4 * to.high() + 2 * (c % 8 / 4)));
  }
  std::memcpy(to.chunk + 1024 + 16 * to.row, block, 16);
  std::memcpy(to.chunk + 1280 + 4 * to.row, block + 80, 4);
}

void PackIQ2_XXS(const std::byte* block, Place to) {
  for (int step = 0; step < 8; ++step) {
    const std::byte* indices = block + 2 + 8 * step;
    const auto packed = LoadLittleEndian<uint32_t>(indices + 4);
    const int octet = 2 * (step % 2) + to.high();
    for (int t = 0; t < 4; ++t) {
      std::byte* words = to.Lane(step / 4, t) + 8 * (step % 4 / 2);
      words[octet] = indices[t];
      int parity = 0;
      for (int j = 0; j < 8; ++j) {
        const int negative = j < 7 ? static_cast<int>(packed >> (7 * t + j) & 1) : parity;
        parity ^= negative;
        Or(words + 4 + j / 2, negative << (4 * (j % 2) + octet));
      }
    }
    Or(to.chunk + 1024 + 2 * (4 * to.g() + step % 4) + step / 4, static_cast<int>(packed >> 28)
                                                                     << (4 * to.high()));
  }
  std::memcpy(to.chunk + 1088 + 4 * to.g() + 2 * to.high(), block, 2);
}

// Column c of the chunk, 16-bit types.
void PackHalf(const std::byte* value, int c, Place to) {
  std::memcpy(to.Lane(c / 16, c % 16 / 4) + 4 * (to.high() + 2 * (c % 4 / 2)) + 2 * (c % 2), value,
              2);
}

void PackFloat(const std::byte* value, int c, Place to) {
  std::memcpy(to.Lane(c / 8, c % 8 / 2) + 4 * (to.high() + 2 * (c % 2)), value, 4);
}

// One block of the file, the idx-th of its chunk.
void PackBlock(DType dtype, const std::byte* block, int idx, Place to) {
  switch (dtype) {
    case DType::kQ8_0:
      return PackQ8_0(block, idx, to);
    case DType::kMXFP4:
      return PackMXFP4(block, idx, to);
    case DType::kQ4_K:
      return PackQ4_K(block, to);
    case DType::kQ2_K:
      return PackQ2_K(block, to);
    case DType::kIQ2_XXS:
      return PackIQ2_XXS(block, to);
    case DType::kF32:
      return PackFloat(block, idx, to);
    default:
      return PackHalf(block, idx, to);
  }
}

}  // namespace

void PackOnHost(DType dtype, int64_t rows, int64_t cols, const std::byte* src, int64_t src_stride,
                std::byte* out) {
  const DTypeInfo& info = Info(dtype);
  CHECK(cols % info.block_elems == 0) << cols << " columns of " << info.name;
  std::memset(out, 0, static_cast<size_t>(PackedBytes(dtype, rows, cols)));
  const int64_t blocks_per_chunk = ChunkCols(dtype) / info.block_elems;
  for (int64_t row = 0; row < rows; ++row) {
    std::byte* tile = out + row / kTileRows * TileBytes(dtype, cols);
    for (int64_t block = 0; block < cols / info.block_elems; ++block) {
      const Place to{tile + block / blocks_per_chunk * ChunkBytes(dtype),
                     static_cast<int>(row % kTileRows)};
      PackBlock(dtype, src + row * src_stride + block * info.block_bytes,
                static_cast<int>(block % blocks_per_chunk), to);
    }
  }
}

}  // namespace ds4::cuda
