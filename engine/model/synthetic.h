// Models without a file: the true shapes and types of a preset, random weights. For measuring speed
// and memory where the real weights are not at hand; what such a model writes is noise.
//
//   preset   what
//   flash    DeepSeek V4 Flash as published: 43 layers, 256 experts, hidden 4096, vocabulary 129280
//   tiny     all kinds of layers, small: 6 layers, 8 experts, hidden 256, vocabulary 1024
//
//   quant    routed gate and up, down       whole Flash
//   q2       IQ2_XXS, Q2_K                  86.7 GB
//   q4       Q4_K, Q4_K                    164.6 GB
//   q8       Q8_0, Q8_0                    301.8 GB
//   mxfp4    MXFP4, MXFP4                  156.0 GB (the published precision)
// The rest is the same in all: attention projections, shared expert and head Q8_0; embedding,
// compressors, indexer, router and hyper-connection matrices F16; norms, biases and sinks F32.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {

// A small byte tokeniser is in the metadata too, so that a coordinator can serve such a model.

// {"flash", "tiny"} and {"q2", "q4", "q8", "mxfp4"}, for option texts.
std::vector<std::string> SyntheticPresets();
std::vector<std::string> SyntheticQuants();

// Metadata and tensor directory, no data: what ReadModelConfig and MakeShardPlan need. Its path()
// names preset, quant and layers and so tells such models apart, as a digest does for files.
// num_layers 0: the preset's; more repeat the pattern of kinds. kInvalidArgument names the value
// and what it may be.
Result<std::unique_ptr<GgufFile>> MakeSyntheticFile(const std::string& preset,
                                                    const std::string& quant, int64_t num_layers);

// The same with data in memory: matrices of standard deviation 0.02, norms near 1, expert ids in
// range; equal bytes on every machine. kResourceExhausted: more than 16 GiB; kUnimplemented: a type
// that only devices make values for (named).
Result<std::unique_ptr<GgufFile>> MakeSyntheticModel(const std::string& preset,
                                                     const std::string& quant, int64_t num_layers);

}  // namespace ds4
