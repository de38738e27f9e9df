// How a router's logits become experts and weights: what the kernels of few and of many rows share.
#pragma once

#include "engine/cuda/experts.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {

inline constexpr int kMaxExperts = 512;

// Stops where no kernel can do what the parameters say. Host.
void CheckRouter(const RouterParams& params);

__device__ __forceinline__ float RouterScore(float logit) {
  // log1p keeps the relative precision of small values, and so their order.
  const float softplus = logit > 20.0f ? logit : log1pf(expf(logit));
  return sqrtf(softplus);
}

// Unsigned keys in the order of the floats; 0 is below every one of them. A total order, so that
// scores that are no numbers still give distinct experts.
__device__ __forceinline__ uint32_t SortKey(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes +0
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return key == 0 ? 1u : key;
}

// The experts of a row as one warp chooses among them: a group of neighbours for each lane, each
// group with the largest key first, the lower id on ties.
__host__ __device__ constexpr int GroupExperts(int num_experts) {
  return num_experts <= 8 * kWarpSize ? 8 : 16;
}
// With those that are no experts, whose key is 0.
__host__ __device__ constexpr int RowExperts(int num_experts) {
  return kWarpSize * GroupExperts(num_experts);
}

// In shared memory.
struct RowScores {
  uint32_t* keys;  // in order, one free word behind each group: the lanes read different banks
  uint16_t* ids;   // the same places
  float* scores;   // by expert

  __device__ __forceinline__ RowScores(std::byte* memory, int num_experts)
      : keys(reinterpret_cast<uint32_t*>(memory)) {
    const int words = RowExperts(num_experts) + kWarpSize;
    ids = reinterpret_cast<uint16_t*>(keys + words);
    scores = reinterpret_cast<float*>(ids + words);
  }
};
__host__ __device__ constexpr int RowScoresBytes(int num_experts) {
  return (RowExperts(num_experts) + kWarpSize) * 6 + RowExperts(num_experts) * 4;
}

// Leaves one expert where it belongs. Called by whole warps: 32 neighbours, lane by lane, those
// that are no experts too.
__device__ __forceinline__ void PlaceScore(const RouterParams& params, const RowScores& row,
                                           int expert, float score, float bias) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool small_groups = GroupExperts(params.num_experts) == 8;
  const uint32_t key = expert < params.num_experts ? SortKey(score + bias) : 0;
  int place = 0;
  const auto compare = [&](int other) {
    const uint32_t key_of = __shfl_xor_sync(kFullMask, key, other);
    if (key_of > key || (key_of == key && (lane ^ other) < lane)) ++place;
  };
#pragma unroll
  for (int other = 1; other < 8; ++other) compare(other);
  if (!small_groups) {
#pragma unroll 1
    for (int other = 8; other < 16; ++other) compare(other);
  }
  const int at =
      expert + (small_groups ? expert / 8 - expert % 8 : expert / 16 - expert % 16) + place;
  row.keys[at] = key;
  row.ids[at] = static_cast<uint16_t>(expert);
  row.scores[expert] = score;
}

// Of lane k < used: the k-th expert of a row.
struct Choice {
  int expert = 0;
  float weight = 0.0f;
  int place = 0;  // among the row's experts by rising id, then k
};

// One warp: the k-th expert of a row by score for lane k. Nothing in the loop waits for shared
// memory.
__device__ __forceinline__ int ChooseByScore(const RouterParams& params, const RowScores& row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int pitch = GroupExperts(params.num_experts) + 1;
  // The best two of the lane's group that are left; `next` is the place of the one after.
  int next = lane * pitch;
  const int end = next + pitch - 1;
  uint32_t key = row.keys[next], key_after = row.keys[next + 1];
  int id = row.ids[next], id_after = row.ids[next + 1];
  next += 2;
  uint16_t* chosen = row.ids + pitch - 1;  // the free places, which lie behind each group
#pragma unroll 1
  for (int k = 0; k < params.used; ++k) {
    const uint32_t largest = __reduce_max_sync(kFullMask, key);
    if (lane == __ffs(static_cast<int>(__ballot_sync(kFullMask, key == largest))) - 1) {
      *chosen = static_cast<uint16_t>(id);
      key = key_after;
      id = id_after;
      key_after = next < end ? row.keys[next] : 0;
      id_after = next < end ? row.ids[next] : 0;
      ++next;
    }
    chosen += pitch;
  }
  __syncwarp();
  return row.ids[end];
}

// One warp chooses a row's experts. listed: what the table of a hash-routed layer says for this
// lane.
__device__ __forceinline__ Choice ChooseRow(const RouterParams& params, int listed,
                                            const RowScores& row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  Choice own;
  own.expert = params.hash_ids != nullptr ? listed : ChooseByScore(params, row);
  if (lane >= params.used) own.expert = 0;
  const float score = row.scores[own.expert];
  float sum = 0.0f;
#pragma unroll 2
  for (int k = 0; k < params.used; ++k) {
    sum += __shfl_sync(kFullMask, score, k);
    const int other = __shfl_sync(kFullMask, own.expert, k);
    if (other < own.expert || (other == own.expert && k < lane)) ++own.place;
  }
  own.weight = score / (sum + 1e-20f) * params.scale;
  return own;
}

// The expert that a token's table gives to this lane; tokens: of the rows.
__device__ __forceinline__ int ListedExpert(const RouterParams& params, const int32_t* tokens,
                                            int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (params.hash_ids == nullptr || lane >= params.used) return 0;
  return params.hash_ids[static_cast<int64_t>(tokens[row]) * params.used + lane];
}

}  // namespace ds4::cuda
