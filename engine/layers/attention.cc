#include "engine/layers/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "engine/kernels/compressor.h"
#include "engine/kernels/indexer.h"
#include "engine/kernels/norm.h"
#include "engine/kernels/rope.h"
#include "engine/kernels/row_grain.h"

namespace ds4 {

AttentionLayer::AttentionLayer(const RankContext& context)
    : context_(context),
      config_(*context.config),
      local_heads_(context.plan->heads.size()),
      plain_frequencies_(RopeFrequencies(config_.rope_base, config_.rope_dim)),
      yarn_frequencies_(YarnFrequencies(config_.compress_rope_base, config_.rope_dim,
                                        {config_.yarn_factor, config_.yarn_original_context,
                                         config_.yarn_beta_fast, config_.yarn_beta_slow})),
      group_activations_(context.plan->groups.size()),
      lane_activations_(context.plan->lanes.size()),
      num_roots_(context.num_roots()) {}

void AttentionLayer::SetBatch(const Batch& batch) {
  rows_ = static_cast<int64_t>(batch.size());
  positions_.clear();
  for (const BatchRow& row : batch) positions_.push_back(row.pos);
  const int64_t pairs = config_.rope_dim / 2;
  RopeAngles(positions_, plain_frequencies_, plain_cos_.Get(rows_ * pairs),
             plain_sin_.Get(rows_ * pairs));
  RopeAngles(positions_, yarn_frequencies_, yarn_cos_.Get(rows_ * pairs),
             yarn_sin_.Get(rows_ * pairs));
}

Status AttentionLayer::Forward(const LayerConfig& layer, const AttentionTensors& weights,
                               const float* x, const std::vector<LayerState*>& states, float* out,
                               IndexPicks* picks) {
  const int64_t pairs = config_.rope_dim / 2;
  const bool sliding = layer.attention == AttentionKind::kSliding;
  cos_ = (sliding ? plain_cos_ : yarn_cos_).Get(rows_ * pairs);
  sin_ = (sliding ? plain_sin_ : yarn_sin_).Get(rows_ * pairs);

  Project(layer, weights, x);
  StoreWindow(weights, states);
  if (!sliding) StoreAllCompressed(layer, weights, states);
  ListKeys(layer, states, picks);

  float* attended = attended_.Get(rows_ * local_heads_ * config_.head_dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  Attend(q_.Get(0), weights.sinks.data(), {keys_.data(), static_cast<size_t>(rows_)}, rows_,
         local_heads_, config_.head_dim, scale, attended, *context_.pool);
  // Values carried their rotary phase; turning back leaves relative offsets only.
  ApplyRope(attended, rows_, local_heads_, config_.head_dim, pairs, cos_, sin_, /*inverse=*/true,
            *context_.pool);
  return Output(weights, out);
}

void AttentionLayer::Project(const LayerConfig& layer, const AttentionTensors& weights,
                             const float* x) {
  ThreadPool& pool = *context_.pool;
  const int64_t hidden = config_.hidden_dim;
  float* normed = normed_.Get(rows_ * hidden);
  RmsNorm(x, weights.norm.data(), rows_, hidden, config_.norm_eps, normed, pool);

  const bool csa = layer.attention == AttentionKind::kCompressed;
  const ActivationView input = x_activation_.Make(
      normed, rows_, hidden, hidden,
      NeedsQuantized(weights.q_a) || NeedsQuantized(weights.kv) ||
          NeedsQuantized(weights.compressor.kv) || NeedsQuantized(weights.compressor.gate) ||
          NeedsQuantized(weights.index_proj) || NeedsQuantized(weights.index_compressor.kv) ||
          NeedsQuantized(weights.index_compressor.gate),
      pool);
  std::vector<MatMulJob>& jobs = jobs_;
  jobs.clear();
  const auto project = [&](const Matrix& matrix, const ActivationView& from, Scratch<float>& to) {
    jobs.push_back({matrix.view(), from, to.Get(rows_ * matrix.rows()), matrix.rows(), false});
  };
  project(weights.q_a, input, q_low_);
  project(weights.kv, input, kv_);
  if (layer.attention != AttentionKind::kSliding) {
    project(weights.compressor.kv, input, comp_values_);
    project(weights.compressor.gate, input, comp_gates_);
  }
  if (csa) {
    project(weights.index_compressor.kv, input, index_values_);
    project(weights.index_compressor.gate, input, index_gates_);
    project(weights.index_proj, input, index_weights_);
  }
  MatMul(jobs, pool);

  float* q_low = q_low_.Get(0);
  RmsNorm(q_low, weights.q_a_norm.data(), rows_, config_.q_lora_rank, config_.norm_eps, q_low,
          pool);
  const ActivationView low =
      qr_activation_.Make(q_low, rows_, config_.q_lora_rank, config_.q_lora_rank,
                          NeedsQuantized(weights.q_b) || NeedsQuantized(weights.index_q_b), pool);
  jobs.clear();
  project(weights.q_b, low, q_);
  if (csa) project(weights.index_q_b, low, index_q_);
  MatMul(jobs, pool);

  // Heads get an unweighted norm over all channels; indexer queries get none (spec 2.5, 2.8).
  const int64_t pairs = config_.rope_dim / 2;
  float* q = q_.Get(0);
  RmsNorm(q, nullptr, rows_ * local_heads_, config_.head_dim, config_.norm_eps, q, pool);
  ApplyRope(q, rows_, local_heads_, config_.head_dim, pairs, cos_, sin_, false, pool);
  if (csa) {
    ApplyRope(index_q_.Get(0), rows_, config_.num_index_heads, config_.index_head_dim, pairs, cos_,
              sin_, false, pool);
  }
}

void AttentionLayer::StoreWindow(const AttentionTensors& weights,
                                 const std::vector<LayerState*>& states) {
  float* kv = kv_.Get(0);
  RmsNorm(kv, weights.kv_norm.data(), rows_, config_.head_dim, config_.norm_eps, kv,
          *context_.pool);
  ApplyRope(kv, rows_, 1, config_.head_dim, config_.rope_dim / 2, cos_, sin_, false,
            *context_.pool);
  for (int64_t t = 0; t < rows_; ++t) {
    std::copy_n(kv + t * config_.head_dim, config_.head_dim, states[t]->window.at(positions_[t]));
  }
}

void AttentionLayer::StoreAllCompressed(const LayerConfig& layer, const AttentionTensors& weights,
                                        const std::vector<LayerState*>& states) {
  // The rows that close a window, and the rotation of the compressed row each one makes: that of
  // the window's first token.
  closing_.clear();
  closing_positions_.clear();
  for (int64_t t = 0; t < rows_; ++t) {
    if ((positions_[t] + 1) % layer.compress_ratio != 0) continue;
    closing_.push_back(t);
    closing_positions_.push_back(positions_[t] + 1 - layer.compress_ratio);
  }
  const int64_t count = static_cast<int64_t>(closing_.size()) * (config_.rope_dim / 2);
  RopeAngles(closing_positions_, yarn_frequencies_, row_cos_.Get(count), row_sin_.Get(count));
  StoreCompressed(layer, weights.compressor, comp_values_.Get(0), comp_gates_.Get(0), states,
                  &LayerState::compressor);
  if (layer.attention == AttentionKind::kCompressed) {
    StoreCompressed(layer, weights.index_compressor, index_values_.Get(0), index_gates_.Get(0),
                    states, &LayerState::indexer);
  }
}

// Keeps the rows' projections, then pools each window that one of them closes (spec 2.7). The rings
// hold a whole batch beside what its first window reads, so all may be stored before any is pooled.
void AttentionLayer::StoreCompressed(const LayerConfig& layer, const CompressorTensors& weights,
                                     const float* values, const float* gates,
                                     const std::vector<LayerState*>& states,
                                     CompressorState LayerState::*part) {
  const int64_t width = (states[0]->*part).values.width();
  ThreadPool& pool = *context_.pool;
  pool.ParallelFor(rows_, MinParallelRows(2 * width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      CompressorState& state = states[t]->*part;
      const int64_t pos = positions_[t];
      const float* ape = weights.ape.data() + pos % layer.compress_ratio * width;
      std::copy_n(values + t * width, width, state.values.at(pos));
      float* score = state.scores.at(pos);
      for (int64_t d = 0; d < width; ++d) score[d] = gates[t * width + d] + ape[d];
    }
  });
  // An exponential costs about as much as ten plain values.
  const auto num_closing = static_cast<int64_t>(closing_.size());
  const int64_t work = 10 * layer.compress_ratio * width;
  pool.ParallelFor(num_closing, MinParallelRows(work), [&](int64_t begin, int64_t end) {
    const int64_t pairs = config_.rope_dim / 2;
    for (int64_t i = begin; i < end; ++i) {
      PoolRow(layer, weights, positions_[closing_[i]], row_cos_.Get(0) + i * pairs,
              row_sin_.Get(0) + i * pairs, states[closing_[i]]->*part);
    }
  });
}

// Pools the window that ends at `pos`, norms and turns the new row: series a (first half) of the
// window before, then series b (second half) of this one; with no overlap one series and only this
// window.
void AttentionLayer::PoolRow(const LayerConfig& layer, const CompressorTensors& weights,
                             int64_t pos, const float* cos, const float* sin,
                             CompressorState& state) {
  const bool overlap = layer.attention == AttentionKind::kCompressed;
  const int64_t first = pos + 1 - layer.compress_ratio;
  thread_local std::vector<const float*> slots, slot_scores;  // keep their memory from call to call
  slots.clear();
  slot_scores.clear();
  if (overlap) {
    for (int64_t p = first - layer.compress_ratio; p < first; ++p) {
      slots.push_back(p < 0 ? nullptr : state.values.at(p));
      slot_scores.push_back(p < 0 ? nullptr : state.scores.at(p));
    }
  }
  const int64_t half = overlap ? state.dim : 0;
  for (int64_t p = first; p <= pos; ++p) {
    slots.push_back(state.values.at(p) + half);
    slot_scores.push_back(state.scores.at(p) + half);
  }
  float* out = state.row(pos / layer.compress_ratio);
  PoolWindow(slots, slot_scores, state.dim, out);
  RmsNorm(out, weights.norm.data(), 1, state.dim, config_.norm_eps, out, *context_.pool);
  ApplyRope(out, 1, 1, state.dim, config_.rope_dim / 2, cos, sin, false, *context_.pool);
}

// The keys of each row in the order in which they are added: window from old to new, then
// compressed rows from old to new. Row w is visible to position t when w < (t + 1) / ratio.
void AttentionLayer::ListKeys(const LayerConfig& layer, const std::vector<LayerState*>& states,
                              IndexPicks* picks) {
  if (static_cast<int64_t>(keys_.size()) < rows_) keys_.resize(rows_);
  if (picks != nullptr) picks->assign(rows_, {});
  const auto list = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) ListRowKeys(layer, *states[t], t, picks);
  };
  // Few rows: each splits its scores over the threads instead (ChooseRows). Not through
  // ParallelFor, inside which that would run on one thread.
  if (rows_ < context_.pool->num_threads()) {
    list(0, rows_);
  } else {
    context_.pool->ParallelFor(rows_, 2, list);
  }
}

void AttentionLayer::ListRowKeys(const LayerConfig& layer, LayerState& state, int64_t row,
                                 IndexPicks* picks) {
  KeyList& keys = keys_[row];
  keys.clear();
  const int64_t pos = positions_[row];
  for (int64_t p = std::max<int64_t>(0, pos - config_.sliding_window + 1); p <= pos; ++p) {
    keys.push_back(state.window.at(p));
  }
  if (layer.attention == AttentionKind::kSliding) return;
  const int64_t visible = (pos + 1) / layer.compress_ratio;
  thread_local std::vector<int32_t> picked;
  if (layer.attention == AttentionKind::kHeavy || visible <= config_.index_top_k) {
    picked.resize(visible);
    std::iota(picked.begin(), picked.end(), 0);
  } else {
    picked.resize(config_.index_top_k);
    picked.resize(ChooseRows(state, row, visible, picked.data()));
  }
  for (int32_t w : picked) keys.push_back(state.compressor.row(w));
  if (picks != nullptr) (*picks)[row] = picked;
}

// The indexer's choice among the `visible` compressed rows, in rising order; returns how many.
int64_t AttentionLayer::ChooseRows(LayerState& state, int64_t row, int64_t visible,
                                   int32_t* picked) {
  const int64_t heads = config_.num_index_heads;
  const int64_t dim = config_.index_head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim * heads));
  thread_local std::vector<float> row_scores;
  row_scores.resize(visible);
  // Not `row_scores` itself: in another thread that name is another vector.
  float* scores = row_scores.data();
  context_.pool->ParallelFor(
      visible, MinParallelRows(heads * dim), [&](int64_t begin, int64_t end) {
        IndexerScores(index_q_.Get(0) + row * heads * dim, index_weights_.Get(0) + row * heads,
                      heads, dim, state.indexer.row(begin), end - begin, scale, scores + begin);
      });
  return TopKIndices(scores, visible, config_.index_top_k, picked);
}

// Low-rank output per group, then one partial sum per lane, then the shared sum.
Status AttentionLayer::Output(const AttentionTensors& weights, float* out) {
  ThreadPool& pool = *context_.pool;
  const int64_t groups = context_.plan->groups.size();
  const int64_t lanes = context_.plan->lanes.size();
  const int64_t groups_per_lane = groups / lanes;
  const int64_t group_in = config_.heads_per_group() * config_.head_dim;
  const int64_t rank = config_.output_lora_rank;
  const int64_t lane_in = groups_per_lane * rank;
  const int64_t hidden = config_.hidden_dim;
  const float* attended = attended_.Get(0);
  float* low = lanes_in_.Get(lanes * rows_ * lane_in);

  std::vector<MatMulJob>& jobs = jobs_;
  jobs.clear();
  for (int64_t g = 0; g < groups; ++g) {
    const ActivationView input = group_activations_[g].Make(
        attended + g * group_in, rows_, group_in, local_heads_ * config_.head_dim,
        NeedsQuantized(weights.o_a), pool);
    float* y = low + g / groups_per_lane * rows_ * lane_in + g % groups_per_lane * rank;
    jobs.push_back({weights.o_a.view().Rows(g * rank, rank), input, y, lane_in, false});
  }
  MatMul(jobs, pool);

  jobs.clear();
  float* partial = lanes_out_.Get(lanes * rows_ * hidden);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const ActivationView input = lane_activations_[lane].Make(
        low + lane * rows_ * lane_in, rows_, lane_in, lane_in, NeedsQuantized(weights.o_b), pool);
    jobs.push_back({weights.o_b.view().Rows(lane * hidden, hidden), input,
                    partial + lane * rows_ * hidden, hidden, false});
  }
  MatMul(jobs, pool);
  const Range own = context_.plan->lanes;
  const int64_t count = rows_ * hidden;
  const int64_t num_roots = num_roots_ * count;
  float* roots = roots_.Get(num_roots);
  AddLanes(static_cast<int>(own.begin), static_cast<int>(own.end), partial, count, roots);
  return context_.comm->AllReduceLanes({roots, static_cast<size_t>(num_roots)},
                                       {out, static_cast<size_t>(count)});
}

}  // namespace ds4
