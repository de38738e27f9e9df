#include "engine/layers/moe.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/kernels/math.h"
#include "engine/kernels/norm.h"
#include "engine/kernels/swiglu.h"

namespace ds4 {
namespace {

// Above this many values, expert outputs are computed lane by lane instead of all at once.
constexpr int64_t kAllLanesLimit = int64_t{1} << 22;

}  // namespace

MoeLayer::MoeLayer(const RankContext& context)
    : context_(context),
      config_(*context.config),
      expert_lanes_(context.plan->lanes.size()),
      shared_lanes_(context.plan->lanes.size()) {}

Status MoeLayer::Forward(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
                         const float* x, float* out, ExpertPicks* picks) {
  rows_ = static_cast<int64_t>(batch.size());
  const int64_t hidden = config_.hidden_dim;
  float* normed = normed_.Get(rows_ * hidden);
  RmsNorm(x, weights.norm.data(), rows_, hidden, config_.norm_eps, normed, *context_.pool);

  // The router reads float32 rows, whatever its weights' type (spec 2.9: do not quantise).
  float* logits = logits_.Get(rows_ * config_.num_experts);
  const ActivationView router_input =
      input_.Make(normed, rows_, hidden, hidden, NeedsQuantized(weights.router), *context_.pool);
  MatMul({weights.router.view(), router_input, logits, config_.num_experts, false}, *context_.pool);
  Route(layer, weights, batch, logits);
  if (picks != nullptr) {
    picks->assign(rows_, {});
    for (const Pair& pair : pairs_) (*picks)[pair.row].push_back(pair.expert);
  }
  GateAndUp(layer, weights, normed);
  Down(weights);

  const Range own = context_.plan->lanes;
  const int64_t count = rows_ * hidden;
  const auto subtrees = SubtreesOf(static_cast<int>(own.begin), static_cast<int>(own.end));
  const int64_t num_roots = static_cast<int64_t>(subtrees.size()) * count;
  float* roots = roots_.Get(num_roots);
  AddLanes(static_cast<int>(own.begin), static_cast<int>(own.end), lanes_.Get(0), count, roots);
  return context_.comm->AllReduceLanes({roots, static_cast<size_t>(num_roots)},
                                       {out, static_cast<size_t>(count)});
}

void MoeLayer::ChooseByScore(const MoeTensors& weights, const float* scores,
                             std::vector<int32_t>& ids) {
  const int64_t num_experts = config_.num_experts;
  order_.resize(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) order_[e] = static_cast<int32_t>(e);
  // The bias chooses only; the lower id wins ties.
  const auto better = [&](int32_t a, int32_t b) {
    const float sa = scores[a] + weights.bias[a];
    const float sb = scores[b] + weights.bias[b];
    return sa > sb || (sa == sb && a < b);
  };
  std::partial_sort(order_.begin(), order_.begin() + config_.num_experts_used, order_.end(), better);
  ids.assign(order_.begin(), order_.begin() + config_.num_experts_used);
}

void MoeLayer::Route(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
                     const float* logits) {
  const int64_t used = config_.num_experts_used;
  const int64_t num_experts = config_.num_experts;
  pairs_.clear();
  float* scores = scores_.Get(num_experts);
  for (int64_t t = 0; t < rows_; ++t) {
    for (int64_t e = 0; e < num_experts; ++e) {
      scores[e] = std::sqrt(Softplus(logits[t * num_experts + e]));
    }
    if (layer.router == RouterKind::kHash) {
      const int32_t* row = weights.hash_ids.data() + int64_t{batch[t].token} * used;
      ids_.assign(row, row + used);
    } else {
      ChooseByScore(weights, scores, ids_);
    }
    std::sort(ids_.begin(), ids_.end());
    float sum = 0.0f;
    for (int32_t id : ids_) sum += scores[id];
    for (int32_t id : ids_) {
      const float weight = scores[id] / (sum + 1e-20f) * config_.expert_weights_scale;
      pairs_.push_back({id, static_cast<int32_t>(t), weight});
    }
  }
  // By expert, rows in order within one.
  std::stable_sort(pairs_.begin(), pairs_.end(),
                   [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
  row_pairs_.resize(pairs_.size());
  std::vector<int32_t>& next = order_;
  next.assign(rows_, 0);
  groups_.clear();
  for (size_t p = 0; p < pairs_.size(); ++p) {
    const Pair& pair = pairs_[p];
    row_pairs_[pair.row * used + next[pair.row]++] = static_cast<int32_t>(p);
    if (groups_.empty() || groups_.back().expert != pair.expert) {
      groups_.push_back({pair.expert, static_cast<int64_t>(p), 0});
    }
    ++groups_.back().count;
  }
}

// The input rows of all pairs, in pair order; bits are copied, not computed again.
ActivationView MoeLayer::Gather(const ActivationView& rows) {
  const int64_t num_pairs = static_cast<int64_t>(pairs_.size());
  const int64_t hidden = config_.hidden_dim;
  ActivationView view{num_pairs, hidden, nullptr, hidden, nullptr, nullptr};
  if (rows.q != nullptr) {
    const int64_t blocks = hidden / 32;
    int8_t* q = gathered_q_.Get(num_pairs * hidden);
    float* scale = gathered_scale_.Get(num_pairs * blocks);
    for (int64_t p = 0; p < num_pairs; ++p) {
      std::copy_n(rows.q + pairs_[p].row * hidden, hidden, q + p * hidden);
      std::copy_n(rows.scale + pairs_[p].row * blocks, blocks, scale + p * blocks);
    }
    view.q = q;
    view.scale = scale;
  }
  float* f32 = gathered_.Get(num_pairs * hidden);
  for (int64_t p = 0; p < num_pairs; ++p) {
    std::copy_n(rows.f32 + pairs_[p].row * rows.f32_stride, hidden, f32 + p * hidden);
  }
  view.f32 = f32;
  return view;
}

// Hidden activations of the chosen experts, [pairs, local_ffn], and of the shared one.
void MoeLayer::GateAndUp(const LayerConfig& layer, const MoeTensors& weights, const float* normed) {
  ThreadPool& pool = *context_.pool;
  const int64_t ffn = context_.plan->ffn.size();
  const int64_t hidden = config_.hidden_dim;
  const int64_t num_pairs = static_cast<int64_t>(pairs_.size());
  const bool quantized = NeedsQuantized(weights.gate) || NeedsQuantized(weights.up) ||
                         NeedsQuantized(weights.shared_gate) || NeedsQuantized(weights.shared_up);
  const ActivationView rows = input_.Make(normed, rows_, hidden, hidden, quantized, pool);
  const ActivationView gathered = Gather(rows);

  float* gate = gate_.Get(num_pairs * ffn);
  float* up = up_.Get(num_pairs * ffn);
  float* shared_gate = shared_gate_.Get(rows_ * ffn);
  float* shared_up = shared_up_.Get(rows_ * ffn);
  std::vector<MatMulJob> jobs;
  jobs.push_back({weights.shared_gate.view(), rows, shared_gate, ffn, false});
  jobs.push_back({weights.shared_up.view(), rows, shared_up, ffn, false});
  for (const Group& group : groups_) {
    const ActivationView input = gathered.Rows(group.begin, group.count);
    const int64_t first = group.expert * ffn;
    jobs.push_back(
        {weights.gate.view().Rows(first, ffn), input, gate + group.begin * ffn, ffn, false});
    jobs.push_back({weights.up.view().Rows(first, ffn), input, up + group.begin * ffn, ffn, false});
  }
  MatMul(jobs, pool);

  // The router's weight goes onto the hidden row, before the down product (as the official code does).
  float* pair_weights = weights_.Get(num_pairs);
  for (int64_t p = 0; p < num_pairs; ++p) pair_weights[p] = pairs_[p].weight;
  SwiGlu(gate, up, pair_weights, num_pairs, ffn, layer.swiglu_limit, gate, pool);
  SwiGlu(shared_gate, shared_up, nullptr, rows_, ffn, layer.shared_swiglu_limit, shared_gate,
         pool);
}

// Lane sums [local_lanes, rows, D]: shared expert, then experts by rising id.
void MoeLayer::Down(const MoeTensors& weights) {
  ThreadPool& pool = *context_.pool;
  const int64_t hidden = config_.hidden_dim;
  const int64_t ffn = context_.plan->ffn.size();
  const int64_t num_lanes = context_.plan->lanes.size();
  const int64_t lane_ffn = ffn / num_lanes;
  const int64_t num_pairs = static_cast<int64_t>(pairs_.size());
  const int64_t used = config_.num_experts_used;
  float* lanes = lanes_.Get(num_lanes * rows_ * hidden);
  const int64_t lanes_at_once = num_lanes * num_pairs * hidden <= kAllLanesLimit ? num_lanes : 1;
  float* outputs = expert_out_.Get(lanes_at_once * num_pairs * hidden);

  std::vector<MatMulJob> jobs;
  for (int64_t first = 0; first < num_lanes; first += lanes_at_once) {
    jobs.clear();
    for (int64_t lane = first; lane < first + lanes_at_once; ++lane) {
      const ActivationView shared =
          shared_lanes_[lane].Make(shared_gate_.Get(0) + lane * lane_ffn, rows_, lane_ffn, ffn,
                                   NeedsQuantized(weights.shared_down), pool);
      jobs.push_back({weights.shared_down.view().Rows(lane * hidden, hidden), shared,
                      lanes + lane * rows_ * hidden, hidden, false});
      const ActivationView experts =
          expert_lanes_[lane].Make(gate_.Get(0) + lane * lane_ffn, num_pairs, lane_ffn, ffn,
                                   NeedsQuantized(weights.down), pool);
      for (const Group& group : groups_) {
        jobs.push_back({weights.down.view().Rows((group.expert * num_lanes + lane) * hidden, hidden),
                        experts.Rows(group.begin, group.count),
                        outputs + ((lane - first) * num_pairs + group.begin) * hidden, hidden,
                        false});
      }
    }
    MatMul(jobs, pool);
    pool.ParallelFor(lanes_at_once * rows_, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i % rows_;
        float* to = lanes + (first * rows_ + i) * hidden;
        const float* from = outputs + i / rows_ * num_pairs * hidden;
        for (int64_t k = 0; k < used; ++k) {
          const float* y = from + row_pairs_[t * used + k] * hidden;
          for (int64_t d = 0; d < hidden; ++d) to[d] += y[d];
        }
      }
    });
  }
}

}  // namespace ds4
