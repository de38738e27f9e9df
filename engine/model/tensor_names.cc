#include "engine/model/tensor_names.h"

#include "engine/base/strings.h"
#include "engine/model/model_config.h"

namespace ds4 {
namespace {

using Dims = std::vector<int64_t>;

// Collects the tensors under one prefix.
class Block {
 public:
  Block(std::string prefix, ReadPattern read, std::vector<TensorSpec>& out)
      : prefix_(std::move(prefix)), read_(read), out_(out) {}

  void Add(const char* name, Dims dims, Split split = Split::kReplicate) {
    out_.push_back({prefix_ + name, std::move(dims), split, read_});
  }
  void Add(const char* name, Dims dims, Split split, ReadPattern read) {
    // A draft block's experts are read when drafting, like all of it.
    out_.push_back({prefix_ + name, std::move(dims), split,
                    read_ == ReadPattern::kDraft ? ReadPattern::kDraft : read});
  }

 private:
  std::string prefix_;
  ReadPattern read_;
  std::vector<TensorSpec>& out_;
};

void AddHyperConnection(const ModelConfig& c, const std::string& site, Block& block) {
  const int64_t mixes = 2 * c.num_streams + c.num_streams * c.num_streams;
  block.Add((site + "_fn.weight").c_str(), {c.num_streams * c.hidden_dim, mixes});
  block.Add((site + "_base.weight").c_str(), {mixes});
  block.Add((site + "_scale.weight").c_str(), {3});
}

void AddCompressor(const std::string& name, int64_t hidden, int64_t width, int64_t dim,
                   int64_t ratio, Block& block) {
  block.Add((name + "_kv.weight").c_str(), {hidden, width});
  block.Add((name + "_gate.weight").c_str(), {hidden, width});
  block.Add((name + "_ape.weight").c_str(), {width, ratio});
  block.Add((name + "_norm.weight").c_str(), {dim});
}

void AddAttention(const ModelConfig& c, const LayerConfig& layer, Block& block) {
  const int64_t group_in = c.heads_per_group() * c.head_dim;
  const int64_t low_rank = c.num_output_groups * c.output_lora_rank;
  block.Add("attn_norm.weight", {c.hidden_dim});
  block.Add("attn_q_a.weight", {c.hidden_dim, c.q_lora_rank});
  block.Add("attn_q_a_norm.weight", {c.q_lora_rank});
  block.Add("attn_q_b.weight", {c.q_lora_rank, c.num_heads * c.head_dim}, Split::kRows);
  block.Add("attn_kv.weight", {c.hidden_dim, c.head_dim});
  block.Add("attn_kv_a_norm.weight", {c.head_dim});
  block.Add("attn_sinks.weight", {c.num_heads}, Split::kElements);
  block.Add("attn_output_a.weight", {group_in, low_rank}, Split::kRows);
  block.Add("attn_output_b.weight", {low_rank, c.hidden_dim}, Split::kColumns);
  if (layer.attention == AttentionKind::kSliding) return;
  const int64_t width = ModelConfig::CompressorWidth(layer.attention, c.head_dim);
  AddCompressor("attn_compressor", c.hidden_dim, width, c.head_dim, layer.compress_ratio, block);
  if (layer.attention != AttentionKind::kCompressed) return;
  block.Add("indexer.attn_q_b.weight", {c.q_lora_rank, c.num_index_heads * c.index_head_dim});
  block.Add("indexer.proj.weight", {c.hidden_dim, c.num_index_heads});
  AddCompressor("indexer_compressor", c.hidden_dim, 2 * c.index_head_dim, c.index_head_dim,
                layer.compress_ratio, block);
}

void AddMoe(const ModelConfig& c, const LayerConfig& layer, Block& block) {
  const Dims up = {c.hidden_dim, c.ffn_dim};
  const Dims down = {c.ffn_dim, c.hidden_dim};
  const Dims expert_up = {c.hidden_dim, c.ffn_dim, c.num_experts};
  const Dims expert_down = {c.ffn_dim, c.hidden_dim, c.num_experts};
  block.Add("ffn_norm.weight", {c.hidden_dim});
  block.Add("ffn_gate_inp.weight", {c.hidden_dim, c.num_experts});
  if (layer.router == RouterKind::kHash) {
    block.Add("ffn_gate_tid2eid.weight", {c.num_experts_used, c.vocab_size}, Split::kReplicate,
              ReadPattern::kOneRow);
  } else {
    block.Add("exp_probs_b.bias", {c.num_experts});
  }
  block.Add("ffn_gate_exps.weight", expert_up, Split::kRows, ReadPattern::kExperts);
  block.Add("ffn_up_exps.weight", expert_up, Split::kRows, ReadPattern::kExperts);
  block.Add("ffn_down_exps.weight", expert_down, Split::kColumns, ReadPattern::kExperts);
  block.Add("ffn_gate_shexp.weight", up, Split::kRows);
  block.Add("ffn_up_shexp.weight", up, Split::kRows);
  block.Add("ffn_down_shexp.weight", down, Split::kColumns);
}

void AddLayer(const ModelConfig& c, const LayerConfig& layer, Block& block) {
  AddHyperConnection(c, "hc_attn", block);
  AddAttention(c, layer, block);
  AddHyperConnection(c, "hc_ffn", block);
  AddMoe(c, layer, block);
}

void AddHeadCollapse(const ModelConfig& c, const std::string& name, Block& block) {
  block.Add((name + "_fn.weight").c_str(), {c.num_streams * c.hidden_dim, c.num_streams});
  block.Add((name + "_base.weight").c_str(), {c.num_streams});
  block.Add((name + "_scale.weight").c_str(), {1});
}

}  // namespace

std::string BlockPrefix(int64_t layer) { return StrCat("blk.", layer, "."); }
std::string MtpPrefix() { return "mtp.0."; }

std::vector<TensorSpec> ModelTensors(const ModelConfig& c) {
  std::vector<TensorSpec> specs;
  Block model("", ReadPattern::kAll, specs);
  model.Add("token_embd.weight", {c.hidden_dim, c.vocab_size}, Split::kReplicate,
            ReadPattern::kOneRow);
  for (int64_t i = 0; i < c.num_layers; ++i) {
    Block block(BlockPrefix(i), ReadPattern::kAll, specs);
    AddLayer(c, c.layers[i], block);
  }
  AddHeadCollapse(c, "output_hc", model);
  model.Add("output_norm.weight", {c.hidden_dim});
  model.Add("output.weight", {c.hidden_dim, c.vocab_size}, Split::kRows);
  if (c.num_mtp_blocks > 0) {
    Block mtp(MtpPrefix(), ReadPattern::kDraft, specs);
    mtp.Add("enorm.weight", {c.hidden_dim});
    mtp.Add("hnorm.weight", {c.hidden_dim});
    mtp.Add("e_proj.weight", {c.hidden_dim, c.hidden_dim});
    mtp.Add("h_proj.weight", {c.hidden_dim, c.hidden_dim});
    AddLayer(c, c.mtp_layer, mtp);
    AddHeadCollapse(c, "hc_head", mtp);
    mtp.Add("norm.weight", {c.hidden_dim});
  }
  return specs;
}

std::string DimsString(const std::vector<int64_t>& dims) {
  std::vector<std::string> parts;
  for (int64_t dim : dims) parts.push_back(std::to_string(dim));
  return "[" + StrJoin(parts, ", ") + "]";
}

Result<const TensorInfo*> BindTensor(const GgufFile& file, const TensorSpec& spec) {
  const TensorInfo* tensor = file.FindTensor(spec.name);
  constexpr std::string_view kSuffix = ".weight";
  if (tensor == nullptr && spec.name.ends_with(kSuffix)) {
    tensor = file.FindTensor(spec.name.substr(0, spec.name.size() - kSuffix.size()));
  }
  if (tensor == nullptr) {
    return NotFoundError(StrCat(file.path(), ": tensor ", spec.name, " is missing"));
  }
  // A trailing dimension of 1 may be written or left out.
  std::vector<int64_t> dims = tensor->dims;
  while (dims.size() > spec.dims.size() && dims.back() == 1) dims.pop_back();
  if (dims != spec.dims) {
    return InvalidArgumentError(StrCat(file.path(), ": tensor ", spec.name, " has dims ",
                                       DimsString(tensor->dims), ", the metadata asks for ",
                                       DimsString(spec.dims)));
  }
  return tensor;
}

}  // namespace ds4
