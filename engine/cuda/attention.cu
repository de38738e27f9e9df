// Attention for few rows: a block for each row, split of 64 keys and group of heads, then a second
// kernel that puts the splits together. From kRowBlocks blocks on, one block goes through all
// splits of a row instead (attention_prefill.cu): the same bits with no partial results in memory.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/attention_tile.cuh"

namespace ds4::cuda {
namespace {

constexpr int kPlainThreads = 128;
constexpr int kMaxHeadDim = 512;
constexpr int kCombineBatch = 10;  // splits whose loads are in flight at once: a window and picks
// Rows times groups of 16 heads from which rows alone fill the device. Chosen by size, not by
// device, so that the scratch has one size.
constexpr int kRowBlocks = 96;
constexpr int kPlainRows = 32;  // of one launch without tiles

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t HeadGroups(const AttentionParams& params) { return CeilDiv(params.num_heads, 16); }

// Rows that the scratch holds at most.
int64_t SplitRows(const AttentionParams& params) {
  return UsesTiles(params) ? CeilDiv(kRowBlocks, HeadGroups(params)) - 1 : kPlainRows;
}

// One split's weighted sums of the block's heads, as far as there are `heads`.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void StorePartial(const AttentionArgs& args, int t, int first_head,
                                             int heads, int split, const float* weights,
                                             std::byte* tile) {
  constexpr int kN = kDim / 64 / kHeadTiles;  // at once: what registers allow
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own_head = first_head + lane / 4;
  const int64_t head_stride = static_cast<int64_t>(args.splits) * kDim;
  float* own = args.partial + args.SplitIndex(t, own_head, split) * kDim + warp * (kDim / 8) +
               2 * (lane % 4);
  MultiplyTile<kDim, kHeadTiles, kN>(
      weights, tile, 0, [&](int m, int first_n, const float(&products)[kN][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (own_head + 16 * m + 8 * i >= heads) continue;
          float* to = own + (16 * m + 8 * i) * head_stride + 8 * first_n;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            *reinterpret_cast<float2*>(to + 8 * n) =
                make_float2(products[n][2 * i], products[n][2 * i + 1]);
          }
        }
      });
}

// A split of a row for a block of 16 or 32 heads. turn: as RehearseAndRun has it.
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void SplitTile(const AttentionArgs& args, std::byte* memory, bool turn) {
  using Shared = TileShared<kDim, kHeadTiles, 1>;
  constexpr int kWarps = kTileThreads / 32;
  constexpr int kGroups = kDim / 128;  // of channels: one is used while the next is on its way
  const Shared shared{memory};
  const int t = args.first_row + blockIdx.x, split = blockIdx.y;
  const int first_head = Shared::kHeads * blockIdx.z, first = split * kAttentionSplit;
  const int own_head = static_cast<int>(threadIdx.x) / 32;
  // What needs no position is on its way before the position is used; the norms of the queries come
  // while the keys are on theirs.
  HeadChannels<kDim> heads[Shared::kHeads / kWarps] = {};
  ChannelAngles<4> angles = {};
  int count = kAttentionSplit;  // of keys, and more
  if (turn) {
    const RowPlace place = LoadPlace(args, t);
    EarlyPicks picks;
    picks.Load(args, t, first);
    LoadHeads<kDim>(args, t, first_head, own_head, heads);
    angles = LoadHeadAngles<kDim>(args, t);
    const RowKeys keys = KeysOfRow(args, t, place);
    count = keys.total - first;
    if (count <= 0) return;
    LoadKeyTile<kDim, kGroups>(args, picks.Ids(args, keys, first), shared.keys(0));
  }
#pragma unroll
  for (int i = 0; i < Shared::kHeads / kWarps; ++i) {
    NormRotateHead<kDim>(args, angles, heads[i], shared.query(), own_head + i * kWarps);
  }
  ScoreTile<kDim, kHeadTiles, kGroups>(shared.query(), shared.keys(0), shared.scores(0),
                                       shared.scores(1), [](int group) {
                                         WaitForCopies<kGroups - 1>(kGroups - 1 - group);
                                         __syncthreads();
                                       });
  __syncthreads();
  const int head = HeadOfPass(0);
  if (head < Shared::kHeads) {
    float2 softmax[1];
    WeighHeads(shared.scores(0), shared.scores(1), args.scale, count, softmax);
    if (turn && threadIdx.x % 8 == 0 && first_head + head < args.params.num_heads) {
      args.softmax[args.SplitIndex(t, first_head + head, split)] = softmax[0];
    }
  }
  __syncthreads();
  const int heads_there = turn ? args.params.num_heads : 0;
  StorePartial<kDim, kHeadTiles>(args, t, first_head, heads_there, split, shared.scores(0),
                                 shared.keys(0));
}

template <int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kTileThreads, 2)
    TileSplitKernel(AttentionArgs args, bool rehearse) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  RehearseAndRun(rehearse, [&](bool turn) { SplitTile<kDim, kHeadTiles>(args, memory, turn); });
}

// The head's normed and rotated query, float32, in shared memory.
__device__ void PlainQuery(const AttentionArgs& args, int t, int head, float* query) {
  __shared__ float sums[kPlainThreads / 32];
  const int dim = args.params.head_dim, rope_dim = args.params.rope_dim;
  const float* q = args.job.q + (static_cast<int64_t>(t) * args.params.num_heads + head) * dim;
  float squares = 0.0f;
  for (int d = threadIdx.x; d < dim; d += kPlainThreads) squares = fmaf(q[d], q[d], squares);
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < kPlainThreads / 32; ++w) total += sums[w];
  const float factor = 1.0f / sqrtf(total / static_cast<float>(dim) + args.params.norm_eps);
  for (int d = 2 * threadIdx.x; d < dim; d += 2 * kPlainThreads) {
    float2 x = make_float2(q[d] * factor, q[d + 1] * factor);
    const int from = d - (dim - rope_dim);
    if (from >= 0) {
      const int64_t at = static_cast<int64_t>(t) * (rope_dim / 2) + from / 2;
      x = RotatePair(x, args.rope.cos[at], args.rope.sin[at]);
    }
    query[d] = x.x;
    query[d + 1] = x.y;
  }
  __syncthreads();
}

// Row of the cache that holds a key, in elements.
__device__ __forceinline__ const void* PlainKey(const AttentionArgs& args, const RowKeys& keys,
                                                int j) {
  const int id = keys.Id(j), dim = args.params.head_dim;
  if (args.params.kv_type == KvType::kF32) return KeyAddress<float>(args.cache, dim, id);
  return KeyAddress<uint16_t>(args.cache, dim, id);
}

// Any head_dim and cache type, float32 throughout: a block for each row, split and head.
__global__ void __launch_bounds__(kPlainThreads) PlainSplitKernel(AttentionArgs args) {
  LaunchDependents();
  __shared__ float query[kMaxHeadDim];
  __shared__ float weights[kAttentionSplit];
  GridDependencyWait();
  const int t = args.first_row + blockIdx.x, split = blockIdx.y, head = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int dim = args.params.head_dim;
  const RowKeys keys = KeysOfRow(args, t);
  const int first = split * kAttentionSplit;
  if (first >= keys.total) return;
  const int count = min(keys.total - first, kAttentionSplit);
  PlainQuery(args, t, head, query);
  for (int j = warp; j < count; j += kPlainThreads / 32) {
    const void* key = PlainKey(args, keys, first + j);
    float dot = 0.0f;
    for (int d = lane; d < dim; d += 32) {
      dot = fmaf(query[d], LoadKv(key, d, args.params.kv_type), dot);
    }
    dot = WarpSum(dot);
    if (lane == 0) weights[j] = dot * args.scale;
  }
  __syncthreads();
  if (warp == 0) {
    const float low = lane < count ? weights[lane] : -INFINITY;
    const float high = lane + 32 < count ? weights[lane + 32] : -INFINITY;
    const float top = WarpMax(fmaxf(low, high));
    const float a = expf(low - top), b = expf(high - top);
    weights[lane] = a;
    weights[lane + 32] = b;
    const float sum = WarpSum(a + b);
    if (lane == 0) args.softmax[args.SplitIndex(t, head, split)] = make_float2(top, sum);
  }
  __syncthreads();
  float* to = args.partial + args.SplitIndex(t, head, split) * dim;
  for (int d = threadIdx.x; d < dim; d += kPlainThreads) {
    float sum = 0.0f;
    for (int j = 0; j < count; ++j) {
      sum = fmaf(weights[j], LoadKv(PlainKey(args, keys, first + j), d, args.params.kv_type), sum);
    }
    to[d] = sum;
  }
}

// Fold factors of kCombineBatch splits, worked out by a lane each from its split's (max, sum),
// which is `own`: {old_part, new_part, sum} to `folds`, shared, this warp's.
__device__ __forceinline__ void FoldBatch(float2 own, float& max_so_far, float4* folds) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top = fmaxf(max_so_far, own.x);
#pragma unroll
  for (int distance = 1; distance < kCombineBatch; distance *= 2) {
    const float below = __shfl_sync(kFullMask, top, max(lane - distance, 0));
    top = fmaxf(below, top);
  }
  const float lower = __shfl_sync(kFullMask, top, max(lane - 1, 0));
  const float before = lane == 0 ? max_so_far : lower;
  folds[lane] = make_float4(expf(before - top), expf(own.x - top), own.y, 0.0f);
  max_so_far = __shfl_sync(kFullMask, top, kCombineBatch - 1);
  __syncwarp();
}

// One head's splits of a row, four channels in each thread. Reads the first batch of splits before
// it knows how many there are, for a shorter chain of loads. turn: as RehearseAndRun has it.
__device__ __forceinline__ void CombineSplits(const AttentionArgs& args, const HeadPlace& place,
                                              float sink, float4* folds, bool turn) {
  const int t = args.first_row + blockIdx.x, head = blockIdx.y;
  const int dim = args.params.head_dim, rope_dim = args.params.rope_dim;
  const int channel = 4 * static_cast<int>(threadIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
  const bool active = channel < dim;
  const int64_t head_first = args.SplitIndex(t, head, 0);
  const float* partial = args.partial + head_first * dim + (active ? channel : 0);
  ChannelAngles<2> angles = {};
  RowPlace row;
  if (turn) {
    row = LoadPlace(args, t);
    const int64_t row_angles = static_cast<int64_t>(t) * (rope_dim / 2);
    angles = LoadAngles<2>(channel, dim, rope_dim, args.rope.cos + row_angles,
                           args.rope.sin + row_angles);
  }
  float max_so_far = -INFINITY, sum_so_far = 0.0f;
  float v[4] = {};
  int first = 0, used = kCombineBatch;
  do {
    const int own_split = first + min(lane, kCombineBatch - 1);
    float2 own = make_float2(0.0f, 0.0f);
    float4 splits[kCombineBatch] = {};
    if (turn) {
      const float2* softmax = args.softmax + head_first + min(own_split, args.splits - 1);
      own = make_float2(__uint_as_float(LoadEarly4(&softmax->x)),
                        __uint_as_float(LoadEarly4(&softmax->y)));
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        splits[i] =
            *reinterpret_cast<const float4*>(partial + min(first + i, args.splits - 1) * dim);
      }
      used = (KeysOfRow(args, t, row).total + kAttentionSplit - 1) / kAttentionSplit;
    }
    // Other lanes leave the maximum alone.
    if (lane >= kCombineBatch || own_split >= used) own = make_float2(-INFINITY, 0.0f);
    FoldBatch(own, max_so_far, folds);
#pragma unroll
    for (int i = 0; i < kCombineBatch; ++i) {
      if (first + i >= used) break;
      const float4 fold = folds[i];
      const FoldFactors factors{fold.x, fold.y};
      sum_so_far = FoldValue(sum_so_far, fold.z, factors);
      const float split[4] = {splits[i].x, splits[i].y, splits[i].z, splits[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = FoldValue(v[k], split[k], factors);
    }
    first += kCombineBatch;
    __syncwarp();  // before the next batch's factors
  } while (first < used);
  const float factor = FinalFactor(max_so_far, sum_so_far, sink);
#pragma unroll
  for (int k = 0; k < 4; ++k) v[k] = active ? v[k] * factor : 0.0f;
  TurnBack(v, channel, dim, rope_dim, angles);
  StoreColumns(args.job.out, t, place.first_col + channel, v, active && turn);
  if (!turn) return;
  StorePadding<4>(args.job.out, t, place.first_col + dim, place.padding_end, threadIdx.x,
                  blockDim.x);
}

__global__ void __launch_bounds__(kMaxHeadDim / 4, 8)
    CombineKernel(AttentionArgs args, bool rehearse) {
  LaunchDependents();
  __shared__ float4 folds[kMaxHeadDim / 4];  // 32 of each warp
  const int head = blockIdx.y;
  const float sink = args.job.sinks[head];  // a weight
  const HeadPlace place =
      PlaceOfHead(head, args.params.num_heads, args.job.heads_per_group, args.params.head_dim);
  RehearseAndRun(rehearse, [&](bool turn) {
    CombineSplits(args, place, sink, folds + threadIdx.x / 32 * 32, turn);
  });
}

void CheckJob(const AttentionParams& params, const AttentionJob& job, const LayerCache& cache) {
  CHECK(params.head_dim % 8 == 0 && params.head_dim <= kMaxHeadDim) << params.head_dim;
  CHECK(params.rope_dim % 2 == 0 && params.rope_dim <= params.head_dim) << params.rope_dim;
  CHECK(cache.ring >= params.sliding_window)
      << "ring of " << cache.ring << " for a window of " << params.sliding_window;
  CHECK(params.num_heads % job.heads_per_group == 0)
      << params.num_heads << " heads in groups of " << job.heads_per_group;
  CHECK(job.out.q == nullptr || params.head_dim % 32 == 0)
      << "int8 output of heads of " << params.head_dim;
  const int64_t group_cols =
      PaddedCols(static_cast<int64_t>(job.heads_per_group) * params.head_dim);
  CHECK(job.out.cols >= params.num_heads / job.heads_per_group * group_cols) << job.out.cols;
}

AttentionArgs MakeArgs(const AttentionParams& params, const StepRows& step, int rows,
                       const RopeView& rope, const AttentionJob& job, const LayerCache& cache) {
  CheckJob(params, job, cache);
  AttentionArgs args;
  args.params = params;
  args.by_ratio = MakeDivider(std::max(params.ratio, 1));
  args.by_ring = MakeDivider(cache.ring);
  args.step = step;
  args.rope = rope;
  args.job = job;
  args.cache = cache;
  args.scale = 1.0f / std::sqrt(static_cast<float>(params.head_dim));
  args.splits = static_cast<int>(CeilDiv(job.max_keys, kAttentionSplit));
  args.partial = reinterpret_cast<float*>(job.scratch);
  const int64_t scratch_rows = std::min<int64_t>(rows, SplitRows(params));
  args.softmax = reinterpret_cast<float2*>(args.partial + scratch_rows * params.num_heads *
                                                              args.splits * params.head_dim);
  return args;
}

template <int kDim, int kHeadTiles>
void LaunchTileSplits(const LaunchContext& launch, const AttentionArgs& args, int rows,
                      bool rehearse) {
  static_assert(2 * (TileShared<kDim, kHeadTiles, 1>::kSplitBytes + 1024) <= 228 * 1024,
                "two blocks on one SM");
  const dim3 grid(rows, args.splits, CeilDiv(args.params.num_heads, 16 * kHeadTiles));
  Launch(launch, grid, dim3(kTileThreads), TileShared<kDim, kHeadTiles, 1>::kSplitBytes,
         TileSplitKernel<kDim, kHeadTiles>, args, rehearse);
}

// More heads in a block read each key less often, once there are blocks for all of the device. Two
// blocks run on one SM.
template <int kDim>
void ChooseSplitHeads(const LaunchContext& launch, const AttentionArgs& args, int rows) {
  const int64_t blocks = int64_t{rows} * args.splits * HeadGroups(args.params);
  if (args.params.num_heads > 16 && blocks > int64_t{2} * launch.num_sms) {
    LaunchTileSplits<kDim, 2>(launch, args, rows, false);
  } else {
    // The choice of keys leaves most of the device free, a product before it does not.
    LaunchTileSplits<kDim, 1>(launch, args, rows, args.job.picks != nullptr);
  }
}

void LaunchSplits(const LaunchContext& launch, const AttentionArgs& args, int rows) {
  if (!UsesTiles(args.params)) {
    Launch(launch, dim3(rows, args.splits, args.params.num_heads), dim3(kPlainThreads), 0,
           PlainSplitKernel, args);
  } else if (args.params.head_dim == 512) {
    ChooseSplitHeads<512>(launch, args, rows);
  } else {
    ChooseSplitHeads<256>(launch, args, rows);
  }
  const unsigned threads = CeilDiv(args.params.head_dim, 4 * 32) * 32;
  const bool rehearse = rows * args.params.num_heads <= 2 * launch.num_sms;
  Launch(launch, dim3(rows, args.params.num_heads), dim3(threads), 0, CombineKernel, args,
         rehearse);
}

}  // namespace

bool UsesTiles(const AttentionParams& params) {
  return params.kv_type == KvType::kBF16 && (params.head_dim == 512 || params.head_dim == 256) &&
         params.rope_dim <= 256 && params.rope_dim % 8 == 0;
}

int64_t AttentionScratchBytes(const AttentionParams& params, int64_t rows, int64_t max_keys) {
  return std::min(rows, SplitRows(params)) * params.num_heads * CeilDiv(max_keys, kAttentionSplit) *
         (params.head_dim * sizeof(float) + sizeof(float2));
}

void LaunchAttention(const LaunchContext& launch, const AttentionParams& params,
                     const StepRows& step, int rows, const RopeView& rope, const AttentionJob& job,
                     const LayerCache& cache) {
  AttentionArgs args = MakeArgs(params, step, rows, rope, job, cache);
  if (UsesTiles(params) && rows > SplitRows(params)) {
    LaunchTileRows(launch, args, rows);
    return;
  }
  CHECK(args.splits > 0 && job.scratch != nullptr) << job.max_keys << " keys at most";
  const int batch = static_cast<int>(SplitRows(params));
  for (; args.first_row < rows; args.first_row += batch) {
    LaunchSplits(launch, args, std::min(batch, rows - args.first_row));
  }
}

void LaunchPrefillAttention(const LaunchContext& launch, const AttentionParams& params,
                            const StepRows& step, int rows, const RopeView& rope,
                            const AttentionJob& job, const LayerCache& cache) {
  if (UsesTiles(params)) {
    LaunchTileRows(launch, MakeArgs(params, step, rows, rope, job, cache), rows);
  } else {
    LaunchAttention(launch, params, step, rows, rope, job, cache);
  }
}

}  // namespace ds4::cuda
