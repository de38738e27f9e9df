// The indexer's scores of all visible compressed rows, from which indexer_choose.cu chooses.
//
// On bf16 caches of 128 channels matrix instructions find them: keys are the left operand,
// one row's heads, rotated and rounded to bf16, the right one. Columns are dealt to the
// instructions so that a lane's values of 32 columns are 16 bytes in a row: both sides use the same
// deal, so the dot products are the same sums. Two kernels share the work in two ways with the same
// bits. For few rows a warp has eight heads and all warps of a block go through the same keys, so
// that a block is done soon. For many rows a warp has some keys, and heads after heads of several
// rows come from shared memory, so that keys are read once for all of them. Any other shape takes
// the plain kernel, a thread a key.
//
// The order of additions of a score: of eight heads, lane t of four adds its two; each lane adds
// these over the eights; then the four lanes.
#include <algorithm>
#include <cmath>

#include "engine/base/check.h"
#include "engine/cuda/indexer.cuh"

namespace ds4::cuda {
namespace {

constexpr int64_t kScratchLimit = int64_t{256} << 20;

constexpr int kDim = 128;  // of the matrix kernels
constexpr int kMaxHeads = 128;

constexpr int kMaxFewScoreRows = 64;
constexpr int kFewKeys = 32;   // of a block at once
constexpr int kFewBlocks = 4;  // on one SM
constexpr int kKeyBytes = 2 * kDim;

constexpr int kRowTile = 4;
constexpr int kScoreWarps = 4;
constexpr int kWarpKeys = 32;
constexpr int kBlockKeys = kScoreWarps * kWarpKeys;
constexpr int kScoreThreads = kScoreWarps * kWarpSize;
constexpr int kMaxKeyTiles = 16;  // runs of keys of one block

// Channels c and c + 1 (c even) of a head of row t, rotated.
__device__ __forceinline__ float2 RotatedPair(const IndexArgs& args, int t, float2 x, int c) {
  const int first = args.params.index_dim - args.params.rope_dim;
  if (c < first) return x;
  const int64_t at = (static_cast<int64_t>(t) * args.params.rope_dim + (c - first)) / 2;
  return RotatePair(x, args.rope.cos[at], args.rope.sin[at]);
}

// ---- Scores by matrix instructions, many rows ----

// Shared memory of one row: its heads in the order in which lanes read them, then their weights.
__device__ __host__ constexpr int QueryBytes(int heads) { return heads * kDim * 2; }
constexpr int64_t ScoreSharedBytes(int heads, int rows) {
  return static_cast<int64_t>(rows) * (QueryBytes(heads) + heads * 4);
}

// One row into shared memory: unit (n, group, lane 4g + t) is 16 bytes, columns 32 group + 8t..+7
// of head 8n + g.
__device__ __forceinline__ void StageQuery(const IndexArgs& args, int t, uint4* query,
                                           float* weights) {
  const int heads = args.params.index_heads;
  const float* q = args.q + static_cast<int64_t>(t) * heads * kDim;
  for (int unit = static_cast<int>(threadIdx.x); unit < heads * 16; unit += kScoreThreads) {
    const int lane = unit % kWarpSize, group = unit / kWarpSize % 4, n = unit / (4 * kWarpSize);
    const int c = 32 * group + 8 * (lane % 4);
    const float4* from = reinterpret_cast<const float4*>(q + (8 * n + lane / 4) * kDim + c);
    const float4 lo = from[0], hi = from[1];
    const float2 p0 = RotatedPair(args, t, make_float2(lo.x, lo.y), c);
    const float2 p1 = RotatedPair(args, t, make_float2(lo.z, lo.w), c + 2);
    const float2 p2 = RotatedPair(args, t, make_float2(hi.x, hi.y), c + 4);
    const float2 p3 = RotatedPair(args, t, make_float2(hi.z, hi.w), c + 6);
    query[unit] = make_uint4(FloatsToBf162(p0.x, p0.y), FloatsToBf162(p1.x, p1.y),
                             FloatsToBf162(p2.x, p2.y), FloatsToBf162(p3.x, p3.y));
  }
  for (int i = static_cast<int>(threadIdx.x); i < heads; i += kScoreThreads) {
    weights[i] = args.head_weights[static_cast<int64_t>(t) * heads + i];
  }
}

// 32 keys of a warp: two tiles of 16, of each lane rows g and g + 8, four groups of 32 columns.
struct WarpKeys {
  uint4 row[2][2][4];
};

__device__ __forceinline__ void LoadKeys(const IndexArgs& args, int slot, int first,
                                         WarpKeys& keys) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const uint4* base = static_cast<const uint4*>(args.keys) +
                      static_cast<int64_t>(slot) * args.max_rows * (kDim / 8) + lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first + 16 * m + 8 * half + lane / 4;
      const uint4* from = base + static_cast<int64_t>(key) * (kDim / 8);
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        keys.row[m][half][group] = key < args.max_rows ? from[4 * group] : make_uint4(0, 0, 0, 0);
      }
    }
  }
}

// d[m] += tile m of the warp's keys times eight heads, columns 32 group..+31.
__device__ __forceinline__ void Multiply(const WarpKeys& keys, int group, uint4 b,
                                         float (&d)[2][4]) {
  const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint4 lo = keys.row[m][0][group], hi = keys.row[m][1][group];
    const uint32_t a[4] = {lo.x, hi.x, lo.y, hi.y};
    MmaBf16(d[m], a, b0);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint4 lo = keys.row[m][0][group], hi = keys.row[m][1][group];
    const uint32_t a[4] = {lo.z, hi.z, lo.w, hi.w};
    MmaBf16(d[m], a, b1);
  }
}

// What a lane's two heads of eight add to a score.
__device__ __forceinline__ float HeadPair(float2 weight, float dot0, float dot1) {
  return fmaf(weight.y, fmaxf(dot1, 0.0f), weight.x * fmaxf(dot0, 0.0f));
}

// The scores of the warp's keys for one row. Lane 4g + t returns that of key 16 (t / 2) + 8 (t % 2)
// + g. kGroups groups of eight heads go side by side, so that no product waits for the one before.
template <int kGroups>
__device__ __forceinline__ float WarpScores(const WarpKeys& keys, const uint4* query,
                                            const float* weights, int heads) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, t = lane % 4;
  float sum[2][2] = {};
#pragma unroll 1
  for (int n = 0; n < heads / 8; n += kGroups) {
    float d[kGroups][2][4] = {};
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        Multiply(keys, group, query[(4 * (n + i) + group) * kWarpSize + lane], d[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float2 w = *reinterpret_cast<const float2*>(weights + 8 * (n + i) + 2 * t);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sum[m][half] += HeadPair(w, d[i][m][2 * half], d[i][m][2 * half + 1]);
        }
      }
    }
  }
  float score = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float s = sum[m][half];
      s += __shfl_xor_sync(kFullMask, s, 1);
      s += __shfl_xor_sync(kFullMask, s, 2);
      if (t == 2 * m + half) score = s;
    }
  }
  return score;
}

__global__ void __launch_bounds__(kScoreThreads) ManyScoresKernel(IndexArgs args, int key_tiles) {
  DS4_DYNAMIC_SHARED(shared);
  LaunchDependents();
  GridDependencyWait();
  const int heads = args.params.index_heads, top_k = args.params.index_top_k;
  const int first_row = args.first + static_cast<int>(blockIdx.y) * kRowTile;
  const int num_rows = min(kRowTile, args.end - first_row);
  const int first_key = static_cast<int>(blockIdx.x) * key_tiles * kBlockKeys;
  int most = 0;
  for (int r = 0; r < num_rows; ++r) most = max(most, VisibleRows(args, first_row + r));
  if (most <= top_k || most <= first_key) return;

  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp_key = first_key + static_cast<int>(threadIdx.x) / kWarpSize * kWarpKeys;
  WarpKeys keys;
  int loaded_slot = max(args.step.slot[first_row], 0);
  LoadKeys(args, loaded_slot, warp_key, keys);  // on their way while the queries are made
  uint4* queries = reinterpret_cast<uint4*>(shared);
  float* weights = reinterpret_cast<float*>(shared + kRowTile * QueryBytes(heads));
  for (int r = 0; r < num_rows; ++r) {
    StageQuery(args, first_row + r, queries + r * (heads * 16), weights + r * heads);
  }
  __syncthreads();

  const int end_key = min(most, first_key + key_tiles * kBlockKeys);
  for (int first = warp_key; first < end_key; first += kBlockKeys) {
    if (first != warp_key) LoadKeys(args, loaded_slot, first, keys);
    for (int r = 0; r < num_rows; ++r) {
      const int visible = VisibleRows(args, first_row + r);
      if (visible <= top_k || visible <= first) continue;
      if (args.step.slot[first_row + r] != loaded_slot) {
        loaded_slot = args.step.slot[first_row + r];
        LoadKeys(args, loaded_slot, first, keys);
      }
      const uint4* query = queries + r * (heads * 16);
      const float score = heads % 16 == 0 ? WarpScores<2>(keys, query, weights + r * heads, heads)
                                          : WarpScores<1>(keys, query, weights + r * heads, heads);
      const int key = first + 16 * (lane % 4 / 2) + 8 * (lane % 2) + lane / 4;
      if (key < visible) {
        args.scores[(first_row + r - args.first) * args.stride + key] = score * args.scale;
      }
    }
  }
}

// ---- Scores by matrix instructions, few rows ----

// Shared memory: kFewKeys keys, whose 16-byte chunks 4 to 7 of eight stand before 0 to 3 in odd
// rows, against bank conflicts; each warp's part of their scores; the row's angles.
constexpr int64_t FewSharedBytes(int heads) {
  return kFewKeys * kKeyBytes + heads / 8 * (kFewKeys * 4 * 4) + kDim / 2 * 8;
}

// Starts the copies of the run of keys at `first`, as far as they are visible. keys: of the slot.
__device__ __forceinline__ void CopyRun(const std::byte* keys, int first, int visible,
                                        std::byte* to) {
#pragma unroll 1
  for (int unit = static_cast<int>(threadIdx.x); unit < kFewKeys * (kKeyBytes / 16);
       unit += static_cast<int>(blockDim.x)) {
    const int key = unit / (kKeyBytes / 16);
    if (first + key < visible) {
      CopyAsync16(to + 16 * (unit ^ (key % 2 * 4)),
                  keys + static_cast<int64_t>(first) * kKeyBytes + 16 * unit);
    }
  }
  CopyAsyncCommit();
}

// A lane's part of its warp's eight heads, the right operand: columns 32 group + 8t..+7 of head g.
struct EightHeads {
  uint4 group[4];
};
__device__ __forceinline__ EightHeads RotateHeads(const uint4 (&q)[4][2], const float4* angles) {
  EightHeads heads;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const float4* of = angles + 2 * (4 * group + static_cast<int>(threadIdx.x) % 4);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = q[group][i];
      const float4 turn = of[i];
      const float2 lo =
          RotatePair(make_float2(__uint_as_float(x.x), __uint_as_float(x.y)), turn.x, turn.y);
      const float2 hi =
          RotatePair(make_float2(__uint_as_float(x.z), __uint_as_float(x.w)), turn.z, turn.w);
      words[2 * i] = FloatsToBf162(lo.x, lo.y);
      words[2 * i + 1] = FloatsToBf162(hi.x, hi.y);
    }
    heads.group[group] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return heads;
}

// The warp's part of the scores of a run of keys: that of key k and lanes t at 4k + t.
__device__ __forceinline__ void AddRun(const std::byte* keys, const EightHeads& heads,
                                       float2 weight, float* parts) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int odd = lane / 4 % 2 * 64;
  const std::byte* own = keys + lane / 4 * kKeyBytes + lane % 4 * 16;
  float d[2][4] = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint32_t b0[2] = {heads.group[group].x, heads.group[group].y};
    const uint32_t b1[2] = {heads.group[group].z, heads.group[group].w};
    const std::byte* from = own + (64 * group ^ odd);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 lo = *reinterpret_cast<const uint4*>(from + 16 * m * kKeyBytes);
      const uint4 hi = *reinterpret_cast<const uint4*>(from + (16 * m + 8) * kKeyBytes);
      const uint32_t a0[4] = {lo.x, hi.x, lo.y, hi.y}, a1[4] = {lo.z, hi.z, lo.w, hi.w};
      MmaBf16(d[m], a0, b0);
      MmaBf16(d[m], a1, b1);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      parts[(2 * m + half) * kWarpSize + lane] =
          HeadPair(weight, d[m][2 * half], d[m][2 * half + 1]);
    }
  }
}

// All warps' parts to the scores of a run of keys.
__device__ __forceinline__ void StoreRun(const float* parts, int warps, float scale, int count,
                                         float* scores) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 4 * kFewKeys; i += static_cast<int>(blockDim.x)) {
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += parts[w * (4 * kFewKeys) + i];
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    if (i % 4 == 0 && i / 4 < count) scores[i / 4] = sum * scale;
  }
}

// The row's angles by pairs of channels, (cos, sin), into shared memory, by one warp; pairs before
// the rotated ones stay as they are.
__device__ __forceinline__ void LoadAngles(const IndexArgs& args, int t, int lane, float2* angles) {
  const int pairs = args.params.rope_dim / 2, first = kDim / 2 - pairs;
  const float* cos = args.rope.cos + t * pairs - first;
  const float* sin = args.rope.sin + t * pairs - first;
  float2 own[2] = {{1.0f, 0.0f}, {1.0f, 0.0f}};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int i = lane + k * kWarpSize;
    if (i >= first) own[k] = make_float2(cos[i], sin[i]);
  }
  angles[lane] = own[0];
  angles[lane + kWarpSize] = own[1];
}

// One row and key_tiles runs of keys, a warp for eight heads. turn: as RehearseAndRun has it.
__device__ __forceinline__ void ScoreRuns(const IndexArgs& args, int key_tiles, std::byte* shared,
                                          bool turn) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float* all_parts = reinterpret_cast<float*>(shared + kFewKeys * kKeyBytes);
  float2* angles = reinterpret_cast<float2*>(all_parts + warps * (4 * kFewKeys));
  const int row = static_cast<int>(blockIdx.y), t = args.first + row;
  const int first_key = static_cast<int>(blockIdx.x) * key_tiles * kFewKeys;
  uint4 q[4][2] = {};
  float2 weight = make_float2(0.0f, 0.0f);
  const std::byte* keys = static_cast<const std::byte*>(args.keys);
  int visible = first_key, end_key = first_key;
  if (turn) {
    // All that needs no position is on its way before the position is used.
    const int slot = args.step.slot[t], pos = args.step.pos[t];
    const int64_t head = static_cast<int64_t>(t) * (8 * warps) + 8 * warp;
    const float* q_at = args.q + (head + lane / 4) * kDim + lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      q[group][0] = LoadEarly16(q_at + 32 * group);
      q[group][1] = LoadEarly16(q_at + 32 * group + 4);
    }
    if (warp == 0) LoadAngles(args, t, lane, angles);
    visible = VisibleRows(args, slot, pos);
    end_key = min(visible, first_key + key_tiles * kFewKeys);
    if (visible <= args.params.index_top_k || first_key >= end_key) return;
    keys += static_cast<int64_t>(slot) * args.max_rows * kKeyBytes;
    CopyRun(keys, first_key, visible, shared);
    weight = *reinterpret_cast<const float2*>(args.head_weights + head + lane % 4 * 2);
  }
  __syncthreads();
  const EightHeads heads = RotateHeads(q, reinterpret_cast<const float4*>(angles));

  float* scores = args.scores + row * args.stride;
#pragma unroll 1
  for (int first = first_key;;) {
    CopyAsyncWait<0>();
    __syncthreads();
    AddRun(shared, heads, weight, all_parts + warp * (4 * kFewKeys));
    __syncthreads();
    const int next = first + kFewKeys;
    if (next < end_key) CopyRun(keys, next, visible, shared);
    StoreRun(all_parts, warps, args.scale, visible - first, scores + first);
    if (next >= end_key) break;
    first = next;
  }
}

__global__ void __launch_bounds__(kMaxHeads * 4, 2)
    FewScoresKernel(IndexArgs args, int key_tiles, bool rehearse) {
  DS4_DYNAMIC_SHARED(shared);
  LaunchDependents();
  RehearseAndRun(rehearse, [&](bool turn) { ScoreRuns(args, key_tiles, shared, turn); });
}

// ---- Scores of any shape ----

int64_t PlainSharedBytes(const AttentionParams& params) {
  return (static_cast<int64_t>(params.index_heads) * params.index_dim +
          static_cast<int64_t>(kBlockKeys) * (params.index_dim + 1)) *
         4;
}

__global__ void __launch_bounds__(kBlockKeys) PlainScoresKernel(IndexArgs args) {
  DS4_DYNAMIC_SHARED(shared);
  LaunchDependents();
  GridDependencyWait();
  const int heads = args.params.index_heads, dim = args.params.index_dim;
  const int t = args.first + static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.x) * kBlockKeys;
  const int visible = VisibleRows(args, t);
  if (visible <= args.params.index_top_k || visible <= first) return;

  float* query = reinterpret_cast<float*>(shared);
  float* keys = query + heads * dim;  // a value more a row, against bank conflicts
  const float* q = args.q + static_cast<int64_t>(t) * heads * dim;
  for (int i = 2 * static_cast<int>(threadIdx.x); i < heads * dim; i += 2 * kBlockKeys) {
    const float2 x = RotatedPair(args, t, make_float2(q[i], q[i + 1]), i % dim);
    query[i] = x.x;
    query[i + 1] = x.y;
  }
  const int count = min(kBlockKeys, visible - first);
  const int64_t base = (static_cast<int64_t>(args.step.slot[t]) * args.max_rows + first) * dim;
  for (int i = static_cast<int>(threadIdx.x); i < count * dim; i += kBlockKeys) {
    keys[i / dim * (dim + 1) + i % dim] = LoadKv(args.keys, base + i, args.params.kv_type);
  }
  __syncthreads();

  const int own = static_cast<int>(threadIdx.x);
  if (own >= count) return;
  const float* weights = args.head_weights + static_cast<int64_t>(t) * heads;
  float sum = 0.0f;
  for (int h = 0; h < heads; ++h) {
    float dot = 0.0f;
    for (int c = 0; c < dim; ++c) dot = fmaf(query[h * dim + c], keys[own * (dim + 1) + c], dot);
    sum = fmaf(weights[h], fmaxf(dot, 0.0f), sum);
  }
  args.scores[(t - args.first) * args.stride + first + own] = sum * args.scale;
}

// ---- Host ----

bool UsesMatrixKernel(const AttentionParams& params) {
  return params.kv_type == KvType::kBF16 && params.index_dim == kDim &&
         params.index_heads % 8 == 0 && params.index_heads <= kMaxHeads;
}

void CheckParams(const AttentionParams& params, const CompressorCache& cache, int64_t max_visible) {
  CHECK(params.ratio > 0 && params.index_top_k > 0 && params.index_heads > 0)
      << "an indexer with ratio " << params.ratio << ", top " << params.index_top_k << ", "
      << params.index_heads << " heads";
  CHECK(params.index_dim > 0 && params.index_dim % 2 == 0 && params.rope_dim % 2 == 0 &&
        params.rope_dim <= params.index_dim && cache.dim == params.index_dim)
      << "indexer keys of " << cache.dim << " channels, queries of " << params.index_dim << ", "
      << params.rope_dim << " rotated";
  CHECK(max_visible <= cache.max_rows)
      << max_visible << " visible rows in a cache of " << cache.max_rows;
  CHECK(UsesMatrixKernel(params) || PlainSharedBytes(params) <= 220 * 1024)
      << params.index_heads << " heads of " << params.index_dim << " channels need "
      << PlainSharedBytes(params) << " bytes of shared memory";
}

// Rows scored at once, so that their scores fit the scratch.
int64_t ScoreRows(int64_t rows, int64_t stride) {
  return std::min(rows, std::max<int64_t>(kRowTile, kScratchLimit / (4 * stride)));
}

int64_t ScoreStride(int64_t max_visible) { return (max_visible + 3) / 4 * 4; }

// Runs of keys of one block, so that `blocks` blocks of one run each become no more than `enough`
// where possible.
int KeyTiles(int64_t blocks, int64_t enough) {
  return static_cast<int>(std::clamp<int64_t>(blocks / enough, 1, kMaxKeyTiles));
}

void LaunchFewScores(const LaunchContext& launch, const IndexArgs& args, int64_t max_visible) {
  const int rows = args.end - args.first, heads = args.params.index_heads;
  const int key_runs = static_cast<int>((max_visible + kFewKeys - 1) / kFewKeys);
  const int tiles = KeyTiles(int64_t{key_runs} * rows, int64_t{kFewBlocks} * launch.num_sms);
  const dim3 grid((key_runs + tiles - 1) / tiles, rows);
  Launch(launch, grid, dim3(heads * 4), FewSharedBytes(heads), FewScoresKernel, args, tiles,
         int64_t{grid.x} * grid.y <= launch.num_sms);
}

// Neighbours share the keys that a warp holds, and a block keeps its queries for several runs of
// keys, as long as every SM has some blocks.
void LaunchManyScores(const LaunchContext& launch, const IndexArgs& args, int64_t max_visible) {
  const int key_runs = static_cast<int>((max_visible + kBlockKeys - 1) / kBlockKeys);
  const int row_blocks = (args.end - args.first + kRowTile - 1) / kRowTile;
  const int tiles = KeyTiles(int64_t{key_runs} * row_blocks, int64_t{8} * launch.num_sms);
  const dim3 grid((key_runs + tiles - 1) / tiles, row_blocks);
  Launch(launch, grid, dim3(kScoreThreads), ScoreSharedBytes(args.params.index_heads, kRowTile),
         ManyScoresKernel, args, tiles);
}

// Neither the rows nor the keys of a block matter to the results.
void LaunchScores(const LaunchContext& launch, const IndexArgs& args, int64_t max_visible) {
  const int rows = args.end - args.first;
  if (!UsesMatrixKernel(args.params)) {
    const dim3 grid((max_visible + kBlockKeys - 1) / kBlockKeys, rows);
    Launch(launch, grid, dim3(kBlockKeys), PlainSharedBytes(args.params), PlainScoresKernel, args);
  } else if (rows <= kMaxFewScoreRows) {
    LaunchFewScores(launch, args, max_visible);
  } else {
    LaunchManyScores(launch, args, max_visible);
  }
}

}  // namespace

int64_t IndexScratchBytes(const AttentionParams& params, int64_t rows, int64_t max_visible) {
  if (max_visible <= params.index_top_k) return 0;
  // Never less for fewer visible rows or more rows, so that one scratch serves smaller steps.
  const int64_t row_bytes = 4 * ScoreStride(max_visible);
  return std::min(rows * row_bytes, std::max(kScratchLimit, kRowTile * row_bytes));
}

void LaunchIndex(const LaunchContext& launch, const AttentionParams& params, const StepRows& step,
                 int rows, const RopeView& rope, const float* index_q, const float* head_weights,
                 const CompressorCache& cache, int64_t max_visible, std::byte* scratch,
                 int32_t* picks, int32_t* count) {
  CheckParams(params, cache, max_visible);
  IndexArgs args;
  args.params = params;
  args.by_ratio = MakeDivider(params.ratio);
  args.step = step;
  args.rope = rope;
  args.q = index_q;
  args.head_weights = head_weights;
  args.keys = cache.rows;
  args.max_rows = cache.max_rows;
  args.end = rows;
  if (max_visible <= params.index_top_k) {
    LaunchChoose(launch, args, max_visible, picks, count);
    return;
  }
  args.scale = 1.0f / (std::sqrt(static_cast<float>(params.index_dim)) *
                       std::sqrt(static_cast<float>(params.index_heads)));
  args.scores = reinterpret_cast<float*>(scratch);
  args.stride = ScoreStride(max_visible);
  const int64_t batch = ScoreRows(rows, args.stride);
  for (int64_t first = 0; first < rows; first += batch) {
    args.first = static_cast<int>(first);
    args.end = static_cast<int>(std::min<int64_t>(rows, first + batch));
    LaunchScores(launch, args, max_visible);
    LaunchChoose(launch, args, max_visible, picks, count);
  }
}

}  // namespace ds4::cuda
