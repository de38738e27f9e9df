// tokenizer.json (Hugging Face format, byte-level BPE) to the tokenizer keys of GGUF.
#pragma once

#include <cstdint>
#include <string>

#include "engine/base/status.h"
#include "engine/gguf/gguf_writer.h"
#include "engine/gguf/hf_config.h"

namespace ds4 {

// Ids must be dense from 0 and as many as the configuration's vocabulary; begin and end of sentence
// are found by their texts and must have the configuration's ids. kInvalidArgument says what does
// not fit.
Status WriteTokenizerKeys(const std::string& path, const HfConfig& config, GgufWriter* writer);

}  // namespace ds4
