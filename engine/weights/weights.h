// One rank's tensors as named fields, in the layout that kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/kernels/hyper_connection.h"
#include "engine/kernels/matrix.h"

namespace ds4 {

struct HyperConnectionTensors {
  Matrix fn;                 // [2H + H*H, H*D]; for a head collapse [H, H*D]
  std::vector<float> base;   // [2H + H*H] or [H]
  std::vector<float> scale;  // [3] or [1]

  HyperConnectionWeights view() const { return {fn.view(), base.data(), scale.data()}; }
};

struct CompressorTensors {
  Matrix kv;                // [width, D]; width = 2 * dim for CSA, dim for HCA
  Matrix gate;              // [width, D]
  std::vector<float> ape;   // [ratio, width]
  std::vector<float> norm;  // [dim]
};

// "local" sizes are this rank's part (RankPlan).
struct AttentionTensors {
  std::vector<float> norm;      // [D]
  Matrix q_a;                   // [q_lora_rank, D]
  std::vector<float> q_a_norm;  // [q_lora_rank]
  Matrix q_b;                   // [local_heads * head_dim, q_lora_rank]
  Matrix kv;                    // [head_dim, D]
  std::vector<float> kv_norm;   // [head_dim]
  std::vector<float> sinks;     // [local_heads]
  Matrix o_a;                   // [local_groups * output_lora_rank, heads_per_group * head_dim]
  // One matrix per lane, one after the other, so that each streams in order:
  Matrix o_b;                    // [local_lanes * D, groups_per_lane * output_lora_rank]
  CompressorTensors compressor;  // CSA, HCA
  // CSA:
  Matrix index_q_b;   // [num_index_heads * index_head_dim, q_lora_rank]
  Matrix index_proj;  // [num_index_heads, D]
  CompressorTensors index_compressor;
};

struct MoeTensors {
  std::vector<float> norm;        // [D]
  Matrix router;                  // [num_experts, D]
  std::vector<float> bias;        // [num_experts], score-routed
  std::vector<int32_t> hash_ids;  // [vocab, num_experts_used], hash-routed
  Matrix gate;                    // [num_experts * local_ffn, D]
  Matrix up;                      // [num_experts * local_ffn, D]
  Matrix down;                    // [num_experts * local_lanes * D, lane_ffn]
  Matrix shared_gate;             // [local_ffn, D]
  Matrix shared_up;               // [local_ffn, D]
  Matrix shared_down;             // [local_lanes * D, lane_ffn]
};

struct BlockTensors {
  HyperConnectionTensors attn_hc;
  AttentionTensors attention;
  HyperConnectionTensors ffn_hc;
  MoeTensors moe;
};

struct MtpTensors {
  std::vector<float> enorm;  // [D]
  std::vector<float> hnorm;  // [D]
  Matrix e_proj;             // [D, D]
  Matrix h_proj;             // [D, D]
  BlockTensors block;
  HyperConnectionTensors head_hc;
  std::vector<float> norm;  // [D]
};

struct Weights {
  Matrix embedding;  // [vocab, D]
  std::vector<BlockTensors> blocks;
  HyperConnectionTensors head_hc;
  std::vector<float> norm;      // [D]
  Matrix head;                  // [local_vocab, D]
  std::vector<MtpTensors> mtp;  // none or one
  int64_t size_bytes = 0;
};

}  // namespace ds4
