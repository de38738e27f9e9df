// GGUF files in memory with any key, type and value, right or wrong: what the writer would refuse
// too. Also the metadata of Flash (the published hyper-parameters) and of a small model with 8
// lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/gguf/gguf_reader.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_names.h"

namespace ds4 {

class GgufBuilder {
 public:
  void SetInt(const std::string& key, int64_t value);  // u32 when it fits, else i64
  void SetFloat(const std::string& key, float value);
  void SetBool(const std::string& key, bool value);
  void SetString(const std::string& key, const std::string& value);
  void SetInts(const std::string& key, const std::vector<int32_t>& values);
  void SetFloats(const std::string& key, const std::vector<float>& values);
  void Remove(const std::string& key) { keys_.erase(key); }
  std::vector<std::string> Keys() const;

  struct Tensor {
    std::string name;
    DType dtype = DType::kF32;
    std::vector<int64_t> dims;
    int64_t size_bytes() const;
  };
  void AddTensor(const std::string& name, DType dtype, std::vector<int64_t> dims) {
    tensors_.push_back({name, dtype, std::move(dims)});
  }
  // Every tensor of the model, stored as type_of says.
  void AddModel(const ModelConfig& config, const std::function<DType(const TensorSpec&)>& type_of);
  Tensor* Find(const std::string& name);
  void RemoveTensor(const std::string& name);

  // Header, metadata and tensor directory; no data.
  std::vector<std::byte> Directory() const;
  // The same with data: fill writes one tensor's bytes.
  std::vector<std::byte> File(const std::function<void(const Tensor&, std::byte*)>& fill) const;

 private:
  std::map<std::string, std::vector<std::byte>> keys_;  // type and value, as in the file
  std::vector<Tensor> tensors_;
};

// A parsed directory together with the bytes it points into.
struct ParsedGguf {
  std::vector<std::byte> bytes;
  std::unique_ptr<GgufFile> file;
};
// Fails the test when the bytes are no GGUF file.
ParsedGguf ParseDirectory(const GgufBuilder& builder);

// Metadata as published for DeepSeek V4 Flash; no tensors.
GgufBuilder FlashMetadata();
// The types of the published files: Q8_0 attention, shared expert and head; F16 small matrices;
// experts gate and up in one type, down in another.
DType FlashType(const TensorSpec& spec, DType gate_up, DType down);

// Every kind of layer in a few kilobytes: 8 heads in 8 groups, 8 lanes of 32 columns, a vocabulary
// that does not divide, hash and score routing, an MTP block.
GgufBuilder SmallMetadata();

// Writes the small model with random weights of a seed into the tests' folder and returns the path.
// Large matrices get `type`; what must stay finer (mixes, norms, routers, position biases) is F32.
// `change` may alter tensors and keys before the file is written, `patch` a tensor's bytes after.
struct SmallModelOptions {
  DType type = DType::kF32;
  uint32_t seed = 1;
  std::function<void(GgufBuilder&)> change = nullptr;
  std::function<void(const GgufBuilder::Tensor&, std::byte*)> patch = nullptr;
};
std::string WriteSmallModel(const std::string& name, const SmallModelOptions& options);

}  // namespace ds4
