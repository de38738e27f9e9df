// Attention over tiles of 64 keys on tensor cores: bf16 keys of 512 or 256 channels, up to 64 heads
// of one row in a block of eight warps.
//
// Each tile is one split of attention.h: its own maximum, its weights rounded to bf16, its weighted
// sum started from zero. The tiles are then folded together in rising order, so the result is the
// same whether one block folds them in registers or a second kernel folds what many blocks wrote.
// Additions of one score and of one output value do not depend on the number of heads in the block.
//
// Shared memory: queries [heads][dim] and key tiles [64][dim], bf16, 16-byte chunks of a row
// swapped by row % 8 so that matrix loads meet no bank conflict; scores of the two halves of the
// channels, [2][heads][kScoreStride] float32; weights in place of the first half's scores, bf16.
#pragma once

#include "engine/cuda/attention_output.cuh"

namespace ds4::cuda {

// Whether the tiles serve this model and cache (at most 256 channels turn, by eights), and the
// launch in which one block folds all tiles of a row and up to 64 heads (attention_prefill.cu).
bool UsesTiles(const AttentionParams& params);
void LaunchTileRows(const LaunchContext& launch, const AttentionArgs& args, int rows);

inline constexpr int kTileThreads = 256;
inline constexpr int kScoreStride = 68;
static_assert(kAttentionSplit == 64, "a tile is a split");

template <int kDim, int kHeadTiles, int kStages>
struct TileShared {
  static constexpr int kHeads = 16 * kHeadTiles;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kQueryBytes = kHeads * kRowBytes;
  static constexpr int kKeyBytes = kAttentionSplit * kRowBytes;
  static constexpr int kScoreBytes = kHeads * kScoreStride * 4;
  // Without and with the fold factors, which only blocks that fold tiles use.
  static constexpr int kSplitBytes = kQueryBytes + kStages * kKeyBytes + 2 * kScoreBytes;
  static constexpr int kBytes = kSplitBytes + 2 * kHeads * 4;

  std::byte* base;

  __device__ std::byte* query() const { return base; }
  __device__ std::byte* keys(int stage) const { return base + kQueryBytes + stage * kKeyBytes; }
  __device__ float* scores(int half) const {
    return reinterpret_cast<float*>(base + kQueryBytes + kStages * kKeyBytes + half * kScoreBytes);
  }
  // Fold factors of the tile: what came before, and the tile.
  __device__ float* old_part() const { return scores(2); }
  __device__ float* new_part() const { return scores(2) + kHeads; }
};

template <int kDim>
__device__ __forceinline__ std::byte* ChunkAt(std::byte* rows, int row, int chunk) {
  return rows + row * (2 * kDim) + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void StoreFloats(uint4 bits, float* to) {
  to[0] = __uint_as_float(bits.x), to[1] = __uint_as_float(bits.y);
  to[2] = __uint_as_float(bits.z), to[3] = __uint_as_float(bits.w);
}

// One head's projections, eight neighbouring channels of each 256 in a lane.
template <int kDim>
using HeadChannels = float[kDim / 256][8];

template <int kDim>
__device__ __forceinline__ void LoadHead(const float* q, HeadChannels<kDim>& v) {
#pragma unroll
  for (int i = 0; i < kDim / 256; ++i) {
#pragma unroll
    for (int k = 0; k < 8; k += 4) {
      StoreFloats(LoadEarly16(q + 256 * i + 8 * (threadIdx.x % 32) + k), &v[i][k]);
    }
  }
}

// A lane's angles for its channels of a head's last 256, the same for every head.
template <int kDim>
__device__ __forceinline__ ChannelAngles<4> LoadHeadAngles(const AttentionArgs& args, int t) {
  const int pairs = args.params.rope_dim / 2;
  // The lane's channels turn all or not at all.
  const int from = 4 * static_cast<int>(threadIdx.x % 32) - (128 - pairs);
  ChannelAngles<4> angles;
#pragma unroll
  for (int k = 0; k < 4; ++k) angles.cos[k] = 1.0f, angles.sin[k] = 0.0f;
  if (from >= 0) {
    const int64_t at = static_cast<int64_t>(t) * pairs + from;
    StoreFloats(LoadEarly16(args.rope.cos + at), angles.cos);
    StoreFloats(LoadEarly16(args.rope.sin + at), angles.sin);
  }
  return angles;
}

// Norm over all channels, rotation of the last ones, to a row of bf16 queries.
template <int kDim>
__device__ __forceinline__ void NormRotateHead(const AttentionArgs& args,
                                               const ChannelAngles<4>& angles,
                                               HeadChannels<kDim>& v, std::byte* queries, int row) {
  const int lane = threadIdx.x % 32;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kDim / 256; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k) squares = fmaf(v[i][k], v[i][k], squares);
  }
  const float factor = rsqrtf(WarpSum(squares) / static_cast<float>(kDim) + args.params.norm_eps);
#pragma unroll
  for (int i = 0; i < kDim / 256; ++i) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      float2 x = make_float2(v[i][k] * factor, v[i][k + 1] * factor);
      if (i + 1 == kDim / 256) x = RotatePair(x, angles.cos[k / 2], angles.sin[k / 2]);
      v[i][k] = x.x, v[i][k + 1] = x.y;
    }
    *reinterpret_cast<uint4*>(ChunkAt<kDim>(queries, row, 32 * i + lane)) =
        make_uint4(FloatsToBf162(v[i][0], v[i][1]), FloatsToBf162(v[i][2], v[i][3]),
                   FloatsToBf162(v[i][4], v[i][5]), FloatsToBf162(v[i][6], v[i][7]));
  }
}

// The projections of kBatch of the block's heads on their way: `first` and every eighth behind it.
// In place of heads past the last one, which nobody uses, stands that one again.
template <int kDim, int kBatch>
__device__ __forceinline__ void LoadHeads(const AttentionArgs& args, int t, int first_head,
                                          int first, HeadChannels<kDim> (&heads)[kBatch]) {
  const int num_heads = args.params.num_heads;
  const float* q = args.job.q + static_cast<int64_t>(t) * num_heads * kDim;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int head = min(first_head + first + i * (kTileThreads / 32), num_heads - 1);
    LoadHead<kDim>(q + static_cast<int64_t>(head) * kDim, heads[i]);
  }
}

// A lane brings an eighth of two keys of a tile: of rows OwnTileRow(0) and OwnTileRow(1).
__device__ __forceinline__ int OwnTileRow(int i) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return static_cast<int>(threadIdx.x) / 32 * 8 + 4 * i + lane / 8;
}
// Their ids, of the tile that starts at key `first`. Keys past the last one will weigh nothing.
__device__ __forceinline__ int2 OwnKeyIds(const RowKeys& keys, int first) {
  return make_int2(keys.Id(first + OwnTileRow(0)), keys.Id(first + OwnTileRow(1)));
}

// The ids of a lane's keys of the tile that starts at key `first`. Picks are on their way before
// the position is known: where they stand if the window is full, which it is but for a session's
// start.
struct EarlyPicks {
  int of[2] = {0, 0};

  __device__ __forceinline__ void Load(const AttentionArgs& args, int t, int first) {
    if (args.job.picks == nullptr) return;
    const int32_t* picks = args.job.picks + static_cast<int64_t>(t) * args.params.index_top_k;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int w = first + OwnTileRow(i) - args.params.sliding_window;
      of[i] = static_cast<int>(LoadEarly4(picks + min(max(w, 0), args.params.index_top_k - 1)));
    }
  }
  __device__ __forceinline__ int2 Ids(const AttentionArgs& args, const RowKeys& keys,
                                      int first) const {
    if (keys.picks == nullptr || keys.num_window < args.params.sliding_window) {
      return OwnKeyIds(keys, first);
    }
    return make_int2(keys.Id(first + OwnTileRow(0), of[0]), keys.Id(first + OwnTileRow(1), of[1]));
  }
};

// Starts the copy of a tile's keys, in kGroups groups of neighbouring channels of both halves.
template <int kDim, int kGroups>
__device__ __forceinline__ void LoadKeyTile(const AttentionArgs& args, int2 own_ids,
                                            std::byte* tile) {
  const int chunk = static_cast<int>(threadIdx.x) % 8;
  const uint16_t* keys[2];
  std::byte* to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    keys[i] = KeyAddress<uint16_t>(args.cache, kDim, i == 0 ? own_ids.x : own_ids.y) + 8 * chunk;
    to[i] = ChunkAt<kDim>(tile, OwnTileRow(i), chunk);
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int c = group; c < kDim / 64; c += kGroups) {
#pragma unroll
      for (int i = 0; i < 2; ++i) CopyAsync16(to[i] + 128 * c, keys[i] + 64 * c);
    }
    CopyAsyncCommit();
  }
}

// CopyAsyncWait<left> for a `left` of at most kMost.
template <int kMost>
__device__ __forceinline__ void WaitForCopies(int left) {
  if (left == kMost) {
    CopyAsyncWait<kMost>();
  } else if constexpr (kMost > 0) {
    WaitForCopies<kMost - 1>(left);
  }
}

// How the eight warps of a block share the scores of a tile: halves of the channels, keys, heads.
template <int kHeadTiles>
struct ScoreShare {
  static constexpr int kM = kHeadTiles == 1 ? 1 : 2;  // tiles of 16 heads of a warp
  static constexpr int kWarpsM = kHeadTiles / kM;
  static constexpr int kWarpsN = 4 / kWarpsM;
  static constexpr int kN = 8 / kWarpsN;  // tiles of 8 keys of a warp

  // Matrix fragments of one step of 16 channels.
  struct Step {
    uint32_t a[kM][4];
    uint32_t b[kN / 2][4];
  };

  int lane = threadIdx.x % 32;
  int half = threadIdx.x / 32 % 2;
  int first_key = static_cast<int>(threadIdx.x) / 64 % kWarpsN * (8 * kN);
  int first_head = static_cast<int>(threadIdx.x) / 64 / kWarpsN * (16 * kM);

  template <int kDim>
  __device__ __forceinline__ void Load(std::byte* queries, std::byte* tile, int step,
                                       Step& to) const {
    const int chunk = half * (kDim / 16) + 2 * step;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int head = first_head + 16 * m + lane % 16;
      LoadMatrix4(to.a[m], ChunkAt<kDim>(queries, head, chunk + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const int key = first_key + 16 * n + lane % 8 + lane / 16 * 8;
      LoadMatrix4(to.b[n], ChunkAt<kDim>(tile, key, chunk + lane / 8 % 2));
    }
  }
};

// scores[half][head][key] = q . k over one half of the channels. A step's fragments are on their
// way while the step before multiplies. wait(group) comes before group `group` of kGroups is read.
template <int kDim, int kHeadTiles, int kGroups, typename Wait>
__device__ __forceinline__ void ScoreTile(std::byte* queries, std::byte* tile, float* low,
                                          float* high, Wait wait) {
  using Share = ScoreShare<kHeadTiles>;
  constexpr int kSteps = kDim / 32 / kGroups;
  const Share share;
  float sums[Share::kM][Share::kN][4] = {};
  typename Share::Step steps[2];
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    wait(group);
    share.template Load<kDim>(queries, tile, group * kSteps, steps[0]);
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) {
      const typename Share::Step& now = steps[step % 2];
      if (step + 1 < kSteps) {
        share.template Load<kDim>(queries, tile, group * kSteps + step + 1, steps[(step + 1) % 2]);
      }
#pragma unroll
      for (int n = 0; n < Share::kN; ++n) {
        const uint32_t b[2] = {now.b[n / 2][n % 2 * 2], now.b[n / 2][n % 2 * 2 + 1]};
#pragma unroll
        for (int m = 0; m < Share::kM; ++m) MmaBf16(sums[m][n], now.a[m], b);
      }
    }
  }
  float* scores = share.half == 0 ? low : high;
#pragma unroll
  for (int m = 0; m < Share::kM; ++m) {
#pragma unroll
    for (int n = 0; n < Share::kN; ++n) {
      float* at = scores + (share.first_head + 16 * m + share.lane / 4) * kScoreStride +
                  share.first_key + 8 * n + 2 * (share.lane % 4);
      *reinterpret_cast<float2*>(at) = make_float2(sums[m][n][0], sums[m][n][1]);
      *reinterpret_cast<float2*>(at + 8 * kScoreStride) = make_float2(sums[m][n][2], sums[m][n][3]);
    }
  }
}

// Of each pass, over the eight lanes that share a head. Passes go side by side, for a shuffle takes
// its time.
template <int kPasses>
__device__ __forceinline__ void HeadMax(float (&x)[kPasses]) {
#pragma unroll
  for (int lane = 4; lane > 0; lane /= 2) {
    float other[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) other[p] = __shfl_xor_sync(kFullMask, x[p], lane);
#pragma unroll
    for (int p = 0; p < kPasses; ++p) x[p] = fmaxf(x[p], other[p]);
  }
}
template <int kPasses>
__device__ __forceinline__ void HeadSum(float (&x)[kPasses]) {
#pragma unroll
  for (int lane = 4; lane > 0; lane /= 2) {
    float other[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) other[p] = __shfl_xor_sync(kFullMask, x[p], lane);
#pragma unroll
    for (int p = 0; p < kPasses; ++p) x[p] += other[p];
  }
}

// The head of scores and weights that this thread works on in pass i; each has eight lanes, which
// stand in one warp.
__device__ __forceinline__ int HeadOfPass(int pass) { return 32 * pass + threadIdx.x / 8; }

// A head's share of a lane: eight scores, keys 4 part..+3 and 32 + 4 part..+3. Those past `count`
// weigh nothing.
__device__ __forceinline__ void LoadScores(const float* low, const float* high, int head,
                                           float scale, int count, float (&s)[8]) {
  const int part = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = head * kScoreStride + 32 * i + 4 * part;
    const float4 a = *reinterpret_cast<const float4*>(low + at);
    const float4 b = *reinterpret_cast<const float4*>(high + at);
    s[4 * i] = (a.x + b.x) * scale, s[4 * i + 1] = (a.y + b.y) * scale;
    s[4 * i + 2] = (a.z + b.z) * scale, s[4 * i + 3] = (a.w + b.w) * scale;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k / 4 * 32 + 4 * part + k % 4 >= count) s[k] = -INFINITY;
  }
}

// s to weights e^(s - top), rounded to bf16 and written over the scores of the first half; returns
// the lane's part of their sum.
__device__ __forceinline__ float StoreWeights(const float (&s)[8], float top, float* low,
                                              int head) {
  float sum = 0.0f;
  uint32_t pairs[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    pairs[k] = FloatsToBf162(expf(s[2 * k] - top), expf(s[2 * k + 1] - top));
    const float2 weights = Bf162ToFloat2(pairs[k]);
    sum += weights.x;
    sum += weights.y;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint16_t* to = reinterpret_cast<uint16_t*>(low + head * kScoreStride) + 32 * i +
                   4 * (static_cast<int>(threadIdx.x) % 8);
    *reinterpret_cast<uint2*>(to) = make_uint2(pairs[2 * i], pairs[2 * i + 1]);
  }
  return sum;
}

// The scores of this thread's heads, one a pass, to weights. Returns (max, sum of the weights) of
// each in each of its eight lanes. count: valid keys.
template <int kPasses>
__device__ __forceinline__ void WeighHeads(float* low, const float* high, float scale, int count,
                                           float2 (&softmax)[kPasses]) {
  float s[kPasses][8], top[kPasses], sum[kPasses];
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    LoadScores(low, high, HeadOfPass(p), scale, count, s[p]);
    top[p] = -INFINITY;
#pragma unroll
    for (int k = 0; k < 8; ++k) top[p] = fmaxf(top[p], s[p][k]);
  }
  HeadMax(top);
  __syncwarp();  // all lanes have read the scores that the weights replace
#pragma unroll
  for (int p = 0; p < kPasses; ++p) sum[p] = StoreWeights(s[p], top[p], low, HeadOfPass(p));
  HeadSum(sum);
#pragma unroll
  for (int p = 0; p < kPasses; ++p) softmax[p] = make_float2(top[p], sum[p]);
}

// A warp's share of the output: all heads of the block, kDim / 8 channels. Lane 4g + t of a warp
// holds of head tile m and channel tile n: [m][n][0..1] row g, channels 2t, 2t+1; [2..3] row g + 8.
template <int kDim, int kHeadTiles>
using TileSums = float[kHeadTiles][kDim / 64][4];

// The products of a warp's channels and kM tiles of 16 heads from head `first` on, started from
// zero, kN channel tiles at once: take(head tile of kM, first channel tile, products).
template <int kDim, int kM, int kN, typename Take>
__device__ __forceinline__ void MultiplyTile(const float* weights, std::byte* tile, int first,
                                             Take take) {
  constexpr int kSteps = kAttentionSplit / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t a[kM][kSteps][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      LoadMatrix4(a[m][step], weights + (first + 16 * m + lane % 16) * kScoreStride + 8 * step +
                                  4 * (lane / 16));
    }
  }
#pragma unroll
  for (int first_n = 0; first_n < kDim / 64; first_n += kN) {
    float products[kM][kN][4] = {};
    uint32_t b[2][kN / 2][4];  // of a step, and of the next, on its way
    const auto load = [&](int step) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        LoadMatrix4Trans(b[step % 2][n / 2],
                         ChunkAt<kDim>(tile, 16 * step + lane % 16,
                                       warp * (kDim / 64) + first_n + n + lane / 16));
      }
    };
    load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) load(step + 1);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const uint32_t(&both)[4] = b[step % 2][n / 2];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          MmaBf16(products[m][n], a[m][step], {both[n % 2 * 2], both[n % 2 * 2 + 1]});
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) take(m, first_n, products[m]);
  }
}

// sums = old_part * sums + new_part * (weights x tile).
template <int kDim, int kHeadTiles>
__device__ __forceinline__ void AddTile(const float* weights, std::byte* tile,
                                        const float* old_part, const float* new_part,
                                        TileSums<kDim, kHeadTiles>& sums) {
  constexpr int kM = kHeadTiles == 1 ? 1 : 2;  // at once: what registers allow
  const int row = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int first = 0; first < kHeadTiles; first += kM) {
    FoldFactors factors[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = 16 * (first + m) + 8 * i + row;
        factors[m][i] = {old_part[head], new_part[head]};
      }
    }
    MultiplyTile<kDim, kM, 2>(
        weights, tile, 16 * first, [&](int m, int n, const float(&products)[2][4]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            float& sum = sums[first + m][n + i / 4][i % 4];
            sum = FoldValue(sum, products[i / 4][i % 4], factors[m][i % 4 / 2]);
          }
        });
  }
}

}  // namespace ds4::cuda
