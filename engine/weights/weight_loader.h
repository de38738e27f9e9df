// Reads one rank's slices from a mapped GGUF file into place; touches no other bytes of the
// tensors.
#pragma once

#include "engine/gguf/gguf_reader.h"
#include "engine/model/model_config.h"
#include "engine/shard/shard_plan.h"
#include "engine/weights/tensor_source.h"
#include "engine/weights/weights.h"

namespace ds4 {

// kUnimplemented: a matrix in a type without kernels (named); kDataLoss: an expert id or a scale
// that cannot be; kResourceExhausted: no memory; kCancelled: called off.
Result<Weights> LoadWeights(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
                            const WeightProgress& progress);

}  // namespace ds4
