#include "engine/layers/transformer.h"

#include <algorithm>

#include "engine/kernels/norm.h"

namespace ds4 {

Transformer::Transformer(const RankContext& context)
    : context_(context),
      config_(*context.config),
      hc_{config_.num_streams, config_.hidden_dim, config_.sinkhorn_iterations, config_.hc_eps,
          config_.norm_eps},
      attention_(context),
      moe_(context) {}

Result<const float*> Transformer::Forward(const Batch& batch, ForwardTrace* trace) {
  const int64_t rows = static_cast<int64_t>(batch.size());
  const int64_t hidden = config_.hidden_dim;
  const int64_t row_size = config_.num_streams * hidden;
  float* streams = streams_.Get(rows * row_size);
  for (int64_t t = 0; t < rows; ++t) {
    float* row = streams + t * row_size;
    context_.weights->embedding.DequantizeRow(batch[t].token, row);
    for (int64_t h = 1; h < config_.num_streams; ++h) std::copy_n(row, hidden, row + h * hidden);
  }
  attention_.SetBatch(batch);
  states_.resize(rows);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    for (int64_t t = 0; t < rows; ++t) states_[t] = &batch[t].state->layer(i);
    RETURN_IF_ERROR(RunBlock(i, config_.layers[i], context_.weights->blocks[i], batch, states_,
                             streams, trace));
    if (trace != nullptr) trace->streams.emplace_back(streams, streams + rows * row_size);
  }
  return streams;
}

Status Transformer::RunBlock(int64_t layer_index, const LayerConfig& layer,
                             const BlockTensors& weights, const Batch& batch,
                             const std::vector<LayerState*>& states, float* streams,
                             ForwardTrace* trace) {
  const int64_t rows = static_cast<int64_t>(batch.size());
  const int64_t num_streams = config_.num_streams;
  ThreadPool& pool = *context_.pool;
  float* collapsed = collapsed_.Get(rows * config_.hidden_dim);
  float* result = result_.Get(rows * config_.hidden_dim);
  float* post = post_.Get(rows * num_streams);
  float* comb = comb_.Get(rows * num_streams * num_streams);
  IndexPicks* index_picks = nullptr;
  ExpertPicks* expert_picks = nullptr;
  if (trace != nullptr) {
    index_picks = &trace->index_picks.emplace_back();
    expert_picks = &trace->expert_picks.emplace_back();
  }

  HyperConnectionPre(streams, rows, hc_, weights.attn_hc.view(), collapsed, post, comb, pool);
  context_.comm->set_site(static_cast<int>(layer_index), "after attention");
  RETURN_IF_ERROR(
      attention_.Forward(layer, weights.attention, collapsed, states, result, index_picks));
  HyperConnectionPost(streams, result, post, comb, rows, hc_, pool);

  HyperConnectionPre(streams, rows, hc_, weights.ffn_hc.view(), collapsed, post, comb, pool);
  context_.comm->set_site(static_cast<int>(layer_index), "after experts");
  RETURN_IF_ERROR(moe_.Forward(layer, weights.moe, batch, collapsed, result, expert_picks));
  HyperConnectionPost(streams, result, post, comb, rows, hc_, pool);
  return OkStatus();
}

Result<const float*> Transformer::ForwardMtp(const Batch& batch, const float* streams) {
  const MtpTensors& mtp = context_.weights->mtp.front();
  ThreadPool& pool = *context_.pool;
  const int64_t rows = static_cast<int64_t>(batch.size());
  const int64_t hidden = config_.hidden_dim;
  const int64_t num_streams = config_.num_streams;

  float* embedding = embedding_.Get(rows * hidden);
  for (int64_t t = 0; t < rows; ++t) {
    context_.weights->embedding.DequantizeRow(batch[t].token, embedding + t * hidden);
  }
  RmsNorm(embedding, mtp.enorm.data(), rows, hidden, config_.norm_eps, embedding, pool);
  float* normed = normed_.Get(rows * num_streams * hidden);
  RmsNorm(streams, mtp.hnorm.data(), rows * num_streams, hidden, config_.norm_eps, normed, pool);

  float* from_token = projected_.Get(rows * hidden);
  float* out = mtp_out_.Get(rows * num_streams * hidden);
  const std::vector<MatMulJob> jobs = {
      {mtp.e_proj.view(),
       mtp_embedding_.Make(embedding, rows, hidden, hidden, NeedsQuantized(mtp.e_proj), pool),
       from_token, hidden, false},
      {mtp.h_proj.view(),
       mtp_streams_.Make(normed, rows * num_streams, hidden, hidden, NeedsQuantized(mtp.h_proj),
                         pool),
       out, hidden, false}};
  MatMul(jobs, pool);
  for (int64_t i = 0; i < rows * num_streams; ++i) {
    for (int64_t d = 0; d < hidden; ++d) {
      out[i * hidden + d] += from_token[i / num_streams * hidden + d];
    }
  }
  attention_.SetBatch(batch);
  states_.resize(rows);
  for (int64_t t = 0; t < rows; ++t) states_[t] = &batch[t].state->mtp();
  RETURN_IF_ERROR(
      RunBlock(config_.num_layers, config_.mtp_layer, mtp.block, batch, states_, out, nullptr));
  return out;
}

const float* Transformer::Logits(const float* streams, int64_t num_rows) {
  return HeadLogits(context_.weights->head_hc, context_.weights->norm, streams, num_rows);
}

const float* Transformer::MtpLogits(const float* streams, int64_t num_rows) {
  const MtpTensors& mtp = context_.weights->mtp.front();
  return HeadLogits(mtp.head_hc, mtp.norm, streams, num_rows);
}

const float* Transformer::HeadLogits(const HyperConnectionTensors& hc,
                                     const std::vector<float>& norm, const float* streams,
                                     int64_t num_rows) {
  ThreadPool& pool = *context_.pool;
  const int64_t hidden = config_.hidden_dim;
  float* collapsed = head_.Get(num_rows * hidden);
  HyperConnectionHead(streams, num_rows, hc_, hc.view(), collapsed, pool);
  RmsNorm(collapsed, norm.data(), num_rows, hidden, config_.norm_eps, collapsed, pool);
  const Matrix& head = context_.weights->head;
  float* logits = logits_.Get(num_rows * head.rows());
  const ActivationView input =
      head_input_.Make(collapsed, num_rows, hidden, hidden, NeedsQuantized(head), pool);
  MatMul({head.view(), input, logits, head.rows(), false}, pool);
  return logits;
}

}  // namespace ds4
