// The flat configuration of DeepSeek V4 (config.json) to GGUF metadata (spec 1.1, 4.3).
#pragma once

#include <cstdint>
#include <string>

#include "engine/base/status.h"
#include "engine/gguf/gguf_writer.h"
#include "engine/gguf/hf_names.h"

namespace ds4 {

struct HfConfig {
  CheckpointLayout layout;
  int64_t vocab_size = 0;
  int64_t num_experts = 0;
  int64_t bos_token_id = 0;
  int64_t eos_token_id = 1;
};

// Checks `json`, writes the keys of architecture deepseek4, and returns what the conversion needs.
// Errors: kInvalidArgument or kNotFound name the key; kUnimplemented another kind of model.
Result<HfConfig> WriteConfigKeys(const std::string& json, bool has_mtp, GgufWriter* writer);

}  // namespace ds4
