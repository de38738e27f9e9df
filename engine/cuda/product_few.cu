// Products for up to 8 rows of x, the heart of decoding. A block owns a contiguous range of row
// tiles (of all jobs, one after the other) and goes over it in rounds. The (row tile, slice) pairs
// of a round are its items; warp i takes items i, i + 8, ... so that it keeps its slice, and with
// it x in registers, wherever 8 slices make a row tile or divide 8. Its weights come through a ring
// that never drains, not even between jobs. A round's sums meet in shared memory: one barrier, then
// the block adds slices in rising order (product.h) and writes the results. Two blocks live on an
// SM and leave a corner of it free (kThreadsOfRegisters, kRoundFloats), in which a small kernel
// behind this one starts and reads what it needs meanwhile.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/dot.cuh"
#include "engine/cuda/product_few.h"
#include "engine/cuda/product_few_floats.cuh"
#include "engine/cuda/product_output.cuh"
#include "engine/cuda/quantize.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// Launch bounds for the registers of so many threads, in blocks of kThreads: what two blocks then
// leave of an SM's 65,536 is enough for a block of 128 threads with 96 registers each.
constexpr int kThreadsOfRegisters = kThreads + 64;
constexpr int kMaxBlocks = 288;
constexpr int kMaxSegments = 128;  // slices of a row tile, over all lanes

constexpr int kStages = 3;
constexpr int kStageBytes = ChunkBytes(DType::kQ8_0);  // float types' chunks are smaller
constexpr int kRingBytes = kStages * kStageBytes;

// Sums of a round that are worth a barrier, as long as every warp has an item. Two buffers of them
// beside the rings are 106 KB: two such blocks leave 14 KB of an SM's shared memory.
constexpr int kRoundFloats = 512;
constexpr int kMaxTwoBufferFloats = 1024;  // larger ones come alone: half of an SM is all there is
constexpr int kMaxRoundFloats = 8192;      // what the general kernel must do instead

struct FewJob {
  DType dtype;
  int rows;          // of w
  int segments;      // lanes * slices: items of a row tile
  int slices;        // of a lane
  int chunks;        // of a lane's row tile
  int slice_chunks;  // of a whole slice
  int chunk_bytes;
  int first_unit;  // units: what ranges of blocks are made of
  int units;
  int unit_tiles;            // 2 where blocks of 32 rows are quantised, else 1
  int tiles_per_round;       // a multiple of unit_tiles
  uint32_t segment_inverse;  // see Quotient
  uint32_t slice_inverse;
  int tile_bytes;
  int64_t matrix_bytes;
  const std::byte* w;
  ActivationView x;
  int x_col;
  int lane_x_cols;
  float* y;
  int64_t y_stride;
  ActivationView out;
  int64_t out_col;
};

struct FewParams {
  int num_jobs;
  int x_rows;
  int x_shift;       // sums are kept for 2^x_shift >= x_rows rows
  int round_floats;  // of a buffer
  int num_buffers;   // 1 or 2
  LaneRoots lanes;
  uint16_t starts[kMaxBlocks + 1];  // first unit of each block
  FewJob jobs[kMaxProductJobs];
};
static_assert(sizeof(FewParams) <= 4096, "kernel parameters are limited to 4 KB");

// n / d for small n, with the inverse ceil(2^16 / d): exact while n * d < 2^16.
constexpr uint32_t InverseOf(int d) {
  return (65536u + static_cast<uint32_t>(d) - 1) / static_cast<uint32_t>(d);
}
__device__ __forceinline__ int Quotient(int n, uint32_t inverse) {
  return static_cast<int>(static_cast<uint32_t>(n) * inverse >> 16);
}

// The rounds of a block, in order.
struct Rounds {
  int job = -1;
  int tile = 0;   // of the job, the round's first
  int end = 0;    // of the block's tiles of the job
  int tiles = 0;  // of the round
  int items = 0;

  __device__ __forceinline__ bool Next(const FewParams& params) {
    tile += tiles;
    while (tile >= end) {
      items = 0;
      if (++job >= params.num_jobs) return false;
      const FewJob& next = params.jobs[job];
      const uint16_t* range = params.starts + blockIdx.x;
      // All others are of blocks further on: their parameters would come from far away.
      if (range[1] <= next.first_unit) {
        job = params.num_jobs;
        return false;
      }
      tile = max(range[0] - next.first_unit, 0) * next.unit_tiles;
      end = min(range[1] - next.first_unit, next.units) * next.unit_tiles;
    }
    tiles = min(params.jobs[job].tiles_per_round, end - tile);
    items = tiles * params.jobs[job].segments;
    return true;
  }
};

// One item, but for its row tile.
struct Segment {
  int tile;  // of the round
  int lane;
  int slice;
  int chunks;

  __device__ __forceinline__ Segment(const FewJob& job, int item) {
    tile = Quotient(item, job.segment_inverse);
    const int segment = item - tile * job.segments;
    lane = Quotient(segment, job.slice_inverse);
    slice = segment - lane * job.slices;
    chunks = min(job.slice_chunks, job.chunks - slice * job.slice_chunks);
  }
  __device__ __forceinline__ int XCol(const FewJob& job) const {
    return job.x_col + lane * job.lane_x_cols + slice * kSliceCols;
  }
};

// The chunks of a warp, in the order in which it multiplies them.
struct ChunkSource {
  const FewParams* params;
  Rounds rounds = {};
  int item;
  int left = 0;   // chunks of the item
  int bytes = 0;  // of a chunk
  const std::byte* next = nullptr;

  __device__ __forceinline__ ChunkSource(const FewParams& all, int warp)
      : params(&all), item(warp - kWarps) {}

  // nullptr: there is none left.
  __device__ __forceinline__ const std::byte* Next() {
    if (left == 0 && !NextItem()) return nullptr;
    const std::byte* chunk = next;
    next += bytes;
    --left;
    return chunk;
  }

 private:
  __device__ __forceinline__ bool NextItem() {
    item += kWarps;
    while (item >= rounds.items) {
      if (!rounds.Next(*params)) return false;
      item = static_cast<int>(threadIdx.x) / kWarpSize;
    }
    const FewJob& job = params->jobs[rounds.job];
    const Segment segment(job, item);
    next = job.w + int64_t{rounds.tile + segment.tile} * job.tile_bytes +
           segment.lane * job.matrix_bytes + segment.slice * (job.slice_chunks * job.chunk_bytes);
    left = segment.chunks;
    bytes = job.chunk_bytes;
    return true;
  }
};

// As WeightStream (dot.cuh), for chunks of several types.
struct Ring {
  std::byte* memory;  // kRingBytes
  ChunkSource source;
  int at = 0;  // of the oldest stage

  // Code that runs once costs more to fetch than to run.
  __device__ __forceinline__ void Start() {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      const std::byte* chunk = source.Next();
      Copy(chunk, source.bytes, memory + i * kStageBytes);
    }
  }
  // The oldest chunk, in shared memory.
  __device__ __forceinline__ const std::byte* Wait() {
    CopyAsyncWait<kStages - 1>();
    __syncwarp();
    return memory + at;
  }
  // The warp is done with it: the next one takes its place.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    const std::byte* chunk = source.Next();
    Copy(chunk, source.bytes, memory + at);
    at = at == kRingBytes - kStageBytes ? 0 : at + kStageBytes;
  }

 private:
  __device__ __forceinline__ static void Copy(const std::byte* chunk, int bytes, std::byte* stage) {
    if (chunk != nullptr) {
      std::byte* to = stage + 16 * LaneId();
      const std::byte* from = chunk + 16 * LaneId();
#pragma unroll
      for (int i = 0; i < 8; ++i) CopyAsync16(to + 512 * i, from + 512 * i);
      if (4096 + 16 * LaneId() < bytes) CopyAsync16(to + 4096, from + 4096);
    }
    CopyAsyncCommit();  // also when empty: Wait counts groups
  }
};

// ---- Quantised weights.

constexpr int kChunkSteps = ChunkCols(DType::kQ8_0) / 32;

// x of a chunk, one tile of 8 rows, in registers: row g, columns 8t..8t+7 of each step. Rows past
// the last one repeat it: nobody reads their results.
struct XCodes {
  uint64_t q[kChunkSteps];

  __device__ __forceinline__ void Load(const ActivationView& x, int col) {
    const int row = min(LaneId() / 4, x.rows - 1);
    const uint64_t* from = x.q + (col + row * 4 + LaneId() % 4);
#pragma unroll
    for (int s = 0; s < kChunkSteps; ++s) q[s] = from[32 * s];
  }
};

// The scales of a chunk, spread over the lanes, as registers for all would be too many. Of several
// rows (kRows): lane 4s + t keeps step s of rows 2t and 2t + 1. Of one: lane t steps t and 4 + t.
template <int kRows>
struct XScales {
  float own[2];

  __device__ __forceinline__ void Load(const ActivationView& x, int col) {
    const float* from = x.scale + col / 4;
    if constexpr (kRows == 1) {
      own[0] = from[LaneId() % 4 * 8];
      own[1] = from[LaneId() % 4 * 8 + 32];
    } else {
      const float2 pair = reinterpret_cast<const float2*>(from)[LaneId()];
      own[0] = pair.x;
      own[1] = pair.y;
    }
  }
};

__device__ __forceinline__ void MultiplyStep(const std::byte* at, uint64_t q, int (&sum)[4]) {
  const uint4 w = Load16(at);
  const uint32_t a[4] = {w.x, w.y, w.z, w.w};
  const uint32_t b[2] = {static_cast<uint32_t>(q), static_cast<uint32_t>(q >> 32)};
  MmaS8(sum, a, b);
}

template <int kRows>
__device__ __forceinline__ void DotChunk(const std::byte* chunk, const XCodes& codes,
                                         const XScales<kRows>& scales, float (&acc)[4]) {
  const std::byte* at = chunk + 16 * LaneId();
  const std::byte* scales_at = chunk + 4096 + 16 * (LaneId() / 4);
#pragma unroll
  for (int first = 0; first < kChunkSteps; first += 4) {
    const uint4 row_scales = Load16(scales_at + 32 * first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = first + i;
      int sum[4] = {0, 0, 0, 0};
      MultiplyStep(at + 512 * s, codes.q[s], sum);
      const float2 dw = Half2ToFloat2(Word(row_scales, i));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float dx = __shfl_sync(kFullMask, scales.own[j], 4 * s + LaneId() % 4);
        acc[j] = fmaf(dw.x * dx, static_cast<float>(sum[j]), acc[j]);
        acc[2 + j] = fmaf(dw.y * dx, static_cast<float>(sum[2 + j]), acc[2 + j]);
      }
    }
  }
}

// One row stands in all columns of the product: acc[1] and acc[3] stay as they are. A lane scales
// what it has, and four share.
__device__ __forceinline__ void DotChunk(const std::byte* chunk, const XCodes& codes,
                                         const XScales<1>& scales, float (&acc)[4]) {
  const std::byte* at = chunk + 16 * LaneId();
  const std::byte* scales_at = chunk + 4096 + 4 * LaneId();
#pragma unroll
  for (int first = 0; first < kChunkSteps; first += 4) {
    const float dx = scales.own[first / 4];
    const float2 dw = Half2ToFloat2(*reinterpret_cast<const uint32_t*>(scales_at + 32 * first));
    const float low = dw.x * dx;
    const float high = dw.y * dx;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = first + i;
      int sum[4] = {0, 0, 0, 0};
      MultiplyStep(at + 512 * s, codes.q[s], sum);
      acc[0] = fmaf(FromFour(low, i), static_cast<float>(sum[0]), acc[0]);
      acc[2] = fmaf(FromFour(high, i), static_cast<float>(sum[2]), acc[2]);
    }
  }
}

// x of a slice in registers, from item to item.
template <int kRows>
struct XSlice {
  static constexpr int kChunks = kSliceChunks<DType::kQ8_0>;
  XCodes codes[kChunks];
  XScales<kRows> scales[kChunks];
  int loaded = -1;  // what is there: columns and job

  __device__ __forceinline__ void Load(const ActivationView& x, int col, int num_chunks, int job) {
    const int wanted = col | job;
    if (loaded == wanted) return;
    loaded = wanted;
    static_assert(kMaxProductJobs <= kColumnGrain);  // of which columns are a multiple
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= num_chunks) break;
      codes[c].Load(x, col + c * kChunkCols<DType::kQ8_0>);
      scales[c].Load(x, col + c * kChunkCols<DType::kQ8_0>);
    }
  }
};

template <int kRows>
__device__ __forceinline__ void DotQuantised(Ring& ring, const XSlice<kRows>& x, int chunks,
                                             float (&acc)[4]) {
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const std::byte* chunk = ring.Wait();
    if (c == 0) {
      DotChunk(chunk, x.codes[0], x.scales[0], acc);
    } else {
      DotChunk(chunk, x.codes[1], x.scales[1], acc);
    }
    ring.Release();
  }
}

// Among other types, where registers are for x as they need it: x comes again for every chunk, the
// next one's while the ring moves on.
template <int kRows>
__device__ __forceinline__ void DotQuantisedOnce(Ring& ring, const ActivationView& x, int col,
                                                 int chunks, float (&acc)[4]) {
  XCodes codes;
  XScales<kRows> scales;
  codes.Load(x, col);
  scales.Load(x, col);
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    DotChunk(ring.Wait(), codes, scales, acc);
    col += kChunkCols<DType::kQ8_0>;
    if (c + 1 < chunks) {
      codes.Load(x, col);
      scales.Load(x, col);
    }
    ring.Release();
  }
}

// ---- Float weights.

template <DType kType, int kRows>
__device__ __forceinline__ void DotFloats(Ring& ring, const ActivationView& x, int col, int chunks,
                                          float (&acc)[1][4]) {
  float part[kRows][2] = {};
  if constexpr (kRows == 1) {
    const float* at = x.f32 + col;
    XFloats<kType> columns;
    columns.Load(at);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      columns.Dot(ring.Wait(), part);
      at += kChunkCols<kType>;
      if (c + 1 < chunks) columns.Load(at);
      ring.Release();
    }
  } else {
    const ContiguousX<1> rows(x, 0);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      DotChunkRows<kType, kRows>(ring.Wait(), rows, col + c * kChunkCols<kType>, part);
      ring.Release();
    }
  }
  AddLaneParts<1, kRows>(part, acc);
}

template <int kRows>
__device__ __forceinline__ void DotMixed(const FewJob& job, const Segment& segment, Ring& ring,
                                         float (&acc)[1][4]) {
  const int col = segment.XCol(job);
  switch (job.dtype) {
    case DType::kF16:
      return DotFloats<DType::kF16, kRows>(ring, job.x, col, segment.chunks, acc);
    case DType::kBF16:
      return DotFloats<DType::kBF16, kRows>(ring, job.x, col, segment.chunks, acc);
    case DType::kF32:
      return DotFloats<DType::kF32, kRows>(ring, job.x, col, segment.chunks, acc);
    default:
      return DotQuantisedOnce<kRows>(ring, job.x, col, segment.chunks, acc[0]);
  }
}

// ---- A round's sums: [item][x row][row of the tile].

__device__ __forceinline__ void StoreSums(const FewParams& params, const float (&acc)[4],
                                          float* sums) {
  const int g = LaneId() / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int x_row = LaneId() % 4 * 2 + i;
    if (x_row >= params.x_rows) continue;
    sums[x_row * kTileRows + g] = acc[i];
    sums[x_row * kTileRows + g + 8] = acc[2 + i];
  }
}

// Slices in rising order. pitch: from one item's sum to the next one's. Loads do not wait for sums.
__device__ __forceinline__ float AddSlices(const float* sums, int slices, int pitch) {
  float total = -0.0f;  // changes no value that is added to it
#pragma unroll 1
  for (int first = 0; first < slices; first += 8) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = first + i < slices ? sums[i * pitch] : -0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += sum[i];
    sums += 8 * pitch;
  }
  return total;
}

// Leaves the sum of every lane where its first slice was.
__device__ __forceinline__ void AddLaneSlices(const FewParams& params, const FewJob& job,
                                              const Rounds& round, float* sums) {
  const int pitch = kTileRows << params.x_shift;
  const int lanes = round.tiles * params.lanes.lanes;
  for (int i = static_cast<int>(threadIdx.x); i < lanes * pitch; i += kThreads) {
    const int lane = i / kTileRows >> params.x_shift;
    float* first = sums + lane * job.slices * pitch + (i - lane * pitch);
    *first = AddSlices(first, job.slices, pitch);
  }
}

// A warp for each block of 32 rows and x row.
__device__ __forceinline__ void FinishQuantised(const FewParams& params, const FewJob& job,
                                                const Rounds& round, const float* sums) {
  const int pitch = kTileRows << params.x_shift;
  const int blocks = round.tiles / 2;
  const int count = blocks << params.x_shift;
  for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < count; i += kWarps) {
    const int block = i >> params.x_shift;
    const int x_row = i - (block << params.x_shift);
    if (x_row >= params.x_rows) continue;
    const int tile = 2 * block + LaneId() / kTileRows;
    const float value =
        AddSlices(sums + tile * job.segments * pitch + x_row * kTileRows + LaneId() % kTileRows,
                  job.slices, pitch);
    const int row = (round.tile + 2 * block) * kTileRows;
    if (job.y != nullptr) job.y[x_row * job.y_stride + row + LaneId()] = value;
    StoreActivation32(job.out, x_row, (job.out_col + row) / 32, value);
  }
}

// Adds the sums of a round and writes what they are for.
__device__ __forceinline__ void FinishRound(const FewParams& params, const FewJob& job,
                                            const Rounds& round, float* sums) {
  if (job.out.q != nullptr) return FinishQuantised(params, job, round, sums);
  if (params.lanes.roots != nullptr) {
    AddLaneSlices(params, job, round, sums);
    __syncthreads();
  }
  const int pitch = kTileRows << params.x_shift;
  for (int i = static_cast<int>(threadIdx.x); i < round.tiles * pitch; i += kThreads) {
    const int in_tile = i & (kTileRows - 1);
    const int x_row = i / kTileRows & ((1 << params.x_shift) - 1);
    const int tile = i / kTileRows >> params.x_shift;
    const int row = (round.tile + tile) * kTileRows + in_tile;
    if (x_row >= params.x_rows || row >= job.rows) continue;
    const float* from = sums + tile * job.segments * pitch + x_row * kTileRows + in_tile;
    if (params.lanes.roots != nullptr) {
      StoreRoots(params.lanes, params.x_rows, job.rows, x_row, row, from, job.slices * pitch);
    } else {
      StorePlain(job, x_row, row, AddSlices(from, job.slices, pitch));
    }
  }
}

// kRows: of x, that are computed; quantised weights: 1 or all 8. kFloats: there may be other
// weights than Q8_0.
template <int kRows, bool kFloats>
inline constexpr bool kLeavesRoom = kRows < 8 || !kFloats;

template <int kRows, bool kFloats>
__global__ void __launch_bounds__(kLeavesRoom<kRows, kFloats> ? kThreadsOfRegisters : kThreads, 2)
    FewRowsKernel(const __grid_constant__ FewParams params) {
  DS4_DYNAMIC_SHARED(memory);
  LaunchDependents();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  Ring ring{memory + warp * kRingBytes, ChunkSource(params, warp)};
  ring.Start();
  Rounds round;
  bool more = round.Next(params);
  GridDependencyWait();

  float* buffers = reinterpret_cast<float*>(memory + kWarps * kRingBytes);
  int buffer = 0;
  [[maybe_unused]] XSlice<kRows> x;
#pragma unroll 1
  while (more) {
    const FewJob& job = params.jobs[round.job];
    float* sums = buffers + buffer * params.round_floats;
#pragma unroll 1
    for (int item = warp; item < round.items; item += kWarps) {
      const Segment segment(job, item);
      float acc[1][4] = {};
      if constexpr (kFloats) {
        DotMixed<kRows>(job, segment, ring, acc);
      } else {
        x.Load(job.x, segment.XCol(job), segment.chunks, round.job);
        DotQuantised(ring, x, segment.chunks, acc[0]);
      }
      StoreSums(params, acc[0], sums + (item * kTileRows << params.x_shift));
    }
    __syncthreads();
    FinishRound(params, job, round, sums);
    // With two buffers the next barrier keeps this one's readers apart from its next writers.
    if (params.num_buffers == 1) {
      __syncthreads();
    } else {
      buffer ^= 1;
    }
    more = round.Next(params);
  }
}

// ---- Host side.

bool IsFewRowsType(DType dtype) { return dtype == DType::kQ8_0 || IsFloatType(dtype); }

FewJob MakeFewJob(const ProductJob& job, int lanes) {
  FewJob few = {};
  few.dtype = job.w.dtype;
  few.rows = static_cast<int>(job.w.rows);
  few.slices = static_cast<int>((job.w.padded_cols() + kSliceCols - 1) / kSliceCols);
  few.segments = lanes * few.slices;
  few.chunks = static_cast<int>(job.w.padded_cols() / ChunkCols(job.w.dtype));
  few.slice_chunks = kSliceCols / ChunkCols(job.w.dtype);
  few.chunk_bytes = ChunkBytes(job.w.dtype);
  few.unit_tiles = job.out.q != nullptr ? 2 : 1;
  few.units = static_cast<int>(PaddedRows(job.w.rows) / (kTileRows * few.unit_tiles));
  few.segment_inverse = InverseOf(few.segments);
  few.slice_inverse = InverseOf(few.slices);
  few.tile_bytes = static_cast<int>(TileBytes(job.w.dtype, job.w.cols));
  few.matrix_bytes = job.w.matrix_bytes();
  few.w = job.w.data;
  few.x = job.x;
  few.x_col = static_cast<int>(job.x_col);
  few.lane_x_cols = static_cast<int>(job.w.padded_cols());
  few.y = job.y;
  few.y_stride = job.y_stride;
  few.out = job.out;
  few.out_col = job.out_col;
  return few;
}

// Cuts the units of all jobs into ranges of about the same number of bytes: block b gets the units
// whose middle lies in the b-th part of the bytes.
void CutRanges(FewParams& params, int blocks) {
  int64_t bytes[kMaxProductJobs];
  int64_t total = 0;
  for (int i = 0; i < params.num_jobs; ++i) {
    const FewJob& job = params.jobs[i];
    bytes[i] = int64_t{job.unit_tiles} * job.tile_bytes * (job.segments / job.slices);
    total += bytes[i] * job.units;
  }
  for (int b = 0; b <= blocks; ++b) {
    int64_t left = total * b / blocks;  // bytes of the blocks before
    int64_t units = 0;
    for (int i = 0; i < params.num_jobs; ++i) {
      const FewJob& job = params.jobs[i];
      const int64_t before = (left + bytes[i] / 2) / bytes[i];
      units += std::clamp<int64_t>(before, 0, job.units);
      left = std::max<int64_t>(left - bytes[i] * job.units, 0);
    }
    params.starts[b] = static_cast<uint16_t>(units);
  }
}

}  // namespace

bool LaunchFewRowProducts(const LaunchContext& launch, std::span<const ProductJob> jobs,
                          const LaneRoots& roots) {
  FewParams params = {};
  params.num_jobs = static_cast<int>(jobs.size());
  params.x_rows = jobs[0].x.rows;
  params.lanes = roots;
  if (params.x_rows > kMaxFewProductRows) return false;
  while ((1 << params.x_shift) < params.x_rows) ++params.x_shift;

  const int item_floats = kTileRows << params.x_shift;
  int64_t units = 0;
  bool floats = false;
  const int round_floats = std::max(kRoundFloats, kWarps * item_floats);
  params.round_floats = round_floats;
  for (int i = 0; i < params.num_jobs; ++i) {
    if (!IsFewRowsType(jobs[i].w.dtype)) return false;
    floats = floats || IsFloatType(jobs[i].w.dtype);
    const int64_t slices = (jobs[i].w.padded_cols() + kSliceCols - 1) / kSliceCols;
    if (slices * roots.lanes > kMaxSegments) return false;
    FewJob& job = params.jobs[i];
    job = MakeFewJob(jobs[i], roots.lanes);
    const int unit_floats = job.unit_tiles * job.segments * item_floats;
    if (unit_floats > kMaxRoundFloats) return false;
    job.tiles_per_round = std::max(round_floats / unit_floats, 1) * job.unit_tiles;
    params.round_floats = std::max(params.round_floats, unit_floats);
    job.first_unit = static_cast<int>(units);
    units += job.units;
  }
  if (units > UINT16_MAX) return false;
  params.num_buffers = params.round_floats <= kMaxTwoBufferFloats ? 2 : 1;
  // Two blocks live on an SM: the second hides the first one's latencies, and a block that ends
  // makes room for the next kernel's.
  const int blocks =
      static_cast<int>(std::min<int64_t>(units, std::clamp(2 * launch.num_sms, 1, kMaxBlocks)));
  CutRanges(params, blocks);

  const dim3 grid(static_cast<unsigned>(blocks));
  const size_t shared =
      kWarps * kRingBytes +
      sizeof(float) * static_cast<size_t>(params.round_floats * params.num_buffers);
  const auto launch_kernel = [&](auto kernel) {
    Launch(launch, grid, dim3(kThreads), shared, kernel, params);
  };
  if (params.x_rows > 4) {
    launch_kernel(floats ? FewRowsKernel<8, true> : FewRowsKernel<8, false>);
  } else if (params.x_rows > 1) {
    launch_kernel(floats ? FewRowsKernel<4, true> : FewRowsKernel<8, false>);
  } else {
    launch_kernel(floats ? FewRowsKernel<1, true> : FewRowsKernel<1, false>);
  }
  return true;
}

}  // namespace ds4::cuda
