// LaunchRoute: which experts each row uses, and the lists of work by expert.
//
// One warp chooses a row's experts; then a stable counting sort of the pairs by expert. Up to
// 64 rows all of it is one block of one launch; more rows take three launches, because then one
// block would be the slowest part of the step.
#include "engine/base/check.h"
#include "engine/cuda/experts.h"
#include "engine/cuda/experts_groups.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kMaxExperts = 512;
constexpr int kRouteOneBlockRows = 64;
constexpr int kRouteThreads = 512;
constexpr int kFewPairs = 128;
constexpr int kPlaceThreads = 256;

struct RouteJob {
  RouterParams params;
  const float* logits = nullptr;
  const int32_t* tokens = nullptr;
  int rows = 0;
  Routing routing;
};

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

// One warp: the `used` experts with the largest score + bias of one row; the lower id on ties.
// Thread k gets the k-th one chosen. score(i), bias[i]: of expert 32 i + this thread's lane.
template <int kPerThread, typename Score>
__device__ int ChooseByScore(const RouterParams& params, const float (&bias)[kPerThread],
                             const Score& score) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t key[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    key[i] = lane + 32 * i < params.num_experts ? SortKey(score(lane + 32 * i) + bias[i]) : 0;
  }
  int chosen = 0;
  for (int k = 0; k < params.used; ++k) {
    uint32_t best = 0;
    int best_i = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool better = key[i] > best;
      best = better ? key[i] : best;
      best_i = better ? i : best_i;
    }
    int best_expert = lane + 32 * best_i;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const uint32_t other = __shfl_xor_sync(kFullMask, best, offset);
      const int other_expert = __shfl_xor_sync(kFullMask, best_expert, offset);
      const bool better = other > best || (other == best && other_expert < best_expert);
      best = better ? other : best;
      best_expert = better ? other_expert : best_expert;
    }
    if (lane == k) chosen = best_expert;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (best_expert == lane + 32 * i) key[i] = 0;
    }
  }
  return chosen;
}

// The biases of this thread's experts. They are weights: no kernel writes them.
template <int kPerThread>
__device__ void LoadBias(const RouterParams& params, float (&bias)[kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    bias[i] = params.bias != nullptr && expert < params.num_experts ? params.bias[expert] : 0.0f;
  }
}

struct Choice {
  int expert;
  float weight;
};

// One warp routes one row; thread k < used gets the k-th choice and writes it to ids and weights.
template <int kPerThread, typename Score>
__device__ Choice RouteRow(const RouteJob& job, int row, const float (&bias)[kPerThread],
                           const Score& score) {
  const RouterParams& params = job.params;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int expert = 0;
  if (params.hash_ids == nullptr) {
    expert = ChooseByScore(params, bias, score);
  } else if (lane < params.used) {
    expert = params.hash_ids[static_cast<int64_t>(job.tokens[row]) * params.used + lane];
  }
  const float own = score(expert);
  float sum = 0.0f;
  for (int k = 0; k < params.used; ++k) sum += __shfl_sync(kFullMask, own, k);
  const float weight = own / (sum + 1e-20f) * params.scale;
  if (lane < params.used) {
    const int64_t pair = static_cast<int64_t>(row) * params.used + lane;
    job.routing.ids[pair] = expert;
    job.routing.weights[pair] = weight;
  }
  return {expert, weight};
}

struct PrefixSum {
  int before;  // of the threads below this one
  int total;   // of the block
};

// Sums of `value` over the block's threads; `shared`: 32 words.
__device__ PrefixSum BlockPrefixSum(int value, int* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_sync(kFullMask, inclusive, lane >= offset ? lane - offset : lane);
    if (lane >= offset) inclusive += below;
  }
  __syncthreads();  // the last use of `shared` is over
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  PrefixSum sum = {inclusive - value, 0};
  for (int w = 0; w < num_warps; ++w) {
    if (w < warp) sum.before += shared[w];
    sum.total += shared[w];
  }
  return sum;
}

// Thread e of a block of at least num_experts threads has count = pairs of expert e. Gives the
// expert's first place; the one block that may `write` writes the lists.
__device__ int PlaceExperts(const RouteJob& job, int count, bool write, int* shared) {
  const int expert = static_cast<int>(threadIdx.x);
  const int num_groups = (count + kGroupPairs - 1) / kGroupPairs;
  const PrefixSum pairs = BlockPrefixSum(count, shared);
  const PrefixSum groups = BlockPrefixSum(num_groups, shared);
  if (write) {
    const Routing& routing = job.routing;
    if (expert < job.params.num_experts) routing.expert_first[expert] = pairs.before;
    for (int i = 0; i < num_groups; ++i) {
      const int group = groups.before + i;
      routing.group_expert[group] = expert;
      routing.group_first[group] = pairs.before + i * kGroupPairs;
      routing.group_size[group] = min(kGroupPairs, count - i * kGroupPairs);
    }
    if (expert == 0) {
      routing.expert_first[job.params.num_experts] = pairs.total;
      *routing.num_groups = groups.total;
    }
  }
  return pairs.before;
}

// Lists of at most kFewPairs pairs, by comparing each with all: shorter than counting and adding
// up. begins: shared, [kFewPairs].
__device__ void PlaceFewPairs(const RouteJob& job, int num_pairs, const int* ids,
                              const float* weights, int* begins) {
  constexpr int kNoBegin = 0x7fffffff;
  const Routing& routing = job.routing;
  const int p = static_cast<int>(threadIdx.x);
  for (int e = p; e <= job.params.num_experts; e += static_cast<int>(blockDim.x)) {
    int first = 0;
    for (int q = 0; q < num_pairs; ++q) first += ids[q] < e ? 1 : 0;
    routing.expert_first[e] = first;
  }
  int less = 0, rank = 0, same = 0;
  if (p < num_pairs) {
    for (int q = 0; q < num_pairs; ++q) {
      less += ids[q] < ids[p] ? 1 : 0;
      same += ids[q] == ids[p] ? 1 : 0;
      rank += ids[q] == ids[p] && q < p ? 1 : 0;
    }
    const int place = less + rank;
    routing.pairs[place] = p;
    routing.pair_place[p] = place;
    routing.place_weight[place] = weights[p];
    begins[p] = rank % kGroupPairs == 0 ? place : kNoBegin;
  }
  __syncthreads();
  if (p < num_pairs && begins[p] != kNoBegin) {
    int group = 0;
    for (int q = 0; q < num_pairs; ++q) group += begins[q] < begins[p] ? 1 : 0;
    routing.group_expert[group] = ids[p];
    routing.group_first[group] = begins[p];
    routing.group_size[group] = min(kGroupPairs, same - rank);
  }
  if (p == 0) {
    int num_groups = 0;
    for (int q = 0; q < num_pairs; ++q) num_groups += begins[q] != kNoBegin ? 1 : 0;
    *routing.num_groups = num_groups;
  }
}

// The same by counting. counts, first: shared, [kMaxExperts]; scan: shared, [32].
__device__ void PlacePairsByCount(const RouteJob& job, int num_pairs, const int* ids,
                                  const float* weights, int* counts, int* first, int* scan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  for (int e = thread; e < kMaxExperts; e += num_threads) counts[e] = 0;
  __syncthreads();
  for (int p = thread; p < num_pairs; p += num_threads) atomicAdd(&counts[ids[p]], 1);
  __syncthreads();
  const int count = thread < kMaxExperts ? counts[thread] : 0;
  const int first_pair = PlaceExperts(job, count, true, scan);
  if (thread < kMaxExperts) first[thread] = first_pair;
  __syncthreads();
  for (int p = thread; p < num_pairs; p += num_threads) {
    const int expert = ids[p];
    int place = first[expert];
    for (int q = 0; q < p; ++q) place += ids[q] == expert ? 1 : 0;
    job.routing.pairs[place] = p;
    job.routing.pair_place[p] = place;
    job.routing.place_weight[place] = weights[p];
  }
}

// All of the routing in one block. Dynamic shared memory: ids and weights of the pairs, scores.
template <int kPerThread>
__global__ void __launch_bounds__(kRouteThreads) RouteFewRows(const RouteJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  __shared__ int counts[kMaxExperts];
  __shared__ int first[kMaxExperts];
  __shared__ int scan[32];
  const int num_experts = job.params.num_experts;
  const int num_pairs = job.rows * job.params.used;
  int* ids = reinterpret_cast<int*>(memory);
  float* weights = reinterpret_cast<float*>(ids + num_pairs);
  float* scores = weights + num_pairs;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  float bias[kPerThread];
  LoadBias(job.params, bias);
  GridDependencyWait();
  for (int i = thread; i < job.rows * num_experts; i += num_threads) {
    scores[i] = RouterScore(job.logits[i]);
  }
  __syncthreads();
  for (int row = thread / 32; row < job.rows; row += num_threads / 32) {
    const float* own = scores + row * num_experts;
    const Choice choice = RouteRow(job, row, bias, [own](int expert) { return own[expert]; });
    if (thread % 32 < job.params.used) {
      ids[row * job.params.used + thread % 32] = choice.expert;
      weights[row * job.params.used + thread % 32] = choice.weight;
    }
  }
  __syncthreads();
  if (num_pairs <= kFewPairs) {
    PlaceFewPairs(job, num_pairs, ids, weights, counts);
  } else {
    PlacePairsByCount(job, num_pairs, ids, weights, counts, first, scan);
  }
}

template <int kPerThread>
__global__ void __launch_bounds__(kPlaceThreads) RouteRows(const RouteJob job) {
  LaunchDependents();
  float bias[kPerThread];
  LoadBias(job.params, bias);
  GridDependencyWait();
  const int row =
      static_cast<int>(blockIdx.x) * (kPlaceThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (row >= job.rows) return;  // the same for all threads of a warp
  const float* logits = job.logits + static_cast<int64_t>(row) * job.params.num_experts;
  RouteRow(job, row, bias, [logits](int expert) { return RouterScore(logits[expert]); });
}

// Calls found(p, rank) in the thread that sees pair p of this warp's expert, for all of them; rank
// counts the expert's pairs before p. Returns their number (in all threads).
template <typename Found>
__device__ int FindPairs(const int32_t* ids, int num_pairs, int expert, const Found& found) {
  constexpr int kAhead = 8;  // loads in flight
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned below = (1u << lane) - 1u;
  int count = 0;
  for (int begin = 0; begin < num_pairs; begin += 32 * kAhead) {
    int id[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int p = begin + 32 * i + lane;
      id[i] = p < num_pairs ? ids[p] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const unsigned mine = __ballot_sync(kFullMask, id[i] == expert);
      if (id[i] == expert) found(begin + 32 * i + lane, count + __popc(mine & below));
      count += __popc(mine);
    }
  }
  return count;
}

// A warp per expert counts its pairs.
__global__ void __launch_bounds__(kPlaceThreads) CountPairs(const RouteJob job) {
  LaunchDependents();
  GridDependencyWait();
  const int expert =
      static_cast<int>(blockIdx.x) * (kPlaceThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int count = FindPairs(job.routing.ids, job.rows * job.params.used, expert, [](int, int) {});
  if (expert < job.params.num_experts && threadIdx.x % 32 == 0) job.routing.counts[expert] = count;
}

// A warp per expert places its pairs; every block adds up the counts for itself.
__global__ void __launch_bounds__(kMaxExperts) PlacePairs(const RouteJob job) {
  LaunchDependents();
  __shared__ int scan[32];
  __shared__ int first[kMaxExperts];
  GridDependencyWait();
  const int thread = static_cast<int>(threadIdx.x);
  const int count = thread < job.params.num_experts ? job.routing.counts[thread] : 0;
  first[thread] = PlaceExperts(job, count, blockIdx.x == 0, scan);
  __syncthreads();
  const int expert = static_cast<int>(blockIdx.x) * (kMaxExperts / 32) + thread / 32;
  if (expert >= job.params.num_experts) return;
  const Routing& routing = job.routing;
  const int begin = first[expert];
  FindPairs(routing.ids, job.rows * job.params.used, expert, [&](int p, int rank) {
    routing.pairs[begin + rank] = p;
    routing.pair_place[p] = begin + rank;
    routing.place_weight[begin + rank] = routing.weights[p];
  });
}

// Cuts memory into 256-byte aligned arrays.
class Cutter {
 public:
  explicit Cutter(std::byte* memory) : memory_(memory) {}
  template <typename T>
  void Take(int64_t count, T*& array) {
    array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

int64_t CutRouting(std::byte* memory, int64_t max_rows, const RouterParams& params, Routing& out) {
  Cutter cutter(memory);
  const int64_t num_pairs = max_rows * params.used;
  const int64_t max_groups = MaxGroups(num_pairs, params.num_experts);
  cutter.Take(num_pairs, out.ids);
  cutter.Take(num_pairs, out.weights);
  cutter.Take(max_groups, out.group_expert);
  cutter.Take(max_groups, out.group_first);
  cutter.Take(max_groups, out.group_size);
  cutter.Take(1, out.num_groups);
  cutter.Take(num_pairs, out.pairs);
  cutter.Take(num_pairs, out.pair_place);
  cutter.Take(num_pairs, out.place_weight);
  cutter.Take(params.num_experts + 1, out.expert_first);
  cutter.Take(params.num_experts, out.counts);
  return cutter.bytes();
}

}  // namespace

int64_t RoutingBytes(int64_t max_rows, const RouterParams& params) {
  Routing routing;
  return CutRouting(nullptr, max_rows, params, routing);
}

Routing MakeRouting(std::byte* memory, int64_t max_rows, const RouterParams& params) {
  Routing routing;
  CutRouting(memory, max_rows, params, routing);
  return routing;
}

void LaunchRoute(const LaunchContext& launch, const RouterParams& params, const float* logits,
                 const int32_t* tokens, int rows, const Routing& routing) {
  CHECK(params.num_experts >= 1 && params.num_experts <= kMaxExperts)
      << params.num_experts << " experts, the router takes 1 to " << kMaxExperts;
  CHECK(params.used >= 1 && params.used <= kMaxExpertsUsed && params.used <= params.num_experts)
      << params.used << " of " << params.num_experts << " experts used";
  CHECK((params.hash_ids != nullptr) != (params.bias != nullptr))
      << "a router has either a bias or a table of ids";
  if (rows == 0) return;
  const RouteJob job = {params, logits, tokens, rows, routing};
  const bool few_experts = params.num_experts <= 256;
  if (rows <= kRouteOneBlockRows) {
    const size_t shared_bytes =
        rows * (params.used * (sizeof(int) + sizeof(float)) + params.num_experts * sizeof(float));
    Launch(launch, dim3(1), dim3(kRouteThreads), shared_bytes,
           few_experts ? RouteFewRows<8> : RouteFewRows<16>, job);
    return;
  }
  const int warps = kPlaceThreads / 32;
  Launch(launch, dim3((rows + warps - 1) / warps), dim3(kPlaceThreads), 0,
         few_experts ? RouteRows<8> : RouteRows<16>, job);
  Launch(launch, dim3((params.num_experts + warps - 1) / warps), dim3(kPlaceThreads), 0, CountPairs,
         job);
  const int place_warps = kMaxExperts / 32;
  Launch(launch, dim3((params.num_experts + place_warps - 1) / place_warps), dim3(kMaxExperts), 0,
         PlacePairs, job);
}

}  // namespace ds4::cuda
