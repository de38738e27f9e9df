#include "engine/gguf/hf_names.h"

#include "engine/base/strings.h"

namespace ds4 {
namespace {

// Which blocks have a tensor.
enum class When { kAlways, kCompressed, kIndexed, kHashRouted, kScoreRouted };

struct Rule {
  const char* hf;
  const char* gguf;
  WeightRole role;
  When when = When::kAlways;
};

constexpr WeightRole kMatrix = WeightRole::kMatrix;
constexpr WeightRole kSmall = WeightRole::kSmallMatrix;
constexpr WeightRole kVector = WeightRole::kVector;

constexpr Rule kModelStart[] = {{"model.embed_tokens.weight", "token_embd.weight", kMatrix}};

constexpr Rule kModelEnd[] = {
    {"model.hc_head.hc_fn", "output_hc_fn.weight", kSmall},
    {"model.hc_head.hc_base", "output_hc_base.weight", kVector},
    {"model.hc_head.hc_scale", "output_hc_scale.weight", kVector},
    {"model.norm.weight", "output_norm.weight", kVector},
    {"lm_head.weight", "output.weight", kMatrix},
};

constexpr Rule kMtpStart[] = {
    {"enorm.weight", "enorm.weight", kVector},
    {"hnorm.weight", "hnorm.weight", kVector},
    {"e_proj.weight", "e_proj.weight", kMatrix},
    {"h_proj.weight", "h_proj.weight", kMatrix},
};

constexpr Rule kMtpEnd[] = {
    {"hc_head.hc_fn", "hc_head_fn.weight", kSmall},
    {"hc_head.hc_base", "hc_head_base.weight", kVector},
    {"hc_head.hc_scale", "hc_head_scale.weight", kVector},
    {"norm.weight", "norm.weight", kVector},
};

constexpr Rule kBlock[] = {
    {"attn_hc.fn", "hc_attn_fn.weight", kSmall},
    {"attn_hc.base", "hc_attn_base.weight", kVector},
    {"attn_hc.scale", "hc_attn_scale.weight", kVector},
    {"input_layernorm.weight", "attn_norm.weight", kVector},
    {"self_attn.q_a_proj.weight", "attn_q_a.weight", kMatrix},
    {"self_attn.q_a_norm.weight", "attn_q_a_norm.weight", kVector},
    {"self_attn.q_b_proj.weight", "attn_q_b.weight", kMatrix},
    {"self_attn.kv_proj.weight", "attn_kv.weight", kMatrix},
    {"self_attn.kv_norm.weight", "attn_kv_a_norm.weight", kVector},
    {"self_attn.sinks", "attn_sinks.weight", kVector},
    {"self_attn.o_a_proj.weight", "attn_output_a.weight", kMatrix},
    {"self_attn.o_b_proj.weight", "attn_output_b.weight", kMatrix},
    {"self_attn.compressor.kv_proj.weight", "attn_compressor_kv.weight", kMatrix,
     When::kCompressed},
    {"self_attn.compressor.gate_proj.weight", "attn_compressor_gate.weight", kMatrix,
     When::kCompressed},
    {"self_attn.compressor.position_bias", "attn_compressor_ape.weight", kSmall, When::kCompressed},
    {"self_attn.compressor.kv_norm.weight", "attn_compressor_norm.weight", kVector,
     When::kCompressed},
    {"self_attn.compressor.indexer.q_b_proj.weight", "indexer.attn_q_b.weight", kMatrix,
     When::kIndexed},
    {"self_attn.compressor.indexer.scorer.weights_proj.weight", "indexer.proj.weight", kMatrix,
     When::kIndexed},
    {"self_attn.compressor.indexer.kv_proj.weight", "indexer_compressor_kv.weight", kMatrix,
     When::kIndexed},
    {"self_attn.compressor.indexer.gate_proj.weight", "indexer_compressor_gate.weight", kMatrix,
     When::kIndexed},
    {"self_attn.compressor.indexer.position_bias", "indexer_compressor_ape.weight", kSmall,
     When::kIndexed},
    {"self_attn.compressor.indexer.kv_norm.weight", "indexer_compressor_norm.weight", kVector,
     When::kIndexed},
    {"ffn_hc.fn", "hc_ffn_fn.weight", kSmall},
    {"ffn_hc.base", "hc_ffn_base.weight", kVector},
    {"ffn_hc.scale", "hc_ffn_scale.weight", kVector},
    {"post_attention_layernorm.weight", "ffn_norm.weight", kVector},
    {"mlp.gate.weight", "ffn_gate_inp.weight", kSmall},
    {"mlp.gate.tid2eid", "ffn_gate_tid2eid.weight", WeightRole::kIdTable, When::kHashRouted},
    {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias", kVector, When::kScoreRouted},
    {"mlp.experts.gate_up_proj", "ffn_gate_exps.weight", WeightRole::kGateHalf},
    {"mlp.experts.gate_up_proj", "ffn_up_exps.weight", WeightRole::kUpHalf},
    {"mlp.experts.down_proj", "ffn_down_exps.weight", kMatrix},
    {"mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", kMatrix},
    {"mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", kMatrix},
    {"mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight", kMatrix},
};

bool Applies(When when, int64_t compress_ratio, bool hash_routed) {
  switch (when) {
    case When::kAlways:
      return true;
    case When::kCompressed:
      return compress_ratio > 0;
    case When::kIndexed:
      return compress_ratio == 4;
    case When::kHashRouted:
      return hash_routed;
    case When::kScoreRouted:
      return !hash_routed;
  }
  return false;
}

class Planner {
 public:
  template <size_t n>
  void Add(const Rule (&rules)[n], const std::string& hf_prefix, const std::string& gguf_prefix) {
    for (const Rule& rule : rules) {
      plan_.push_back({hf_prefix + rule.hf, gguf_prefix + rule.gguf, rule.role});
    }
  }
  void AddBlock(const std::string& hf_prefix, const std::string& gguf_prefix,
                int64_t compress_ratio, bool hash_routed) {
    for (const Rule& rule : kBlock) {
      if (!Applies(rule.when, compress_ratio, hash_routed)) continue;
      plan_.push_back({hf_prefix + rule.hf, gguf_prefix + rule.gguf, rule.role});
    }
  }
  std::vector<PlannedTensor> Take() { return std::move(plan_); }

 private:
  std::vector<PlannedTensor> plan_;
};

}  // namespace

std::vector<PlannedTensor> PlanTensors(const CheckpointLayout& layout) {
  Planner planner;
  planner.Add(kModelStart, "", "");
  for (size_t i = 0; i < layout.compress_ratios.size(); ++i) {
    planner.AddBlock(StrCat("model.layers.", i, "."), StrCat("blk.", i, "."),
                     layout.compress_ratios[i], static_cast<int64_t>(i) < layout.num_hash_layers);
  }
  planner.Add(kModelEnd, "", "");
  if (layout.has_mtp) {
    planner.Add(kMtpStart, "mtp.0.", "mtp.0.");
    planner.AddBlock("mtp.0.block.", "mtp.0.", /*compress_ratio=*/0, /*hash_routed=*/false);
    planner.Add(kMtpEnd, "mtp.0.", "mtp.0.");
  }
  return planner.Take();
}

}  // namespace ds4
