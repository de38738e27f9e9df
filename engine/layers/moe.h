// One mixture-of-experts site: router, chosen experts, shared expert (spec 2.9). Ends in the second of
// a layer's two shared sums.
#pragma once

#include <vector>

#include "engine/layers/activation.h"
#include "engine/layers/rank_context.h"

namespace ds4 {

// Chosen experts per row, in rising order; for tests.
using ExpertPicks = std::vector<std::vector<int32_t>>;

class MoeLayer {
 public:
  explicit MoeLayer(const RankContext& context);

  // x: [rows, D], the collapsed stream input before its norm; out: [rows, D], equal on all ranks.
  //
  // Order of additions for one row and lane: shared expert, then the chosen experts by rising id. The
  // router's arithmetic is replicated, so all ranks choose the same experts.
  Status Forward(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
                 const float* x, float* out, ExpertPicks* picks);

 private:
  // One row's work for one expert; sorted by expert, so that an expert's weights are read once.
  struct Pair {
    int32_t expert = 0;
    int32_t row = 0;
    float weight = 0.0f;
  };

  void Route(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
             const float* logits);
  void ChooseByScore(const MoeTensors& weights, const float* scores, std::vector<int32_t>& ids);
  void GateAndUp(const LayerConfig& layer, const MoeTensors& weights, const float* normed);
  void Down(const MoeTensors& weights);
  ActivationView Gather(const ActivationView& rows);

  const RankContext& context_;
  const ModelConfig& config_;
  int64_t rows_ = 0;
  std::vector<Pair> pairs_;
  std::vector<int32_t> ids_, order_;
  // Pairs of row t, by rising expert: row_pairs_[t * used + i] indexes pairs_.
  std::vector<int32_t> row_pairs_;
  struct Group {
    int32_t expert;
    int64_t begin;
    int64_t count;
  };
  std::vector<Group> groups_;

  Activation input_;
  std::vector<Activation> expert_lanes_, shared_lanes_;
  Scratch<float> normed_, logits_, scores_, gathered_, gathered_scale_, gate_, up_, shared_gate_,
      shared_up_, weights_, expert_out_, lanes_, roots_;
  Scratch<int8_t> gathered_q_;
};

}  // namespace ds4
