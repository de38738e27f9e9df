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
constexpr int kExpertsPerThread = kMaxExperts / 32;
constexpr int kRouteOneBlockRows = 64;
constexpr int kRouteThreads = 1024;
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
// Thread k gets the k-th one chosen.
__device__ int ChooseByScore(const RouterParams& params, const float* logits) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t key[kExpertsPerThread];
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int expert = lane + 32 * i;
    key[i] = 0;
    if (expert < params.num_experts) {
      key[i] = SortKey(RouterScore(logits[expert]) + params.bias[expert]);
    }
  }
  int chosen = 0;
  for (int k = 0; k < params.used; ++k) {
    uint32_t best = 0;
    int best_i = 0;
#pragma unroll
    for (int i = 0; i < kExpertsPerThread; ++i) {
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
    for (int i = 0; i < kExpertsPerThread; ++i) {
      if (best_expert == lane + 32 * i) key[i] = 0;
    }
  }
  return chosen;
}

// One warp routes one row: ids and weights, also into shared memory when that is given.
__device__ void RouteRow(const RouteJob& job, int row, int* shared_ids, float* shared_weights) {
  const RouterParams& params = job.params;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* logits = job.logits + static_cast<int64_t>(row) * params.num_experts;
  int expert = 0;
  if (params.hash_ids == nullptr) {
    expert = ChooseByScore(params, logits);
  } else if (lane < params.used) {
    expert = params.hash_ids[static_cast<int64_t>(job.tokens[row]) * params.used + lane];
  }
  const float score = RouterScore(logits[expert]);
  float sum = 0.0f;
  for (int k = 0; k < params.used; ++k) sum += __shfl_sync(kFullMask, score, k);
  if (lane < params.used) {
    const int64_t pair = static_cast<int64_t>(row) * params.used + lane;
    job.routing.ids[pair] = expert;
    const float weight = score / (sum + 1e-20f) * params.scale;
    job.routing.weights[pair] = weight;
    if (shared_ids != nullptr) {
      shared_ids[pair] = expert;
      shared_weights[pair] = weight;
    }
  }
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

// All of the routing in one block. Dynamic shared memory: ids and weights of the pairs.
__global__ void __launch_bounds__(kRouteThreads) RouteFewRows(RouteJob job) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  __shared__ int counts[kMaxExperts];
  __shared__ int first[kMaxExperts];
  __shared__ int scan[32];
  const int num_pairs = job.rows * job.params.used;
  int* ids = reinterpret_cast<int*>(memory);
  float* weights = reinterpret_cast<float*>(ids + num_pairs);
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  if (thread == 0 && job.params.bias != nullptr &&
      reinterpret_cast<uintptr_t>(job.params.bias) % 16 == 0 && job.params.num_experts >= 4) {
    PrefetchL2(job.params.bias, static_cast<uint32_t>(job.params.num_experts / 4 * 16));
  }
  for (int e = thread; e < kMaxExperts; e += num_threads) counts[e] = 0;
  GridDependencyWait();
  for (int row = thread / 32; row < job.rows; row += num_threads / 32) {
    RouteRow(job, row, ids, weights);
  }
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

__global__ void __launch_bounds__(kPlaceThreads) RouteRows(RouteJob job) {
  LaunchDependents();
  GridDependencyWait();
  const int row =
      static_cast<int>(blockIdx.x) * (kPlaceThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (row < job.rows) RouteRow(job, row, nullptr, nullptr);  // the same for all threads of a warp
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
__global__ void __launch_bounds__(kPlaceThreads) CountPairs(RouteJob job) {
  LaunchDependents();
  GridDependencyWait();
  const int expert =
      static_cast<int>(blockIdx.x) * (kPlaceThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int count = FindPairs(job.routing.ids, job.rows * job.params.used, expert, [](int, int) {});
  if (expert < job.params.num_experts && threadIdx.x % 32 == 0) job.routing.counts[expert] = count;
}

// A warp per expert places its pairs; every block adds up the counts for itself.
__global__ void __launch_bounds__(kMaxExperts) PlacePairs(RouteJob job) {
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
  if (rows <= kRouteOneBlockRows) {
    const int threads = rows <= 16 ? kRouteThreads / 2 : kRouteThreads;
    Launch(launch, dim3(1), dim3(threads), rows * params.used * (sizeof(int) + sizeof(float)),
           RouteFewRows, job);
    return;
  }
  const int warps = kPlaceThreads / 32;
  Launch(launch, dim3((rows + warps - 1) / warps), dim3(kPlaceThreads), 0, RouteRows, job);
  Launch(launch, dim3((params.num_experts + warps - 1) / warps), dim3(kPlaceThreads), 0, CountPairs,
         job);
  const int place_warps = kMaxExperts / 32;
  Launch(launch, dim3((params.num_experts + place_warps - 1) / place_warps), dim3(kMaxExperts), 0,
         PlacePairs, job);
}

}  // namespace ds4::cuda
