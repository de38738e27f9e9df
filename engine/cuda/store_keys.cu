// Keys and pending compressor inputs into the caches, and the compressed rows that they complete.
//
// One launch: a block for each row and each of (window, main compressor, indexer's compressor), and
// one for a norm that needs no more than they do, and blocks that balance stream mixes beside. A
// block that pools a window takes what this batch brings from the projections and only older
// positions from the pending ring, so no block waits for another. A batch longer than the ring's
// slack would store over positions that its first windows still read: there the pending inputs
// follow in a launch of their own, each session's last ones.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/attention.cuh"
#include "engine/cuda/row_forms.cuh"
#include "engine/cuda/sinkhorn.cuh"

namespace ds4::cuda {
namespace {

constexpr int kMaxThreads = 512;  // one thread for each pair of channels
constexpr size_t kMaxApePrefetch = 32 << 10;
constexpr int kPoolBatch = 8;  // slots whose loads are in flight at once

// One compressor's part of a StoreKeys.
struct Part {
  const float* kv = nullptr;
  const float* gate = nullptr;
  const float* ape = nullptr;
  const float* norm = nullptr;
  CompressorCache cache;
  uint32_t ape_prefetch = 0;  // bytes of ape worth fetching before the position is known
};

struct Args {
  AttentionParams params;
  StepRows step;
  int rows = 0;
  RopeView rope;
  const float* kv = nullptr;
  const float* kv_norm = nullptr;
  LayerCache cache;
  Part parts[2];
  int num_parts = 0;  // window and compressors
  RowNorm norm;       // of blocks behind the parts
  bool norm_vectors = false;
  int balance_y = 0;  // blockIdx.y of the blocks that balance
  SinkhornJob balance;
};

__device__ float BlockSum(float value) {
  __shared__ float sums[kMaxThreads / 32];
  value = WarpSum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) total += sums[w];
  return total;
}

// Two channels at an 8-byte boundary.
__device__ __forceinline__ float2 LoadPair(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}
__device__ __forceinline__ float2 AddPairs(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}

// The channels of this thread and their norm weights, which are there before the kernel's turn.
struct Channels {
  int first = 0;  // of two
  float2 weight = make_float2(0.0f, 0.0f);
};
__device__ Channels OwnChannels(const float* norm, int dim) {
  Channels own;
  own.first = 2 * static_cast<int>(threadIdx.x);
  if (own.first < dim) own.weight = make_float2(norm[own.first], norm[own.first + 1]);
  return own;
}

// The block's vector of `dim` channels, a pair in each thread: norm, rotation of the last channels
// by `angle` (cos, sin), into the cache.
__device__ void NormRotateStore(float2 x, int dim, const Channels& own,
                                const AttentionParams& params, float2 angle, void* cache,
                                int64_t row) {
  const float total = BlockSum(fmaf(x.x, x.x, x.y * x.y));
  if (own.first >= dim) return;
  const float factor = 1.0f / sqrtf(total / static_cast<float>(dim) + params.norm_eps);
  x = make_float2(x.x * factor * own.weight.x, x.y * factor * own.weight.y);
  if (own.first >= dim - params.rope_dim) x = RotatePair(x, angle.x, angle.y);
  StoreKvPair(cache, row * dim + own.first, params.kv_type, x);
}

// The rotary pair that this thread's channels are; negative where they do not turn.
__device__ __forceinline__ int OwnTurn(const Channels& own, int dim, int rope_dim) {
  const int first_turned = dim - rope_dim;
  return own.first >= first_turned && own.first < dim ? (own.first - first_turned) / 2 : -1;
}

// Loads that need no position come before the position is known, for a shorter chain of loads.
__device__ void StoreWindow(const Args& args, int t, const Channels& own) {
  const int dim = args.params.head_dim;
  float2 x = make_float2(0.0f, 0.0f), angle = make_float2(0.0f, 0.0f);
  if (own.first < dim) x = LoadPair(args.kv + static_cast<int64_t>(t) * dim + own.first);
  const int turn = OwnTurn(own, dim, args.params.rope_dim);
  if (turn >= 0) {
    const int64_t at = static_cast<int64_t>(t) * (args.params.rope_dim / 2) + turn;
    angle = make_float2(args.rope.cos[at], args.rope.sin[at]);
  }
  const int slot = args.step.slot[t], pos = args.step.pos[t];
  if (slot < 0) return;
  const int64_t row = static_cast<int64_t>(slot) * args.cache.ring + pos % args.cache.ring;
  NormRotateStore(x, dim, own, args.params, angle, args.cache.window, row);
}

// The pairs of a row of pending values that this thread keeps: one for each half of the width.
struct Pending {
  float2 value[2], gate[2];
};
__device__ Pending LoadPending(const Part& part, int t) {
  Pending pending;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = 2 * static_cast<int>(threadIdx.x + i * blockDim.x);
    pending.value[i] = pending.gate[i] = make_float2(0.0f, 0.0f);
    if (c >= part.cache.width) continue;
    const int64_t from = static_cast<int64_t>(t) * part.cache.width + c;
    pending.value[i] = LoadPair(part.kv + from);
    pending.gate[i] = LoadPair(part.gate + from);
  }
  return pending;
}
__device__ void StorePending(const Args& args, const Part& part, const Pending& pending, int slot,
                             int pos) {
  const int width = part.cache.width;
  const int64_t to = (static_cast<int64_t>(slot) * part.cache.ring + pos % part.cache.ring) * width;
  const float* ape = part.ape + static_cast<int64_t>(pos % args.params.ratio) * width;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = 2 * static_cast<int>(threadIdx.x + i * blockDim.x);
    if (c >= width) continue;
    *reinterpret_cast<float2*>(part.cache.values + to + c) = pending.value[i];
    *reinterpret_cast<float2*>(part.cache.scores + to + c) =
        AddPairs(pending.gate[i], LoadPair(ape + c));
  }
}

// source[i] = the row of this batch that brings position first + i of the session, or -1: the ring
// has it. Row t is at `pos` and `count` positions end there.
__device__ void FindSources(const Args& args, int t, int slot, int first, int count, int* source) {
  const int run_begin = t - (count - 1);
  // A session's rows rise by one position each, so when the first position stands where an unbroken
  // run would put it, the run is unbroken.
  const bool run =
      run_begin >= 0 && args.step.slot[run_begin] == slot && args.step.pos[run_begin] == first;
  for (int i = threadIdx.x; i < count; i += blockDim.x) source[i] = run ? run_begin + i : -1;
  __syncthreads();
  if (!run) {
    for (int r = threadIdx.x; r <= t; r += blockDim.x) {
      const int i = args.step.pos[r] - first;
      if (args.step.slot[r] == slot && i >= 0 && i < count) source[i] = r;
    }
  }
  __syncthreads();
}

// Softmax over the slots of one channel, taken in batches.
struct ChannelPool {
  float max = -INFINITY;
  float sum = 0.0f;
  float value = 0.0f;

  __device__ __forceinline__ void MoveMax(float batch_max) {
    const float top = fmaxf(max, batch_max);
    const float factor = expf(max - top);
    sum *= factor;
    value *= factor;
    max = top;
  }
  __device__ __forceinline__ void Add(float score, float x) {
    const float weight = expf(score - max);
    sum += weight;
    value = fmaf(weight, x, value);
  }
};

// Where one slot's value and score stand: in this batch's projections, whose score lacks its ape
// still, or in the ring.
struct Slot {
  const float* value = nullptr;
  const float* score = nullptr;
  const float* ape = nullptr;  // null: the score has it
};
__device__ __forceinline__ Slot SlotAt(const Args& args, const Part& part, int slot, int pos,
                                       int source, int channel) {
  const int width = part.cache.width;
  if (source >= 0) {
    const int64_t at = static_cast<int64_t>(source) * width + channel;
    return {part.kv + at, part.gate + at, part.ape + pos % args.params.ratio * width + channel};
  }
  const int64_t at =
      (static_cast<int64_t>(slot) * part.cache.ring + pos % part.cache.ring) * width + channel;
  return {part.cache.values + at, part.cache.scores + at, nullptr};
}

// Pools positions first..first + count - 1 at the block's channels. With overlap the last `ratio`
// of them are read from series b, the second half of the width (spec 2.7).
__device__ float2 Pool(const Args& args, const Part& part, int slot, int first, int count,
                       const int* source) {
  const int channel = 2 * static_cast<int>(threadIdx.x);
  if (channel >= part.cache.dim) return make_float2(0.0f, 0.0f);
  const int current = args.params.overlap ? count - args.params.ratio : count;
  ChannelPool low, high;
  for (int begin = 0; begin < count; begin += kPoolBatch) {
    float2 values[kPoolBatch], scores[kPoolBatch], apes[kPoolBatch];
    float2 top = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int i = 0; i < kPoolBatch; ++i) {
      values[i] = apes[i] = make_float2(0.0f, 0.0f);
      scores[i] = make_float2(-INFINITY, -INFINITY);
      const int s = begin + i;
      if (s >= count) continue;
      const int half = s >= current ? part.cache.dim : 0;
      const Slot at = SlotAt(args, part, slot, first + s, source[s], half + channel);
      values[i] = LoadPair(at.value);
      scores[i] = LoadPair(at.score);
      if (at.ape != nullptr) apes[i] = LoadPair(at.ape);
    }
#pragma unroll
    for (int i = 0; i < kPoolBatch; ++i) {
      scores[i] = AddPairs(scores[i], apes[i]);
      top = make_float2(fmaxf(top.x, scores[i].x), fmaxf(top.y, scores[i].y));
    }
    low.MoveMax(top.x);
    high.MoveMax(top.y);
#pragma unroll
    for (int i = 0; i < kPoolBatch; ++i) {
      low.Add(scores[i].x, values[i].x);
      high.Add(scores[i].y, values[i].y);
    }
  }
  return make_float2(low.value / low.sum, high.value / high.sum);
}

// The compressed row that position `pos` completes, rotated at its window's first position.
__device__ void PoolWindow(const Args& args, const Part& part, int t, int slot, int pos,
                           const Channels& own, int* source) {
  const int ratio = args.params.ratio;
  const int window_first = pos + 1 - ratio;
  // The first window of a session has none before it.
  const int first = args.params.overlap && window_first > 0 ? window_first - ratio : window_first;
  const int count = pos + 1 - first;
  FindSources(args, t, slot, first, count, source);
  const float2 pooled = Pool(args, part, slot, first, count, source);
  float2 angle = make_float2(0.0f, 0.0f);
  const int turn = OwnTurn(own, part.cache.dim, args.params.rope_dim);
  if (turn >= 0) {
    double sin, cos;
    sincos(static_cast<double>(window_first) * args.rope.frequencies[turn], &sin, &cos);
    angle = make_float2(static_cast<float>(cos), static_cast<float>(sin));
  }
  const int64_t row = static_cast<int64_t>(slot) * part.cache.max_rows + pos / ratio;
  NormRotateStore(pooled, part.cache.dim, own, args.params, angle, part.cache.rows, row);
}

template <bool kStorePending>
__device__ void StoreCompressed(const Args& args, const Part& part, int t, const Channels& own,
                                int* source) {
  Pending pending;
  if constexpr (kStorePending) pending = LoadPending(part, t);
  const int slot = args.step.slot[t], pos = args.step.pos[t];
  if (slot < 0) return;
  if constexpr (kStorePending) StorePending(args, part, pending, slot, pos);
  if ((pos + 1) % args.params.ratio != 0) return;
  PoolWindow(args, part, t, slot, pos, own, source);
}

template <bool kStorePending>
__global__ void __launch_bounds__(kMaxThreads) StoreKeysKernel(Args args) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(shared);
  const int t = blockIdx.x;
  if (static_cast<int>(blockIdx.y) == args.balance_y) {
    BalanceRows(args.balance, t);
  } else if (blockIdx.y == 0) {
    const Channels own = OwnChannels(args.kv_norm, args.params.head_dim);
    GridDependencyWait();
    StoreWindow(args, t, own);
  } else if (static_cast<int>(blockIdx.y) == args.num_parts) {
    __shared__ float squares[kMaxThreads / kWarpSize];
    NormRow(args.norm, t, args.norm_vectors, squares);
  } else {
    const Part& part = args.parts[blockIdx.y - 1];
    const Channels own = OwnChannels(part.norm, part.cache.dim);
    if (threadIdx.x == 0 && part.ape_prefetch > 0) PrefetchL2(part.ape, part.ape_prefetch);
    GridDependencyWait();
    StoreCompressed<kStorePending>(args, part, t, own, reinterpret_cast<int*>(shared));
  }
}

// Whether this batch also brings the position that takes the same place in the ring. It stands
// `ring` rows further on, or later still when rows of other sessions are between.
__device__ bool IsOverwritten(const Args& args, int ring, int t, int slot, int pos) {
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (int r = t + ring + static_cast<int>(threadIdx.x); r < args.rows;
       r += static_cast<int>(blockDim.x)) {
    if (args.step.slot[r] == slot && args.step.pos[r] == pos + ring) found = 1;
  }
  __syncthreads();
  return found != 0;
}

__global__ void __launch_bounds__(kMaxThreads) StorePendingKernel(Args args) {
  LaunchDependents();
  GridDependencyWait();
  const int t = blockIdx.x;
  const Part& part = args.parts[blockIdx.y];
  const int slot = args.step.slot[t], pos = args.step.pos[t];
  if (slot < 0 || IsOverwritten(args, part.cache.ring, t, slot, pos)) return;
  StorePending(args, part, LoadPending(part, t), slot, pos);
}

void CheckPart(const AttentionParams& params, const Part& part) {
  const int halves = params.overlap ? 2 : 1;
  CHECK(part.cache.width == halves * part.cache.dim)
      << "width " << part.cache.width << " for " << part.cache.dim << " channels";
  CHECK(part.cache.dim % 2 == 0 && part.cache.dim <= 2 * kMaxThreads) << part.cache.dim;
  CHECK(part.cache.dim >= params.rope_dim) << part.cache.dim << ", rotary " << params.rope_dim;
  CHECK(part.cache.ring >= halves * params.ratio)
      << "pending ring of " << part.cache.ring << " for windows of " << params.ratio;
}

Args MakeArgs(const AttentionParams& params, const StepRows& step, int rows, const RopeView& rope,
              const StoreKeys& in, const LayerCache& cache) {
  CHECK(params.head_dim % 2 == 0 && params.head_dim <= 2 * kMaxThreads) << params.head_dim;
  CHECK(params.rope_dim % 2 == 0 && params.rope_dim <= params.head_dim) << params.rope_dim;
  Args args;
  args.params = params;
  args.step = step;
  args.rows = rows;
  args.rope = rope;
  args.kv = in.kv;
  args.kv_norm = in.kv_norm;
  args.cache = cache;
  args.num_parts = 1;
  const auto add = [&](Part part) {
    CheckPart(params, part);
    const size_t ape_bytes = sizeof(float) * params.ratio * part.cache.width;
    const bool aligned = reinterpret_cast<uintptr_t>(part.ape) % 16 == 0 && ape_bytes % 16 == 0;
    if (aligned && ape_bytes <= kMaxApePrefetch) part.ape_prefetch = ape_bytes;
    args.parts[args.num_parts++ - 1] = part;
  };
  if (params.ratio > 0) {
    add({in.comp_kv, in.comp_gate, in.ape, in.comp_norm, cache.compressor, 0});
    if (in.index_kv != nullptr) {
      add({in.index_kv, in.index_gate, in.index_ape, in.index_norm, cache.indexer, 0});
    }
  }
  return args;
}

// `threads`: what a norm needs, or none.
void LaunchArgs(const LaunchContext& launch, Args args, unsigned threads,
                const SinkhornJob& balance) {
  args.balance_y = args.num_parts + (threads > 0 ? 1 : 0);
  args.balance = balance;
  int channels = args.params.head_dim;
  for (int i = 0; i + 1 < args.num_parts; ++i) {
    channels = std::max(channels, args.parts[i].cache.dim);
  }
  threads = std::max(threads, static_cast<unsigned>((channels / 2 + 31) / 32 * 32));
  const int pending = args.params.ratio * (args.params.overlap ? 2 : 1);
  const size_t shared_bytes = sizeof(int) * pending;
  CHECK(balance.rows <= args.rows) << balance.rows << " rows to balance beside " << args.rows;
  const dim3 grid(args.rows, args.balance_y + (balance.rows > 0 ? 1 : 0));
  // Up to `pending` - 1 positions before the batch's first are read. Its own take other places.
  bool fits = true;
  for (int i = 0; i + 1 < args.num_parts; ++i) {
    fits = fits && args.rows <= args.parts[i].cache.ring - pending;
  }
  if (fits) {
    Launch(launch, grid, dim3(threads), shared_bytes, StoreKeysKernel<true>, args);
    return;
  }
  Launch(launch, grid, dim3(threads), shared_bytes, StoreKeysKernel<false>, args);
  Launch(launch, dim3(args.rows, args.num_parts - 1), dim3(threads), 0, StorePendingKernel, args);
}

}  // namespace

void LaunchStoreKeys(const LaunchContext& launch, const AttentionParams& params,
                     const StepRows& step, int rows, const RopeView& rope, const StoreKeys& in,
                     const LayerCache& cache, const SinkhornJob& balance) {
  LaunchArgs(launch, MakeArgs(params, step, rows, rope, in, cache), 0, balance);
}

void LaunchNormAndStore(const LaunchContext& launch, const AttentionParams& params,
                        const StepRows& step, int rows, const RopeView& rope, const StoreKeys& in,
                        const LayerCache& cache, const RowNorm& norm, const SinkhornJob& balance) {
  const unsigned threads = RowThreads(norm.out.cols);
  if (threads > kMaxThreads) {
    LaunchRmsNorm(launch, norm.x, norm.stride, rows, norm.cols, norm.weight, norm.eps, norm.out);
    LaunchStoreKeys(launch, params, step, rows, rope, in, cache, balance);
    return;
  }
  CHECK(norm.cols >= 1 && norm.cols <= norm.out.cols)
      << norm.cols << " columns into " << norm.out.cols;
  Args args = MakeArgs(params, step, rows, rope, in, cache);
  args.norm = norm;
  args.norm_vectors = VectorsFit(norm.x, norm.stride, norm.cols);
  LaunchArgs(launch, args, threads, balance);
}

}  // namespace ds4::cuda
