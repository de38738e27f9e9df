// The indexer's choice among scored rows, a block a row.
//
// Scores are counted in bins of one width each from the least to the greatest, and the few of the
// bin that holds the k-th largest are ranked among themselves. Where that is no use (many equal
// scores, scores that are no numbers), four passes over bytes find the k-th largest. Then
// everything above it and the first of its equals are written in rising order.
#include <algorithm>

#include "engine/cuda/indexer.cuh"

namespace ds4::cuda {
namespace {

constexpr int kChooseThreads = 1024;
constexpr int kChooseWarps = kChooseThreads / kWarpSize;
constexpr int kFewChooseThreads = 256;  // up to kFewChooseKeys keys
constexpr int kFewChooseKeys = 2048;
constexpr int kMaxKeptKeys = 32768;  // a row's keys in shared memory; more are read again
constexpr int kDigits = 256;         // and bins
constexpr int kMaxCandidates = 128;  // of one bin, to be ranked among themselves

// Bits that order like the choice (engine/kernels/indexer.cc): -0 equals +0, NaN comes last.
__device__ __forceinline__ uint32_t RisingBits(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  if (score != score) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint4 RisingFour(float4 scores) {
  return make_uint4(RisingBits(scores.x), RisingBits(scores.y), RisingBits(scores.z),
                    RisingBits(scores.w));
}
__device__ __forceinline__ float ScoreOfBits(uint32_t rising) {
  return __uint_as_float((rising & 0x80000000u) != 0 ? rising ^ 0x80000000u : ~rising);
}

// One warp: in which digit the need-th largest lies, how many have it, and how many of those are
// needed.
struct Place {
  int digit;
  int count;
  int need;
};
__device__ __forceinline__ void FindDigit(const int* histogram, int need, Place* found) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  constexpr int kOwn = kDigits / kWarpSize;
  static_assert(kOwn == 8);
  const int bottom = kDigits - (lane + 1) * kOwn;  // lane 0 has the largest digits
  const int4 low = *reinterpret_cast<const int4*>(histogram + bottom);
  const int4 high = *reinterpret_cast<const int4*>(histogram + bottom + 4);
  const int counts[kOwn] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
  int own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += counts[i];
  int above = own;  // of this lane and those with larger digits
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_sync(kFullMask, above, max(lane - step, 0));
    if (lane >= step) above += other;
  }
  above -= own;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (above < need && above + counts[i] >= need) {
      *found = {bottom + kOwn - 1 - i, counts[i], need - above};
    }
    above += counts[i];
  }
}

// The row's keys as RisingBits: the first `kept` in shared memory.
struct RowScores {
  const float* scores;
  const uint32_t* kept_bits;
  int kept;
  __device__ __forceinline__ uint32_t operator[](int i) const {
    return i < kept ? kept_bits[i] : RisingBits(scores[i]);
  }
  // Four from i on, a multiple of four; the row's room and `kept` are in fours.
  __device__ __forceinline__ uint4 Four(int i) const {
    if (i < kept) return *reinterpret_cast<const uint4*>(kept_bits + i);
    return RisingFour(*reinterpret_cast<const float4*>(scores + i));
  }
};

// Which keys are chosen: those above `bits`, and of those equal to it the first `ties`.
struct Threshold {
  uint32_t bits;
  int ties;
};

// What the block's threads share while they look for it.
struct alignas(16) ChooseShared {
  int histogram[kDigits];
  uint32_t candidates[kMaxCandidates];
  uint32_t least[kChooseWarps], greatest[kChooseWarps];
  int num_candidates;
  Place place;
  Threshold threshold;
};

// Four passes over bytes, for any keys.
__device__ Threshold FindByBytes(const RowScores& keys, int count, int need, ChooseShared& shared) {
  const int self = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  uint32_t threshold = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
#pragma unroll 1
    for (int i = self; i < kDigits; i += num_threads) shared.histogram[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = self; i < count; i += num_threads) {
      const uint32_t key = keys[i];
      // Equal in all bytes so far.
      if (shift == 24 || (key ^ threshold) >> (shift + 8) == 0) {
        atomicAdd(&shared.histogram[key >> shift & 0xff], 1);
      }
    }
    __syncthreads();
    if (self < kWarpSize) FindDigit(shared.histogram, need, &shared.place);
    __syncthreads();
    threshold |= static_cast<uint32_t>(shared.place.digit) << shift;
    need = shared.place.need;
  }
  return {threshold, need};
}

// Scores to bins of one width each. Never falling for rising scores, so that bins order like them.
struct Bins {
  float least;
  float per_score;
  // Whether they are any use: the scores are numbers, and some way apart.
  __device__ __forceinline__ bool Set(uint32_t least_bits, uint32_t greatest_bits) {
    least = ScoreOfBits(least_bits);
    const float width = ScoreOfBits(greatest_bits) - least;
    per_score = static_cast<float>(kDigits - 1) / width;
    return width > 0x1p-100f && width < 0x1p100f;
  }
  __device__ __forceinline__ int Of(uint32_t bits) const {
    return static_cast<int>((ScoreOfBits(bits) - least) * per_score);
  }
};

// The threshold when its bin has few keys. The histogram is zeros, num_candidates too.
__device__ __forceinline__ bool FindByBins(const RowScores& keys, int count, int need,
                                           const Bins& bins, ChooseShared& shared) {
  const int self = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int i = 4 * self; i < count; i += 4 * num_threads) {
    const uint4 four = keys.Four(i);
    const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k < count) atomicAdd(&shared.histogram[bins.Of(bits[k])], 1);
    }
  }
  __syncthreads();
  if (self < kWarpSize) FindDigit(shared.histogram, need, &shared.place);
  __syncthreads();
  const Place place = shared.place;
  if (place.count > kMaxCandidates) return false;
#pragma unroll 1
  for (int i = 4 * self; i < count; i += 4 * num_threads) {
    const uint4 four = keys.Four(i);
    const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k < count && bins.Of(bits[k]) == place.digit) {
        shared.candidates[atomicAdd(&shared.num_candidates, 1)] = bits[k];
      }
    }
  }
  __syncthreads();
  if (self < place.count) {
    const uint32_t own = shared.candidates[self];
    int above = 0, upto = 0;
    for (int i = 0; i < place.count; ++i) {
      const uint32_t other = shared.candidates[i];
      above += other > own ? 1 : 0;
      upto += other >= own ? 1 : 0;
    }
    // Equal candidates all write the same.
    if (above < place.need && upto >= place.need) shared.threshold = {own, place.need - above};
  }
  __syncthreads();
  return true;
}

// Sums over this thread and those before it in its warp.
__device__ __forceinline__ int2 WarpPrefix(int2 sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int x = __shfl_sync(kFullMask, sums.x, max(lane - step, 0));
    const int y = __shfl_sync(kFullMask, sums.y, max(lane - step, 0));
    if (lane >= step) sums = make_int2(sums.x + x, sums.y + y);
  }
  return sums;
}

// Writes the ids of the chosen keys in rising order, if `picks` is not null. Each thread counts
// what its stretch of ids adds, so that those behind it know where to write.
__device__ __forceinline__ void WriteChoice(const RowScores& keys, int count, Threshold threshold,
                                            int32_t* picks) {
  __shared__ int2 of_warp[kChooseWarps];
  const int self = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  const int lane = self % kWarpSize, warp = self / kWarpSize;
  const int stretch = (count + 4 * num_threads - 1) / (4 * num_threads) * 4;
  const int begin = self * stretch, end = min(count, begin + stretch);
  int2 own = make_int2(0, 0);  // above the threshold, equal to it
#pragma unroll 1
  for (int i = begin; i < end; i += 4) {
    const uint4 four = keys.Four(i);
    const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      own.x += i + k < end && bits[k] > threshold.bits ? 1 : 0;
      own.y += i + k < end && bits[k] == threshold.bits ? 1 : 0;
    }
  }
  const int2 upto = WarpPrefix(own);
  if (lane == kWarpSize - 1) of_warp[warp] = upto;
  __syncthreads();
  const int2 other = lane < warp ? of_warp[lane] : make_int2(0, 0);
  int above = __reduce_add_sync(kFullMask, other.x) + upto.x - own.x;
  int equal = __reduce_add_sync(kFullMask, other.y) + upto.y - own.y;
#pragma unroll 1
  for (int i = begin; i < end; i += 4) {
    const uint4 four = keys.Four(i);
    const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k >= end || bits[k] < threshold.bits) continue;
      const bool is_above = bits[k] > threshold.bits;
      if (picks != nullptr && (is_above || equal < threshold.ties)) {
        picks[above + min(equal, threshold.ties)] = i + k;
      }
      above += is_above ? 1 : 0;
      equal += is_above ? 0 : 1;
    }
  }
}

// Loads a row's scores and keeps the first of them in `kept_bits`. Returns the least and the
// greatest of them all to every thread. `four`: the thread's first four.
__device__ __forceinline__ uint2 KeepScores(const float* scores, float4 four, int count, int kept,
                                            uint32_t* kept_bits, ChooseShared& shared) {
  const int self = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  uint32_t least = ~0u, greatest = 0;
#pragma unroll 1
  for (int i = 4 * self; i < count; i += 4 * num_threads) {
    if (i != 4 * self) four = *reinterpret_cast<const float4*>(scores + i);
    const uint4 rising = RisingFour(four);
    if (i < kept) *reinterpret_cast<uint4*>(kept_bits + i) = rising;
    const uint32_t bits[4] = {rising.x, rising.y, rising.z, rising.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k >= count) continue;
      least = min(least, bits[k]);
      greatest = max(greatest, bits[k]);
    }
  }
  least = __reduce_min_sync(kFullMask, least);
  greatest = __reduce_max_sync(kFullMask, greatest);
  const int warp = self / kWarpSize, lane = self % kWarpSize;
  if (lane == 0) {
    shared.least[warp] = least;
    shared.greatest[warp] = greatest;
  }
  __syncthreads();
  const bool there = lane < num_threads / kWarpSize;
  return make_uint2(__reduce_min_sync(kFullMask, there ? shared.least[lane] : ~0u),
                    __reduce_max_sync(kFullMask, there ? shared.greatest[lane] : 0u));
}

// The row of this block. turn: as RehearseAndRun has it; the rehearsal chooses from a rising row.
__device__ __forceinline__ void ChooseRow(const IndexArgs& args, int kept, uint32_t* kept_bits,
                                          ChooseShared& shared, int32_t* picks, int32_t* count,
                                          bool turn) {
  const int self = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  const int t = args.first + static_cast<int>(blockIdx.x), top_k = args.params.index_top_k;
  const float* scores = args.scores + blockIdx.x * args.stride;
  picks += static_cast<int64_t>(t) * top_k;
#pragma unroll 1
  for (int i = self; i < kDigits; i += num_threads) shared.histogram[i] = 0;
  if (self == 0) shared.num_candidates = 0;
  const float rising = static_cast<float>(4 * self);
  float4 four = make_float4(rising, rising + 1.0f, rising + 2.0f, rising + 3.0f);
  int visible = top_k + 1;
  if (turn) {
    // On their way before it is known whether they are needed. The row's room is in fours.
    if (4 * self < args.stride) four = *reinterpret_cast<const float4*>(scores + 4 * self);
    visible = VisibleRows(args, t);
    if (self == 0) count[t] = min(visible, top_k);
    if (visible <= top_k) {
      for (int i = self; i < visible; i += num_threads) picks[i] = i;
      return;
    }
  }
  const RowScores keys{scores, kept_bits, kept};
  const uint2 ends = KeepScores(scores, four, visible, kept, kept_bits, shared);
  Bins bins;
  const bool found = bins.Set(ends.x, ends.y) && FindByBins(keys, visible, top_k, bins, shared);
  const Threshold threshold = found ? shared.threshold : FindByBytes(keys, visible, top_k, shared);
  WriteChoice(keys, visible, threshold, turn ? picks : nullptr);
}

__global__ void __launch_bounds__(kChooseThreads)
    ChooseKernel(IndexArgs args, int kept, int32_t* picks, int32_t* count, bool rehearse) {
  DS4_DYNAMIC_SHARED(memory);
  __shared__ ChooseShared shared;
  LaunchDependents();
  RehearseAndRun(rehearse, [&](bool turn) {
    ChooseRow(args, kept, reinterpret_cast<uint32_t*>(memory), shared, picks, count, turn);
  });
}

}  // namespace

void LaunchChoose(const LaunchContext& launch, const IndexArgs& args, int64_t max_visible,
                  int32_t* picks, int32_t* count) {
  const int kept = static_cast<int>(std::min<int64_t>(args.stride, kMaxKeptKeys));
  const int threads = max_visible <= kFewChooseKeys ? kFewChooseThreads : kChooseThreads;
  const int rows = args.end - args.first, top_k = args.params.index_top_k;
  // The scores leave room beside them. What the rehearsal chooses from is what one round loads.
  const bool rehearse = rows <= launch.num_sms && top_k < kept && top_k < 4 * threads;
  Launch(launch, dim3(rows), dim3(threads), size_t{4} * kept, ChooseKernel, args, kept, picks,
         count, rehearse);
}

}  // namespace ds4::cuda
