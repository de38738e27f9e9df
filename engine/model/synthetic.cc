#include "engine/model/synthetic.h"

#include <algorithm>
#include <new>
#include <span>
#include <string_view>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/gguf/gguf_format.h"
#include "engine/gguf/gguf_writer.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_names.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

constexpr int64_t kMaxModelBytes = int64_t{16} << 30;
constexpr int64_t kMaxLayers = 256;

struct Preset {
  const char* name;
  uint32_t num_layers, hidden_dim, vocab_size, num_heads, head_dim, rope_dim, num_groups;
  uint32_t q_lora_rank, output_lora_rank, num_experts, num_experts_used, ffn_dim;
  uint32_t num_index_heads, index_head_dim, index_top_k;
};

constexpr Preset kPresets[] = {
    {"flash", 43, 4096, 129280, 64, 512, 64, 8, 1024, 1024, 256, 6, 2048, 64, 128, 512},
    {"tiny", 6, 256, 1024, 8, 64, 16, 8, 64, 64, 8, 2, 2048, 8, 64, 16},
};

struct Quant {
  const char* name;
  DType gate_up;
  DType down;
};

constexpr Quant kQuants[] = {
    {"q2", DType::kIQ2_XXS, DType::kQ2_K},
    {"q4", DType::kQ4_K, DType::kQ4_K},
    {"q8", DType::kQ8_0, DType::kQ8_0},
    {"mxfp4", DType::kMXFP4, DType::kMXFP4},
};

template <typename T, size_t N>
std::vector<std::string> NamesOf(const T (&table)[N]) {
  std::vector<std::string> names;
  for (const T& entry : table) names.emplace_back(entry.name);
  return names;
}

template <typename T, size_t N>
Result<const T*> FindNamed(const T (&table)[N], const std::string& name, const char* what) {
  for (const T& entry : table) {
    if (name == entry.name) return &entry;
  }
  return InvalidArgumentError(
      StrCat("synthetic ", what, " is \"", name, "\", must be ", StrJoin(NamesOf(table), ", ")));
}

// Window only in the first two layers, then CSA and HCA in turn (spec 1).
int32_t CompressRatio(int64_t layer) { return layer < 2 ? 0 : layer % 2 == 0 ? 4 : 128; }

void AddAttentionKeys(const Preset& p, int64_t num_layers, GgufWriter& out) {
  const std::string a = "deepseek4.attention.";
  out.AddU32(a + "head_count", p.num_heads);
  out.AddU32(a + "head_count_kv", 1);
  out.AddU32(a + "key_length", p.head_dim);
  out.AddU32(a + "value_length", p.head_dim);
  out.AddF32(a + "layer_norm_rms_epsilon", 1e-6f);
  out.AddU32(a + "q_lora_rank", p.q_lora_rank);
  out.AddU32(a + "output_lora_rank", p.output_lora_rank);
  out.AddU32(a + "output_group_count", p.num_groups);
  out.AddU32(a + "sliding_window", 128);
  out.AddU32(a + "indexer.head_count", p.num_index_heads);
  out.AddU32(a + "indexer.key_length", p.index_head_dim);
  out.AddU32(a + "indexer.top_k", p.index_top_k);
  std::vector<int32_t> ratios;
  for (int64_t i = 0; i < num_layers; ++i) ratios.push_back(CompressRatio(i));
  out.AddI32Array(a + "compress_ratios", ratios);
  out.AddF32(a + "compress_rope_freq_base", 160000.0f);
}

void AddRopeKeys(const Preset& p, GgufWriter& out) {
  const std::string a = "deepseek4.rope.";
  out.AddU32(a + "dimension_count", p.rope_dim);
  out.AddF32(a + "freq_base", 10000.0f);
  out.AddString(a + "scaling.type", "yarn");
  out.AddF32(a + "scaling.factor", 16.0f);
  out.AddU32(a + "scaling.original_context_length", 65536);
  out.AddF32(a + "scaling.yarn_beta_fast", 32.0f);
  out.AddF32(a + "scaling.yarn_beta_slow", 1.0f);
}

void AddExpertKeys(const Preset& p, int64_t num_layers, GgufWriter& out) {
  const std::string a = "deepseek4.";
  out.AddU32(a + "expert_count", p.num_experts);
  out.AddU32(a + "expert_used_count", p.num_experts_used);
  out.AddU32(a + "expert_shared_count", 1);
  out.AddU32(a + "expert_feed_forward_length", p.ffn_dim);
  out.AddF32(a + "expert_weights_scale", 1.5f);
  out.AddBool(a + "expert_weights_norm", true);
  out.AddU32(a + "expert_gating_func", 4);
  out.AddU32(a + "hash_layer_count", static_cast<uint32_t>(std::min<int64_t>(3, num_layers)));
  const std::vector<float> limits(static_cast<size_t>(num_layers), 10.0f);
  out.AddF32Array(a + "swiglu_clamp_exp", limits);
  out.AddF32Array(a + "swiglu_clamp_shexp", limits);
}

// A character of the printable byte alphabet of GPT-2, as UTF-8.
std::string AlphabetChar(uint32_t code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

// Bytes that print stand for themselves; the other 68 come from U+0100 on, in order.
std::vector<std::string> ByteTokens() {
  std::vector<std::string> tokens;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool prints = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    tokens.push_back(AlphabetChar(prints ? byte : next++));
  }
  return tokens;
}

// " dabemi": a word of its own for each index below 8 million, so that noise reads like a text.
std::string WordToken(int64_t index) {
  constexpr std::string_view kConsonants = "bcdfghjklmnpqrstvwxz";
  constexpr std::string_view kVowels = "aeiou";
  std::string word = AlphabetChar(0x120);  // the space
  for (int i = 0; i < 3; ++i) {
    word += kConsonants[static_cast<size_t>(index % 20)];
    index /= 20;
    word += kVowels[static_cast<size_t>(index % 5)];
    index /= 5;
  }
  return word;
}

// Enough of a tokeniser for a coordinator: what a chat prompt needs, every byte, and words that
// only an answer has.
void AddTokenizer(const Preset& p, GgufWriter& out) {
  constexpr int32_t kNormal = 1;
  constexpr int32_t kControl = 3;
  std::vector<std::string> tokens = {"<｜begin▁of▁sentence｜>",
                                     "<｜end▁of▁sentence｜>",
                                     "<｜▁pad▁｜>",
                                     "<｜User｜>",
                                     "<｜Assistant｜>",
                                     "<think>",
                                     "</think>"};
  std::vector<int32_t> types(tokens.size(), kControl);
  for (std::string& token : ByteTokens()) tokens.push_back(std::move(token));
  for (int64_t i = 0; std::ssize(tokens) < p.vocab_size; ++i) tokens.push_back(WordToken(i));
  types.resize(tokens.size(), kNormal);
  out.AddString("tokenizer.ggml.model", "gpt2");
  out.AddString("tokenizer.ggml.pre", "joyai-llm");
  out.AddStringArray("tokenizer.ggml.tokens", tokens);
  out.AddI32Array("tokenizer.ggml.token_type", types);
  out.AddStringArray("tokenizer.ggml.merges", {});
  out.AddU32("tokenizer.ggml.bos_token_id", 0);
  out.AddU32("tokenizer.ggml.eos_token_id", 1);
}

void AddMetadata(const Preset& p, const std::string& name, int64_t num_layers, GgufWriter& out) {
  const std::string a = "deepseek4.";
  out.AddString("general.architecture", "deepseek4");
  out.AddString("general.name", name);
  out.AddU32(a + "block_count", static_cast<uint32_t>(num_layers));
  out.AddU32(a + "context_length", 1048576);
  out.AddU32(a + "embedding_length", p.hidden_dim);
  out.AddU32(a + "vocab_size", p.vocab_size);
  AddAttentionKeys(p, num_layers, out);
  AddRopeKeys(p, out);
  AddExpertKeys(p, num_layers, out);
  out.AddU32(a + "hyper_connection.count", 4);
  out.AddU32(a + "hyper_connection.sinkhorn_iterations", 20);
  out.AddF32(a + "hyper_connection.epsilon", 1e-6f);
  AddTokenizer(p, out);
}

// "ffn_gate_exps.weight" of "blk.7.ffn_gate_exps.weight".
std::string_view Role(std::string_view name) {
  return name.starts_with("blk.") ? name.substr(name.find('.', 4) + 1) : name;
}

DType TypeOf(const Quant& quant, const TensorSpec& spec) {
  const std::string_view role = Role(spec.name);
  if (role == "ffn_gate_tid2eid.weight") return DType::kI32;
  if (spec.dims.size() == 1) return DType::kF32;
  if (role == "ffn_down_exps.weight") return quant.down;
  if (role == "ffn_gate_exps.weight" || role == "ffn_up_exps.weight") return quant.gate_up;
  // What is split over ranks, and the two projections before it.
  if (spec.split != Split::kReplicate || role == "attn_q_a.weight" || role == "attn_kv.weight") {
    return DType::kQ8_0;
  }
  return DType::kF16;
}

Result<ModelConfig> ConfigOf(const GgufWriter& metadata, const std::string& name) {
  ASSIGN_OR_RETURN(const auto file, GgufFile::Adopt(metadata.Directory(), name));
  return ReadModelConfig(*file);
}

struct Directory {
  std::string name;
  std::vector<std::byte> bytes;
  int64_t data_bytes = 0;  // of the tensors that would follow
};

// The tensor table comes from the config that the metadata gives, as for any file.
Result<Directory> MakeDirectory(const std::string& preset_name, const std::string& quant_name,
                                int64_t num_layers) {
  ASSIGN_OR_RETURN(const Preset* preset, FindNamed(kPresets, preset_name, "preset"));
  ASSIGN_OR_RETURN(const Quant* quant, FindNamed(kQuants, quant_name, "quant"));
  if (num_layers < 0 || num_layers > kMaxLayers) {
    return InvalidArgumentError(StrCat("synthetic layers is ", num_layers, ", must be from 1 to ",
                                       kMaxLayers, ", or 0 for the preset's ", preset->num_layers));
  }
  if (num_layers == 0) num_layers = preset->num_layers;
  Directory directory;
  directory.name = StrCat("synthetic ", preset->name, " ", quant->name, ", ", num_layers,
                          num_layers == 1 ? " layer" : " layers");
  GgufWriter writer;
  AddMetadata(*preset, directory.name, num_layers, writer);
  ASSIGN_OR_RETURN(const ModelConfig config, ConfigOf(writer, directory.name));
  for (const TensorSpec& spec : ModelTensors(config)) {
    RETURN_IF_ERROR(writer.AddTensor(spec.name, TypeOf(*quant, spec), spec.dims));
  }
  directory.bytes = writer.Directory();
  const TensorInfo& last = writer.tensors().back();
  directory.data_bytes = (last.offset + last.size_bytes + kDefaultGgufAlignment - 1) /
                         kDefaultGgufAlignment * kDefaultGgufAlignment;
  return directory;
}

// A number from its place alone (the finaliser of splitmix64), so that all machines agree.
class Numbers {
 public:
  explicit Numbers(uint64_t tensor) : tensor_(tensor) {}
  uint64_t Next() {
    uint64_t x = (tensor_ << 40) + ++index_;
    x *= 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }
  // Mean 0, standard deviation 1, nearly normal: the sum of four 16-bit parts.
  float Normal() {
    const uint64_t bits = Next();
    int64_t sum = 0;
    for (int shift = 0; shift < 64; shift += 16) {
      sum += static_cast<int64_t>((bits >> shift) & 0xffff);
    }
    constexpr float kDeviation = 37837.227f;  // of that sum: 65536 * sqrt(4 / 12)
    return (static_cast<float>(sum) - 131070.0f) / kDeviation;
  }

 private:
  uint64_t tensor_;
  uint64_t index_ = 0;
};

struct Distribution {
  float mean = 0.0f;
  float deviation = 0.02f;
};

// Attention over random keys is nearly a mean, the same for all tokens; at full scale it would send
// most tokens to the same experts, so its output is kept small.
Distribution DistributionOf(std::string_view role) {
  if (role.ends_with("_scale.weight")) return {0.3f, 0.0f};
  if (role.ends_with("norm.weight")) return {1.0f, 0.1f};
  if (role.ends_with("_base.weight") || role == "attn_sinks.weight") return {0.0f, 0.3f};
  if (role == "attn_output_b.weight") return {0.0f, 0.005f};
  return {};
}

// Different experts for one token, as a router would choose.
void FillExpertIds(const TensorInfo& tensor, int64_t num_experts, Numbers& numbers,
                   std::byte* out) {
  const int64_t used = tensor.dims[0];
  for (int64_t row = 0; row < tensor.dims[1]; ++row) {
    const auto first = static_cast<int64_t>(numbers.Next() % static_cast<uint64_t>(num_experts));
    for (int64_t i = 0; i < used; ++i) {
      const auto id = static_cast<int32_t>((first + i * (num_experts / used)) % num_experts);
      StoreLittleEndian(id, out + (row * used + i) * 4);
    }
  }
}

Status FillValues(const TensorInfo& tensor, Numbers& numbers, std::byte* out) {
  const Distribution d = DistributionOf(Role(tensor.name));
  const int64_t row_bytes = BytesFor(tensor.dtype, tensor.dims[0]);
  std::vector<float> row(static_cast<size_t>(tensor.dims[0]));
  for (int64_t at = 0; at < tensor.size_bytes; at += row_bytes) {
    for (float& value : row) value = d.mean + d.deviation * numbers.Normal();
    const Status status = Quantize(tensor.dtype, row, {out + at, static_cast<size_t>(row_bytes)});
    if (!status.ok()) {
      return UnimplementedError(StrCat(tensor.name, " is ", Info(tensor.dtype).name,
                                       ", which only a device makes random values for; on the "
                                       "CPU take --quant q8"));
    }
  }
  return OkStatus();
}

}  // namespace

std::vector<std::string> SyntheticPresets() { return NamesOf(kPresets); }
std::vector<std::string> SyntheticQuants() { return NamesOf(kQuants); }

Result<std::unique_ptr<GgufFile>> MakeSyntheticFile(const std::string& preset,
                                                    const std::string& quant, int64_t num_layers) {
  ASSIGN_OR_RETURN(Directory directory, MakeDirectory(preset, quant, num_layers));
  return GgufFile::Adopt(std::move(directory.bytes), directory.name, GgufContent::kDirectory);
}

Result<std::unique_ptr<GgufFile>> MakeSyntheticModel(const std::string& preset,
                                                     const std::string& quant, int64_t num_layers) {
  ASSIGN_OR_RETURN(Directory directory, MakeDirectory(preset, quant, num_layers));
  if (directory.data_bytes > kMaxModelBytes) {
    return ResourceExhaustedError(StrCat(
        directory.name, " takes ", HumanBytes(directory.data_bytes), " in memory, at most ",
        HumanBytes(kMaxModelBytes), " are made there; take fewer layers or a smaller preset"));
  }
  ASSIGN_OR_RETURN(const auto plan,
                   GgufFile::Parse(directory.bytes, directory.name, GgufContent::kDirectory));
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(*plan));
  std::vector<std::byte> all;
  try {
    all.resize(directory.bytes.size() + static_cast<size_t>(directory.data_bytes));
  } catch (const std::bad_alloc&) {
    return ResourceExhaustedError(
        StrCat("no memory for ", directory.name, ": it takes ", HumanBytes(directory.data_bytes)));
  }
  std::copy(directory.bytes.begin(), directory.bytes.end(), all.begin());
  for (size_t i = 0; i < plan->tensors().size(); ++i) {
    const TensorInfo& tensor = plan->tensors()[i];
    Numbers numbers(i);
    if (tensor.dtype == DType::kI32) {
      FillExpertIds(tensor, config.num_experts, numbers, all.data() + tensor.offset);
    } else {
      RETURN_IF_ERROR(FillValues(tensor, numbers, all.data() + tensor.offset));
    }
  }
  return GgufFile::Adopt(std::move(all), directory.name);
}

}  // namespace ds4
