// The layers of one rank on one device (spec 2.1): puts the kernels of a forward pass on a stream.
// The counterpart of engine/layers; rows, lanes and caches mean the same.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/cuda/attention.h"
#include "engine/cuda/cache.h"
#include "engine/cuda/choose.h"
#include "engine/cuda/choose_ranks.h"
#include "engine/cuda/device_group.h"
#include "engine/cuda/draw.h"
#include "engine/cuda/experts.h"
#include "engine/cuda/product.h"
#include "engine/cuda/weights.h"
#include "engine/cuda/workspace.h"

namespace ds4::cuda {

// Rows of one pass through the few-row kernels, whose results do not depend on the batch.
inline constexpr int kMaxFewRows = 64;
static_assert(kMaxFewRows <= kMaxRouterRows);
// Positions that rings hold beyond a window and a batch of few rows, so that a session can go back
// (kv/session_position.h says how far) even after steps that were queued in vain.
inline constexpr int kRewindSlack = 64;

struct TransformerOptions {
  int64_t max_rows = 512;      // of one forward pass
  int64_t max_context = 4096;  // of one session
  int slots = 1;               // sessions
  KvType kv_type = KvType::kBF16;
  bool deterministic = false;  // lanes and row independence in passes of many rows too
};

// Subtree roots of the rank that has most of them: all ranks send as many vectors.
int MostRoots(const LaneLayout& lanes);
// Where rank r's part of the vocabulary begins; r may be the number of ranks. The most ids of any.
int64_t VocabBegin(const ModelConfig& config, const LaneLayout& lanes, int r);
int64_t MostVocab(const ModelConfig& config, const LaneLayout& lanes);

// Filled when asked for; host copies. For tests.
struct DeviceTrace {
  std::vector<std::vector<float>> streams;         // per layer, [rows, H, D]
  std::vector<std::vector<int32_t>> expert_ids;    // per layer, [rows, used]
  std::vector<std::vector<int32_t>> index_picks;   // per layer, [rows, top_k]; empty: no indexer
  std::vector<std::vector<int32_t>> index_counts;  // per layer, [rows]
};

class DeviceTransformer {
 public:
  // `config`, `plan`, `weights`, `group` and `stream` outlive it. Takes all its device memory at
  // once.
  static Result<std::unique_ptr<DeviceTransformer>> Create(
      const ModelConfig& config, const RankPlan& plan, const LaneLayout& lanes,
      const DeviceWeights& weights, const TransformerOptions& options, DeviceGroup* group,
      Stream* stream, int num_sms);

  // Bytes that Create takes: scratch, and caches of all slots.
  static int64_t ScratchBytes(const ModelConfig& config, const RankPlan& plan,
                              const LaneLayout& lanes, const TransformerOptions& options,
                              bool has_f32_weights);
  static int64_t CacheBytes(const ModelConfig& config, const TransformerOptions& options);

  // Largest batch of the few-row kernels.
  int64_t max_few_rows() const { return few_rows_; }
  // Whether passes of many rows have kernels of their own (else rows go in batches of few).
  bool has_many_row_path() const { return many_rows_ > 0; }

  // One pass over `rows` rows at step (device arrays). max_pos: bound over their positions (sizes
  // grids; a captured pass serves any step below it). many: the kernels for many rows.
  Status Forward(const StepRows& step, int rows, int64_t max_pos, bool many,
                 DeviceTrace* trace = nullptr);

  // logits() [count][local_vocab] of stream rows row_index[0..count) of the last pass (device).
  Status Logits(const int32_t* row_index, int count, int rows);
  float* logits() const { return logits_; }
  int64_t local_vocab() const { return weights_.head.rows; }
  // Greedy choice of the whole group over logits() rows, and the per-lane statistics behind its
  // probability. Collective; graph-safe where the group is.
  Status Greedy(int count);
  // After Greedy: replaces the choice of rows with a temperature (params: [count], device) by what
  // is drawn for position pos[t] + 1. Collective, likewise.
  Status Draw(int count, const DrawRow* params, const int32_t* pos);
  // Ends a step of the decode queue.
  void Advance(int rows, const DecodeQueue& queue);

  const float* streams() const { return streams_; }
  LaunchContext& launch() { return launch_; }

  // Bytes of the session caches, for StateHash: calls `visit` with every stretch that a later step
  // at position n of `slot` can read, in one order that all ranks share.
  Status VisitState(int slot, int64_t n,
                    const std::function<void(const void* host, int64_t bytes)>& visit);

 private:
  struct Pass {
    StepRows step;
    int rows = 0;
    int64_t max_pos = 0;
    bool many = false;
  };
  DeviceTransformer(const ModelConfig& config, const RankPlan& plan, const LaneLayout& lanes,
                    const DeviceWeights& weights, const TransformerOptions& options,
                    DeviceGroup* group, Stream* stream, int num_sms);
  void Plan(Workspace& space);
  void PlanCaches(Workspace& space);
  AttentionParams ParamsOf(const LayerConfig& layer) const;
  HcParams hc() const;

  Status Attention(const Pass& pass, int64_t index, DeviceTrace* trace);
  Status Experts(const Pass& pass, int64_t index, DeviceTrace* trace);
  // Gathers the ranks' roots and ends the site.
  Status EndSite(const Pass& pass, const HcMix& mix, const PlainMatrix& next_fn);
  // The form that products with `w` read in this pass.
  int FormFor(const Pass& pass, const PackedMatrix& w) const;
  ActivationView View(const ActivationView& view, const Pass& pass, int rows, int forms) const;
  struct Product {
    PackedMatrix w;
    const ActivationView* x;
    int64_t x_col;
    float* y;
    const ActivationView* out;
    int64_t out_col;
    int out_forms;
  };
  void Products(const Pass& pass, const std::vector<Product>& products);

  const ModelConfig& config_;
  const RankPlan& plan_;
  const LaneLayout& lanes_;
  const DeviceWeights& weights_;
  TransformerOptions options_;
  DeviceGroup* group_;
  LaunchContext launch_;
  int64_t few_rows_ = 0;
  int64_t many_rows_ = 0;
  int num_roots_ = 1;
  DeviceBuffer memory_, cache_memory_;
  std::vector<LayerCache> caches_;
  RouterParams router_shape_;

  double* plain_frequencies_ = nullptr;
  double* yarn_frequencies_ = nullptr;
  int32_t* vocab_lanes_ = nullptr;
  float *plain_cos_ = nullptr, *plain_sin_ = nullptr, *yarn_cos_ = nullptr, *yarn_sin_ = nullptr;
  float *streams_ = nullptr, *partial_ = nullptr, *mixes_ = nullptr, *post_ = nullptr,
        *comb_ = nullptr;
  ActivationView x_, qr_, attended_, lanes_in_, hidden_, shared_hidden_, head_in_;
  float *q_low_ = nullptr, *kv_ = nullptr, *comp_kv_ = nullptr, *comp_gate_ = nullptr,
        *index_kv_ = nullptr, *index_gate_ = nullptr, *index_weights_ = nullptr, *q_ = nullptr,
        *index_q_ = nullptr, *router_logits_ = nullptr, *roots_ = nullptr, *pair_out_ = nullptr,
        *logits_ = nullptr;
  int most_lanes_ = 1;                  // of any rank
  int64_t most_vocab_ = 0;              // likewise, ids
  std::byte* own_choice_ = nullptr;     // this rank's message
  std::byte* merged_choice_ = nullptr;  // the group's
  ChoiceMessage chosen_;                // of the last Greedy
  std::byte *greedy_scratch_ = nullptr, *draw_scratch_ = nullptr, *index_scratch_ = nullptr,
            *attention_scratch_ = nullptr, *routing_memory_ = nullptr, *router_scratch_ = nullptr;
  int32_t *picks_ = nullptr, *pick_count_ = nullptr;
  int64_t head_rows_ = 0;
};

}  // namespace ds4::cuda
