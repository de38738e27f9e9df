#include "engine/layers/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/base/check.h"
#include "engine/kernels/math.h"
#include "engine/kernels/norm.h"
#include "engine/kernels/row_grain.h"
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
      shared_lanes_(context.plan->lanes.size()),
      num_roots_(context.num_roots()) {}

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
  const int64_t num_roots = num_roots_ * count;
  float* roots = roots_.Get(num_roots);
  AddLanes(static_cast<int>(own.begin), static_cast<int>(own.end), lanes_.Get(0), count, roots);
  return context_.comm->AllReduceLanes({roots, static_cast<size_t>(num_roots)},
                                       {out, static_cast<size_t>(count)});
}

void MoeLayer::ChooseByScore(const MoeTensors& weights, const float* scores, int32_t* ids) const {
  const int64_t num_experts = config_.num_experts;
  thread_local std::vector<int32_t> order;  // keeps its memory from call to call
  order.resize(num_experts);
  std::iota(order.begin(), order.end(), 0);
  // The bias chooses only; the lower id wins ties.
  const auto better = [&](int32_t a, int32_t b) {
    const float sa = scores[a] + weights.bias[a];
    const float sb = scores[b] + weights.bias[b];
    return sa > sb || (sa == sb && a < b);
  };
  std::partial_sort(order.begin(), order.begin() + config_.num_experts_used, order.end(), better);
  std::copy_n(order.begin(), config_.num_experts_used, ids);
}

// One row's experts by rising id, with their weights. logits becomes the row's scores.
void MoeLayer::RouteRow(const LayerConfig& layer, const MoeTensors& weights, int32_t token,
                        int32_t row, float* logits, Pair* pairs) const {
  const int64_t used = config_.num_experts_used;
  float* scores = logits;
  for (int64_t e = 0; e < config_.num_experts; ++e) scores[e] = std::sqrt(Softplus(logits[e]));
  thread_local std::vector<int32_t> ids;
  ids.resize(used);
  if (layer.router == RouterKind::kHash) {
    std::copy_n(weights.hash_ids.data() + int64_t{token} * used, used, ids.data());
  } else {
    ChooseByScore(weights, scores, ids.data());
  }
  std::sort(ids.begin(), ids.end());
  float sum = 0.0f;
  for (int32_t id : ids) sum += scores[id];
  for (int64_t i = 0; i < used; ++i) {
    pairs[i] = {ids[i], row, scores[ids[i]] / (sum + 1e-20f) * config_.expert_weights_scale};
  }
}

void MoeLayer::Route(const LayerConfig& layer, const MoeTensors& weights, const Batch& batch,
                     float* logits) {
  const int64_t used = config_.num_experts_used;
  const int64_t num_experts = config_.num_experts;
  routed_.resize(rows_ * used);
  // Logarithm, exponential and the sort: some twenty plain values each.
  context_.pool->ParallelFor(rows_, MinParallelRows(20 * num_experts),
                             [&](int64_t begin, int64_t end) {
                               for (int64_t t = begin; t < end; ++t) {
                                 RouteRow(layer, weights, batch[t].token, static_cast<int32_t>(t),
                                          logits + t * num_experts, routed_.data() + t * used);
                               }
                             });
  GroupByExpert();
}

// Sorts the pairs by expert, rows in order within one, by counting.
void MoeLayer::GroupByExpert() {
  const int64_t used = config_.num_experts_used;
  next_.assign(config_.num_experts, 0);
  for (const Pair& pair : routed_) ++next_[pair.expert];
  groups_.clear();
  int64_t begin = 0;
  for (int64_t e = 0; e < config_.num_experts; ++e) {
    const int64_t count = next_[e];
    next_[e] = begin;
    if (count > 0) groups_.push_back({static_cast<int32_t>(e), begin, count});
    begin += count;
  }
  pairs_.resize(routed_.size());
  row_pairs_.resize(routed_.size());
  for (size_t i = 0; i < routed_.size(); ++i) {
    // A row's experts rise, so its places in row_pairs_ are already in the order of addition.
    const int64_t p = next_[routed_[i].expert]++;
    pairs_[p] = routed_[i];
    row_pairs_[i] = static_cast<int32_t>(p);
  }
  DCHECK(static_cast<int64_t>(pairs_.size()) == rows_ * used);
}

// The input rows of all pairs in the form that experts read, in pair order; bits are copied, not
// computed again.
ActivationView MoeLayer::Gather(const ActivationView& rows, bool need_f32) {
  const int64_t num_pairs = static_cast<int64_t>(pairs_.size());
  const int64_t hidden = config_.hidden_dim;
  const int64_t blocks = hidden / 32;
  const bool need_q = rows.q != nullptr;
  float* f32 = need_f32 ? gathered_.Get(num_pairs * hidden) : nullptr;
  int8_t* q = need_q ? gathered_q_.Get(num_pairs * hidden) : nullptr;
  float* scale = need_q ? gathered_scale_.Get(num_pairs * blocks) : nullptr;
  context_.pool->ParallelFor(num_pairs, MinParallelRows(hidden), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t row = pairs_[p].row;
      if (need_f32) std::copy_n(rows.f32 + row * rows.f32_stride, hidden, f32 + p * hidden);
      if (!need_q) continue;
      std::copy_n(rows.q + row * hidden, hidden, q + p * hidden);
      std::copy_n(rows.scale + row * blocks, blocks, scale + p * blocks);
    }
  });
  return {num_pairs, hidden, f32, hidden, q, scale};
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
  const bool need_f32 = !NeedsQuantized(weights.gate) || !NeedsQuantized(weights.up);
  const ActivationView gathered = Gather(rows, need_f32);

  float* gate = gate_.Get(num_pairs * ffn);
  float* up = up_.Get(num_pairs * ffn);
  float* shared_gate = shared_gate_.Get(rows_ * ffn);
  float* shared_up = shared_up_.Get(rows_ * ffn);
  std::vector<MatMulJob>& jobs = jobs_;
  jobs.clear();
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

  // The router's weight goes onto the hidden row, before the down product (as the official code
  // does).
  float* pair_weights = weights_.Get(num_pairs);
  for (int64_t p = 0; p < num_pairs; ++p) pair_weights[p] = pairs_[p].weight;
  SwiGlu(gate, up, pair_weights, num_pairs, ffn, layer.swiglu_limit, gate, pool);
  SwiGlu(shared_gate, shared_up, nullptr, rows_, ffn, layer.shared_swiglu_limit, shared_gate, pool);
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

  std::vector<MatMulJob>& jobs = jobs_;
  jobs.clear();
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
        jobs.push_back(
            {weights.down.view().Rows((group.expert * num_lanes + lane) * hidden, hidden),
             experts.Rows(group.begin, group.count),
             outputs + ((lane - first) * num_pairs + group.begin) * hidden, hidden, false});
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
