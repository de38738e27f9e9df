#include "tests/support/gguf_builder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>

#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

constexpr int64_t kAlignment = 32;

template <typename T>
void Put(std::vector<std::byte>& out, T value) {
  const size_t at = out.size();
  out.resize(at + sizeof(T));
  std::memcpy(out.data() + at, &value, sizeof(T));
}

void PutText(std::vector<std::byte>& out, const std::string& text) {
  Put(out, static_cast<uint64_t>(text.size()));
  for (char c : text) Put(out, c);
}

template <typename T>
std::vector<std::byte> Scalar(GgufType type, T value) {
  std::vector<std::byte> out;
  Put(out, static_cast<uint32_t>(type));
  Put(out, value);
  return out;
}

template <typename T>
std::vector<std::byte> Array(GgufType type, const std::vector<T>& values) {
  std::vector<std::byte> out;
  Put(out, static_cast<uint32_t>(GgufType::kArray));
  Put(out, static_cast<uint32_t>(type));
  Put(out, static_cast<uint64_t>(values.size()));
  for (T value : values) Put(out, value);
  return out;
}

int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void SetCommonMetadata(GgufBuilder& b) {
  b.SetString("general.architecture", "deepseek4");
  b.SetInt("deepseek4.attention.head_count_kv", 1);
  b.SetFloat("deepseek4.attention.layer_norm_rms_epsilon", 1e-6f);
  b.SetInt("deepseek4.expert_shared_count", 1);
  b.SetFloat("deepseek4.expert_weights_scale", 1.5f);
  b.SetBool("deepseek4.expert_weights_norm", true);
  b.SetInt("deepseek4.expert_gating_func", 4);
  b.SetInt("deepseek4.hyper_connection.count", 4);
  b.SetInt("deepseek4.hyper_connection.sinkhorn_iterations", 20);
  b.SetFloat("deepseek4.hyper_connection.epsilon", 1e-6f);
  b.SetFloat("deepseek4.rope.freq_base", 10000.0f);
  b.SetFloat("deepseek4.attention.compress_rope_freq_base", 160000.0f);
  b.SetString("deepseek4.rope.scaling.type", "yarn");
  b.SetFloat("deepseek4.rope.scaling.factor", 16.0f);
  b.SetInt("deepseek4.rope.scaling.original_context_length", 65536);
  b.SetFloat("deepseek4.rope.scaling.yarn_beta_fast", 32.0f);
  b.SetFloat("deepseek4.rope.scaling.yarn_beta_slow", 1.0f);
}

// Norm gains near 1, everything else around 0 with the spread of a trained layer.
void FillRandom(const GgufBuilder::Tensor& tensor, int64_t num_experts, std::mt19937& random,
                std::byte* out) {
  int64_t count = 1;
  for (int64_t dim : tensor.dims) count *= dim;
  if (tensor.dtype == DType::kI32) {  // expert ids
    for (int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<int32_t>(random() % num_experts);
      std::memcpy(out + i * 4, &id, 4);
    }
    return;
  }
  const bool gain = tensor.name.find("norm.") != std::string::npos;
  const float spread = gain ? 0.2f : 2.0f / std::sqrt(static_cast<float>(tensor.dims[0]));
  std::uniform_real_distribution<float> uniform(-spread, spread);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(random) + (gain ? 1.0f : 0.0f);
  const Status status =
      Quantize(tensor.dtype, values, {out, static_cast<size_t>(tensor.size_bytes())});
  EXPECT_TRUE(status.ok()) << tensor.name << ": " << status;
}

DType SmallType(const TensorSpec& spec, DType type) {
  if (spec.name.find("tid2eid") != std::string::npos) return DType::kI32;
  const bool fine = spec.dims.size() < 2 || spec.name.find("hc_") != std::string::npos ||
                    spec.name.find("_ape") != std::string::npos ||
                    spec.name.find("ffn_gate_inp") != std::string::npos;
  return fine ? DType::kF32 : type;
}

}  // namespace

void GgufBuilder::SetInt(const std::string& key, int64_t value) {
  const bool fits = value >= 0 && value <= int64_t{0xffffffff};
  keys_[key] =
      fits ? Scalar(GgufType::kU32, static_cast<uint32_t>(value)) : Scalar(GgufType::kI64, value);
}
void GgufBuilder::SetFloat(const std::string& key, float value) {
  keys_[key] = Scalar(GgufType::kF32, value);
}
void GgufBuilder::SetBool(const std::string& key, bool value) {
  keys_[key] = Scalar(GgufType::kBool, static_cast<uint8_t>(value));
}
void GgufBuilder::SetString(const std::string& key, const std::string& value) {
  std::vector<std::byte> out;
  Put(out, static_cast<uint32_t>(GgufType::kString));
  PutText(out, value);
  keys_[key] = out;
}
void GgufBuilder::SetInts(const std::string& key, const std::vector<int32_t>& values) {
  keys_[key] = Array(GgufType::kI32, values);
}
void GgufBuilder::SetFloats(const std::string& key, const std::vector<float>& values) {
  keys_[key] = Array(GgufType::kF32, values);
}

std::vector<std::string> GgufBuilder::Keys() const {
  std::vector<std::string> names;
  for (const auto& [key, value] : keys_) names.push_back(key);
  return names;
}

int64_t GgufBuilder::Tensor::size_bytes() const {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return BytesFor(dtype, count);
}

void GgufBuilder::AddModel(const ModelConfig& config,
                           const std::function<DType(const TensorSpec&)>& type_of) {
  for (const TensorSpec& spec : ModelTensors(config))
    AddTensor(spec.name, type_of(spec), spec.dims);
}

GgufBuilder::Tensor* GgufBuilder::Find(const std::string& name) {
  for (Tensor& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void GgufBuilder::RemoveTensor(const std::string& name) {
  std::erase_if(tensors_, [&](const Tensor& tensor) { return tensor.name == name; });
}

std::vector<std::byte> GgufBuilder::Directory() const {
  std::vector<std::byte> out;
  Put(out, uint32_t{0x46554747});
  Put(out, uint32_t{3});
  Put(out, static_cast<uint64_t>(tensors_.size()));
  Put(out, static_cast<uint64_t>(keys_.size()));
  for (const auto& [key, value] : keys_) {
    PutText(out, key);
    out.insert(out.end(), value.begin(), value.end());
  }
  int64_t offset = 0;
  for (const Tensor& tensor : tensors_) {
    PutText(out, tensor.name);
    Put(out, static_cast<uint32_t>(tensor.dims.size()));
    for (int64_t dim : tensor.dims) Put(out, dim);
    Put(out, Info(tensor.dtype).ggml_id);
    Put(out, static_cast<uint64_t>(offset));
    offset += RoundUp(tensor.size_bytes());
  }
  return out;
}

std::vector<std::byte> GgufBuilder::File(
    const std::function<void(const Tensor&, std::byte*)>& fill) const {
  std::vector<std::byte> out = Directory();
  out.resize(RoundUp(static_cast<int64_t>(out.size())));
  for (const Tensor& tensor : tensors_) {
    const size_t at = out.size();
    out.resize(at + RoundUp(tensor.size_bytes()));
    fill(tensor, out.data() + at);
  }
  return out;
}

ParsedGguf ParseDirectory(const GgufBuilder& builder) {
  ParsedGguf parsed;
  parsed.bytes = builder.Directory();
  auto file = GgufFile::Parse(parsed.bytes, "test.gguf", GgufContent::kDirectory);
  EXPECT_TRUE(file.ok()) << file.status();
  if (file.ok()) parsed.file = std::move(file).value();
  return parsed;
}

GgufBuilder FlashMetadata() {
  GgufBuilder b;
  SetCommonMetadata(b);
  b.SetString("general.name", "DeepSeek V4 Flash");
  b.SetInt("deepseek4.block_count", 43);
  b.SetInt("deepseek4.context_length", 1048576);
  b.SetInt("deepseek4.embedding_length", 4096);
  b.SetInt("deepseek4.vocab_size", 129280);
  b.SetInt("deepseek4.attention.head_count", 64);
  b.SetInt("deepseek4.attention.key_length", 512);
  b.SetInt("deepseek4.attention.value_length", 512);
  b.SetInt("deepseek4.rope.dimension_count", 64);
  b.SetInt("deepseek4.attention.q_lora_rank", 1024);
  b.SetInt("deepseek4.attention.output_lora_rank", 1024);
  b.SetInt("deepseek4.attention.output_group_count", 8);
  b.SetInt("deepseek4.attention.sliding_window", 128);
  b.SetInt("deepseek4.attention.indexer.head_count", 64);
  b.SetInt("deepseek4.attention.indexer.key_length", 128);
  b.SetInt("deepseek4.attention.indexer.top_k", 512);
  b.SetInt("deepseek4.expert_count", 256);
  b.SetInt("deepseek4.expert_used_count", 6);
  b.SetInt("deepseek4.expert_feed_forward_length", 2048);
  b.SetInt("deepseek4.hash_layer_count", 3);
  b.SetFloats("deepseek4.swiglu_clamp_exp", std::vector<float>(43, 10.0f));
  std::vector<int32_t> ratios = {0, 0};
  for (int i = 0; i < 20; ++i) ratios.insert(ratios.end(), {4, 128});
  ratios.insert(ratios.end(), {4, 0});  // the last layer, and one draft block
  b.SetInts("deepseek4.attention.compress_ratios", ratios);
  return b;
}

DType FlashType(const TensorSpec& spec, DType gate_up, DType down) {
  const auto has = [&](const char* part) { return spec.name.find(part) != std::string::npos; };
  if (has("tid2eid")) return DType::kI32;
  if (has("gate_exps") || has("up_exps")) return gate_up;
  if (has("down_exps")) return down;
  if (spec.dims.size() < 2) return DType::kF32;
  const bool small =
      has("token_embd") || has("hc_") || has("compressor") || has("indexer") || has("ffn_gate_inp");
  return small ? DType::kF16 : DType::kQ8_0;
}

GgufBuilder SmallMetadata() {
  GgufBuilder b;
  SetCommonMetadata(b);
  b.SetString("general.name", "small");
  b.SetInt("deepseek4.block_count", 4);
  b.SetInt("deepseek4.context_length", 4096);
  b.SetInt("deepseek4.embedding_length", 64);
  b.SetInt("deepseek4.vocab_size", 97);
  b.SetInt("deepseek4.attention.head_count", 8);
  b.SetInt("deepseek4.attention.key_length", 32);
  b.SetInt("deepseek4.attention.value_length", 32);
  b.SetInt("deepseek4.rope.dimension_count", 16);
  b.SetInt("deepseek4.attention.q_lora_rank", 32);
  b.SetInt("deepseek4.attention.output_lora_rank", 32);
  b.SetInt("deepseek4.attention.output_group_count", 8);
  b.SetInt("deepseek4.attention.sliding_window", 8);
  b.SetInt("deepseek4.attention.indexer.head_count", 2);
  b.SetInt("deepseek4.attention.indexer.key_length", 32);
  b.SetInt("deepseek4.attention.indexer.top_k", 4);
  b.SetInt("deepseek4.expert_count", 6);
  b.SetInt("deepseek4.expert_used_count", 2);
  b.SetInt("deepseek4.expert_feed_forward_length", 256);
  b.SetInt("deepseek4.hash_layer_count", 1);
  b.SetFloats("deepseek4.swiglu_clamp_exp", std::vector<float>(4, 10.0f));
  b.SetInts("deepseek4.attention.compress_ratios", {0, 4, 16, 4});
  return b;
}

std::string WriteSmallModel(const std::string& name, const SmallModelOptions& options) {
  GgufBuilder builder = SmallMetadata();
  const ParsedGguf metadata = ParseDirectory(builder);
  ModelConfig config = ReadModelConfig(*metadata.file).value();
  config.num_mtp_blocks = 1;
  builder.AddModel(config, [&](const TensorSpec& spec) { return SmallType(spec, options.type); });
  if (options.change) options.change(builder);
  std::mt19937 random(options.seed);
  const std::vector<std::byte> bytes =
      builder.File([&](const GgufBuilder::Tensor& tensor, std::byte* out) {
        FillRandom(tensor, config.num_experts, random, out);
        if (options.patch) options.patch(tensor, out);
      });
  const std::string path =
      testing::TempDir() + "/ds4_" + name + "_" + std::to_string(getpid()) + ".gguf";
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  out.close();
  EXPECT_TRUE(out.good()) << path;
  return path;
}

}  // namespace ds4
