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
  __syncthreads();
  const int rope_dim = args.params.rope_dim;
  const int64_t angles = static_cast<int64_t>(t) * (rope_dim / 2);
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
      TurnBack(v, channel, kDim, rope_dim,
               LoadAngles(channel, kDim, rope_dim, args.rope.cos + angles, args.rope.sin + angles));
      StoreColumns(args.job.out, t, place.first_col + channel, v, true);
    }
    StorePadding(args.job.out, t, place.first_col + kDim, place.padding_end, lane, 32);
  }
}

template <int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kTileThreads, 1) TileRowsKernel(AttentionArgs args) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  using Shared = TileShared<kDim, kHeadTiles, kStages>;
  constexpr int kPasses = (Shared::kHeads + 31) / 32;
  const Shared shared{memory};
  GridDependencyWait();
  const int t = blockIdx.x, first_head = Shared::kHeads * blockIdx.y;
  const RowKeys keys = KeysOfRow(args, t);
  LoadKeyTile<kDim>(args, OwnKeyId(keys, 0), shared.keys(0));
  int next_id = OwnKeyId(keys, kAttentionSplit);  // one tile ahead of its use
  LoadQueries<kDim, Shared::kHeads>(args, t, first_head, shared.query());

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
    if (first + kAttentionSplit < keys.total) {
      LoadKeyTile<kDim>(args, next_id, shared.keys(stage ^ 1));
      next_id = OwnKeyId(keys, first + 2 * kAttentionSplit);
    }
    ScoreTile<kDim, kHeadTiles>(shared.query(), shared.keys(stage), shared.scores(0),
                                shared.scores(1));
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int head = HeadOfPass(pass);
      if (head >= Shared::kHeads) continue;
      const float2 softmax =
          WeighHead(shared.scores(0), shared.scores(1), head, args.scale, keys.total - first);
      const FoldFactors factors =
          FoldSplit(softmax.x, softmax.y, max_so_far[pass], sum_so_far[pass]);
      if (threadIdx.x % 8 == 0) {
        shared.old_part()[head] = factors.old_part;
        shared.new_part()[head] = factors.new_part;
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
         TileShared<kDim, kHeadTiles, kStages>::kBytes, TileRowsKernel<kDim, kHeadTiles>, args);
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
