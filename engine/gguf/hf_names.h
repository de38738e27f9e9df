// Tensor names of Hugging Face checkpoints of DeepSeek V4 to GGUF names (spec 4.1, 4.4, 6.1), and
// what each tensor is, which decides the type it is stored in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds4 {

enum class WeightRole {
  kMatrix,       // large, read by matrix kernels: takes the type that was asked for
  kSmallMatrix,  // mHC mixes, compressor position bias, router: kept finer, they steer the rest
  kVector,       // norms, biases, sinks, scales
  kIdTable,      // expert ids by token
  kGateHalf,     // of a fused [experts, 2 * ffn, hidden] tensor the first ffn rows of each expert
  kUpHalf,       // and the last
};

struct PlannedTensor {
  std::string hf_name;
  std::string gguf_name;
  WeightRole role;
};

// What decides which tensors a model has.
struct CheckpointLayout {
  std::vector<int64_t>
      compress_ratios;          // one per trunk layer: 0 sliding, 4 with indexer, else heavy
  int64_t num_hash_layers = 0;  // the first layers, routed by a table
  bool has_mtp = false;         // one draft block, sliding and score-routed
};

// Every tensor of the checkpoint, in the order of the file to be written.
std::vector<PlannedTensor> PlanTensors(const CheckpointLayout& layout);

}  // namespace ds4
