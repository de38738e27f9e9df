// One attention site: projections, compressors, indexer, attention over window and chosen rows,
// grouped output (spec 2.5-2.8). Ends in the first of a layer's two shared sums.
#pragma once

#include <vector>

#include "engine/kernels/attention.h"
#include "engine/layers/activation.h"
#include "engine/layers/rank_context.h"

namespace ds4 {

// Which compressed rows each row chose; for tests. -1 pads nothing: lists have their own lengths.
using IndexPicks = std::vector<std::vector<int32_t>>;

class AttentionLayer {
 public:
  explicit AttentionLayer(const RankContext& context);

  // Rotary tables of the batch's positions, once per forward pass and shared by all layers.
  void SetBatch(const Batch& batch);

  // x: [rows, D], the collapsed stream input before its norm; out: [rows, D], equal on all ranks.
  // `states` gives each row's layer state. Writes the rows' keys before anyone attends, so a row
  // sees the batch's earlier rows and, in CSA and HCA, the compressed row that it completes itself.
  Status Forward(const LayerConfig& layer, const AttentionTensors& weights, const float* x,
                 const std::vector<LayerState*>& states, float* out, IndexPicks* picks);

 private:
  void Project(const LayerConfig& layer, const AttentionTensors& weights, const float* x);
  void StoreWindow(const AttentionTensors& weights, const std::vector<LayerState*>& states);
  void StoreAllCompressed(const LayerConfig& layer, const AttentionTensors& weights,
                          const std::vector<LayerState*>& states);
  // `part` names the compressor of a layer state: the main one or the indexer's.
  void StoreCompressed(const LayerConfig& layer, const CompressorTensors& weights,
                       const float* values, const float* gates,
                       const std::vector<LayerState*>& states, CompressorState LayerState::*part);
  void PoolRow(const LayerConfig& layer, const CompressorTensors& weights, int64_t pos,
               const float* cos, const float* sin, CompressorState& state);
  void ListKeys(const LayerConfig& layer, const std::vector<LayerState*>& states,
                IndexPicks* picks);
  void ListRowKeys(const LayerConfig& layer, LayerState& state, int64_t row, IndexPicks* picks);
  int64_t ChooseRows(LayerState& state, int64_t row, int64_t visible, int32_t* picked);
  Status Output(const AttentionTensors& weights, float* out);

  const RankContext& context_;
  const ModelConfig& config_;
  int64_t local_heads_;
  std::vector<double> plain_frequencies_;
  std::vector<double> yarn_frequencies_;

  // Of the current batch.
  int64_t rows_ = 0;
  std::vector<int64_t> positions_;
  Scratch<float> plain_cos_, plain_sin_, yarn_cos_, yarn_sin_;
  const float* cos_ = nullptr;  // of the current layer's kind
  const float* sin_ = nullptr;

  Activation x_activation_, qr_activation_;
  std::vector<Activation> group_activations_, lane_activations_;
  int64_t num_roots_;  // vectors that this rank sends for a shared sum
  Scratch<float> normed_, q_low_, q_, kv_, comp_values_, comp_gates_, index_values_, index_gates_,
      index_q_, index_weights_, attended_, lanes_in_, lanes_out_, roots_, row_cos_, row_sin_;
  std::vector<KeyList> keys_;
  std::vector<MatMulJob> jobs_;
  std::vector<int64_t> closing_, closing_positions_;  // rows that complete a compressed row
};

}  // namespace ds4
