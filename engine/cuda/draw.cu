// LaunchDraw in three launches. Masses by half octaves of each part of the vocabulary (a block
// each); then, knowing them all, each block collects the tokens that the filters can keep; then a
// block for each row sorts these, cuts them off where the filters say, and walks to the drawn one.
// Without filters the walk is by rising id and nothing is collected.
#include <algorithm>
#include <cmath>

#include "engine/base/check.h"
#include "engine/cuda/draw.h"
#include "engine/cuda/simt.h"

namespace ds4::cuda {
namespace {

constexpr int kParts = 16;  // of the vocabulary, by id
constexpr int kPartThreads = 256;
constexpr int kDrawThreads = 1024;
constexpr int kMassBits = 40;
// Bin b holds e^... of [2^(-b/2), 2^((1-b)/2)) about: exponent and top mantissa bit of the float.
constexpr int kBins = 2 * kMassBits + 1;
constexpr uint32_t kTopBin = 254;  // exponent and half of 1.0f

using Mass = unsigned long long;  // atomicAdd knows no uint64_t

struct PartBins {
  Mass mass[kBins];
  uint32_t count[kBins];
  uint32_t pad;
  Mass total;
};

// A row's scratch memory.
struct RowScratch {
  PartBins parts[kParts];
  Mass total;           // mass of the whole vocabulary
  uint32_t candidates;  // how many there are; only kMaxDrawCandidates are kept
  uint32_t pad;
  uint64_t keys[kMaxDrawCandidates];
};

struct DrawJob {
  const DrawRow* params;
  const int32_t* pos;
  GreedyChoice* choice;
  RowScratch* scratch;
  int max_candidates;
  VocabPieces vocab;
};

__device__ __forceinline__ bool IsUnfiltered(const DrawRow& p) {
  return p.top_k == 0 && p.top_p >= 1.0f && p.min_p <= 0.0f;
}
// Rows that keep what they have.
__device__ __forceinline__ bool IsDecided(const DrawRow& p, float best) {
  return p.temperature <= 0.0f || best != best;
}

// Relative to the best token's, in [0, 1].
__device__ __forceinline__ float WeightOf(float logit, float best, float temperature) {
  return expf((logit - best) / temperature);
}
__device__ __forceinline__ Mass MassOf(float weight) {
  return static_cast<Mass>(weight * static_cast<float>(uint64_t{1} << kMassBits));
}
__device__ __forceinline__ int BinOf(float weight) {
  return static_cast<int>(kTopBin - (__float_as_uint(weight) >> 22));
}

// Keys in the order in which tokens are kept: the larger logit, the lower id on ties.
__device__ __forceinline__ uint64_t KeyOf(float logit, int id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes +0
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ float LogitOf(uint64_t key) {
  const auto order = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}
__device__ __forceinline__ int IdOf(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

// visit(logit, id) for the ids [begin, end) that this thread has: every `step`-th.
template <typename Visit>
__device__ __forceinline__ void VisitIds(const VocabPieces& vocab, int row, int begin, int end,
                                         int step, const Visit& visit) {
  for (int i = 0; i < vocab.count; ++i) {
    const VocabPieces::Piece& piece = vocab.pieces[i];
    const float* logits = piece.logits + row * piece.stride;
    const int last = min(end, piece.first_id + piece.count);
    int id = begin;
    if (id < piece.first_id) id += (piece.first_id - id + step - 1) / step * step;
#pragma unroll 4
    for (; id < last; id += step) visit(logits[id - piece.first_id], id);
  }
}
__device__ __forceinline__ int VocabSize(const VocabPieces& vocab) {
  const VocabPieces::Piece& last = vocab.pieces[vocab.count - 1];
  return last.first_id + last.count;
}
__device__ __forceinline__ int PartSize(const VocabPieces& vocab) {
  return (VocabSize(vocab) + kParts - 1) / kParts;
}

// ---- Masses by bins

__global__ void __launch_bounds__(kPartThreads) BinsKernel(const __grid_constant__ DrawJob job) {
  __shared__ Mass mass[kBins];
  __shared__ uint32_t count[kBins];
  __shared__ Mass total;
  LaunchDependents();
  GridDependencyWait();
  const int self = static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
  const DrawRow p = job.params[row];
  const float best = job.choice[row].logit;
  if (IsDecided(p, best)) return;
  for (int b = self; b < kBins; b += kPartThreads) {
    mass[b] = 0;
    count[b] = 0;
  }
  if (self == 0) total = 0;
  __syncthreads();
  const bool by_bins = !IsUnfiltered(p);
  const int begin = part * PartSize(job.vocab);
  const int end = min(begin + PartSize(job.vocab), VocabSize(job.vocab));
  Mass own = 0;
  VisitIds(job.vocab, row, begin + self, end, kPartThreads, [&](float logit, int) {
    const float weight = WeightOf(logit, best, p.temperature);
    const Mass m = MassOf(weight);
    own += m;
    if (by_bins && m != 0) {
      atomicAdd(&mass[BinOf(weight)], m);
      atomicAdd(&count[BinOf(weight)], 1u);
    }
  });
  atomicAdd(&total, own);
  __syncthreads();
  RowScratch& scratch = job.scratch[row];
  PartBins& out = scratch.parts[part];
  for (int b = self; b < kBins; b += kPartThreads) {
    out.mass[b] = mass[b];
    out.count[b] = count[b];
  }
  if (self == 0) {
    out.total = total;
    if (part == 0) scratch.candidates = 0;
  }
}

// ---- Candidates

// The last bin that tokens can be kept from.
__device__ int LastBin(const DrawRow& p, const Mass* mass, const uint32_t* count, Mass total) {
  Mass masses = 0;
  int64_t counts = 0;
  for (int b = 0; b < kBins; ++b) {
    masses += mass[b];
    counts += count[b];
    // top_p is of what top_k keeps, so that with both top_k's last token has to be there.
    const bool closed_k = p.top_k > 0 && counts >= p.top_k;
    const bool closed_p =
        p.top_k == 0 && p.top_p < 1.0f &&
        static_cast<double>(masses) >= static_cast<double>(p.top_p) * static_cast<double>(total);
    const float least = __uint_as_float((kTopBin - static_cast<uint32_t>(b)) << 22);
    const bool closed_min = p.min_p > 0.0f && least <= p.min_p;
    if (closed_k || closed_p || closed_min) return b;
  }
  return kBins - 1;
}

__global__ void __launch_bounds__(kPartThreads) CollectKernel(const __grid_constant__ DrawJob job) {
  __shared__ Mass mass[kBins];
  __shared__ uint32_t count[kBins];
  __shared__ int last_bin;
  LaunchDependents();
  GridDependencyWait();
  const int self = static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
  const DrawRow p = job.params[row];
  const float best = job.choice[row].logit;
  if (IsDecided(p, best) || IsUnfiltered(p)) return;
  RowScratch& scratch = job.scratch[row];
  for (int b = self; b < kBins; b += kPartThreads) {
    Mass masses = 0;
    uint32_t counts = 0;
    for (int i = 0; i < kParts; ++i) {
      masses += scratch.parts[i].mass[b];
      counts += scratch.parts[i].count[b];
    }
    mass[b] = masses;
    count[b] = counts;
  }
  __syncthreads();
  if (self == 0) {
    Mass total = 0;
    for (int b = 0; b < kBins; ++b) total += mass[b];
    last_bin = LastBin(p, mass, count, total);
    if (part == 0) scratch.total = total;
  }
  __syncthreads();
  const int last = last_bin;
  const int begin = part * PartSize(job.vocab);
  const int end = min(begin + PartSize(job.vocab), VocabSize(job.vocab));
  VisitIds(job.vocab, row, begin + self, end, kPartThreads, [&](float logit, int id) {
    const float weight = WeightOf(logit, best, p.temperature);
    if (MassOf(weight) == 0 || BinOf(weight) > last) return;
    const uint32_t at = atomicAdd(&scratch.candidates, 1u);
    if (at < static_cast<uint32_t>(job.max_candidates)) scratch.keys[at] = KeyOf(logit, id);
  });
}

// ---- The draw

// Philox4x32-10 and the 53 bits of it that engine/sampling/random.h takes, in [0, 1).
__device__ double UniformOf(uint64_t seed, int64_t pos) {
  uint32_t counter[4] = {static_cast<uint32_t>(pos), static_cast<uint32_t>(pos >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll 1
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(a);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t mantissa = (static_cast<uint64_t>(counter[0]) << 21) ^ (counter[1] >> 11);
  return static_cast<double>(mantissa & ((uint64_t{1} << 53) - 1)) * 0x1.0p-53;
}

// The mass that the walk has to pass, below `kept`.
__device__ __forceinline__ Mass TargetOf(double draw, Mass kept) {
  const auto target = static_cast<Mass>(draw * static_cast<double>(kept));
  return target < kept ? target : kept - 1;
}

// Inclusive sums of one number of each thread, in thread order. sums: [kDrawThreads], shared.
__device__ Mass SumUpTo(Mass own, Mass* sums) {
  const int self = static_cast<int>(threadIdx.x);
  __syncthreads();  // nobody reads the last sums any more
  sums[self] = own;
  for (int distance = 1; distance < kDrawThreads; distance *= 2) {
    __syncthreads();
    const Mass before = self >= distance ? sums[self - distance] : 0;
    __syncthreads();
    own += before;
    sums[self] = own;
  }
  __syncthreads();
  return own;
}

// What a row's block shares.
struct DrawShared {
  Mass sums[kDrawThreads];
  Mass kept_mass;
  int kept;
  uint64_t key;  // drawn
};

// By rising id: the part, then in it the token, with which the running mass passes the target.
__device__ void DrawById(const DrawJob& job, int row, const DrawRow& p, float best, double draw,
                         DrawShared& shared) {
  const int self = static_cast<int>(threadIdx.x);
  const RowScratch& scratch = job.scratch[row];
  Mass total = 0;
  for (int i = 0; i < kParts; ++i) total += scratch.parts[i].total;
  Mass target = TargetOf(draw, total);
  int part = 0;
  while (target >= scratch.parts[part].total) target -= scratch.parts[part++].total;
  const int size = PartSize(job.vocab);
  const int end = min((part + 1) * size, VocabSize(job.vocab));
  const int run = (size + kDrawThreads - 1) / kDrawThreads;
  const int first = part * size + self * run;
  Mass own = 0;
  VisitIds(job.vocab, row, first, min(first + run, end), 1,
           [&](float logit, int) { own += MassOf(WeightOf(logit, best, p.temperature)); });
  Mass sum = SumUpTo(own, shared.sums) - own;
  if (target < sum || target - sum >= own) return;
  bool found = false;
  VisitIds(job.vocab, row, first, min(first + run, end), 1, [&](float logit, int id) {
    sum += MassOf(WeightOf(logit, best, p.temperature));
    if (!found && sum > target) {
      shared.key = KeyOf(logit, id);
      found = true;
    }
  });
}

// keys[0..size), a power of two of them, the largest first.
__device__ void SortKeys(uint64_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kDrawThreads) {
        const int low = 2 * i - (i & (distance - 1));
        const int high = low + distance;
        const uint64_t a = keys[low], b = keys[high];
        const bool falls = (low & run) == 0;
        if (falls ? a < b : a > b) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Among the sorted candidates.
__device__ void DrawSorted(const DrawJob& job, int row, const DrawRow& p, float best, double draw,
                           uint64_t* keys, DrawShared& shared) {
  const int self = static_cast<int>(threadIdx.x);
  const RowScratch& scratch = job.scratch[row];
  const int count = static_cast<int>(scratch.candidates);
  int size = 1;
  while (size < count) size *= 2;
  for (int i = self; i < size; i += kDrawThreads) keys[i] = i < count ? scratch.keys[i] : 0;
  SortKeys(keys, size);

  constexpr int kRun = kMaxDrawCandidates / kDrawThreads;
  Mass sums[kRun];  // inclusive, of places kRun self, + 1, ...
  bool below_min[kRun];
  Mass own = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int at = kRun * self + i;
    const float weight = at < count ? WeightOf(LogitOf(keys[at]), best, p.temperature) : 0.0f;
    below_min[i] = weight < p.min_p;
    own += at < count ? MassOf(weight) : 0;
    sums[i] = own;
  }
  const Mass before = SumUpTo(own, shared.sums) - own;
#pragma unroll
  for (int i = 0; i < kRun; ++i) sums[i] += before;
  const int limit = p.top_k > 0 ? min(p.top_k, count) : count;
  if (self == 0) shared.kept = limit;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (kRun * self + i == limit - 1) shared.kept_mass = sums[i];
  }
  __syncthreads();
  const Mass total = p.top_k > 0 ? shared.kept_mass : scratch.total;
  const double enough = static_cast<double>(p.top_p) * static_cast<double>(total);
  int kept = limit;
#pragma unroll
  for (int i = kRun - 1; i >= 0; --i) {
    const int at = kRun * self + i;
    if (at >= limit) continue;
    if (p.top_p < 1.0f && static_cast<double>(sums[i]) >= enough) kept = at + 1;
    if (at > 0 && below_min[i]) kept = at;
  }
  atomicMin(&shared.kept, kept);
  __syncthreads();
  kept = shared.kept;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (kRun * self + i == kept - 1) shared.kept_mass = sums[i];
  }
  __syncthreads();
  const Mass target = TargetOf(draw, shared.kept_mass);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const Mass left = i == 0 ? before : sums[i - 1];
    if (left <= target && target < sums[i]) shared.key = keys[kRun * self + i];
  }
}

// Of the tokens whose key is `least` or more and that have any mass.
struct Above {
  Mass mass = 0;
  Mass count = 0;
  Mass heavy = 0;  // how many are not below min_p
};
__device__ Above TokensAbove(const DrawJob& job, int row, const DrawRow& p, float best,
                             uint64_t least, DrawShared& shared) {
  Above own;
  VisitIds(job.vocab, row, static_cast<int>(threadIdx.x), VocabSize(job.vocab), kDrawThreads,
           [&](float logit, int id) {
             const float weight = WeightOf(logit, best, p.temperature);
             const Mass m = MassOf(weight);
             if (m == 0 || KeyOf(logit, id) < least) return;
             own.mass += m;
             ++own.count;
             own.heavy += weight < p.min_p ? 0 : 1;
           });
  Above all;
  for (Mass Above::*part : {&Above::mass, &Above::count, &Above::heavy}) {
    SumUpTo(own.*part, shared.sums);
    all.*part = shared.sums[kDrawThreads - 1];
  }
  return all;
}
// The largest key of which enough(tokens above it) holds, as it does for key 0: bit by bit.
template <typename Enough>
__device__ uint64_t FindKey(const DrawJob& job, int row, const DrawRow& p, float best,
                            DrawShared& shared, const Enough& enough) {
  uint64_t key = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t next = key | uint64_t{1} << bit;
    if (enough(TokensAbove(job, row, p, best, next, shared))) key = next;
  }
  return key;
}

// More candidates than a block can sort: the same cuts and the same walk, by bisection over keys.
__device__ void DrawByBisection(const DrawJob& job, int row, const DrawRow& p, float best,
                                double draw, DrawShared& shared) {
  const Above all = TokensAbove(job, row, p, best, 0, shared);
  Mass total = all.mass;
  Mass limit = all.count;
  uint64_t least = 0;
  if (p.top_k > 0 && static_cast<Mass>(p.top_k) < limit) {
    limit = static_cast<Mass>(p.top_k);
    least = FindKey(job, row, p, best, shared, [&](const Above& a) { return a.count >= limit; });
    total = TokensAbove(job, row, p, best, least, shared).mass;
  }
  if (all.heavy < limit) {
    least =
        FindKey(job, row, p, best, shared, [&](const Above& a) { return a.count >= all.heavy; });
  }
  if (p.top_p < 1.0f) {
    const double enough = static_cast<double>(p.top_p) * static_cast<double>(total);
    const uint64_t key = FindKey(job, row, p, best, shared, [&](const Above& a) {
      return static_cast<double>(a.mass) >= enough;
    });
    least = key > least ? key : least;
  }
  const Mass target = TargetOf(draw, TokensAbove(job, row, p, best, least, shared).mass);
  const uint64_t key =
      FindKey(job, row, p, best, shared, [&](const Above& a) { return a.mass > target; });
  if (threadIdx.x == 0) shared.key = key;
}

__global__ void __launch_bounds__(kDrawThreads) DrawKernel(const __grid_constant__ DrawJob job) {
  DS4_DYNAMIC_SHARED(memory);
  __shared__ DrawShared shared;
  LaunchDependents();
  GridDependencyWait();
  const int row = static_cast<int>(blockIdx.x);
  const DrawRow p = job.params[row];
  const float best = job.choice[row].logit;
  if (IsDecided(p, best)) return;
  const double draw = UniformOf(p.seed, int64_t{job.pos[row]} + 1);
  if (IsUnfiltered(p)) {
    DrawById(job, row, p, best, draw, shared);
  } else if (job.scratch[row].candidates <= static_cast<uint32_t>(job.max_candidates)) {
    DrawSorted(job, row, p, best, draw, reinterpret_cast<uint64_t*>(memory), shared);
  } else {
    DrawByBisection(job, row, p, best, draw, shared);
  }
  __syncthreads();  // also: everyone has read the greedy choice
  if (threadIdx.x != 0) return;
  job.choice[row].token = IdOf(shared.key);
  job.choice[row].logit = LogitOf(shared.key);
}

}  // namespace

int64_t DrawScratchBytes(int rows) { return rows * static_cast<int64_t>(sizeof(RowScratch)); }

void LaunchDraw(const LaunchContext& launch, int rows, const DrawRow* params, const int32_t* pos,
                const VocabPieces& vocab, GreedyChoice* choice, std::byte* scratch,
                int max_candidates) {
  CHECK(vocab.count >= 1 && vocab.count <= kMaxChoiceRanks) << vocab.count << " pieces";
  CHECK(max_candidates >= 1 && max_candidates <= kMaxDrawCandidates) << max_candidates;
  int64_t next_id = 0;
  for (int i = 0; i < vocab.count; ++i) {
    CHECK(vocab.pieces[i].first_id == next_id && vocab.pieces[i].count >= 1)
        << "piece " << i << " of the vocabulary starts at " << vocab.pieces[i].first_id
        << ", not at " << next_id;
    next_id += vocab.pieces[i].count;
  }
  const DrawJob job{params,         pos,  choice, reinterpret_cast<RowScratch*>(scratch),
                    max_candidates, vocab};
  const dim3 parts(kParts, static_cast<unsigned>(rows));
  Launch(launch, parts, kPartThreads, 0, BinsKernel, job);
  Launch(launch, parts, kPartThreads, 0, CollectKernel, job);
  Launch(launch, static_cast<unsigned>(rows), kDrawThreads, kMaxDrawCandidates * sizeof(uint64_t),
         DrawKernel, job);
}

}  // namespace ds4::cuda
