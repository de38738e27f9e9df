// LaunchRoute: which experts each row uses, and the lists of work by expert.
//
// One warp chooses a row's experts; then a stable counting sort of the pairs by expert. Up to
// 64 rows all of it is one block of one launch; more rows take three launches, because then one
// block would be the slowest part of the step.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/experts.h"
#include "engine/cuda/experts_groups.h"
#include "engine/cuda/simt.h"
#include "engine/cuda/sinkhorn.cuh"

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
  int route_blocks = 1;  // the blocks behind them balance
  SinkhornJob balance;
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

// A candidate: the larger one comes first, the lower id on ties.
__device__ __forceinline__ uint64_t Candidate(uint32_t key, int expert) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(expert);
}
__device__ __forceinline__ int ExpertOf(uint64_t candidate) {
  return static_cast<int>(~static_cast<uint32_t>(candidate));
}

// Words that a warp needs to choose: the lanes' best or all candidates, and the chosen ones.
__host__ __device__ constexpr int ChoiceWords(int used, int per_thread) {
  const int candidates = used * per_thread;
  return (candidates < 32 ? 32 : candidates) + kMaxExpertsUsed;
}

// One warp: the `used` experts with the largest score + bias of one row; the lower id on ties.
// Thread k gets the k-th one chosen. score(i), bias[i]: of expert 32 i + this thread's lane. words:
// shared, this warp's own, 16-byte aligned.
//
// The used-th best of the lanes' best is a bound that at most `used` lanes have candidates above
// of: few enough to find each one's place by comparing it with all. No chain of maxima.
template <int kPerThread, typename Score>
__device__ int ChooseByScore(const RouterParams& params, const float (&bias)[kPerThread],
                             const Score& score, uint64_t* words) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int used = params.used;
  uint64_t* const order = words + ChoiceWords(used, kPerThread) - kMaxExpertsUsed;
  uint32_t key[kPerThread];
  uint32_t top = 0;
  int top_expert = lane;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int expert = lane + 32 * i;
    key[i] = expert < params.num_experts ? SortKey(score(expert) + bias[i]) : 0;
    if (key[i] > top) {
      top = key[i];
      top_expert = expert;
    }
  }
  const uint64_t best = Candidate(top, top_expert);
  words[lane] = best;
  __syncwarp();
  int rank = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint4 two = reinterpret_cast<const uint4*>(words)[i];
    rank += (static_cast<uint64_t>(two.y) << 32 | two.x) > best ? 1 : 0;
    rank += (static_cast<uint64_t>(two.w) << 32 | two.z) > best ? 1 : 0;
  }
  const int last = __ffs(static_cast<int>(__ballot_sync(kFullMask, rank == used - 1))) - 1;
  const uint64_t bound =
      Candidate(__shfl_sync(kFullMask, top, last), __shfl_sync(kFullMask, top_expert, last));
  __syncwarp();
  const unsigned below = (1u << lane) - 1u;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint64_t candidate = Candidate(key[i], lane + 32 * i);
    const unsigned in = __ballot_sync(kFullMask, candidate >= bound);
    if (candidate >= bound) words[count + __popc(in & below)] = candidate;
    count += __popc(in);
  }
  __syncwarp();
  for (int c = lane; c < count; c += 32) {
    const uint64_t own = words[c];
    int place = 0;
#pragma unroll 4
    for (int q = 0; q < count; ++q) place += words[q] > own ? 1 : 0;
    if (place < used) order[place] = own;
  }
  __syncwarp();
  return lane < used ? ExpertOf(order[lane]) : 0;
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

// What the table of a hash-routed layer says for thread k < used.
__device__ __forceinline__ int ExpertByToken(const RouteJob& job, int row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane >= job.params.used) return 0;
  return job.params.hash_ids[static_cast<int64_t>(job.tokens[row]) * job.params.used + lane];
}

// One warp: the weight of thread k's expert; ids and weights of a row to memory.
template <typename Score>
__device__ Choice WeighRow(const RouteJob& job, int row, int expert, const Score& score) {
  const RouterParams& params = job.params;
  const int lane = static_cast<int>(threadIdx.x) % 32;
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

// expert_first of at most kFewPairs pairs. The first warp leaves it to the others.
__device__ void PlaceFewExperts(const RouteJob& job, int num_pairs, const int* ids) {
  const int others = static_cast<int>(blockDim.x) - 32;
  for (int e = static_cast<int>(threadIdx.x) - 32; e <= job.params.num_experts; e += others) {
    if (e < 0) return;
    int first = 0;
#pragma unroll 4
    for (int q = 0; q < num_pairs; ++q) first += ids[q] < e ? 1 : 0;
    job.routing.expert_first[e] = first;
  }
}

// The lists of at most 32 pairs, a pair in each lane of one warp. id: of lanes that have none, any.
__device__ void PlaceWarpPairs(const RouteJob& job, int num_pairs, int id, float weight) {
  const Routing& routing = job.routing;
  const int p = static_cast<int>(threadIdx.x) % 32;
  int less = 0, rank = 0, same = 0;
#pragma unroll 2
  for (int q = 0; q < num_pairs; ++q) {
    const int other = __shfl_sync(kFullMask, id, q);
    less += other < id ? 1 : 0;
    same += other == id ? 1 : 0;
    rank += other == id && q < p ? 1 : 0;
  }
  const int place = less + rank;
  const bool begins = p < num_pairs && rank % kGroupPairs == 0;
  const unsigned begin_lanes = __ballot_sync(kFullMask, begins);
  int group = 0;
#pragma unroll 2
  for (int q = 0; q < num_pairs; ++q) {
    const int other = __shfl_sync(kFullMask, place, q);
    group += (begin_lanes >> q & 1) != 0 && other < place ? 1 : 0;
  }
  if (p < num_pairs) {
    routing.pairs[place] = p;
    routing.pair_place[p] = place;
    routing.place_weight[place] = weight;
  }
  if (begins) {
    routing.group_expert[group] = id;
    routing.group_first[group] = place;
    routing.group_size[group] = min(kGroupPairs, same - rank);
  }
  if (p == 0) *routing.num_groups = __popc(begin_lanes);
}

// Lists of at most kFewPairs pairs, by comparing each with all: shorter than counting and adding
// up. begins: shared, [kFewPairs].
__device__ void PlaceFewPairs(const RouteJob& job, int num_pairs, const int* ids,
                              const float* weights, int* begins) {
  constexpr int kNoBegin = 0x7fffffff;
  const Routing& routing = job.routing;
  const int p = static_cast<int>(threadIdx.x);
  PlaceFewExperts(job, num_pairs, ids);
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

// All of the routing in the first block. Dynamic shared memory: words to choose in of each warp,
// ids and weights of the pairs, scores.
template <int kPerThread>
__global__ void __launch_bounds__(kRouteThreads) RouteFewRows(const RouteJob job) {
  LaunchDependents();
  if (blockIdx.x > 0) {
    BalanceRows(job.balance, static_cast<int>(blockIdx.x) - 1);
    return;
  }
  DS4_DYNAMIC_SHARED(memory);
  __shared__ int counts[kMaxExperts];
  __shared__ int first[kMaxExperts];
  __shared__ int scan[32];
  const int num_experts = job.params.num_experts, used = job.params.used;
  const int num_pairs = job.rows * used;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int num_threads = static_cast<int>(blockDim.x);
  uint64_t* words = reinterpret_cast<uint64_t*>(memory);
  const int warp_words = ChoiceWords(used, kPerThread);
  int* ids = reinterpret_cast<int*>(words + num_threads / 32 * warp_words);
  float* weights = reinterpret_cast<float*>(ids + num_pairs);
  float* scores = weights + num_pairs;
  const bool by_token = job.params.hash_ids != nullptr;
  float bias[kPerThread];
  LoadBias(job.params, bias);
  GridDependencyWait();
  // Far away: on its way while the scores are worked out.
  const int first_of_token = by_token && warp < job.rows ? ExpertByToken(job, warp) : 0;
#pragma unroll 1  // one row has one step here: less code to fetch
  for (int i = thread; i < job.rows * num_experts; i += num_threads) {
    scores[i] = RouterScore(job.logits[i]);
  }
  __syncthreads();
  for (int row = warp; row < job.rows; row += num_threads / 32) {
    const float* own = scores + row * num_experts;
    const auto score = [own](int expert) { return own[expert]; };
    int expert = first_of_token;
    if (!by_token) {
      expert = ChooseByScore(job.params, bias, score, words + warp * warp_words);
    } else if (row != warp) {
      expert = ExpertByToken(job, row);
    }
    const Choice choice = WeighRow(job, row, expert, score);
    if (lane < used) {
      ids[row * used + lane] = choice.expert;
      weights[row * used + lane] = choice.weight;
    }
  }
  __syncthreads();
  if (num_pairs <= 32) {
    const int pair = min(lane, num_pairs - 1);
    if (warp == 0) PlaceWarpPairs(job, num_pairs, ids[pair], weights[pair]);
    PlaceFewExperts(job, num_pairs, ids);
  } else if (num_pairs <= kFewPairs) {
    PlaceFewPairs(job, num_pairs, ids, weights, counts);
  } else {
    PlacePairsByCount(job, num_pairs, ids, weights, counts, first, scan);
  }
}

template <int kPerThread>
__global__ void __launch_bounds__(kPlaceThreads) RouteRows(const RouteJob job) {
  LaunchDependents();
  if (static_cast<int>(blockIdx.x) >= job.route_blocks) {
    BalanceRows(job.balance, static_cast<int>(blockIdx.x) - job.route_blocks);
    return;
  }
  DS4_DYNAMIC_SHARED(memory);
  float bias[kPerThread];
  LoadBias(job.params, bias);
  GridDependencyWait();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = static_cast<int>(blockIdx.x) * (kPlaceThreads / 32) + warp;
  if (row >= job.rows) return;  // the same for all threads of a warp
  const float* logits = job.logits + static_cast<int64_t>(row) * job.params.num_experts;
  const auto score = [logits](int expert) { return RouterScore(logits[expert]); };
  uint64_t* words =
      reinterpret_cast<uint64_t*>(memory) + warp * ChoiceWords(job.params.used, kPerThread);
  const int expert = job.params.hash_ids != nullptr ? ExpertByToken(job, row)
                                                    : ChooseByScore(job.params, bias, score, words);
  WeighRow(job, row, expert, score);
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
                 const int32_t* tokens, int rows, const Routing& routing,
                 const SinkhornJob& balance) {
  CHECK(params.num_experts >= 1 && params.num_experts <= kMaxExperts)
      << params.num_experts << " experts, the router takes 1 to " << kMaxExperts;
  CHECK(params.used >= 1 && params.used <= kMaxExpertsUsed && params.used <= params.num_experts)
      << params.used << " of " << params.num_experts << " experts used";
  CHECK((params.hash_ids != nullptr) != (params.bias != nullptr))
      << "a router has either a bias or a table of ids";
  if (rows == 0) return;
  RouteJob job = {params, logits, tokens, rows, routing, 1, balance};
  const bool few_experts = params.num_experts <= 256;
  const size_t warp_bytes = ChoiceWords(params.used, few_experts ? 8 : 16) * sizeof(uint64_t);
  if (rows <= kRouteOneBlockRows) {
    // A score in each thread and a warp more where that is enough; else what counting needs.
    const int threads =
        rows == 1 ? std::min(kRouteThreads, (params.num_experts + 63) / 32 * 32) : kRouteThreads;
    const size_t shared_bytes =
        threads / 32 * warp_bytes +
        rows * (params.used * (sizeof(int) + sizeof(float)) + params.num_experts * sizeof(float));
    Launch(launch, dim3(1 + BalanceBlocks(balance, threads)), dim3(threads), shared_bytes,
           few_experts ? RouteFewRows<8> : RouteFewRows<16>, job);
    return;
  }
  const int warps = kPlaceThreads / 32;
  job.route_blocks = (rows + warps - 1) / warps;
  Launch(launch, dim3(job.route_blocks + BalanceBlocks(balance, kPlaceThreads)),
         dim3(kPlaceThreads), warps * warp_bytes, few_experts ? RouteRows<8> : RouteRows<16>, job);
  Launch(launch, dim3((params.num_experts + warps - 1) / warps), dim3(kPlaceThreads), 0, CountPairs,
         job);
  const int place_warps = kMaxExperts / 32;
  Launch(launch, dim3((params.num_experts + place_warps - 1) / place_warps), dim3(kMaxExperts), 0,
         PlacePairs, job);
}

}  // namespace ds4::cuda
