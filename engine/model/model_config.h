// Checked hyper-parameters of a DeepSeek V4 class model, read from GGUF metadata (spec 1, 4.3).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {

enum class AttentionKind {
  kSliding,     // window only
  kCompressed,  // CSA: window plus the indexer's choice of ratio-4 rows
  kHeavy,       // HCA: window plus all rows of a larger ratio
};

enum class RouterKind {
  kHash,   // expert ids from a table by token id
  kScore,  // the highest scores plus bias
};

struct LayerConfig {
  AttentionKind attention = AttentionKind::kSliding;
  int64_t compress_ratio = 0;  // 0 for kSliding
  RouterKind router = RouterKind::kScore;
  float swiglu_limit = 0.0f;         // of routed experts
  float shared_swiglu_limit = 0.0f;  // of the shared one
};

// Every value is checked to be positive and consistent by ReadModelConfig; counts fit in int64_t
// products of two without overflow.
struct ModelConfig {
  std::string name;
  int64_t vocab_size = 0;
  int64_t num_layers = 0;  // trunk layers, without MTP
  int64_t context_length = 0;
  int64_t hidden_dim = 0;  // D
  int64_t num_heads = 0;   // A
  int64_t head_dim = 0;    // Dh; the trailing rope_dim channels are rotary
  int64_t rope_dim = 0;
  int64_t q_lora_rank = 0;
  int64_t num_output_groups = 0;  // G; heads_per_group = A / G
  int64_t output_lora_rank = 0;   // of one group
  int64_t sliding_window = 0;
  int64_t num_index_heads = 0;  // 0 when no layer is CSA
  int64_t index_head_dim = 0;
  int64_t index_top_k = 0;
  int64_t num_experts = 0;
  int64_t num_experts_used = 0;
  int64_t ffn_dim = 0;  // of one expert, and of the shared one
  float expert_weights_scale = 1.0f;
  int64_t num_streams = 0;  // H, residual streams
  int sinkhorn_iterations = 0;
  float hc_eps = 0.0f;
  float norm_eps = 0.0f;
  double rope_base = 0.0;
  double compress_rope_base = 0.0;
  double yarn_factor = 1.0;
  int64_t yarn_original_context = 0;
  double yarn_beta_fast = 32.0;
  double yarn_beta_slow = 1.0;
  int64_t num_mtp_blocks = 0;  // 0 or 1, by the tensors in the file
  std::vector<LayerConfig> layers;
  LayerConfig mtp_layer;  // sliding, score-routed

  // Parts into which every shared sum is cut (architecture 4): the largest of 8, 4, 2, 1 that
  // divides the output groups and the expert width. Also the largest world size.
  int num_lanes = 1;

  int64_t heads_per_group() const { return num_heads / num_output_groups; }
  // Channels of a compressor's projection: two series for CSA, one for HCA.
  static int64_t CompressorWidth(AttentionKind kind, int64_t dim) {
    return kind == AttentionKind::kCompressed ? 2 * dim : dim;
  }
};

// kInvalidArgument names the key and both values; kNotFound a missing key; kUnimplemented another
// architecture than "deepseek4".
Result<ModelConfig> ReadModelConfig(const GgufFile& file);

}  // namespace ds4
