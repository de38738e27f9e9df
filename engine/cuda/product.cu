// Decode products, in general form; the common types have kernels of their own for few rows of x
// (product_few.cu) and for batches (product_batch.cu). A block owns some row tiles of one job; its
// eight warps share the (tile, slice) pairs, one slice at a time each (dot.cuh). After every pass
// the block adds the slices' sums in rising order, so how many tiles a block has changes no bits. A
// lane product is a job whose slices belong to lanes; the lanes' totals are added in the lane tree
// at the end.
#include <algorithm>
#include <vector>

#include "engine/base/check.h"
#include "engine/comm/lane_tree.h"
#include "engine/cuda/dot.cuh"
#include "engine/cuda/product.h"
#include "engine/cuda/product_batch.h"
#include "engine/cuda/product_few.h"
#include "engine/cuda/quantize.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// Shared memory lets two blocks live on one SM; few x rows leave more of it to weights in flight.
template <int kTiles>
inline constexpr int kRingBytes = kTiles == 1 ? 13056 : 8704;

// Tiles of x rows that a block takes at once: as the kernel's template says, but float types, which
// keep a sum for every x row in each lane, have registers for two only.
template <int kTiles>
inline constexpr int kFloatTiles = kTiles < 2 ? kTiles : 2;
__device__ __forceinline__ bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

struct DeviceJob {
  DType dtype;
  int rows;             // of w
  int lanes;            // 1: an ordinary product
  int slices;           // of a lane
  int chunks;           // of a tile
  int tiles_per_block;  // 1, 2, 4 or 8
  int groups;           // of x rows; blocks that share weights are neighbours
  int first_block;
  const std::byte* w;
  int64_t tile_bytes;
  int64_t matrix_bytes;
  ActivationView x;
  int64_t x_col;
  int64_t lane_x_cols;
  float* y;
  int64_t y_stride;
  ActivationView out;
  int64_t out_col;
};

struct ProductParams {
  int num_jobs;
  LaneRoots lanes;
  DeviceJob jobs[kMaxProductJobs];
};
static_assert(sizeof(ProductParams) <= 4000, "kernel parameters are limited to 4 KB");

// The slices of one warp: one row tile, every step-th (lane, slice).
template <DType kType>
struct SliceSource {
  const std::byte* tile;  // of lane 0; nullptr: nothing to do
  int64_t matrix_bytes;
  int slices;
  int chunks;
  int segment;  // lane * slices + slice, the next one
  int segments;
  int step;
  const std::byte* next = nullptr;
  int left = 0;

  // Chunks of one slice.
  __device__ __forceinline__ int ChunksOf(int slice) const {
    return min(kSliceChunks<kType>, chunks - slice * kSliceChunks<kType>);
  }
  __device__ __forceinline__ const std::byte* Next() {
    if (left == 0) {
      if (segment >= segments) return nullptr;
      const int lane = segment / slices;
      const int slice = segment - lane * slices;
      next = tile + lane * matrix_bytes + slice * (kSliceChunks<kType> * kChunkBytes<kType>);
      left = ChunksOf(slice);
      segment += step;
    }
    const std::byte* chunk = next;
    next += kChunkBytes<kType>;
    --left;
    return chunk;
  }
};

// Shared memory of a block.
template <int kTiles>
struct Room {
  static constexpr int kXRows = 8 * kTiles;
  uint32_t* grid;
  std::byte* rings;
  float* partial;  // [kWarps][16][kXRows]: sums of one slice
  float* total;    // [lanes][tiles_per_block * 16][kXRows]

  __device__ __forceinline__ explicit Room(std::byte* memory)
      : grid(reinterpret_cast<uint32_t*>(memory)),
        rings(memory + kIq2GridBytes),
        partial(reinterpret_cast<float*>(rings + kWarps * kRingBytes<kTiles>)),
        total(partial + kWarps * kTileRows * kXRows) {}
  static size_t Bytes(int total_rows) {
    return kIq2GridBytes + kWarps * kRingBytes<kTiles> +
           sizeof(float) * kXRows * static_cast<size_t>(kWarps * kTileRows + total_rows);
  }
};

// What a block does of its job.
struct BlockWork {
  int first_tile;
  int tiles;    // 1..tiles_per_block
  int first_x;  // first x row
  int x_rows;   // 1..8 * kTiles
};

// One slice of the warp's tile; float types compute no more x rows than there are.
template <DType kType, int kTiles, class Stream>
__device__ __forceinline__ void DotSliceFor(int x_rows, Stream& stream,
                                            const ContiguousX<kTiles>& x, int64_t col, int chunks,
                                            const uint32_t* grid, float (&acc)[kTiles][4]) {
  if constexpr (kIsFloat<kType> && kTiles == 1) {
    if (x_rows == 1) return DotSlice<kType, 1, 1>(stream, x, col, chunks, grid, acc);
    if (x_rows <= 4) return DotSlice<kType, 1, 4>(stream, x, col, chunks, grid, acc);
  }
  DotSlice<kType, kTiles, 8 * kTiles>(stream, x, col, chunks, grid, acc);
}

template <int kTiles>
__device__ __forceinline__ void StorePartial(const float (&acc)[kTiles][4], float* partial) {
  const int g = LaneId() / 4;
  const int t = LaneId() % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(partial + (g + 8 * r) * (8 * kTiles) + 8 * n + 2 * t) =
          make_float2(acc[n][2 * r], acc[n][2 * r + 1]);
    }
  }
}

// Adds the sums of segments [first, first + count) to the totals, in rising order.
template <int kTiles>
__device__ __forceinline__ void AddSegments(const DeviceJob& job, const BlockWork& work, int first,
                                            int count, const Room<kTiles>& room) {
  constexpr int kXRows = 8 * kTiles;
  const int values = work.tiles * kTileRows * kXRows;
  const int lane_values = job.tiles_per_block * kTileRows * kXRows;
  for (int i = static_cast<int>(threadIdx.x); i < values; i += kThreads) {
    const int tile = i / (kTileRows * kXRows);
    const int in_tile = i % (kTileRows * kXRows);
    int lane = first / job.slices;
    int slice = first % job.slices;
    float* total = room.total + lane * lane_values + i;
    for (int k = 0; k < count; ++k) {
      const int warp = k * job.tiles_per_block + tile;
      const float sum = room.partial[warp * (kTileRows * kXRows) + in_tile];
      *total = slice == 0 ? sum : *total + sum;
      if (++slice == job.slices) {
        slice = 0;
        total += lane_values;
      }
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void StoreY(const DeviceJob& job, const BlockWork& work,
                                       const Room<kTiles>& room) {
  const int block_rows = work.tiles * kTileRows;
  const bool plain_forms = job.out.q == nullptr;
  for (int i = static_cast<int>(threadIdx.x); i < block_rows * work.x_rows; i += kThreads) {
    const int in_block = i % block_rows;
    const int in_group = i / block_rows;
    const int row = work.first_tile * kTileRows + in_block;
    if (row >= job.rows) continue;
    const float value = room.total[in_block * (8 * kTiles) + in_group];
    const int64_t x_row = work.first_x + in_group;
    if (job.y != nullptr) job.y[x_row * job.y_stride + row] = value;
    if (!plain_forms) continue;
    const int64_t at = x_row * job.out.cols + job.out_col + row;
    if (job.out.f32 != nullptr) job.out.f32[at] = value;
    if (job.out.bf16 != nullptr) job.out.bf16[at] = FloatToBf16(value);
  }
}

// All forms, where blocks of 32 rows are quantised: a warp for each block and x row.
template <int kTiles>
__device__ __forceinline__ void StoreForms(const DeviceJob& job, const BlockWork& work,
                                           const Room<kTiles>& room) {
  const int blocks = min(work.tiles * kTileRows, job.rows - work.first_tile * kTileRows) / 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < blocks * work.x_rows; i += kWarps) {
    const int block = i % blocks;
    const int in_group = i / blocks;
    const float value = room.total[(32 * block + LaneId()) * (8 * kTiles) + in_group];
    const int64_t out_block = (job.out_col + work.first_tile * kTileRows) / 32 + block;
    StoreActivation32(job.out, work.first_x + in_group, out_block, value);
  }
}

// Adds the lanes of every aligned subtree (lane_tree.h) and writes the roots.
template <int kTiles>
__device__ __forceinline__ void StoreRoots(const ProductParams& params, const DeviceJob& job,
                                           const BlockWork& work, const Room<kTiles>& room) {
  const int block_rows = work.tiles * kTileRows;
  const int lane_values = job.tiles_per_block * kTileRows * (8 * kTiles);
  for (int i = static_cast<int>(threadIdx.x); i < block_rows * work.x_rows; i += kThreads) {
    const int in_block = i % block_rows;
    const int in_group = i / block_rows;
    const int row = work.first_tile * kTileRows + in_block;
    if (row >= job.rows) continue;
    float* lanes = room.total + in_block * (8 * kTiles) + in_group;  // this thread's alone
    for (int root = 0; root < params.lanes.num_roots; ++root) {
      float* first = lanes + params.lanes.begin[root] * lane_values;
      const int size = params.lanes.size[root];
      for (int half = 1; half < size; half *= 2) {
        for (int lane = 0; lane < size; lane += 2 * half) {
          first[lane * lane_values] += first[(lane + half) * lane_values];
        }
      }
      const int64_t x_row = static_cast<int64_t>(root) * job.x.rows + work.first_x + in_group;
      params.lanes.roots[x_row * job.rows + row] = *first;
    }
  }
}

template <DType kType, int kTiles>
__device__ __forceinline__ void RunJob(const ProductParams& params, const DeviceJob& job,
                                       const BlockWork& work, std::byte* memory) {
  const Room<kTiles> room(memory);
  if constexpr (kType == DType::kIQ2_XXS) {
    LoadIq2Grid(room.grid);
    __syncthreads();
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int tile = warp % job.tiles_per_block;
  const int step = kWarps / job.tiles_per_block;  // segments of one pass
  const int segments = tile < work.tiles ? job.lanes * job.slices : 0;
  SliceSource<kType> source{job.w + (work.first_tile + tile) * job.tile_bytes,
                            job.matrix_bytes,
                            job.slices,
                            job.chunks,
                            warp / job.tiles_per_block,
                            segments,
                            step};
  WeightStream<kType, kStagesFor<kType, kRingBytes<kTiles>>, SliceSource<kType>> stream{
      room.rings + warp * kRingBytes<kTiles>, source};
  stream.Start();
  GridDependencyWait();

  const ContiguousX<kTiles> x(job.x, work.first_x);
  float* partial = room.partial + warp * (kTileRows * 8 * kTiles);
  const int all_segments = job.lanes * job.slices;
  for (int first = 0; first < all_segments; first += step) {
    const int segment = first + warp / job.tiles_per_block;
    if (segment < segments) {
      const int lane = segment / job.slices;
      const int slice = segment - lane * job.slices;
      float acc[kTiles][4];
      DotSliceFor<kType, kTiles>(work.x_rows, stream, x,
                                 job.x_col + lane * job.lane_x_cols + slice * kSliceCols,
                                 source.ChunksOf(slice), room.grid, acc);
      StorePartial<kTiles>(acc, partial);
    }
    __syncthreads();
    AddSegments<kTiles>(job, work, first, min(step, all_segments - first), room);
    __syncthreads();
  }
  if (params.lanes.roots != nullptr) return StoreRoots<kTiles>(params, job, work, room);
  StoreY<kTiles>(job, work, room);
  if (job.out.q != nullptr) StoreForms<kTiles>(job, work, room);
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2)
    ProductKernel(const __grid_constant__ ProductParams params) {
  DS4_DYNAMIC_SHARED(memory);
  LaunchDependents();
  const int block = static_cast<int>(blockIdx.x);
  int idx = 0;
  while (idx + 1 < params.num_jobs && block >= params.jobs[idx + 1].first_block) ++idx;
  const DeviceJob& job = params.jobs[idx];
  const int group_tiles = IsFloat(job.dtype) ? kFloatTiles<kTiles> : kTiles;
  const int in_job = block - job.first_block;
  BlockWork work;
  work.first_tile = in_job / job.groups * job.tiles_per_block;
  work.tiles = min(job.tiles_per_block, (job.rows + kTileRows - 1) / kTileRows - work.first_tile);
  work.first_x = in_job % job.groups * 8 * group_tiles;
  work.x_rows = min(8 * group_tiles, job.x.rows - work.first_x);
  switch (job.dtype) {
    case DType::kF32:
      return RunJob<DType::kF32, kFloatTiles<kTiles>>(params, job, work, memory);
    case DType::kF16:
      return RunJob<DType::kF16, kFloatTiles<kTiles>>(params, job, work, memory);
    case DType::kBF16:
      return RunJob<DType::kBF16, kFloatTiles<kTiles>>(params, job, work, memory);
    case DType::kQ8_0:
      return RunJob<DType::kQ8_0, kTiles>(params, job, work, memory);
    case DType::kMXFP4:
      return RunJob<DType::kMXFP4, kTiles>(params, job, work, memory);
    case DType::kQ4_K:
      return RunJob<DType::kQ4_K, kTiles>(params, job, work, memory);
    case DType::kQ2_K:
      return RunJob<DType::kQ2_K, kTiles>(params, job, work, memory);
    case DType::kIQ2_XXS:
      return RunJob<DType::kIQ2_XXS, kTiles>(params, job, work, memory);
    default:
      GridDependencyWait();  // the host refuses other types
  }
}

// ---- The plain form: one thread a value, reading the packed layout by its description alone.

// Row `row` of a packed chunk.
struct PlainRow {
  const std::byte* chunk;
  int row;

  __device__ int At(int64_t byte) const { return static_cast<uint8_t>(chunk[byte]); }
  __device__ uint16_t HalfAt(int64_t byte) const {
    return static_cast<uint16_t>(At(byte) | At(byte + 1) << 8);
  }
  // Byte of the 16 bytes of lane 4g + t of a unit.
  __device__ int64_t Lane(int unit, int t) const { return 512 * unit + 16 * (row % 8 * 4 + t); }
  __device__ int High() const { return row / 8; }

  __device__ int Nibble(int c) const {
    const int word = 2 * (c / 32 % 2) + High();
    const int both = At(Lane(c / 64, c % 32 / 8) + 4 * word + c % 4);
    return c % 8 < 4 ? both & 15 : both >> 4;
  }
  __device__ int Q4Scale(int s, bool min) const {
    const int64_t at = 2048 + 16 * row + 4;
    if (s < 4) return At(at + s + (min ? 4 : 0)) & 63;
    const int low = At(at + s + 4) >> (min ? 4 : 0) & 15;
    return low | At(at + s - (min ? 0 : 4)) >> 6 << 4;
  }
  __device__ int Q2Scale(int c) const { return At(1024 + 16 * row + c / 16); }

  __device__ int IqSigned(int c) const {
    const int step = c / 32;
    const int64_t words = Lane(step / 4, c % 32 / 8) + 8 * (step % 4 / 2);
    const int octet = step % 2 * 2 + High();
    const int magnitude =
        0x002b1908 >> (8 * (Codes()[At(words + octet)] >> (2 * (c % 8)) & 3)) & 255;
    const int negative = At(words + 4 + c % 8 / 2) >> (4 * (c % 2) + octet) & 1;
    return negative != 0 ? -magnitude : magnitude;
  }
  __device__ int IqScale(int s) const {
    return At(1024 + 2 * (row % 8 * 4 + s % 4) + s / 4) >> (4 * High()) & 15;
  }

 private:
  __device__ static const uint16_t* Codes() {
    static constexpr Iq2Grid kGrid = kIq2GridCodes;
    return kGrid.codes;
  }
};

// What column c adds to the exact sum of its step, but for x.
__device__ int PlainCode(DType dtype, const PlainRow& w, int c) {
  constexpr int kHalves[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  switch (dtype) {
    case DType::kQ8_0:
      return static_cast<int8_t>(
          w.At(w.Lane(c / 32, c % 32 / 8) + 4 * (w.High() + c % 8 / 4 * 2) + c % 4));
    case DType::kMXFP4:
      return kHalves[w.Nibble(c)];
    case DType::kQ4_K:
      return w.Nibble(c);
    case DType::kQ2_K: {
      const int four = w.At(w.Lane(c / 128, c % 32 / 8) + 4 * (c / 32 % 4) + c % 4);
      return (four >> (4 * w.High() + c % 8 / 4 * 2) & 3) * (w.Q2Scale(c) & 15);
    }
    default:
      return w.IqSigned(c);
  }
}
__device__ float PlainScale(DType dtype, const PlainRow& w, int s) {
  switch (dtype) {
    case DType::kQ8_0:
      return HalfToFloat(
          w.HalfAt(4096 + 128 * (s / 4) + 4 * (w.row % 8 * 4 + s % 4) + 2 * w.High()));
    case DType::kMXFP4: {
      const int e = w.At(2048 + 4 * (w.row % 8 * 4 + s % 4) + w.High() + s / 4 * 2);
      return static_cast<float>(exp2(static_cast<double>(e - 128)));
    }
    case DType::kQ4_K:
      return HalfToFloat(w.HalfAt(2048 + 16 * w.row)) * static_cast<float>(w.Q4Scale(s, false));
    case DType::kQ2_K:
      return HalfToFloat(w.HalfAt(1280 + 4 * w.row));
    default:
      return HalfToFloat(w.HalfAt(1088 + 4 * (w.row % 8) + 2 * w.High())) * 0.25f *
             (static_cast<float>(w.IqScale(s)) + 0.5f);
  }
}
__device__ int PlainMin(DType dtype, const PlainRow& w, int c) {
  return dtype == DType::kQ4_K ? w.Q4Scale(c / 32, true) : w.Q2Scale(c) >> 4;
}
__device__ float PlainMinScale(DType dtype, const PlainRow& w) {
  return HalfToFloat(
      w.HalfAt(dtype == DType::kQ4_K ? 2048 + 16 * w.row + 2 : 1280 + 4 * w.row + 2));
}
__device__ float PlainFloat(DType dtype, const PlainRow& w, int c) {
  if (dtype == DType::kF32) {
    const int64_t at = w.Lane(c / 8, c % 8 / 2) + 4 * (w.High() + c % 2 * 2);
    return __uint_as_float(static_cast<uint32_t>(w.HalfAt(at)) |
                           static_cast<uint32_t>(w.HalfAt(at + 2)) << 16);
  }
  const int64_t at = w.Lane(c / 16, c % 16 / 4) + 4 * (w.High() + c % 4 / 2 * 2) + 2 * (c % 2);
  return dtype == DType::kF16 ? HalfToFloat(w.HalfAt(at)) : Bf16ToFloat(w.HalfAt(at));
}

struct PlainParams {
  DeviceJob job;
  int chunk_cols;
  int chunk_bytes;
  int64_t padded_cols;
};

__device__ float PlainSlice(const PlainParams& params, const std::byte* tile, int in_tile,
                            int x_row, int64_t first, int64_t end) {
  const DeviceJob& job = params.job;
  const ActivationView& x = job.x;
  const bool is_float = IsFloat(job.dtype);
  float part[4] = {};  // of float types
  float acc = 0;
  for (int64_t block = first / 32; block < end / 32; ++block) {
    const int64_t chunk = 32 * block / params.chunk_cols;
    const PlainRow w{tile + chunk * params.chunk_bytes, in_tile};
    const int c0 = static_cast<int>(32 * block - chunk * params.chunk_cols);
    const int64_t x_block = job.x_col / 32 + block;
    if (is_float) {
      for (int c = c0; c < c0 + 32; ++c) {
        float& sum = part[job.dtype == DType::kF32 ? c % 8 / 2 : c % 16 / 4];
        sum = fmaf(PlainFloat(job.dtype, w, c), x.f32[x_row * x.cols + 32 * x_block + c - c0], sum);
      }
      continue;
    }
    const bool has_min = job.dtype == DType::kQ4_K || job.dtype == DType::kQ2_K;
    const int64_t tiles = TilesOf(x);
    const auto* q =
        reinterpret_cast<const int8_t*>(x.q + ((x_block * tiles + x_row / 8) * 32 + x_row % 8 * 4));
    int sum = 0;
    int min_sum = 0;
    for (int c = 0; c < 32; ++c) {
      sum += PlainCode(job.dtype, w, c0 + c) * q[c];
      if (has_min) min_sum += PlainMin(job.dtype, w, c0 + c) * q[c];
    }
    const float dx = x.scale[x_block * tiles * 8 + x_row];
    acc = fmaf(PlainScale(job.dtype, w, c0 / 32) * dx, static_cast<float>(sum), acc);
    if (!has_min) continue;
    acc = fmaf(-PlainMinScale(job.dtype, w) * dx, static_cast<float>(min_sum), acc);
  }
  return is_float ? (part[0] + part[1]) + (part[2] + part[3]) : acc;
}

// A warp for 32 rows of w and one x row.
__global__ void __launch_bounds__(32)
    PlainProductKernel(const __grid_constant__ PlainParams params) {
  LaunchDependents();
  GridDependencyWait();
  const DeviceJob& job = params.job;
  const int row = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  const int x_row = static_cast<int>(blockIdx.y);
  float value = 0;
  if (row < job.rows) {
    const std::byte* tile = job.w + row / kTileRows * job.tile_bytes;
    for (int64_t first = 0; first < params.padded_cols; first += kSliceCols) {
      const int64_t end = min(first + kSliceCols, params.padded_cols);
      const float sum = PlainSlice(params, tile, row % kTileRows, x_row, first, end);
      value = first == 0 ? sum : value + sum;
    }
    if (job.y != nullptr) job.y[x_row * job.y_stride + row] = value;
  }
  if (job.out.q != nullptr) {
    StoreActivation32(job.out, x_row, job.out_col / 32 + blockIdx.x, value);
  } else if (row < job.rows) {
    const int64_t at = x_row * job.out.cols + job.out_col + row;
    if (job.out.f32 != nullptr) job.out.f32[at] = value;
    if (job.out.bf16 != nullptr) job.out.bf16[at] = FloatToBf16(value);
  }
}

// ---- Host side.

void CheckJob(const ProductJob& job) {
  const std::string_view type = Info(job.w.dtype).name;
  CHECK(IsDeviceMatrixType(job.w.dtype)) << type << " has no packed form";
  CHECK(job.w.count == 1 && job.w.rows > 0 && job.w.cols > 0)
      << job.w.count << " x " << job.w.rows << " x " << job.w.cols;
  CHECK(job.x.rows > 0 && job.x_col % kColumnGrain == 0 &&
        job.x_col + job.w.padded_cols() <= job.x.cols)
      << "x columns " << job.x_col << " + " << job.w.padded_cols() << " of " << job.x.cols;
  CHECK(IsFloatType(job.w.dtype) ? job.x.f32 != nullptr
                                 : job.x.q != nullptr && job.x.scale != nullptr)
      << "x lacks the form that " << type << " reads";
  CHECK(job.out.q == nullptr || (job.w.rows % 32 == 0 && job.out_col % 32 == 0))
      << job.w.rows << " rows at column " << job.out_col << " are no whole blocks of 32";
}

DeviceJob MakeJob(const ProductJob& job) {
  DeviceJob device = {};
  device.dtype = job.w.dtype;
  device.rows = static_cast<int>(job.w.rows);
  device.lanes = 1;
  device.slices = static_cast<int>((job.w.padded_cols() + kSliceCols - 1) / kSliceCols);
  device.chunks = static_cast<int>(job.w.padded_cols() / ChunkCols(job.w.dtype));
  device.w = job.w.data;
  device.tile_bytes = TileBytes(job.w.dtype, job.w.cols);
  device.matrix_bytes = job.w.matrix_bytes();
  device.x = job.x;
  device.x_col = job.x_col;
  device.y = job.y;
  device.y_stride = job.y_stride;
  device.out = job.out;
  device.out_col = job.out_col;
  return device;
}

int NumTiles(const DeviceJob& job) { return (job.rows + kTileRows - 1) / kTileRows; }

// Row tiles of a block: enough (tile, slice) pairs for its warps, as long as every SM gets a block;
// more when there are many blocks, since starting one costs.
int ChooseTilesPerBlock(const DeviceJob& job, int num_sms) {
  const int tiles = NumTiles(job);
  const int segments = job.lanes * job.slices;
  int per_block = job.out.q != nullptr ? 2 : 1;
  while (per_block < kWarps && per_block * segments < kWarps && tiles / per_block > num_sms) {
    per_block *= 2;
  }
  const int limit = job.lanes > 1 ? 1 : 4;
  while (per_block < limit && tiles / per_block > 8 * num_sms) per_block *= 2;
  return per_block;
}

// Fills in how the grid is cut and launches. total_rows: most rows of totals that a block keeps.
void LaunchJobs(const LaunchContext& launch, ProductParams& params) {
  const int rows = params.jobs[0].x.rows;
  const int tiles = rows <= 8 ? 1 : rows <= 16 ? 2 : 4;
  int blocks = 0;
  int total_rows = 0;
  for (int i = 0; i < params.num_jobs; ++i) {
    DeviceJob& job = params.jobs[i];
    job.tiles_per_block = ChooseTilesPerBlock(job, launch.num_sms);
    job.first_block = blocks;
    const int group_rows = 8 * (IsFloatType(job.dtype) ? std::min(tiles, 2) : tiles);
    job.groups = (rows + group_rows - 1) / group_rows;
    blocks += (NumTiles(job) + job.tiles_per_block - 1) / job.tiles_per_block * job.groups;
    total_rows = std::max(total_rows, job.lanes * job.tiles_per_block * kTileRows);
  }
  const dim3 grid(static_cast<unsigned>(blocks));
  if (tiles == 1) {
    Launch(launch, grid, dim3(kThreads), Room<1>::Bytes(total_rows), ProductKernel<1>, params);
  } else if (tiles == 2) {
    Launch(launch, grid, dim3(kThreads), Room<2>::Bytes(total_rows), ProductKernel<2>, params);
  } else {
    Launch(launch, grid, dim3(kThreads), Room<4>::Bytes(total_rows), ProductKernel<4>, params);
  }
}

void LaunchGeneral(const LaunchContext& launch, std::span<const ProductJob> jobs) {
  ProductParams params = {};
  params.num_jobs = static_cast<int>(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) params.jobs[i] = MakeJob(jobs[i]);
  LaunchJobs(launch, params);
}

}  // namespace

void LaunchProducts(const LaunchContext& launch, std::span<const ProductJob> jobs) {
  CHECK(!jobs.empty() && jobs.size() <= kMaxProductJobs) << jobs.size() << " jobs";
  for (const ProductJob& job : jobs) {
    CheckJob(job);
    CHECK(job.x.rows == jobs[0].x.rows) << job.x.rows << " and " << jobs[0].x.rows;
  }
  if (LaunchFewRowProducts(launch, jobs, {})) return;
  if (jobs[0].x.rows <= kMaxFewProductRows) return LaunchGeneral(launch, jobs);
  // Batches have kernels for Q8_0 alone, and for float types alone.
  std::vector<ProductJob> sorted(jobs.begin(), jobs.end());
  const auto is_q8 = [](const ProductJob& job) { return job.w.dtype == DType::kQ8_0; };
  const auto is_float = [](const ProductJob& job) { return IsFloatType(job.w.dtype); };
  const auto floats = std::stable_partition(sorted.begin(), sorted.end(), is_q8);
  const auto others = std::stable_partition(floats, sorted.end(), is_float);
  for (const std::span<const ProductJob> same :
       {std::span(sorted.begin(), floats), std::span(floats, others),
        std::span(others, sorted.end())}) {
    if (!same.empty() && !LaunchBatchProducts(launch, same, {})) LaunchGeneral(launch, same);
  }
}

void LaunchLaneProduct(const LaunchContext& launch, const PackedMatrix& w, const ActivationView& x,
                       int lane_begin, float* roots) {
  const int lanes = static_cast<int>(w.count);
  CHECK(w.count >= 1 && w.count <= kMaxProductLanes)
      << w.count << " lanes, at most " << kMaxProductLanes;
  CHECK(w.count * w.padded_cols() <= x.cols)
      << w.count << " lanes of " << w.padded_cols() << " columns, x has " << x.cols;
  const auto subtrees = SubtreesOf(lane_begin, lane_begin + lanes);
  CHECK(subtrees.size() <= kMaxProductRoots) << subtrees.size();
  ProductParams params = {};
  params.num_jobs = 1;
  params.lanes.roots = roots;
  params.lanes.lanes = lanes;
  params.lanes.num_roots = static_cast<int>(subtrees.size());
  for (size_t i = 0; i < kMaxProductRoots && i < subtrees.size(); ++i) {
    params.lanes.begin[i] = static_cast<int8_t>(subtrees[i].begin - lane_begin);
    params.lanes.size[i] = static_cast<int8_t>(subtrees[i].size);
  }
  ProductJob job;
  job.w = w.At(0);
  job.x = x;
  CheckJob(job);
  params.jobs[0] = MakeJob(job);
  params.jobs[0].lanes = lanes;
  params.jobs[0].lane_x_cols = w.padded_cols();
  if (LaunchFewRowProducts(launch, {&job, 1}, params.lanes)) return;
  if (!LaunchBatchProducts(launch, {&job, 1}, params.lanes)) LaunchJobs(launch, params);
}

void LaunchProductPlain(const LaunchContext& launch, const ProductJob& job) {
  CheckJob(job);
  PlainParams params = {};
  params.job = MakeJob(job);
  params.chunk_cols = ChunkCols(job.w.dtype);
  params.chunk_bytes = ChunkBytes(job.w.dtype);
  params.padded_cols = job.w.padded_cols();
  const dim3 grid(static_cast<unsigned>((job.w.rows + 31) / 32), static_cast<unsigned>(job.x.rows));
  Launch(launch, grid, dim3(32), 0, PlainProductKernel, params);
}

}  // namespace ds4::cuda
