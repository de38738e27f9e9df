// LaunchRoute: which experts each row uses, and the lists of work by expert, from logits: for rows
// that LaunchRouter does not take.
//
// One warp chooses a row's experts; then a stable counting sort of the pairs by expert, in a launch
// for counting and one for placing.
#include <algorithm>

#include "engine/base/check.h"
#include "engine/cuda/experts.h"
#include "engine/cuda/experts_groups.h"
#include "engine/cuda/router.cuh"
#include "engine/cuda/simt.h"
#include "engine/cuda/sinkhorn.cuh"

namespace ds4::cuda {
namespace {

constexpr int kPlaceThreads = 256;

struct RouteJob {
  RouterParams params;
  const float* logits = nullptr;
  const int32_t* tokens = nullptr;
  int rows = 0;
  Routing routing;
  int route_blocks = 0;  // of RouteRows; the blocks behind them balance
  SinkhornJob balance;
};

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

// A warp for each row. Dynamic shared memory: each warp's RowScores.
__global__ void __launch_bounds__(kPlaceThreads) RouteRows(const __grid_constant__ RouteJob job) {
  LaunchDependents();
  if (static_cast<int>(blockIdx.x) >= job.route_blocks) {
    BalanceRows(job.balance, static_cast<int>(blockIdx.x) - job.route_blocks);
    return;
  }
  DS4_DYNAMIC_SHARED(memory);
  const RouterParams& params = job.params;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int row = static_cast<int>(blockIdx.x) * (kPlaceThreads / kWarpSize) + warp;
  const RowScores scores(memory + warp * RowScoresBytes(params.num_experts), params.num_experts);
  GridDependencyWait();
  if (row >= job.rows) return;  // the same for all threads of a warp
  const float* logits = job.logits + static_cast<int64_t>(row) * params.num_experts;
  const int listed = ListedExpert(params, job.tokens, row);
#pragma unroll 1
  for (int expert = lane; expert < RowExperts(params.num_experts); expert += kWarpSize) {
    const bool any = expert < params.num_experts;
    const float bias = any && params.bias != nullptr ? params.bias[expert] : 0.0f;
    PlaceScore(params, scores, expert, any ? RouterScore(logits[expert]) : 0.0f, bias);
  }
  __syncwarp();
  const Choice choice = ChooseRow(params, listed, scores);
  if (lane < params.used) {
    const int64_t pair = static_cast<int64_t>(row) * params.used + lane;
    job.routing.ids[pair] = choice.expert;
    job.routing.weights[pair] = choice.weight;
  }
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

void CheckRouter(const RouterParams& params) {
  CHECK(params.num_experts >= 1 && params.num_experts <= kMaxExperts)
      << params.num_experts << " experts, the router takes 1 to " << kMaxExperts;
  CHECK(params.used >= 1 && params.used <= kMaxExpertsUsed && params.used <= params.num_experts)
      << params.used << " of " << params.num_experts << " experts used";
  CHECK((params.hash_ids != nullptr) != (params.bias != nullptr))
      << "a router has either a bias or a table of ids";
}

void LaunchRoute(const LaunchContext& launch, const RouterParams& params, const float* logits,
                 const int32_t* tokens, int rows, const Routing& routing,
                 const SinkhornJob& balance) {
  CheckRouter(params);
  if (rows == 0) return;
  const int warps = kPlaceThreads / kWarpSize;
  const int route_blocks = (rows + warps - 1) / warps;
  const RouteJob job = {params, logits, tokens, rows, routing, route_blocks, balance};
  Launch(launch, dim3(route_blocks + BalanceBlocks(balance, kPlaceThreads)), dim3(kPlaceThreads),
         warps * RowScoresBytes(params.num_experts), RouteRows, job);
  Launch(launch, dim3((params.num_experts + warps - 1) / warps), dim3(kPlaceThreads), 0, CountPairs,
         job);
  const int place_warps = kMaxExperts / 32;
  Launch(launch, dim3((params.num_experts + place_warps - 1) / place_warps), dim3(kMaxExperts), 0,
         PlacePairs, job);
}

}  // namespace ds4::cuda
