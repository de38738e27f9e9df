#include "engine/gguf/hf_config.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

using Json = nlohmann::json;

constexpr char kPrefix[] = "deepseek4.";
constexpr int64_t kMaxLayers = 4096;

// Copies values of one JSON object to metadata keys; the first problem sticks.
class KeyCopier {
 public:
  KeyCopier(const Json& json, GgufWriter* writer) : json_(json), writer_(*writer) {}

  int64_t Int(const Json& object, const char* from, int64_t low = 1) {
    const Json* value = Find(object, from);
    if (value == nullptr) return 0;
    if (!value->is_number_integer() || !InRange(*value, low)) {
      Fail(InvalidArgumentError(StrCat("config key ", from, " is ", value->dump(),
                                       ", it must be an integer from ", low, " to ",
                                       std::numeric_limits<int32_t>::max())));
      return 0;
    }
    return value->get<int64_t>();
  }
  double Float(const Json& object, const char* from) {
    const Json* value = Find(object, from);
    if (value == nullptr) return 0;
    if (!value->is_number() || !std::isfinite(value->get<double>())) {
      Fail(InvalidArgumentError(
          StrCat("config key ", from, " is ", value->dump(), ", it must be a number")));
      return 0;
    }
    return value->get<double>();
  }
  int64_t CopyInt(const char* from, const char* to, int64_t low = 1) {
    const int64_t value = Int(json_, from, low);
    writer_.AddU32(kPrefix + std::string(to), static_cast<uint32_t>(value));
    return value;
  }
  void CopyFloat(const char* from, const char* to) {
    writer_.AddF32(kPrefix + std::string(to), static_cast<float>(Float(json_, from)));
  }
  void Require(bool condition, const Status& status) {
    if (!condition) Fail(status);
  }
  const Json* Find(const Json& object, const char* key) {
    const auto it = object.find(key);
    if (it != object.end()) return &*it;
    Fail(NotFoundError(StrCat("config key ", key, " is missing")));
    return nullptr;
  }
  void Fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  const Status& status() const { return status_; }

 private:
  static bool InRange(const Json& value, int64_t low) {
    if (value.is_number_unsigned() &&
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return false;
    }
    return value.get<int64_t>() >= low;
  }

  const Json& json_;
  GgufWriter& writer_;
  Status status_;
};

// What only one value of is known to us: a model with another one computes something else.
void RequireKnownKind(const Json& json, KeyCopier& keys) {
  const auto require = [&](const char* key, const Json& known) {
    const auto it = json.find(key);
    if (it != json.end() && *it != known) {
      keys.Fail(UnimplementedError(
          StrCat("config key ", key, " is ", it->dump(), ", only ", known.dump(), " is known")));
    }
  };
  require("model_type", "deepseek_v4");
  require("scoring_func", "sqrtsoftplus");
  require("topk_method", "noaux_tc");
  require("norm_topk_prob", true);
  require("tie_word_embeddings", false);
  require("num_key_value_heads", 1);
  require("n_shared_experts", 1);
}

void CopyAttention(KeyCopier& keys, GgufWriter& writer) {
  keys.CopyInt("num_attention_heads", "attention.head_count");
  keys.CopyInt("num_key_value_heads", "attention.head_count_kv");
  const int64_t head_dim = keys.CopyInt("head_dim", "attention.key_length");
  writer.AddU32("deepseek4.attention.value_length", static_cast<uint32_t>(head_dim));
  keys.CopyFloat("rms_norm_eps", "attention.layer_norm_rms_epsilon");
  keys.CopyInt("q_lora_rank", "attention.q_lora_rank");
  keys.CopyInt("o_lora_rank", "attention.output_lora_rank");
  keys.CopyInt("o_groups", "attention.output_group_count");
  keys.CopyInt("sliding_window", "attention.sliding_window");
  keys.CopyInt("index_n_heads", "attention.indexer.head_count");
  keys.CopyInt("index_head_dim", "attention.indexer.key_length");
  keys.CopyInt("index_topk", "attention.indexer.top_k");
}

void CopyRope(const Json& json, KeyCopier& keys, GgufWriter& writer) {
  keys.CopyInt("qk_rope_head_dim", "rope.dimension_count");
  keys.CopyFloat("rope_theta", "rope.freq_base");
  keys.CopyFloat("compress_rope_theta", "attention.compress_rope_freq_base");
  const Json* scaling = keys.Find(json, "rope_scaling");
  if (scaling == nullptr) return;
  const char* type_key =
      scaling->is_object() && scaling->contains("rope_type") ? "rope_type" : "type";
  if (!scaling->is_object() || scaling->value(type_key, Json()) != "yarn") {
    keys.Fail(UnimplementedError(
        StrCat("config key rope_scaling is ", scaling->dump(), ", only type \"yarn\" is known")));
    return;
  }
  writer.AddString("deepseek4.rope.scaling.type", "yarn");
  writer.AddF32("deepseek4.rope.scaling.factor",
                static_cast<float>(keys.Float(*scaling, "factor")));
  writer.AddU32("deepseek4.rope.scaling.original_context_length",
                static_cast<uint32_t>(keys.Int(*scaling, "original_max_position_embeddings")));
  writer.AddF32("deepseek4.rope.scaling.yarn_beta_fast",
                static_cast<float>(keys.Float(*scaling, "beta_fast")));
  writer.AddF32("deepseek4.rope.scaling.yarn_beta_slow",
                static_cast<float>(keys.Float(*scaling, "beta_slow")));
}

int64_t CopyExperts(KeyCopier& keys, GgufWriter& writer) {
  const int64_t num_experts = keys.CopyInt("n_routed_experts", "expert_count");
  keys.CopyInt("num_experts_per_tok", "expert_used_count");
  keys.CopyInt("n_shared_experts", "expert_shared_count");
  keys.CopyInt("moe_intermediate_size", "expert_feed_forward_length");
  keys.CopyFloat("routed_scaling_factor", "expert_weights_scale");
  writer.AddBool("deepseek4.expert_weights_norm", true);
  writer.AddU32("deepseek4.expert_gating_func", 4);  // sqrtsoftplus
  keys.CopyInt("hc_mult", "hyper_connection.count");
  keys.CopyInt("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations");
  keys.CopyFloat("hc_eps", "hyper_connection.epsilon");
  return num_experts;
}

// One compress ratio per layer; the configuration may list more, for draft blocks.
std::vector<int32_t> ReadRatios(const Json& json, int64_t num_layers, KeyCopier& keys) {
  std::vector<int32_t> ratios;
  const Json* list = keys.Find(json, "compress_ratios");
  if (list == nullptr) return ratios;
  if (!list->is_array() || static_cast<int64_t>(list->size()) < num_layers) {
    keys.Fail(InvalidArgumentError(StrCat("config key compress_ratios is ", list->dump(),
                                          ", it must list at least ", num_layers, " ratios")));
    return ratios;
  }
  for (const Json& item : *list) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > 65536) {
      keys.Fail(InvalidArgumentError(
          StrCat("config key compress_ratios holds ", item.dump(), ", known are 0 to 65536")));
      return ratios;
    }
    ratios.push_back(item.get<int32_t>());
  }
  return ratios;
}

Result<HfConfig> CopyKeys(const Json& json, bool has_mtp, GgufWriter* writer) {
  KeyCopier keys(json, writer);
  RequireKnownKind(json, keys);
  HfConfig config;
  const int64_t num_layers = keys.CopyInt("num_hidden_layers", "block_count");
  keys.Require(num_layers <= kMaxLayers,
               InvalidArgumentError(StrCat("config key num_hidden_layers is ", num_layers,
                                           ", at most ", kMaxLayers, " are known")));
  RETURN_IF_ERROR(keys.status());
  keys.CopyInt("max_position_embeddings", "context_length");
  keys.CopyInt("hidden_size", "embedding_length");
  config.vocab_size = keys.CopyInt("vocab_size", "vocab_size");
  CopyAttention(keys, *writer);
  CopyRope(json, keys, *writer);
  config.num_experts = CopyExperts(keys, *writer);
  config.layout.num_hash_layers = keys.CopyInt("num_hash_layers", "hash_layer_count", 0);
  config.bos_token_id = keys.Int(json, "bos_token_id", 0);
  config.eos_token_id = keys.Int(json, "eos_token_id", 0);
  const std::vector<int32_t> ratios = ReadRatios(json, num_layers, keys);
  const std::vector<float> limits(static_cast<size_t>(num_layers),
                                  static_cast<float>(keys.Float(json, "swiglu_limit")));
  RETURN_IF_ERROR(keys.status());
  writer->AddI32Array("deepseek4.attention.compress_ratios", ratios);
  writer->AddF32Array("deepseek4.swiglu_clamp_exp", limits);
  writer->AddU32("deepseek4.nextn_predict_layers", has_mtp ? 1 : 0);
  config.layout.compress_ratios.assign(ratios.begin(), ratios.begin() + num_layers);
  config.layout.has_mtp = has_mtp;
  return config;
}

}  // namespace

Result<HfConfig> WriteConfigKeys(const std::string& json, bool has_mtp, GgufWriter* writer) {
  const Json config = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) return InvalidArgumentError("config_json is not a JSON object");
  return CopyKeys(config, has_mtp, writer);
}

}  // namespace ds4
