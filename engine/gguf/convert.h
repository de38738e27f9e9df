// Hugging Face checkpoint (safetensors) to GGUF of architecture deepseek4. Reads float tensors and
// the flat configuration in the file's metadata "config_json"; scaled FP8 and FP4 are not read.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/tensor/dtype.h"

namespace ds4 {

struct ConvertOptions {
  std::vector<std::string> inputs;   // pieces of one checkpoint; each tensor is in exactly one
  std::string tokenizer;             // tokenizer.json; empty: the file gets no tokenizer
  std::string output;                // appears only when it is complete
  std::string name = "DeepSeek V4";  // general.name
  // Of large matrices: F32, F16, BF16 or Q8_0. Rows that are no multiple of 32 values stay F32
  // under Q8_0 (reported). mHC mixes, position biases and routers are F16, vectors F32, unless F32
  // is asked for: then every float is F32 and nothing is rounded.
  DType type = DType::kQ8_0;
  std::function<void(const std::string&)> report;  // progress, one line each; may be empty
};

// Tensors named case.* (recorded runs in test files) are left out; any other tensor that the
// configuration does not call for, or a missing one, is an error.
// Errors: kInvalidArgument what does not fit, kNotFound a missing tensor or key, kUnimplemented a
// storage or model type we do not convert; those of the files.
Status ConvertSafetensors(const ConvertOptions& options);

}  // namespace ds4
