// Which tensors a model has and into which fields they go, in the file's order: one list for the
// loaders of all engines, whose structs name the fields alike.
//
// A Loader has these, each of a tensor's name and the field (of its own type) that takes it:
//   Embedding    of the whole struct
//   Vector       a float vector or small table; and what a synthetic one is drawn from
//   HashIds      a table of experts' ids
//   Mixing       a matrix of hyper-connections, which is never rounded
//   Rows         a matrix, whole or the rank's rows of it
//   GroupRows    the same, in output groups
//   LaneColumns  a matrix split by columns
//   Replicated   a whole matrix that every rank has; and the others that read its input
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_names.h"

namespace ds4 {

// Uniform in mean +- spread.
struct VectorDraw {
  float mean = 0.0f;
  float spread = 0.0f;
};
inline constexpr VectorDraw kNormDraw = {1.0f, 0.1f};
inline constexpr VectorDraw kBiasDraw = {0.0f, 0.1f};

template <class Loader, class HyperConnection>
Status WalkHyperConnection(Loader& load, const std::string& name, HyperConnection& out) {
  RETURN_IF_ERROR(load.Mixing(name + "_fn.weight", out.fn));
  RETURN_IF_ERROR(load.Vector(name + "_base.weight", out.base, VectorDraw{0.0f, 0.5f}));
  return load.Vector(name + "_scale.weight", out.scale, VectorDraw{0.5f, 0.2f});
}

template <class Loader, class Compressor>
Status WalkCompressor(Loader& load, const std::string& name, const std::vector<std::string>& beside,
                      Compressor& out) {
  RETURN_IF_ERROR(load.Replicated(name + "_kv.weight", out.kv, beside));
  RETURN_IF_ERROR(load.Replicated(name + "_gate.weight", out.gate, beside));
  RETURN_IF_ERROR(load.Vector(name + "_ape.weight", out.ape, kBiasDraw));
  return load.Vector(name + "_norm.weight", out.norm, kNormDraw);
}

template <class Loader, class Attention>
Status WalkAttention(Loader& load, const std::string& prefix, const LayerConfig& layer,
                     Attention& out) {
  const std::string q_a = prefix + "attn_q_a.weight";
  const std::string q_b = prefix + "attn_q_b.weight";
  const std::string kv = prefix + "attn_kv.weight";
  RETURN_IF_ERROR(load.Vector(prefix + "attn_norm.weight", out.norm, kNormDraw));
  RETURN_IF_ERROR(load.Rows(q_a, out.q_a));
  RETURN_IF_ERROR(load.Vector(prefix + "attn_q_a_norm.weight", out.q_a_norm, kNormDraw));
  RETURN_IF_ERROR(load.Rows(q_b, out.q_b));
  RETURN_IF_ERROR(load.Rows(kv, out.kv));
  RETURN_IF_ERROR(load.Vector(prefix + "attn_kv_a_norm.weight", out.kv_norm, kNormDraw));
  RETURN_IF_ERROR(load.Vector(prefix + "attn_sinks.weight", out.sinks, VectorDraw{0.0f, 0.5f}));
  RETURN_IF_ERROR(load.GroupRows(prefix + "attn_output_a.weight", out.o_a));
  RETURN_IF_ERROR(load.LaneColumns(prefix + "attn_output_b.weight", out.o_b));
  if (layer.attention == AttentionKind::kSliding) return OkStatus();
  RETURN_IF_ERROR(WalkCompressor(load, prefix + "attn_compressor", {q_a, kv}, out.compressor));
  if (layer.attention != AttentionKind::kCompressed) return OkStatus();
  RETURN_IF_ERROR(load.Replicated(prefix + "indexer.attn_q_b.weight", out.index_q_b, {q_b}));
  RETURN_IF_ERROR(load.Replicated(prefix + "indexer.proj.weight", out.index_proj, {q_a, kv}));
  return WalkCompressor(load, prefix + "indexer_compressor", {q_a, kv}, out.index_compressor);
}

template <class Loader, class Moe>
Status WalkMoe(Loader& load, const std::string& prefix, const LayerConfig& layer, Moe& out) {
  RETURN_IF_ERROR(load.Vector(prefix + "ffn_norm.weight", out.norm, kNormDraw));
  RETURN_IF_ERROR(load.Rows(prefix + "ffn_gate_inp.weight", out.router));
  if (layer.router == RouterKind::kHash) {
    RETURN_IF_ERROR(load.HashIds(prefix + "ffn_gate_tid2eid.weight", out.hash_ids));
  } else {
    RETURN_IF_ERROR(load.Vector(prefix + "exp_probs_b.bias", out.bias, kBiasDraw));
  }
  RETURN_IF_ERROR(load.Rows(prefix + "ffn_gate_exps.weight", out.gate));
  RETURN_IF_ERROR(load.Rows(prefix + "ffn_up_exps.weight", out.up));
  RETURN_IF_ERROR(load.LaneColumns(prefix + "ffn_down_exps.weight", out.down));
  RETURN_IF_ERROR(load.Rows(prefix + "ffn_gate_shexp.weight", out.shared_gate));
  RETURN_IF_ERROR(load.Rows(prefix + "ffn_up_shexp.weight", out.shared_up));
  return load.LaneColumns(prefix + "ffn_down_shexp.weight", out.shared_down);
}

template <class Loader, class Block>
Status WalkBlock(Loader& load, const std::string& prefix, const LayerConfig& layer, Block& out) {
  RETURN_IF_ERROR(WalkHyperConnection(load, prefix + "hc_attn", out.attn_hc));
  RETURN_IF_ERROR(WalkAttention(load, prefix, layer, out.attention));
  RETURN_IF_ERROR(WalkHyperConnection(load, prefix + "hc_ffn", out.ffn_hc));
  return WalkMoe(load, prefix, layer, out.moe);
}

// All but the draft blocks, which not every engine runs.
template <class Loader, class Model>
Status WalkModel(Loader& load, const ModelConfig& config, Model& out) {
  RETURN_IF_ERROR(load.Embedding("token_embd.weight", out));
  out.blocks.resize(config.num_layers);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    RETURN_IF_ERROR(WalkBlock(load, BlockPrefix(i), config.layers[i], out.blocks[i]));
  }
  RETURN_IF_ERROR(WalkHyperConnection(load, "output_hc", out.head_hc));
  RETURN_IF_ERROR(load.Vector("output_norm.weight", out.norm, kNormDraw));
  return load.Rows("output.weight", out.head);
}

}  // namespace ds4
