// Keys into the caches, and attention over window and chosen compressed rows (spec 2.5-2.8).
#pragma once

#include "engine/cuda/activation.h"
#include "engine/cuda/cache.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/launch.h"

namespace ds4::cuda {

struct AttentionParams {
  int num_heads = 0;  // of this rank
  int head_dim = 0;
  int rope_dim = 0;
  int sliding_window = 0;
  int ratio = 0;         // 0: window only
  bool overlap = false;  // CSA
  float norm_eps = 1e-6f;
  KvType kv_type = KvType::kBF16;
  int index_heads = 0;
  int index_dim = 0;
  int index_top_k = 0;
};

// Rotary tables of the step for this layer's kind, and of its compressed rows.
struct RopeView {
  const float* cos = nullptr;  // [rows][rope_dim / 2]
  const float* sin = nullptr;
  const double* frequencies = nullptr;  // [rope_dim / 2], for rows at other positions
};

// kv: [rows][head_dim] projections. Norms (kv_norm), rotates at pos, stores into the window ring.
// comp_kv, comp_gate: [rows][width] projections of the main compressor, index_* of the indexer's
// (null when the layer has none): values and scores (gate + ape[pos mod ratio]) go into the pending
// rings; each row whose position closes a window (pos + 1 multiple of ratio) then pools it, norms
// and rotates it at the window's first position, and stores it as compressed row pos / ratio.
// Rows of one session stand in rising consecutive positions; any row order across sessions. The
// window ring holds the window and all rows of the step; pending rings may be shorter than the
// step: the last positions of each session stay.
struct StoreKeys {
  const float* kv = nullptr;
  const float* kv_norm = nullptr;
  const float* comp_kv = nullptr;
  const float* comp_gate = nullptr;
  const float* ape = nullptr;
  const float* comp_norm = nullptr;
  const float* index_kv = nullptr;
  const float* index_gate = nullptr;
  const float* index_ape = nullptr;
  const float* index_norm = nullptr;
};
// In the same launch, `balance`, of at most as many rows.
void LaunchStoreKeys(const LaunchContext& launch, const AttentionParams& params,
                     const StepRows& step, int rows, const RopeView& rope, const StoreKeys& in,
                     const LayerCache& cache, const SinkhornJob& balance = {});

// LaunchStoreKeys and a LaunchRmsNorm of as many rows in one launch; neither reads what the other
// writes.
void LaunchNormAndStore(const LaunchContext& launch, const AttentionParams& params,
                        const StepRows& step, int rows, const RopeView& rope, const StoreKeys& in,
                        const LayerCache& cache, const RowNorm& norm,
                        const SinkhornJob& balance = {});

// The indexer's choice. index_q: [rows][index_heads * index_dim] projections, not rotated yet;
// head_weights: [rows][index_heads]. picks: [rows][index_top_k] compressed row ids, rising; count:
// [rows]. Rows with at most index_top_k visible rows choose all of them without scores. scratch:
// IndexScratchBytes. max_visible: bound over the step's rows (sizes the grid; a graph serves any
// step up to it).
int64_t IndexScratchBytes(const AttentionParams& params, int64_t rows, int64_t max_visible);
void LaunchIndex(const LaunchContext& launch, const AttentionParams& params, const StepRows& step,
                 int rows, const RopeView& rope, const float* index_q, const float* head_weights,
                 const CompressorCache& cache, int64_t max_visible, std::byte* scratch,
                 int32_t* picks, int32_t* count);

// Attention for few rows. q: [rows][num_heads * head_dim] projections: per head unweighted norm and
// rotation happen here. Keys in this order: window rows by rising position, then the compressed
// rows: HCA all visible, CSA picks (may be null: all visible). Keys in splits of kAttentionSplit;
// each split's (max, sum, weighted sum), then splits in rising order, then the sink, so the result
// does not depend on the other rows. out: rotated back, in the forms of `out`, columns head *
// head_dim (+ group padding: heads_per_group heads, then PaddedCols). max_keys: bound over the
// rows. The scratch holds a limited number of rows, whatever `rows` is: with more, the launch needs
// none or goes through them in batches.
inline constexpr int kAttentionSplit = 64;
int64_t AttentionScratchBytes(const AttentionParams& params, int64_t rows, int64_t max_keys);
struct AttentionJob {
  const float* q = nullptr;
  const float* sinks = nullptr;  // [num_heads]
  const int32_t* picks = nullptr;
  const int32_t* pick_count = nullptr;
  int64_t max_keys = 0;
  int heads_per_group = 1;
  std::byte* scratch = nullptr;
  ActivationView out;
};
void LaunchAttention(const LaunchContext& launch, const AttentionParams& params,
                     const StepRows& step, int rows, const RopeView& rope, const AttentionJob& job,
                     const LayerCache& cache);

// The same for many rows (prefill), the same bits: one block a row and head group, all keys in one
// pass, tensor cores, no scratch; only for KvType::kBF16 and head_dim 512 or 256 (else
// LaunchAttention is used).
void LaunchPrefillAttention(const LaunchContext& launch, const AttentionParams& params,
                            const StepRows& step, int rows, const RopeView& rope,
                            const AttentionJob& job, const LayerCache& cache);

}  // namespace ds4::cuda
