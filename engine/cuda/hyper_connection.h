// Streams and their mixing (spec 2.2, 2.3), norms, embedding, rotary tables. All float32.
#pragma once

#include "engine/cuda/activation.h"
#include "engine/cuda/cache.h"
#include "engine/cuda/layout.h"

namespace ds4::cuda {

// A matrix that stays row-major: F32, F16 or BF16 values [rows][cols]; device pointer.
struct PlainMatrix {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  const std::byte* data = nullptr;
};

inline constexpr int kMaxDeviceStreams = 4;

struct HcParams {
  int num_streams = 4;  // H <= kMaxDeviceStreams
  int hidden_dim = 0;   // D
  int sinkhorn_iterations = 20;
  float hc_eps = 1e-6f;
  float norm_eps = 1e-6f;
};

struct HcWeights {
  PlainMatrix fn;                // [2H + H*H][H*D]; head: [H][H*D]; 16-byte aligned
  const float* base = nullptr;   // [2H + H*H] or [H]
  const float* scale = nullptr;  // [3] or [1]
};

// What a site leaves for its end: per row post [H] and comb [H*H] (row-major, comb[j][k]).
struct HcMix {
  float* post = nullptr;  // [rows][H]
  float* comb = nullptr;  // [rows][H*H]
};

// Post and comb from what a site's start leaves: a job that a kernel between the site's start and
// its end does beside its own work, since only the end needs the result (sinkhorn.cuh).
inline constexpr int kMixSlots = 32;
struct SinkhornJob {
  const float* mixes = nullptr;  // [rows][kMixSlots]: mix i >= H, scale * dot product + base
  HcMix mix;                     // post and comb go there
  int rows = 0;                  // 0: nothing to do
  int streams = 0;
  int iterations = 0;
  float eps = 0.0f;
};
inline SinkhornJob BalanceOf(const HcParams& params, int rows, const float* mixes,
                             const HcMix& mix) {
  return {mixes, mix, rows, params.num_streams, params.sinkhorn_iterations, params.hc_eps};
}

// What the start of a site needs to know of the streams, as sums over parts of the columns: `start`
// [parts][rows][kStartSlots], then `rest` [parts][rows][kRestSlots].
//   start: slot i < H: the dot product with row i of fn (pre). Slot kGramSlot + 4 k + j, k < 2 or j
//   <
//     2: the product of streams j and (j + k) % 4, so that the square of any sum of streams is
//     known.
//   rest: slot i: the dot product with row H + i of fn (post and comb).
// Slots with no such row hold anything. A part is kPartCols columns of all streams, so the order of
// additions depends on D only. D: a multiple of 8.
inline constexpr int kPartCols = 32;
inline constexpr int kStartSlots = 16;
inline constexpr int kGramSlot = 4;
inline constexpr int kRestSlots = 20;
inline int NumParts(const HcParams& params) {
  return (params.hidden_dim + kPartCols - 1) / kPartCols;
}
inline int64_t PartialFloats(const HcParams& params, int64_t rows) {
  return NumParts(params) * rows * (kStartSlots + kRestSlots);
}
// Where `rest` begins.
inline int64_t RestOffset(int parts, int64_t rows) { return parts * rows * kStartSlots; }

// Rotary tables of a step, [rows][pairs] each: cos and sin of pos[t] * frequencies[i], the product
// in double.
struct RopeTables {
  static constexpr int kMax = 2;
  struct Table {
    const double* frequencies = nullptr;  // [pairs]
    float* cos = nullptr;
    float* sin = nullptr;
  };
  int count = 0;
  int pairs = 0;
  Table tables[kMax];
};

// streams[t][h][:] = embedding row of token[t] for all h, and the partials for the first site's fn.
// embedding: rows as in the file, F32, F16, BF16 or Q8_0 blocks, row r at r * BytesFor(dtype, D).
// In the same launch, the step's rotary tables.
void LaunchEmbed(const LaunchContext& launch, const HcParams& params, const StepRows& step,
                 int rows, DType dtype, const std::byte* embedding, const PlainMatrix& next_fn,
                 float* streams, float* partial, const RopeTables& rope = {});

// Ends a site and prepares the next: streams[t][k] = post[k] * s[t] + sum_j comb[j][k] *
// streams[t][j], s = the lane tree's total of the roots of all ranks (`count` vectors [rows][D] in
// lane order, added as AddRoots does), then the partials with next_fn (of the next site, or the
// head's). In place.
struct RootSet {
  static constexpr int kMax = 16;
  int count = 0;
  const float* data[kMax] = {};
  int begin[kMax] = {};  // first lane of each
  int size[kMax] = {};   // lanes of each
  int num_lanes = 1;
};
void LaunchHcPost(const LaunchContext& launch, const HcParams& params, int rows,
                  const RootSet& roots, const HcMix& mix, const PlainMatrix& next_fn,
                  float* streams, float* partial);

// Starts a site: mixes [rows][kMixSlots] from the partials, for a SinkhornJob; collapsed
// c = sum_h pre_h X_h, x = norm_weight * R(c) in the forms that `x` has, padding columns zeros. One
// result for any number of rows.
void LaunchHcPre(const LaunchContext& launch, const HcParams& params, int rows,
                 const float* streams, const float* partial, const HcWeights& weights,
                 const float* norm_weight, float* mixes, const ActivationView& x);

// Head collapse and final norm of the chosen rows (row_index[i], device, [out.rows]) into `out`.
void LaunchHcHead(const LaunchContext& launch, const HcParams& params, int rows,
                  const int32_t* row_index, const float* streams, const float* partial,
                  const HcWeights& weights, const float* norm_weight, const ActivationView& out);

// out = weight * R(x), x: [rows][stride], `cols` values (weight may be null), in the forms of `out`
// at columns 0..cols-1; padding columns get zeros. out.cols up to 8192.
struct RowNorm {
  const float* x = nullptr;
  int64_t stride = 0;
  int cols = 0;
  const float* weight = nullptr;
  float eps = 0;
  ActivationView out;
};
void LaunchRmsNorm(const LaunchContext& launch, const float* x, int64_t stride, int rows, int cols,
                   const float* weight, float eps, const ActivationView& out);

}  // namespace ds4::cuda
