// One mixture-of-experts site: router, chosen experts, shared expert (spec 2.9). Ends in the second
// of a layer's two shared sums.
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
  // Order of additions for one row and lane: shared expert, then the chosen experts by rising id.
  // The router's arithmetic is replicated, so all ranks choose the same experts.
  Status Forward(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
                 const float* x, float* out, ExpertPicks* picks);

 private:
  // One row's work for one expert; sorted by expert, so that an expert's weights are read once.
  struct Pair {
    int32_t expert = 0;
    int32_t row = 0;
    float weight = 0.0f;
  };

  // Fills pairs_, row_pairs_ and groups_ from the router's logits, which become scores.
  void Route(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
             float* logits);
  void RouteRow(const LayerConfig& layer, const MoeTensors& weights, int32_t token, int32_t row,
                float* logits, Pair* pairs) const;
  void ChooseByScore(const MoeTensors& weights, const float* scores, int32_t* ids) const;
  void GroupByExpert();
  void GateAndUp(const LayerConfig& layer, const MoeTensors& weights, const float* normed);
  void Down(const MoeTensors& weights);
  ActivationView Gather(const ActivationView& rows, bool need_f32);

  const RankContext& context_;
  const ModelConfig& config_;
  int64_t rows_ = 0;
  std::vector<Pair> routed_;  // [rows, used], by rising expert within a row
  std::vector<Pair> pairs_;   // the same by expert
  std::vector<int64_t> next_;
  // Pairs of row t, by rising expert: row_pairs_[t * used + i] indexes pairs_.
  std::vector<int32_t> row_pairs_;
  struct Group {
    int32_t expert;
    int64_t begin;
    int64_t count;
  };
  std::vector<Group> groups_;

  std::vector<MatMulJob> jobs_;
  Activation input_;
  std::vector<Activation> expert_lanes_, shared_lanes_;
  Scratch<float> normed_, logits_, gathered_, gathered_scale_, gate_, up_, shared_gate_, shared_up_,
      weights_, expert_out_, lanes_, roots_;
  Scratch<int8_t> gathered_q_;
  int64_t num_roots_;  // vectors that this rank sends for a shared sum
};

}  // namespace ds4
