// The only place that knows layer order (spec 2.1, 6.2). Prefill is layer-major over a batch of
// rows; decode is the same with one row or several.
#pragma once

#include <memory>
#include <vector>

#include "engine/layers/attention.h"
#include "engine/layers/moe.h"
#include "engine/layers/rank_context.h"

namespace ds4 {

// What tests compare with golden data; filled when asked for.
struct ForwardTrace {
  std::vector<std::vector<float>> streams;  // per layer, [rows, H, D]
  std::vector<IndexPicks> index_picks;      // per layer, empty lists where there is no indexer
  std::vector<ExpertPicks> expert_picks;    // per layer
};

class Transformer {
 public:
  // `context` and all it points to outlive the transformer.
  explicit Transformer(const RankContext& context);

  // Runs the trunk over the batch and moves nothing: the caller advances the sessions. Collective.
  // Returns the last layer's streams, [rows, H, D], valid until the next call.
  Result<const float*> Forward(const Batch& batch, ForwardTrace* trace = nullptr);

  // One MTP block over rows (token t_{i+1}, streams h_i, position i), spec 6.2. `streams`: [rows,
  // H, D], borrowed. Returns the block's own streams, [rows, H, D], valid until the next call.
  Result<const float*> ForwardMtp(const Batch& batch, const float* streams);

  // This rank's part of the logits, [num_rows, local_vocab], for rows of streams [num_rows, H, D]:
  // head collapse, norm, head product. Valid until the next call.
  const float* Logits(const float* streams, int64_t num_rows);
  const float* MtpLogits(const float* streams, int64_t num_rows);

 private:
  Status RunBlock(int64_t layer_index, const LayerConfig& layer, const BlockTensors& weights,
                  const Batch& batch, const std::vector<LayerState*>& states, float* streams,
                  ForwardTrace* trace);
  const float* HeadLogits(const HyperConnectionTensors& hc, const std::vector<float>& norm,
                          const float* streams, int64_t num_rows);

  const RankContext& context_;
  const ModelConfig& config_;
  HyperConnectionParams hc_;
  AttentionLayer attention_;
  MoeLayer moe_;
  Activation head_input_, mtp_embedding_, mtp_streams_;
  std::vector<LayerState*> states_;
  Scratch<float> streams_, mtp_out_, collapsed_, result_, post_, comb_, head_, logits_, embedding_,
      projected_, normed_;
};

}  // namespace ds4
