// The fast path of routed experts, for the formats that models come in: products of quantised
// weights with x in registers, one kernel for each format.
//
// Order of additions for one (weight row, x row) and one slice of 512 columns: four sums; sum i
// takes the steps of 32 columns s with s mod 4 = i, in rising order,
//   sum = fma(dw * dx, exact int32 sum of the step, sum), and for formats with a minimum then
//   sum = fma(-(dmin * dx), exact int32 sum of min * q, sum);
// then (sum 0 + sum 1) + (sum 2 + sum 3). dw and dmin as in dot.cuh.
//
// Why four: with one or two rows of x a matrix instruction has 8 columns for them. Step i of four
// goes to columns 2i and 2i + 1, zeros to the others, so four instructions add up in the same
// registers, and lane 4g + t is left with step t alone: the very step whose scales lie in this
// lane. It converts, scales and adds for one step while its neighbours do for the others. Groups of
// more rows take a column for each row, and four sums in every lane.
#pragma once

#include "engine/cuda/experts_stream.cuh"

namespace ds4::cuda {

// ---- Stages: what a warp copies and waits for at a time, about 2 KB. Half a chunk of Q8_0 (its
// codes, then its scales), a chunk, or the two chunks of a slice.

constexpr int StagesOfSlice(DType dtype) {
  return dtype == DType::kQ8_0 ? 4 : ChunkBytes(dtype) > 2048 ? 2 : 1;
}
constexpr int StageBytesOf(DType dtype) {
  return ChunkBytes(dtype) * (kSliceCols / kColumnGrain) / StagesOfSlice(dtype);
}
inline constexpr int kHalfCodes = 2048;  // bytes of codes in half a chunk of Q8_0
inline constexpr int kHalfScales = 128;

constexpr int MaxOf(int a, int b) { return a > b ? a : b; }
inline constexpr int kRingSlots = 3;
// Two blocks live on an SM: latencies of one hide behind the other. What one may take for that:
inline constexpr int kBlocksAnSm = 2;
inline constexpr int kHalfSharedBytes = 113 << 10;
inline int BlocksAnSm(int shared_bytes) {
  return shared_bytes <= kHalfSharedBytes ? kBlocksAnSm : 1;
}
// The same for device code, which may not call host functions.
template <DType kType>
inline constexpr int kStages = StagesOfSlice(kType);
template <DType kType>
inline constexpr int kStageBytes = StageBytesOf(kType);
// Largest stage beside a shared expert of Q8_0.
constexpr int SlotBytesOf(DType dtype) {
  return MaxOf(StageBytesOf(dtype), StageBytesOf(DType::kQ8_0));
}
template <DType kType>
inline constexpr int kSlotBytes = SlotBytesOf(kType);

// ---- Decoders of half chunks and of own scales.

// ChunkDecoder for half a chunk of Q8_0 in a slot.
struct HalfDecoder {
  static constexpr bool kHasMin = false;
  const std::byte* half;
  uint4 scales;

  __device__ __forceinline__ explicit HalfDecoder(const std::byte* at)
      : half(at), scales(Load16(at + kHalfCodes + 16 * (LaneId() / 4))) {}
  __device__ __forceinline__ void Step(int s, StepWeights& w) {
    const uint4 v = Load16(half + 512 * s + 16 * LaneId());
    w.a[0] = v.x;
    w.a[1] = v.y;
    w.a[2] = v.z;
    w.a[3] = v.w;
    const float2 d = Half2ToFloat2(Word(scales, s));
    w.scale[0] = d.x;
    w.scale[1] = d.y;
  }
  __device__ __forceinline__ float2 OwnScales(int) const {
    return Half2ToFloat2(*reinterpret_cast<const uint32_t*>(half + kHalfCodes + 4 * LaneId()));
  }
};

// Four steps a unit. OwnScales(u): dw of rows g, g + 8 in step 4u + t, of lane 4g + t.
template <DType kType>
struct RowDecoder : ChunkDecoder<kType> {
  const std::byte* start;
  template <class Tables>
  __device__ __forceinline__ RowDecoder(const std::byte* at, const Tables&)
      : ChunkDecoder<kType>(at, nullptr), start(at) {}

  __device__ __forceinline__ float2 OwnScales(int u) const {
    if constexpr (kType == DType::kMXFP4) {
      const uint32_t word =
          *reinterpret_cast<const uint32_t*>(start + 2048 + 4 * LaneId()) >> (16 * u);
      return make_float2(this->Scale(word & 255), this->Scale(word >> 8 & 255));
    } else if constexpr (kType == DType::kQ4_K) {
      const uint32_t byte = 0x7650u + static_cast<uint32_t>(LaneId() % 4);
      const auto own = [&](int r) {
        const uint32_t bits = __byte_perm(this->scale[r][u], kTwo23Bits, byte);
        return this->d[r].x * (__uint_as_float(bits) - 8388608.0f);
      };
      return make_float2(own(0), own(1));
    } else {
      return make_float2(this->d[0].x, this->d[1].x);
    }
  }
};

// ---- One or two rows of x.

// One slice of kRows rows, as the lanes need it. Blocks of 256 columns that are not there are
// zeros.
template <int kRows>
struct RowsX {
  static constexpr int kCount = kRows;
  static constexpr int kPairs = 1;  // matrix instructions a step
  uint64_t
      q[16];  // of step s, in the lanes that give columns 2 (s mod 4), + 1; zeros in the others
  float scale[4][kRows];  // of step 4u + t

  // Unit u from what OwnRows loads.
  __device__ __forceinline__ void Spread(int u, uint64_t own) {
    const int g = LaneId() / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) q[4 * u + i] = (kRows == 1 ? g == 2 * i : g / 2 == i) ? own : 0;
  }
  // What a lane gives in step 4u + i.
  __device__ __forceinline__ uint64_t Q(int, int u, int i) const { return q[4 * u + i]; }
  __device__ __forceinline__ float Scale(int u, int r) const { return scale[u][r]; }
};

// Units of 128 columns, before their values are spread over the steps.
template <int kRows, int kUnits>
struct OwnRows {
  uint64_t q[kUnits];
  float scale[kUnits][kRows];

  // rows: of the view; columns: blocks of 256 from the view's block `block` of 32 on.
  __device__ __forceinline__ void Load(const ActivationView& x, const int (&rows)[kRows], int block,
                                       int columns) {
    const int tiles = TilesOf(x);
    const int g = LaneId() / 4;
    const int t = LaneId() % 4;
    const int row = rows[kRows == 1 ? 0 : g % 2];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const bool there = u / 2 < columns;
      const int first = block + 4 * u;
      q[u] = there ? x.q[((first + g / 2) * tiles + row / 8) * 32 + row % 8 * 4 + t] : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        scale[u][r] = there ? x.scale[(first + t) * (8 * tiles) + rows[r]] : 0.0f;
      }
    }
  }
  // Of two that are the same row.
  __device__ __forceinline__ OwnRows<1, kUnits> First() const {
    OwnRows<1, kUnits> first;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      first.q[u] = q[u];
      first.scale[u][0] = scale[u][0];
    }
    return first;
  }
  __device__ __forceinline__ void SpreadTo(RowsX<kRows>& x) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      x.Spread(u, q[u]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) x.scale[u][r] = scale[u][r];
    }
  }
};

// One slice of four rows, in pairs. Steps are told apart when they are used: spread, they would
// take too many registers.
struct PairsX {
  static constexpr int kCount = 4;
  static constexpr int kPairs = 2;
  OwnRows<2, 4> pair[2];

  __device__ __forceinline__ uint64_t Q(int p, int u, int i) const {
    return LaneId() / 8 == i ? pair[p].q[u] : 0;
  }
  __device__ __forceinline__ float Scale(int u, int r) const { return pair[r / 2].scale[u][r % 2]; }
};

// x: rows of the view, by number, in one slice.
template <int kRows>
__device__ __forceinline__ void LoadSlice(const ActivationView& view, const int (&rows)[kRows],
                                          int block, int columns, RowsX<kRows>& x) {
  OwnRows<kRows, 4> own;
  own.Load(view, rows, block, columns);
  own.SpreadTo(x);
}
__device__ __forceinline__ void LoadSlice(const ActivationView& view, const int (&rows)[4],
                                          int block, int columns, PairsX& x) {
#pragma unroll
  for (int p = 0; p < 2; ++p) x.pair[p].Load(view, {rows[2 * p], rows[2 * p + 1]}, block, columns);
}

// sum[r] of lane 4g + t (weight rows g, g + 8) += the steps 4 (first + u) + t.
template <int kUnits, int kRows, class Decoder>
__device__ __forceinline__ void AddUnits(Decoder& decoder, const RowsX<kRows>& x, int first,
                                         float (&sum)[kRows][2]) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    int products[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
    int minima[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
    float min_scale[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      StepWeights w;
      decoder.Step(4 * u + i, w);
      const uint64_t q = x.q[4 * (first + u) + i];
      const uint32_t b[2] = {static_cast<uint32_t>(q), static_cast<uint32_t>(q >> 32)};
      MmaS8(products, w.a, b);
      if constexpr (Decoder::kHasMin) {
        const uint32_t a[4] = {w.min[0], w.min[1], w.min[0], w.min[1]};
        MmaS8(minima, a, b);
        min_scale[0] = -w.min_scale[0];
        min_scale[1] = -w.min_scale[1];
      }
    }
    const float2 own = decoder.OwnScales(u);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float dx = x.scale[first + u][r];
      sum[r][0] = fmaf(own.x * dx, SumToFloat(products[r]), sum[r][0]);
      sum[r][1] = fmaf(own.y * dx, SumToFloat(products[2 + r]), sum[r][1]);
      if constexpr (Decoder::kHasMin) {
        sum[r][0] = fmaf(min_scale[0] * dx, SumToFloat(minima[r]), sum[r][0]);
        sum[r][1] = fmaf(min_scale[1] * dx, SumToFloat(minima[2 + r]), sum[r][1]);
      }
    }
  }
}

// The sums of all steps over the four lanes of a weight row.
template <int kRows>
__device__ __forceinline__ void SumOverLanes(float (&sum)[kRows][2]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[r][i] += __shfl_xor_sync(kFullMask, sum[r][i], 1);
      sum[r][i] += __shfl_xor_sync(kFullMask, sum[r][i], 2);
    }
  }
}

// AddUnits of kChunks chunks of IQ2_XXS, one after the other in shared memory. The units of a chunk
// take turns, so that a matrix instruction need not wait for the one before it.
template <int kChunks, class X, class Tables>
__device__ __forceinline__ void AddIq2Chunks(const std::byte* chunks, const X& x,
                                             const Tables& tables, float (&sum)[X::kCount][2]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const std::byte* chunk = chunks + c * kChunkBytes<DType::kIQ2_XXS>;
    const uint4 unit[2] = {Load16(chunk + 16 * LaneId()), Load16(chunk + 512 + 16 * LaneId())};
    const Iq2Scales scales(chunk);
    int products[2][X::kPairs][4];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int p = 0; p < X::kPairs; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[u][p][i] = kSumBase;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        StepWeights w;
        Iq2Step(tables, unit[u], i, w);
#pragma unroll
        for (int p = 0; p < X::kPairs; ++p) {
          const uint64_t q = x.Q(p, 2 * c + u, i);
          const uint32_t b[2] = {static_cast<uint32_t>(q), static_cast<uint32_t>(q >> 32)};
          MmaS8(products[u][p], w.a, b);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float2 own = scales.Own(u);
#pragma unroll
      for (int r = 0; r < X::kCount; ++r) {
        const float dx = x.Scale(2 * c + u, r);
        const int(&product)[4] = products[u][r / 2];
        sum[r][0] = fmaf(own.x * dx, SumToFloat(product[r % 2]), sum[r][0]);
        sum[r][1] = fmaf(own.y * dx, SumToFloat(product[2 + r % 2]), sum[r][1]);
      }
    }
  }
}

// Weight rows g, g + 8 of one slice part for each row of x, in every lane of g. kType: of the part.
template <DType kType, class X, class Ring, class Tables>
__device__ __forceinline__ void DotPart(Ring& ring, const X& x, int columns, const Tables& tables,
                                        float (&sum)[X::kCount][2]) {
#pragma unroll
  for (int r = 0; r < X::kCount; ++r) sum[r][0] = sum[r][1] = 0.0f;
  if constexpr (kType == DType::kQ8_0) {
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      if (half / 2 >= columns) break;
      HalfDecoder decoder(ring.Wait());
      AddUnits<1>(decoder, x, half, sum);
      ring.Release();
    }
  } else if constexpr (kType == DType::kIQ2_XXS) {
    const std::byte* chunks = ring.Wait();
    if (columns == 2) {
      AddIq2Chunks<2>(chunks, x, tables, sum);
    } else {
      AddIq2Chunks<1>(chunks, x, tables, sum);
    }
    ring.Release();
  } else {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (block >= columns) break;
      constexpr bool kTwo = kStages<kType> == 1;
      const std::byte* chunk = ring.Wait() + (kTwo ? block * kChunkBytes<kType> : 0);
      RowDecoder<kType> decoder(chunk, tables);
      AddUnits<2>(decoder, x, 2 * block, sum);
      if (!kTwo || block + 1 == columns) ring.Release();
    }
  }
  SumOverLanes(sum);
}

// ---- A group of up to 8 rows of x.

// sum[i] += the steps of the blocks whose number mod 4 is i; laid out as in dot.cuh.
template <int kSteps, class Decoder>
__device__ __forceinline__ void AddSteps(Decoder& decoder, const BlockX<2>& x, int first,
                                         float (&sum)[4][4]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    StepWeights w;
    decoder.Step(s, w);
    AddStep<2>(w.a, x, first + s, w.scale[0], w.scale[1], sum[s % 4]);
    if constexpr (Decoder::kHasMin) {
      const uint32_t a[4] = {w.min[0], w.min[1], w.min[0], w.min[1]};
      AddStep<2>(a, x, first + s, -w.min_scale[0], -w.min_scale[1], sum[s % 4]);
    }
  }
}

// load(i, x): x of the part's block i of 256 columns.
template <DType kType, class Ring, class LoadX, class Tables>
__device__ __forceinline__ void DotGroup(Ring& ring, const LoadX& load, int columns,
                                         const Tables& tables, float (&total)[4]) {
  float sum[4][4];
  Clear(sum);
  if constexpr (kType == DType::kQ8_0) {
#pragma unroll 1
    for (int block = 0; block < columns; ++block) {
      BlockX<2> x;
      load(block, x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        HalfDecoder decoder(ring.Wait());
        AddSteps<4>(decoder, x, half * 4, sum);
        ring.Release();
      }
    }
  } else {
#pragma unroll 1
    for (int block = 0; block < columns; ++block) {
      constexpr bool kTwo = kStages<kType> == 1;
      BlockX<2> x;
      load(block, x);
      std::byte* chunk = ring.Wait() + (kTwo ? block * kChunkBytes<kType> : 0);
      ExpertDecoder<kType, Tables> decoder(chunk, tables);
      AddSteps<8>(decoder, x, 0, sum);
      if (!kTwo || block + 1 == columns) ring.Release();
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) total[i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
}

}  // namespace ds4::cuda
