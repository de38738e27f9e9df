// Products of quantised weights in the kernels of routed experts, with fewer instructions a byte
// than dot.cuh: experts come in formats of 2 to 4 bits, of which an SM can be fed more than it can
// decode, so a step here counts every instruction:
//   - x of a group stands in registers for all row tiles of a stage;
//   - kCols == 1 computes only the first x row of a group (decoding: there is no other);
//   - IQ2_XXS looks patterns and signs up in tables that have a copy for each lane, because lanes
//     that read different words of one bank wait for each other.
// DotStage adds in the order of DotSlice; experts_ring.cuh, which uses the same decoders, has its
// own.
#pragma once

#include "engine/cuda/dot.cuh"

namespace ds4::cuda {

// ---- IQ2_XXS tables in shared memory: entry i of lane l at word kIq2Copies i + l % kIq2Copies
// (a copy for every lane would leave no room for a second block on an SM). An entry has a nibble
// for each of 8 columns: which of the magnitudes 8, 25, 43 (grid, entries 0-255), and 4 where it is
// negative (signs, entries 256-511), so that grid | signs selects bytes of two registers. Signs
// have an entry for each byte, though the top bit of a sign code belongs to the scale: a whole byte
// times a power of two is one instruction's address.
inline constexpr int kIq2Entries = 512;
inline constexpr int kIq2Copies = 16;
inline constexpr int kIq2EntryBytes = 4 * kIq2Copies;
inline constexpr int kIq2TableBytes = kIq2Entries * kIq2EntryBytes;

struct Iq2Selectors {
  uint32_t words[kIq2Entries];
};
constexpr Iq2Selectors MakeIq2Selectors() {
  Iq2Selectors table{};
  for (uint32_t i = 0; i < kIq2Entries; ++i) {
    const uint32_t code = i < 256 ? uint32_t{kIq2XxsCodes[i]} : i & 127;
    uint32_t parity = code ^ code >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    for (uint32_t j = 0; j < 8; ++j) {
      const uint32_t negative = j < 7 ? code >> j & 1 : parity & 1;
      table.words[i] |= (i < 256 ? code >> (2 * j) & 3 : 4 * negative) << (4 * j);
    }
  }
  return table;
}
inline constexpr Iq2Selectors kIq2Selectors = MakeIq2Selectors();

// All threads of the block call it, and meet at a barrier before they use the tables.
__device__ __forceinline__ void LoadIq2Tables(uint32_t* tables) {
  static constexpr Iq2Selectors kSelectors = kIq2Selectors;
  // Four copies a thread.
  constexpr int kParts = kIq2Copies / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kIq2Entries * kParts;
       i += static_cast<int>(blockDim.x)) {
    const uint32_t word = kSelectors.words[i / kParts];
    *reinterpret_cast<uint4*>(tables + 4 * i) = make_uint4(word, word, word, word);
  }
}

// The tables for one lane.
struct LaneTables {
  SharedWordAddress copy;  // the lane's copy of entry 0

  __device__ __forceinline__ explicit LaneTables(const std::byte* tables)
      : copy(AddressOfShared(tables)) {
    // The exchange with itself keeps the compiler from working the offset out at each look-up.
    copy += static_cast<uint32_t>(__shfl_sync(kFullMask, 4 * (LaneId() % kIq2Copies), LaneId()));
  }
};

// Eight signed values of one row from bytes kByte (index) and kByte + 1 (sign code) of the word.
template <uint32_t kByte>
__device__ __forceinline__ void Iq2Values(const LaneTables& own, uint32_t word, uint32_t& low,
                                          uint32_t& high) {
  const uint32_t index = SelectBytes(word, 0, 0x4440u + kByte);
  const uint32_t code = SelectBytes(word, 0, 0x4441u + kByte);
  const uint32_t grid = LoadSharedWord(own.copy + index * kIq2EntryBytes);
  const uint32_t signs = LoadSharedWord(own.copy + code * kIq2EntryBytes + 256 * kIq2EntryBytes);
  const uint32_t selector = grid | signs;
  low = SelectBytes(0x002b1908u, 0x00d5e7f8u, selector);
  high = SelectBytes(0x002b1908u, 0x00d5e7f8u, selector >> 16);
}
// The scale nibbles of step 4u + t, a bit in each word of lane t's unit u: row g in the low half,
// row g + 8 in the high one.
__device__ __forceinline__ uint32_t Iq2Nibbles(const uint4& v) {
  return (v.x >> 15 & 0x00010001u) | (v.y >> 14 & 0x00020002u) | (v.z >> 13 & 0x00040004u) |
         (v.w >> 12 & 0x00080008u);
}
// (n + 0.5) / 4 as 2^21 + n / 4 - (2^21 - 1/8): exact.
__device__ __forceinline__ float Iq2Factor(uint32_t nibble) {
  return __uint_as_float(nibble | 0x4a000000u) - 2097151.875f;
}

// The interface of ChunkDecoder, for one chunk in shared memory. It leaves the scales of all steps
// where the first codes of the chunk stood.
struct Iq2Decoder {
  static constexpr bool kHasMin = false;
  const std::byte*
      scales;  // of row g: (row g, row g + 8) for each of 4 steps; units 256 bytes apart
  const LaneTables& tables;
  uint4 unit[2];
  float4 now[2];

  __device__ __forceinline__ Iq2Decoder(std::byte* chunk, const LaneTables& own) : tables(own) {
    const int lane = LaneId();
    unit[0] = Load16(chunk + 16 * lane);
    unit[1] = Load16(chunk + 512 + 16 * lane);
    const auto* d = reinterpret_cast<const uint16_t*>(chunk + 1024);
    const float d0 = HalfToFloat(d[lane / 4]);
    const float d1 = HalfToFloat(d[lane / 4 + 8]);
    __syncwarp();  // all codes are in registers
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint32_t nibbles = Iq2Nibbles(unit[u]);
      const float low = Iq2Factor(nibbles & 15u);
      const float high = Iq2Factor(nibbles >> 16);
      *reinterpret_cast<float2*>(chunk + 256 * u + 8 * lane) = make_float2(d0 * low, d1 * high);
    }
    __syncwarp();
    scales = chunk + 32 * (lane / 4);
  }
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 4 == 0) {
      now[0] = *reinterpret_cast<const float4*>(scales + 256 * (s / 4));
      now[1] = *reinterpret_cast<const float4*>(scales + 256 * (s / 4) + 16);
    }
    const uint32_t word = Word(unit[s / 4], s % 4);
    Iq2Values<0>(tables, word, w.a[0], w.a[2]);
    Iq2Values<2>(tables, word, w.a[1], w.a[3]);
    const float4& pair = now[s % 4 / 2];
    w.scale[0] = s % 2 == 0 ? pair.x : pair.z;
    w.scale[1] = s % 2 == 0 ? pair.y : pair.w;
  }
};

template <DType kType>
struct ExpertDecoder : ChunkDecoder<kType> {
  __device__ __forceinline__ ExpertDecoder(std::byte* at, const LaneTables&)
      : ChunkDecoder<kType>(at, nullptr) {}
};
template <>
struct ExpertDecoder<DType::kIQ2_XXS> : Iq2Decoder {
  using Iq2Decoder::Iq2Decoder;
};

// x of one group for 256 columns: what a lane needs of each step.
template <int kCols>
struct BlockX {
  uint64_t q[8];
  float scale[8][kCols];  // of x rows 2t, 2t + 1 of the group
};

// acc += row scales * x scales * (a x q); kCols == 1: only x row 2t.
template <int kCols>
__device__ __forceinline__ void AddStep(const uint32_t (&a)[4], const BlockX<kCols>& x, int s,
                                        float scale0, float scale1, float (&acc)[4]) {
  const uint32_t b[2] = {static_cast<uint32_t>(x.q[s]), static_cast<uint32_t>(x.q[s] >> 32)};
  int sum[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
  MmaS8(sum, a, b);
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    acc[i] = fmaf(scale0 * x.scale[s][i], SumToFloat(sum[i]), acc[i]);
    acc[2 + i] = fmaf(scale1 * x.scale[s][i], SumToFloat(sum[2 + i]), acc[2 + i]);
  }
}

// acc[tile] += one chunk of each of kTiles row tiles (one after the other in shared memory) times
// 256 columns.
template <DType kType, int kTiles, int kCols, int kRoom>
__device__ __forceinline__ void DotStage(std::byte* stage, const BlockX<kCols>& x,
                                         const LaneTables& tables, float (&acc)[kRoom][4]) {
  static_assert(kChunkCols<kType> == kColumnGrain && kTiles <= kRoom);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    ExpertDecoder<kType> decoder(stage + tile * kChunkBytes<kType>, tables);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      StepWeights w;
      decoder.Step(s, w);
      AddStep<kCols>(w.a, x, s, w.scale[0], w.scale[1], acc[tile]);
      if constexpr (ExpertDecoder<kType>::kHasMin) {
        const uint32_t a[4] = {w.min[0], w.min[1], w.min[0], w.min[1]};
        AddStep<kCols>(a, x, s, -w.min_scale[0], -w.min_scale[1], acc[tile]);
      }
    }
  }
}

}  // namespace ds4::cuda
