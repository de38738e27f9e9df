// Products of quantised weights in the kernels of routed experts, with fewer instructions a byte
// than dot.cuh: experts come in formats of 2 to 4 bits, of which an SM can be fed more than it can
// decode, so a step here counts every instruction:
//   - x of a group stands in registers for all row tiles of a stage;
//   - kCols == 1 computes only the first x row of a group (decoding: there is no other);
//   - IQ2_XXS looks patterns up in tables that have a copy for each lane, because lanes that read
//     different words of one bank wait for each other.
// DotStage adds in the order of DotSlice; experts_ring.cuh, which uses the same decoders, has its
// own.
#pragma once

#include "engine/cuda/dot.cuh"

namespace ds4::cuda {

// ---- IQ2_XXS patterns in shared memory: 256 entries of 256 bytes, so that an index byte is the
// second byte of an address, one instruction to put together. An entry is a word in two forms, each
// with a copy for every lane: a nibble for each of 8 columns, which of the magnitudes 8, 25, 43.
//   low form (first half of the entry): in bits 1-2, the sign goes to bit 0
//   high form: in bits 0-1, the sign goes to bit 2
// Pattern | signs then selects bytes of two registers. Two forms, because a word has signs of four
// octets, a bit apart: octets 0 and 2 have theirs in place for one form each, 1 and 3 after one
// shift.
inline constexpr int kIq2Entries = 256;
inline constexpr int kIq2FormBytes = 4 * kWarpSize;
inline constexpr int kIq2TableBytes = kIq2Entries * 2 * kIq2FormBytes;

struct Iq2Patterns {
  uint32_t words[kIq2Entries];  // high form
};
constexpr Iq2Patterns MakeIq2Patterns() {
  Iq2Patterns table{};
  for (uint32_t i = 0; i < kIq2Entries; ++i) {
    for (uint32_t j = 0; j < 8; ++j) {
      table.words[i] |= (uint32_t{kIq2XxsCodes[i]} >> (2 * j) & 3) << (4 * j);
    }
  }
  return table;
}
inline constexpr Iq2Patterns kIq2Patterns = MakeIq2Patterns();

// A thread fills half an entry, all copies of one form: entry half / 2.
inline constexpr int kIq2Halves = 2 * kIq2Entries;
__device__ __forceinline__ uint32_t LoadIq2Pattern(int half) {
  static constexpr Iq2Patterns kPatterns = kIq2Patterns;
  return kPatterns.words[half / 2];
}
__device__ __forceinline__ void StoreIq2Pattern(std::byte* tables, int half, uint32_t pattern) {
  const uint32_t word = half % 2 == 0 ? pattern << 1 : pattern;
  std::byte* to = tables + half * kIq2FormBytes;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // Threads side by side write to different banks.
    *reinterpret_cast<uint4*>(to + 16 * ((i ^ half) & 7)) = make_uint4(word, word, word, word);
  }
}
// All threads of the block call it, and meet at a barrier before they use the tables.
__device__ __forceinline__ void LoadIq2Tables(uint32_t* tables) {
  std::byte* at = reinterpret_cast<std::byte*>(tables);
  for (int i = static_cast<int>(threadIdx.x); i < kIq2Halves; i += static_cast<int>(blockDim.x)) {
    StoreIq2Pattern(at, i, LoadIq2Pattern(i));
  }
}

// What selectors of the low form choose from, 8, -8, 25, -25, 43, -43; and those of the high form,
// 8, 25, 43, -, -8, -25, -43.
__device__ __forceinline__ uint32_t Iq2First(uint32_t octet) {
  return octet < 2 ? 0xe719f808u : 0x002b1908u;
}
__device__ __forceinline__ uint32_t Iq2Second(uint32_t octet) {
  return octet < 2 ? 0x0000d52bu : 0x00d5e7f8u;
}

// The tables for one lane.
struct LaneTables {
  SharedWordAddress tables;
  uint32_t offset;  // of the lane's copy

  __device__ __forceinline__ explicit LaneTables(const std::byte* at)
      : tables(AddressOfShared(at)), offset(4 * static_cast<uint32_t>(LaneId())) {}

  __device__ __forceinline__ uint32_t First(uint32_t octet) const { return Iq2First(octet); }
  // The pattern with its number in byte `octet` of `indices`, in the form for that octet.
  __device__ __forceinline__ uint32_t Pattern(uint32_t indices, uint32_t octet) const {
    const uint32_t entry = SelectBytes(indices, offset, 0x6604u | octet << 4);
    return LoadSharedWord(tables + entry + (octet < 2 ? 0 : kIq2FormBytes));
  }
};

// The same of tables at a multiple of their size: an instruction less.
struct AlignedTables {
  SharedWordAddress copy;  // the lane's copy in entry 0
  uint32_t first[2];       // of the two forms

  // pattern: any of those in the table. None has bit 2, but the compiler cannot know, and keeps the
  // constants in registers.
  __device__ __forceinline__ AlignedTables(const std::byte* at, uint32_t pattern)
      : copy(AddressOfShared(at) + 4 * static_cast<uint32_t>(LaneId())) {
    // A permutation takes one constant from the instruction; the other would be copied each time.
    for (uint32_t i = 0; i < 2; ++i) first[i] = Iq2First(2 * i) | (pattern & 4u);
  }
  __device__ __forceinline__ uint32_t First(uint32_t octet) const { return first[octet / 2]; }
  __device__ __forceinline__ uint32_t Pattern(uint32_t indices, uint32_t octet) const {
    return LoadSharedWord(WithByte1(copy, indices, octet) + (octet < 2 ? 0 : kIq2FormBytes));
  }
};

// The signs of octets 0, 2 and 1, 3 where the two forms of a pattern want them.
struct Iq2Signs {
  uint32_t even, odd;
  __device__ __forceinline__ explicit Iq2Signs(uint32_t signs) : even(signs), odd(signs >> 1) {}
};

// Eight signed values: of octet `octet` of a word of indices and one of signs.
template <class Tables>
__device__ __forceinline__ void Iq2Values(const Tables& own, uint32_t indices,
                                          const Iq2Signs& signs, uint32_t octet, uint32_t& low,
                                          uint32_t& high) {
  const uint32_t word = octet % 2 == 0 ? signs.even : signs.odd;
  const uint32_t mask = octet < 2 ? 0x11111111u : 0x44444444u;
  const uint32_t selector = own.Pattern(indices, octet) | (word & mask);
  const uint32_t first = own.First(octet);
  const uint32_t second = Iq2Second(octet);
  low = SelectBytes(first, second, selector);
  high = SelectBytes(first, second, selector >> 16);
}
// Step i of a unit, 0..3.
template <class Tables>
__device__ __forceinline__ void Iq2Step(const Tables& own, const uint4& unit, int i,
                                        StepWeights& w) {
  const uint32_t indices = Word(unit, i / 2 * 2);
  const Iq2Signs signs(Word(unit, i / 2 * 2 + 1));
  const uint32_t octet = 2 * (static_cast<uint32_t>(i) % 2);
  Iq2Values(own, indices, signs, octet, w.a[0], w.a[2]);
  Iq2Values(own, indices, signs, octet + 1, w.a[1], w.a[3]);
}
// (n + 0.5) / 4 for the nibble n at bit `shift` of `codes`: n / 4 stands at the end of the float
// 2^(21 - shift), from which all but 1/8 is taken off. Exact.
__device__ __forceinline__ float Iq2Factor(uint32_t codes, int shift) {
  const uint32_t bits = (codes & 15u << shift) | (0x4a000000u - (uint32_t{1} << 23) * shift);
  return __uint_as_float(bits) - (static_cast<float>(1 << (21 - shift)) - 0.125f);
}
// What scales the lane's own steps 4u + t: rows g and g + 8.
struct Iq2Scales {
  uint32_t codes;
  float2 d;
  __device__ __forceinline__ explicit Iq2Scales(const std::byte* chunk)
      : codes(*reinterpret_cast<const uint16_t*>(chunk + 1024 + 2 * LaneId())),
        d(Half2ToFloat2(*reinterpret_cast<const uint32_t*>(chunk + 1088 + LaneId() / 4 * 4))) {}
  __device__ __forceinline__ float2 Own(int u) const {
    return make_float2(d.x * Iq2Factor(codes, 8 * u), d.y * Iq2Factor(codes, 8 * u + 4));
  }
};

// The interface of ChunkDecoder, for one chunk in shared memory. It leaves the scales of all steps
// where the first codes of the chunk stood.
template <class Tables>
struct Iq2Decoder {
  static constexpr bool kHasMin = false;
  // Of row g: (row g, row g + 8) for each of 4 steps; units 256 bytes apart.
  const std::byte* scales;
  const Tables& tables;
  uint4 unit[2];
  float4 now[2];

  __device__ __forceinline__ Iq2Decoder(std::byte* chunk, const Tables& own) : tables(own) {
    const int lane = LaneId();
    unit[0] = Load16(chunk + 16 * lane);
    unit[1] = Load16(chunk + 512 + 16 * lane);
    const Iq2Scales scale(chunk);
    __syncwarp();  // all codes are in registers
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      *reinterpret_cast<float2*>(chunk + 256 * u + 8 * lane) = scale.Own(u);
    }
    __syncwarp();
    scales = chunk + 32 * (lane / 4);
  }
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    if (s % 4 == 0) {
      now[0] = *reinterpret_cast<const float4*>(scales + 256 * (s / 4));
      now[1] = *reinterpret_cast<const float4*>(scales + 256 * (s / 4) + 16);
    }
    Iq2Step(tables, unit[s / 4], s % 4, w);
    const float4& pair = now[s % 4 / 2];
    w.scale[0] = s % 2 == 0 ? pair.x : pair.z;
    w.scale[1] = s % 2 == 0 ? pair.y : pair.w;
  }
};

template <DType kType, class Tables>
struct ExpertDecoder : ChunkDecoder<kType> {
  __device__ __forceinline__ ExpertDecoder(std::byte* at, const Tables&)
      : ChunkDecoder<kType>(at, nullptr) {}
};
template <class Tables>
struct ExpertDecoder<DType::kIQ2_XXS, Tables> : Iq2Decoder<Tables> {
  using Iq2Decoder<Tables>::Iq2Decoder;
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
    ExpertDecoder<kType, LaneTables> decoder(stage + tile * kChunkBytes<kType>, tables);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      StepWeights w;
      decoder.Step(s, w);
      AddStep<kCols>(w.a, x, s, w.scale[0], w.scale[1], acc[tile]);
      if constexpr (ExpertDecoder<kType, LaneTables>::kHasMin) {
        const uint32_t a[4] = {w.min[0], w.min[1], w.min[0], w.min[1]};
        AddStep<kCols>(a, x, s, -w.min_scale[0], -w.min_scale[1], acc[tile]);
      }
    }
  }
}

}  // namespace ds4::cuda
