#include "engine/model/model_config.h"

#include <string_view>

#include "engine/base/strings.h"
#include "engine/model/tensor_names.h"

namespace ds4 {
namespace {

constexpr char kPrefix[] = "deepseek4.";
// No real model comes near this; it keeps products of two sizes inside int64_t.
constexpr int64_t kMaxDim = int64_t{1} << 30;
// Rotary angles are exact up to this position (kernels/exact_double.h).
constexpr int64_t kMaxContext = int64_t{1} << 26;
// As many residual streams as kernels keep in registers (kernels/isa.h).
constexpr int64_t kMaxNumStreams = 8;
constexpr int kMaxNumLanes = 8;

// Reads keys of one file; the first problem sticks.
class Keys {
 public:
  explicit Keys(const GgufFile& file) : file_(file) {}

  int64_t Int(const char* key, int64_t low, int64_t high = kMaxDim) {
    Result<int64_t> value = file_.GetInt(kPrefix + std::string(key));
    if (!value.ok()) return Fail<int64_t>(value.status());
    if (*value < low || *value > high) {
      return Fail<int64_t>(InvalidArgumentError(
          StrCat(kPrefix, key, " is ", *value, ", must be from ", low, " to ", high)));
    }
    return *value;
  }
  int64_t IntOr(const char* key, int64_t fallback, int64_t low, int64_t high = kMaxDim) {
    return file_.HasKey(kPrefix + std::string(key)) ? Int(key, low, high) : fallback;
  }
  double Float(const char* key, double low, double high) {
    Result<double> value = file_.GetFloat(kPrefix + std::string(key));
    if (!value.ok()) return Fail<double>(value.status());
    if (!(*value >= low && *value <= high)) {
      return Fail<double>(InvalidArgumentError(
          StrCat(kPrefix, key, " is ", *value, ", must be from ", low, " to ", high)));
    }
    return *value;
  }
  // A key of which only one value is known: another one would mean other arithmetic.
  void OnlyTrueIfPresent(const char* key) {
    if (!file_.HasKey(kPrefix + std::string(key))) return;
    Result<bool> value = file_.GetBool(kPrefix + std::string(key));
    if (!value.ok()) return static_cast<void>(Fail<bool>(value.status()));
    Require(*value, StrCat(kPrefix, key, " is false, only true is known"));
  }
  void OnlyTextIfPresent(const char* key, std::string_view known) {
    if (!file_.HasKey(kPrefix + std::string(key))) return;
    Result<std::string> value = file_.GetString(kPrefix + std::string(key));
    if (!value.ok()) return static_cast<void>(Fail<bool>(value.status()));
    Require(*value == known,
            StrCat(kPrefix, key, " is \"", *value, "\", only \"", known, "\" is known"));
  }
  bool Has(const char* key) const { return file_.HasKey(kPrefix + std::string(key)); }
  std::vector<int64_t> Ints(const char* key) {
    Result<std::vector<int64_t>> value = file_.GetIntArray(kPrefix + std::string(key));
    if (!value.ok()) return Fail<std::vector<int64_t>>(value.status());
    return *value;
  }
  std::vector<double> Floats(const char* key) {
    Result<std::vector<double>> value = file_.GetFloatArray(kPrefix + std::string(key));
    if (!value.ok()) return Fail<std::vector<double>>(value.status());
    return *value;
  }
  void Require(bool condition, const std::string& message) {
    if (!condition && status_.ok()) status_ = InvalidArgumentError(message);
  }
  const Status& status() const { return status_; }

 private:
  template <typename T>
  T Fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
    return T{};
  }
  const GgufFile& file_;
  Status status_;
};

LayerConfig MakeLayer(int64_t ratio, bool hash, double limit, double shared_limit) {
  LayerConfig layer;
  layer.compress_ratio = ratio;
  layer.attention = ratio == 0   ? AttentionKind::kSliding
                    : ratio == 4 ? AttentionKind::kCompressed
                                 : AttentionKind::kHeavy;
  layer.router = hash ? RouterKind::kHash : RouterKind::kScore;
  layer.swiglu_limit = static_cast<float>(limit);
  layer.shared_swiglu_limit = static_cast<float>(shared_limit);
  return layer;
}

// One limit per layer, each above 0; more entries belong to draft blocks.
std::vector<double> ReadLimits(Keys& keys, const char* key, int64_t num_layers) {
  const std::vector<double> limits = keys.Floats(key);
  if (!keys.status().ok()) return {};
  keys.Require(static_cast<int64_t>(limits.size()) >= num_layers,
               StrCat(kPrefix, key, " has ", limits.size(), " entries, ", num_layers,
                      " layers need one each"));
  for (size_t i = 0; i < limits.size(); ++i) {
    keys.Require(limits[i] > 0,
                 StrCat(kPrefix, key, "[", i, "] is ", limits[i], ", must be above 0"));
  }
  return limits;
}

void ReadLayers(Keys& keys, ModelConfig& config) {
  const int64_t num_hash = keys.Int("hash_layer_count", 0, config.num_layers);
  const std::vector<int64_t> ratios = keys.Ints("attention.compress_ratios");
  const std::vector<double> limits = ReadLimits(keys, "swiglu_clamp_exp", config.num_layers);
  const std::vector<double> shared_limits =
      keys.Has("swiglu_clamp_shexp") ? ReadLimits(keys, "swiglu_clamp_shexp", config.num_layers)
                                     : limits;
  keys.Require(static_cast<int64_t>(ratios.size()) >= config.num_layers,
               StrCat(kPrefix, "attention.compress_ratios has ", ratios.size(), " entries, ",
                      config.num_layers, " layers need one each"));
  if (!keys.status().ok()) return;
  for (int64_t i = 0; i < config.num_layers; ++i) {
    keys.Require(ratios[i] >= 0 && ratios[i] <= 65536,
                 StrCat(kPrefix, "attention.compress_ratios[", i, "] is ", ratios[i],
                        ", must be from 0 to 65536"));
    config.layers.push_back(MakeLayer(ratios[i], i < num_hash, limits[i], shared_limits[i]));
  }
  config.mtp_layer =
      MakeLayer(0, false, limits[config.num_layers - 1], shared_limits[config.num_layers - 1]);
}

void CheckShapes(Keys& keys, const ModelConfig& c) {
  keys.Require(c.num_heads % c.num_output_groups == 0,
               StrCat("attention.head_count ", c.num_heads,
                      " is no multiple of output_group_count ", c.num_output_groups));
  keys.Require(c.rope_dim % 2 == 0 && c.rope_dim <= c.head_dim,
               StrCat("rope.dimension_count ", c.rope_dim, " must be even and at most key_length ",
                      c.head_dim));
  keys.Require(
      c.num_experts_used <= c.num_experts,
      StrCat("expert_used_count ", c.num_experts_used, " is over expert_count ", c.num_experts));
  keys.Require(c.vocab_size >= kMaxNumLanes,
               StrCat("vocab_size ", c.vocab_size, " is below ", kMaxNumLanes,
                      ", the number of parts into which it may be cut"));
  keys.Require(c.num_index_heads == 0 || c.rope_dim <= c.index_head_dim,
               StrCat("rope.dimension_count ", c.rope_dim, " is over attention.indexer.key_length ",
                      c.index_head_dim));
}

int NumLanes(const ModelConfig& c) {
  for (int lanes : {kMaxNumLanes, 4, 2}) {
    if (c.num_output_groups % lanes == 0 && c.ffn_dim % lanes == 0) return lanes;
  }
  return 1;
}

}  // namespace

Result<ModelConfig> ReadModelConfig(const GgufFile& file) {
  ASSIGN_OR_RETURN(const std::string architecture, file.GetString("general.architecture"));
  if (architecture != "deepseek4") {
    return UnimplementedError(StrCat(file.path(), ": general.architecture is \"", architecture,
                                     "\", this engine runs \"deepseek4\""));
  }
  Keys keys(file);
  ModelConfig c;
  if (file.HasKey("general.name")) {
    ASSIGN_OR_RETURN(c.name, file.GetString("general.name"));
  }
  c.num_mtp_blocks = file.FindTensor(MtpPrefix() + "e_proj.weight") != nullptr ? 1 : 0;
  c.num_layers = keys.Int("block_count", 1, 4096);
  c.vocab_size = keys.Int("vocab_size", 1);
  c.context_length = keys.Int("context_length", 1, kMaxContext);
  c.hidden_dim = keys.Int("embedding_length", 1, 1 << 20);
  c.num_heads = keys.Int("attention.head_count", 1, 1 << 16);
  keys.Int("attention.head_count_kv", 1, 1);
  c.head_dim = keys.Int("attention.key_length", 1, 1 << 16);
  const int64_t value_dim = keys.Int("attention.value_length", 1, 1 << 16);
  keys.Require(value_dim == c.head_dim,
               StrCat("attention.value_length ", value_dim, " must equal key_length ", c.head_dim));
  c.rope_dim = keys.Int("rope.dimension_count", 2, 1 << 16);
  c.q_lora_rank = keys.Int("attention.q_lora_rank", 1, 1 << 20);
  c.num_output_groups = keys.Int("attention.output_group_count", 1, 1 << 16);
  c.output_lora_rank = keys.Int("attention.output_lora_rank", 1, 1 << 20);
  c.sliding_window = keys.Int("attention.sliding_window", 1, 1 << 20);
  c.num_experts = keys.Int("expert_count", 1, 1 << 16);
  c.num_experts_used = keys.Int("expert_used_count", 1, 1 << 16);
  keys.Int("expert_shared_count", 1, 1);
  c.ffn_dim = keys.Int("expert_feed_forward_length", 1, 1 << 20);
  c.expert_weights_scale = static_cast<float>(keys.Float("expert_weights_scale", 1e-6, 1e6));
  keys.IntOr("expert_gating_func", 4, 4, 4);
  keys.IntOr("expert_group_count", 0, 0, 1);  // no choice among groups of experts
  keys.OnlyTrueIfPresent("expert_weights_norm");
  c.num_streams = keys.Int("hyper_connection.count", 1, kMaxNumStreams);
  c.sinkhorn_iterations =
      static_cast<int>(keys.Int("hyper_connection.sinkhorn_iterations", 1, 1000));
  c.hc_eps = static_cast<float>(keys.Float("hyper_connection.epsilon", 0, 1));
  c.norm_eps = static_cast<float>(keys.Float("attention.layer_norm_rms_epsilon", 0, 1));
  c.rope_base = keys.Float("rope.freq_base", 1, 1e12);
  // Not 1: YaRN divides by its logarithm.
  c.compress_rope_base = keys.Float("attention.compress_rope_freq_base", 1.001, 1e12);
  keys.OnlyTextIfPresent("rope.scaling.type", "yarn");
  c.yarn_factor = keys.Float("rope.scaling.factor", 1, 1e6);
  c.yarn_original_context = keys.Int("rope.scaling.original_context_length", 1);
  c.yarn_beta_fast = keys.Float("rope.scaling.yarn_beta_fast", 1e-3, 1e6);
  c.yarn_beta_slow = keys.Float("rope.scaling.yarn_beta_slow", 1e-3, 1e6);
  RETURN_IF_ERROR(keys.status().WithContext(file.path()));
  ReadLayers(keys, c);
  bool has_csa = false;
  for (const LayerConfig& layer : c.layers) {
    has_csa = has_csa || layer.attention == AttentionKind::kCompressed;
  }
  if (has_csa) {
    c.num_index_heads = keys.Int("attention.indexer.head_count", 1, 1 << 16);
    c.index_head_dim = keys.Int("attention.indexer.key_length", 1, 1 << 16);
    c.index_top_k = keys.Int("attention.indexer.top_k", 1);
  }
  RETURN_IF_ERROR(keys.status().WithContext(file.path()));
  CheckShapes(keys, c);
  RETURN_IF_ERROR(keys.status().WithContext(file.path()));
  c.num_lanes = NumLanes(c);
  return c;
}

}  // namespace ds4
