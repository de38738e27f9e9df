// One rank's tensors in device memory, in the layouts that the kernels read.
//
// Loading walks the tensors twice: once to add up bytes (so that memory is planned and refused
// before anything is read), once to fill one arena. Source rows go through pinned memory to the
// device and are packed there.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/base/status.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/layout.h"
#include "engine/cuda/runtime.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/model/model_config.h"
#include "engine/session/engine_options.h"
#include "engine/shard/shard_plan.h"
#include "engine/weights/tensor_source.h"

namespace ds4::cuda {

struct DeviceCompressor {
  PackedMatrix kv;    // [width, D]
  PackedMatrix gate;  // [width, D]
  const float* ape = nullptr;
  const float* norm = nullptr;
};

struct DeviceAttention {
  const float* norm = nullptr;
  PackedMatrix q_a;
  const float* q_a_norm = nullptr;
  PackedMatrix q_b;  // [local_heads * head_dim, q_lora_rank]
  PackedMatrix kv;
  const float* kv_norm = nullptr;
  const float* sinks = nullptr;  // [local_heads]
  PackedMatrix o_a;              // local_groups x [output_lora_rank, heads_per_group * head_dim]
  PackedMatrix o_b;              // local_lanes x [D, groups_per_lane * output_lora_rank]
  DeviceCompressor compressor;
  PackedMatrix index_q_b;   // [num_index_heads * index_head_dim, q_lora_rank]
  PackedMatrix index_proj;  // [num_index_heads, D]
  DeviceCompressor index_compressor;
};

struct DeviceMoe {
  const float* norm = nullptr;
  PackedMatrix router;
  const float* bias = nullptr;
  const int32_t* hash_ids = nullptr;
  PackedMatrix gate, up;                // num_experts x [local_ffn, D]
  PackedMatrix down;                    // num_experts * local_lanes x [D, lane_ffn]
  PackedMatrix shared_gate, shared_up;  // [local_ffn, D]
  PackedMatrix shared_down;             // local_lanes x [D, lane_ffn]
};

struct DeviceBlock {
  HcWeights attn_hc;
  DeviceAttention attention;
  HcWeights ffn_hc;
  DeviceMoe moe;
};

struct DeviceWeights {
  DType embedding_type = DType::kF32;
  const std::byte* embedding = nullptr;  // row-major, file blocks, [vocab, D]
  std::vector<DeviceBlock> blocks;
  HcWeights head_hc;
  const float* norm = nullptr;
  PackedMatrix head;              // [local_vocab, D]
  bool has_f32_matrices = false;  // among the packed ones: no tensor-core products then

  DeviceBuffer memory;
  PinnedBuffer expert_memory;  // routed experts, when they live in host memory
  int64_t source_bytes = 0;    // read from the file
};

struct WeightBytes {
  int64_t device = 0;             // arena and staging
  int64_t host = 0;               // pinned: routed experts, when they live there
  int64_t saved = 0;              // by conversion, of the file's bytes
  bool has_f32_matrices = false;  // as DeviceWeights will have it
};

struct WeightOptions {
  bool synthetic = false;        // the file has no data; values are drawn on the device
  bool experts_on_host = false;  // routed experts in pinned host memory, read over the link
  ReplicatedWeights replicated = ReplicatedWeights::kAuto;
  int num_threads = 1;
};

// What LoadDeviceWeights takes. kUnimplemented names the first tensor whose type has no device
// kernels, or that cannot become Q8_0 as asked.
Result<WeightBytes> DeviceWeightBytes(const ModelConfig& config, const GgufFile& file,
                                      const RankPlan& plan, const WeightOptions& options);

Result<DeviceWeights> LoadDeviceWeights(const ModelConfig& config, const GgufFile& file,
                                        const RankPlan& plan, const WeightOptions& options,
                                        Stream& stream, const WeightProgress& progress);

}  // namespace ds4::cuda
