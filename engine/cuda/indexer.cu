// The indexer's choice of compressed rows: scores of all visible rows, then the best of them.
//
// Scores. A block has some rows (queries) and a run of keys. On bf16 caches of 128 channels matrix
// instructions find them: a warp holds 32 keys in registers as the left operand, and one row's
// heads after another come from shared memory as the right one, already rotated and rounded to
// bf16. Columns are dealt to the instructions so that a lane's values of 32 columns are 16 bytes in
// a row: both sides use the same deal, so the dot products are the same sums. Any other shape takes
// the plain kernel, a thread a key.
//
// Choice. A block a row: four passes over bytes of the scores find the k-th largest, then
// everything above it and the first of its equals are written in rising order.
#include <algorithm>
#include <cmath>

#include "engine/base/check.h"
#include "engine/cuda/attention.cuh"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int64_t kScratchLimit = int64_t{256} << 20;
constexpr int kMaxRowTile = 4;

constexpr int kDim = 128;  // of the matrix kernel
constexpr int kScoreWarps = 4;
constexpr int kWarpKeys = 32;
constexpr int kBlockKeys = kScoreWarps * kWarpKeys;
constexpr int kScoreThreads = kScoreWarps * kWarpSize;
constexpr int kMaxKeyTiles = 16;  // runs of kBlockKeys of one block

constexpr int kChooseThreads = 1024;
constexpr int kChooseWarps = kChooseThreads / kWarpSize;
constexpr int kMaxKeptKeys = 32768;  // a row's keys in shared memory; more are read again
constexpr int kDigits = 256;

struct IndexArgs {
  AttentionParams params;
  StepRows step;
  RopeView rope;
  const float* q = nullptr;
  const float* head_weights = nullptr;
  const void* keys = nullptr;  // [slots][max_rows][index_dim]
  int max_rows = 0;
  int first = 0;  // rows [first, end) of the step
  int end = 0;
  float scale = 0;
  float* scores = nullptr;  // [end - first][stride]
  int64_t stride = 0;
};

// Rows that row t sees; none for a row that only fills up the batch.
__device__ __forceinline__ int VisibleRows(const IndexArgs& args, int t) {
  return args.step.slot[t] < 0 ? 0 : (args.step.pos[t] + 1) / args.params.ratio;
}

// Channels c and c + 1 (c even) of a head of row t, rotated.
__device__ __forceinline__ float2 RotatedPair(const IndexArgs& args, int t, float2 x, int c) {
  const int first = args.params.index_dim - args.params.rope_dim;
  if (c < first) return x;
  const int64_t at = (static_cast<int64_t>(t) * args.params.rope_dim + (c - first)) / 2;
  return RotatePair(x, args.rope.cos[at], args.rope.sin[at]);
}

// ---- Scores by matrix instructions ----

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

// The scores of the warp's keys for one row. Lane 4g + t returns that of key 16 (t / 2) + 8 (t % 2)
// + g. Heads are added in four sums (by their place in a group of eight, two to a lane), then
// those. kGroups groups of eight heads go side by side, so that no product waits for the one
// before.
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
          sum[m][half] = fmaf(w.x, fmaxf(d[i][m][2 * half], 0.0f), sum[m][half]);
          sum[m][half] = fmaf(w.y, fmaxf(d[i][m][2 * half + 1], 0.0f), sum[m][half]);
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

__global__ void __launch_bounds__(kScoreThreads)
    ScoresKernel(IndexArgs args, int row_tile, int key_tiles) {
  DS4_DYNAMIC_SHARED(shared);
  LaunchDependents();
  GridDependencyWait();
  const int heads = args.params.index_heads, top_k = args.params.index_top_k;
  const int first_row = args.first + static_cast<int>(blockIdx.y) * row_tile;
  const int num_rows = min(row_tile, args.end - first_row);
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
  float* weights = reinterpret_cast<float*>(shared + row_tile * QueryBytes(heads));
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

// ---- Choice ----

// Bits that order like the choice (engine/kernels/indexer.cc): -0 equals +0, NaN comes last.
__device__ __forceinline__ uint32_t RisingBits(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  if (score != score) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ int WarpSumInt(int value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(kFullMask, value, lane);
  return value;
}

// One warp: in which digit the need-th largest lies, and how many it still needs there.
struct Place {
  int digit;
  int need;
};
__device__ __forceinline__ void FindDigit(const int* histogram, int need, Place* found) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  constexpr int kOwn = kDigits / kWarpSize;
  const int top = kDigits - 1 - lane * kOwn;  // lane 0 has the largest digits
  int own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += histogram[top - i];
  int upto = own;  // of this lane and those with larger digits
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_sync(kFullMask, upto, max(lane - step, 0));
    if (lane >= step) upto += other;
  }
  int above = upto - own;
  if (above >= need || upto < need) return;
  for (int i = 0; i < kOwn; ++i) {
    const int here = histogram[top - i];
    if (above + here >= need) {
      *found = {top - i, need - above};
      return;
    }
    above += here;
  }
}

// The row's keys as RisingBits: the first `kept` in shared memory.
struct RowScores {
  const float* scores;
  const uint32_t* kept_bits;
  int kept;
  __device__ __forceinline__ uint32_t operator[](int i) const {
    return i < kept ? kept_bits[i] : RisingBits(scores[i]);
  }
};

// Writes the ids of keys above `threshold`, and of the first `ties` equal to it, in rising order.
// Each warp counts what its stretch of ids adds, so that it knows where to write.
__device__ __forceinline__ void WriteChoice(const RowScores& keys, int count, uint32_t threshold,
                                            int ties, int32_t* picks) {
  __shared__ int above_of[kChooseWarps], equal_of[kChooseWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int stretch = (count + kChooseThreads - 1) / kChooseThreads * kWarpSize;
  const int begin = min(count, warp * stretch), end = min(count, begin + stretch);
  int above = 0, equal = 0;
  for (int first = begin; first < end; first += kWarpSize) {
    const uint32_t key = first + lane < end ? keys[first + lane] : 0;
    above += __popc(__ballot_sync(kFullMask, first + lane < end && key > threshold));
    equal += __popc(__ballot_sync(kFullMask, first + lane < end && key == threshold));
  }
  if (lane == 0) {
    above_of[warp] = above;
    equal_of[warp] = equal;
  }
  __syncthreads();
  above = WarpSumInt(lane < warp ? above_of[lane] : 0);
  equal = WarpSumInt(lane < warp ? equal_of[lane] : 0);
  const uint32_t before = (1u << lane) - 1;
  for (int first = begin; first < end; first += kWarpSize) {
    const uint32_t key = first + lane < end ? keys[first + lane] : 0;
    const bool is_above = first + lane < end && key > threshold;
    const bool is_equal = first + lane < end && key == threshold;
    const uint32_t above_mask = __ballot_sync(kFullMask, is_above);
    const uint32_t equal_mask = __ballot_sync(kFullMask, is_equal);
    const int equal_before = equal + __popc(equal_mask & before);
    if (is_above || (is_equal && equal_before < ties)) {
      picks[above + __popc(above_mask & before) + min(equal_before, ties)] = first + lane;
    }
    above += __popc(above_mask);
    equal += __popc(equal_mask);
  }
}

__global__ void __launch_bounds__(kChooseThreads)
    ChooseKernel(IndexArgs args, int kept, int32_t* picks, int32_t* count) {
  DS4_DYNAMIC_SHARED(shared);
  __shared__ int histogram[4][kDigits];
  __shared__ Place place;
  LaunchDependents();
  const int self = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  GridDependencyWait();
  const int t = args.first + static_cast<int>(blockIdx.x);
  const int visible = VisibleRows(args, t), top_k = args.params.index_top_k;
  picks += static_cast<int64_t>(t) * top_k;
  if (self == 0) count[t] = min(visible, top_k);
  if (visible <= top_k) {
    for (int i = self; i < visible; i += num_threads) picks[i] = i;
    return;
  }

  for (int i = self; i < 4 * kDigits; i += num_threads) histogram[i / kDigits][i % kDigits] = 0;
  __syncthreads();
  uint32_t* kept_bits = reinterpret_cast<uint32_t*>(shared);
  const float* scores = args.scores + blockIdx.x * args.stride;
  const RowScores keys{scores, kept_bits, kept};
#pragma unroll 4
  for (int i = 4 * self; i < visible; i += 4 * num_threads) {
    const float4 four = *reinterpret_cast<const float4*>(scores + i);  // the row's room is in fours
    const uint4 bits =
        make_uint4(RisingBits(four.x), RisingBits(four.y), RisingBits(four.z), RisingBits(four.w));
    if (i < kept) *reinterpret_cast<uint4*>(kept_bits + i) = bits;
    atomicAdd(&histogram[0][bits.x >> 24], 1);
    if (i + 1 < visible) atomicAdd(&histogram[0][bits.y >> 24], 1);
    if (i + 2 < visible) atomicAdd(&histogram[0][bits.z >> 24], 1);
    if (i + 3 < visible) atomicAdd(&histogram[0][bits.w >> 24], 1);
  }
  uint32_t threshold = 0;
  int need = top_k;
  for (int pass = 0; pass < 4; ++pass) {
    const int shift = 24 - 8 * pass;
    if (pass > 0) {
      for (int i = self; i < visible; i += num_threads) {
        const uint32_t key = keys[i];
        // Equal in all bytes so far.
        if ((key ^ threshold) >> (shift + 8) == 0) {
          atomicAdd(&histogram[pass][key >> shift & 0xff], 1);
        }
      }
    }
    __syncthreads();
    if (self < kWarpSize) FindDigit(histogram[pass], need, &place);
    __syncthreads();
    threshold |= static_cast<uint32_t>(place.digit) << shift;
    need = place.need;
  }
  WriteChoice(keys, visible, threshold, need, picks);
}

// ---- Host ----

bool UsesMatrixKernel(const AttentionParams& params) {
  return params.kv_type == KvType::kBF16 && params.index_dim == kDim &&
         params.index_heads % 8 == 0 && params.index_heads <= 128;
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
  return std::min(rows, std::max<int64_t>(kMaxRowTile, kScratchLimit / (4 * stride)));
}

int64_t ScoreStride(int64_t max_visible) { return (max_visible + 3) / 4 * 4; }

// Neither the rows nor the keys of a block matter to the results.
void LaunchScores(const LaunchContext& launch, const IndexArgs& args, int64_t max_visible) {
  const int rows = args.end - args.first;
  const int key_runs = static_cast<int>((max_visible + kBlockKeys - 1) / kBlockKeys);
  if (!UsesMatrixKernel(args.params)) {
    Launch(launch, dim3(static_cast<unsigned>(key_runs), static_cast<unsigned>(rows)), kBlockKeys,
           static_cast<size_t>(PlainSharedBytes(args.params)), PlainScoresKernel, args);
    return;
  }
  // Many rows: neighbours share the keys that a warp holds, and a block keeps its queries for
  // several runs of keys, as long as every SM has some blocks.
  const int row_tile = rows >= 64 ? kMaxRowTile : 1;
  const int row_blocks = (rows + row_tile - 1) / row_tile;
  const int64_t blocks = static_cast<int64_t>(key_runs) * row_blocks;
  const int key_tiles =
      static_cast<int>(std::clamp<int64_t>(blocks / (8 * launch.num_sms), 1, kMaxKeyTiles));
  const int key_blocks = (key_runs + key_tiles - 1) / key_tiles;
  Launch(launch, dim3(static_cast<unsigned>(key_blocks), static_cast<unsigned>(row_blocks)),
         kScoreThreads, static_cast<size_t>(ScoreSharedBytes(args.params.index_heads, row_tile)),
         ScoresKernel, args, row_tile, key_tiles);
}

}  // namespace

int64_t IndexScratchBytes(const AttentionParams& params, int64_t rows, int64_t max_visible) {
  if (max_visible <= params.index_top_k) return 0;
  // Never less for fewer visible rows or more rows, so that one scratch serves smaller steps.
  const int64_t row_bytes = 4 * ScoreStride(max_visible);
  return std::min(rows * row_bytes, std::max(kScratchLimit, kMaxRowTile * row_bytes));
}

void LaunchIndex(const LaunchContext& launch, const AttentionParams& params, const StepRows& step,
                 int rows, const RopeView& rope, const float* index_q, const float* head_weights,
                 const CompressorCache& cache, int64_t max_visible, std::byte* scratch,
                 int32_t* picks, int32_t* count) {
  CheckParams(params, cache, max_visible);
  IndexArgs args;
  args.params = params;
  args.step = step;
  args.rope = rope;
  args.q = index_q;
  args.head_weights = head_weights;
  args.keys = cache.rows;
  args.max_rows = cache.max_rows;
  args.end = rows;
  if (max_visible <= params.index_top_k) {
    Launch(launch, static_cast<unsigned>(rows), 256, 0, ChooseKernel, args, 0, picks, count);
    return;
  }
  args.scale = 1.0f / (std::sqrt(static_cast<float>(params.index_dim)) *
                       std::sqrt(static_cast<float>(params.index_heads)));
  args.scores = reinterpret_cast<float*>(scratch);
  args.stride = ScoreStride(max_visible);
  const int kept = static_cast<int>(std::min<int64_t>(args.stride, kMaxKeptKeys));
  const int64_t batch = ScoreRows(rows, args.stride);
  for (int64_t first = 0; first < rows; first += batch) {
    args.first = static_cast<int>(first);
    args.end = static_cast<int>(std::min<int64_t>(rows, first + batch));
    LaunchScores(launch, args, max_visible);
    Launch(launch, static_cast<unsigned>(args.end - args.first), kChooseThreads,
           static_cast<size_t>(kept) * 4, ChooseKernel, args, kept, picks, count);
  }
}

}  // namespace ds4::cuda
