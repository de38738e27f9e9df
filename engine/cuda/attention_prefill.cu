// Attention for many rows: one block goes through all keys of a row for 16, 32 or 64 heads, tile by
// tile, the next tile on its way while one is used. Sums stay in registers; nothing is kept in
// memory. The result has the same bits as attention.cu's splits.
#include "engine/base/check.h"
#include "engine/cuda/attention_tile.cuh"

namespace ds4::cuda {
namespace {

constexpr int kStages = 2;

// Sums of the block's heads through shared memory to the output, a warp for each head.
template <int kDim, int kHeadTiles>
__device__ void StoreHeads(const AttentionArgs& args, int t, int first_head, float* stage,
                           const float* factors, const TileSums<kDim, kHeadTiles>& sums) {
  constexpr int kStride = kDim + 8;  // rows of a fragment in different banks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kDim / 64; ++n) {
      float* to =
          stage + (16 * m + lane / 4) * kStride + warp * (kDim / 8) + 8 * n + 2 * (lane % 4);
      *reinterpret_cast<float2*>(to) = make_float2(sums[m][n][0], sums[m][n][1]);
      *reinterpret_cast<float2*>(to + 8 * kStride) = make_float2(sums[m][n][2], sums[m][n][3]);
    }
  }
  const int rope_dim = args.params.rope_dim;
  const ChannelAngles<4> angles = LoadHeadAngles<kDim>(args, t);
  __syncthreads();
#pragma unroll 2
  for (int row = warp; row < 16 * kHeadTiles; row += kTileThreads / 32) {
    const int head = first_head + row;
    if (head >= args.params.num_heads) continue;
    const HeadPlace place =
        PlaceOfHead(head, args.params.num_heads, args.job.heads_per_group, kDim);
#pragma unroll
    for (int channel = 8 * lane; channel < kDim; channel += 256) {
      const float4* from = reinterpret_cast<const float4*>(stage + row * kStride + channel);
      const float4 low = from[0], high = from[1];
      const float factor = factors[row];
      float v[8] = {low.x * factor,  low.y * factor,  low.z * factor,  low.w * factor,
                    high.x * factor, high.y * factor, high.z * factor, high.w * factor};
      if (channel >= kDim - 256) TurnBack(v, channel, kDim, rope_dim, angles);
      StoreColumns(args.job.out, t, place.first_col + channel, v, true);
    }
    StorePadding<8>(args.job.out, t, place.first_col + kDim, place.padding_end, lane, 32);
  }
}

// Brings another row's projections to L2.
template <int kDim, int kHeads>
__device__ __forceinline__ void PrefetchQueries(const AttentionArgs& args, int t, int first_head) {
  constexpr int kWarps = kTileThreads / 32;
  if (threadIdx.x % 32 != 0) return;
  const int heads = min(args.params.num_heads - first_head, kHeads);
  const int bytes = heads * (kDim * 4 / kWarps);  // of each warp
  const float* q =
      args.job.q + (static_cast<int64_t>(t) * args.params.num_heads + first_head) * kDim;
  const int warp = threadIdx.x / 32;
  PrefetchL2(reinterpret_cast<const std::byte*>(q) + warp * bytes, static_cast<uint32_t>(bytes));
}

// `ahead`: blocks that run at once; block t + ahead starts about when block t ends.
template <int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kTileThreads, 1) TileRowsKernel(AttentionArgs args, int ahead) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  using Shared = TileShared<kDim, kHeadTiles, kStages>;
  constexpr int kPasses = (Shared::kHeads + 31) / 32, kWarps = kTileThreads / 32;
  const Shared shared{memory};
  GridDependencyWait();
  const int t = blockIdx.x, first_head = Shared::kHeads * blockIdx.y;
  // What needs no position is on its way before the position is used; the norms of the queries come
  // while the keys are on theirs.
  const RowPlace place = LoadPlace(args, t);
  EarlyPicks picks;
  picks.Load(args, t, 0);
  constexpr int kOwnHeads = Shared::kHeads / kWarps;
  HeadChannels<kDim> heads[kOwnHeads];
  const int warp = threadIdx.x / 32;
  LoadHeads<kDim>(args, t, first_head, warp, heads);
  const ChannelAngles<4> angles = LoadHeadAngles<kDim>(args, t);
  const RowKeys keys = KeysOfRow(args, t, place);
  LoadKeyTile<kDim, 1>(args, picks.Ids(args, keys, 0), shared.keys(0));
  int2 next_ids = OwnKeyIds(keys, kAttentionSplit);  // one tile ahead of its use
  // A loop of one round, which keeps the registers of what follows out of this stretch.
#pragma unroll 1
  for (int first = warp; first < Shared::kHeads; first += kOwnHeads * kWarps) {
#pragma unroll
    for (int i = 0; i < kOwnHeads; ++i) {
      NormRotateHead<kDim>(args, angles, heads[i], shared.query(), first + i * kWarps);
    }
  }
  if (t + ahead < static_cast<int>(gridDim.x)) {
    PrefetchQueries<kDim, Shared::kHeads>(args, t + ahead, first_head);
  }
  // Of the two warps of a scheduler, one starts its copies while the other multiplies.
  const bool copies_first = threadIdx.x < kTileThreads / 2;

  TileSums<kDim, kHeadTiles> sums = {};
  float max_so_far[kPasses], sum_so_far[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    max_so_far[pass] = -INFINITY;
    sum_so_far[pass] = 0.0f;
  }
  for (int first = 0, stage = 0; first < keys.total; first += kAttentionSplit, stage ^= 1) {
    CopyAsyncWait<0>();
    __syncthreads();  // the tile is there, and nobody uses the one before any more
    const auto load_next = [&] {
      if (first + kAttentionSplit < keys.total) {
        LoadKeyTile<kDim, 1>(args, next_ids, shared.keys(stage ^ 1));
        next_ids = OwnKeyIds(keys, first + 2 * kAttentionSplit);
      }
    };
    if (copies_first) load_next();
    ScoreTile<kDim, kHeadTiles, 1>(shared.query(), shared.keys(stage), shared.scores(0),
                                   shared.scores(1), [](int) {});
    if (!copies_first) load_next();
    __syncthreads();
    if (HeadOfPass(0) < Shared::kHeads) {
      float2 softmax[kPasses];
      WeighHeads(shared.scores(0), shared.scores(1), args.scale, keys.total - first, softmax);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const FoldFactors factors =
            FoldSplit(softmax[pass].x, softmax[pass].y, max_so_far[pass], sum_so_far[pass]);
        if (threadIdx.x % 8 == 0) {
          shared.old_part()[HeadOfPass(pass)] = factors.old_part;
          shared.new_part()[HeadOfPass(pass)] = factors.new_part;
        }
      }
    }
    __syncthreads();
    AddTile<kDim, kHeadTiles>(shared.scores(0), shared.keys(stage), shared.old_part(),
                              shared.new_part(), sums);
  }

  __syncthreads();  // tiles and factors are free
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int head = HeadOfPass(pass);
    if (head < Shared::kHeads && threadIdx.x % 8 == 0 &&
        first_head + head < args.params.num_heads) {
      shared.new_part()[head] =
          FinalFactor(max_so_far[pass], sum_so_far[pass], args.job.sinks[first_head + head]);
    }
  }
  static_assert(Shared::kHeads * (kDim + 8) * 4 <=
                Shared::kQueryBytes + kStages * Shared::kKeyBytes);
  StoreHeads<kDim, kHeadTiles>(args, t, first_head, reinterpret_cast<float*>(shared.query()),
                               shared.new_part(), sums);
}

template <int kDim, int kHeadTiles>
void LaunchRows(const LaunchContext& launch, const AttentionArgs& args, int rows) {
  const unsigned groups = (args.params.num_heads + 16 * kHeadTiles - 1) / (16 * kHeadTiles);
  Launch(launch, dim3(rows, groups), dim3(kTileThreads),
         TileShared<kDim, kHeadTiles, kStages>::kBytes, TileRowsKernel<kDim, kHeadTiles>, args,
         launch.num_sms);
}

// More heads in a block read each key less often, as long as there are blocks for all of the
// device.
template <int kDim>
void ChooseHeads(const LaunchContext& launch, const AttentionArgs& args, int rows) {
  const int num_heads = args.params.num_heads;
  if (num_heads > 32 && (num_heads + 63) / 64 * static_cast<int64_t>(rows) >= launch.num_sms) {
    LaunchRows<kDim, 4>(launch, args, rows);
  } else if (num_heads > 16) {
    LaunchRows<kDim, 2>(launch, args, rows);
  } else {
    LaunchRows<kDim, 1>(launch, args, rows);
  }
}

}  // namespace

void LaunchTileRows(const LaunchContext& launch, const AttentionArgs& args, int rows) {
  CHECK(UsesTiles(args.params)) << args.params.head_dim;
  if (args.params.head_dim == 512) {
    ChooseHeads<512>(launch, args, rows);
  } else {
    ChooseHeads<256>(launch, args, rows);
  }
}

}  // namespace ds4::cuda
