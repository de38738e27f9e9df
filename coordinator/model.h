// The model file as the coordinator needs it: its directory, its hyper-parameters, its tokeniser.
// The weights are the workers' business.
#pragma once

#include <memory>
#include <string>

#include "engine/gguf/gguf_reader.h"
#include "engine/model/model_config.h"
#include "engine/shard/shard_plan.h"
#include "engine/tokenizer/tokenizer.h"

namespace ds4 {

struct Model {
  std::unique_ptr<GgufFile> file;
  ModelConfig config;
};

// Errors of GgufFile::Open and ReadModelConfig.
Result<Model> OpenModel(const std::string& path);
// A model without data; its path() names it and is its digest too.
Result<Model> OpenSyntheticModel(const std::string& preset, const std::string& quant,
                                 int64_t num_layers);
// The file's tokeniser; kInvalidArgument when it has more tokens than the model.
Result<std::unique_ptr<Tokenizer>> OpenTokenizer(const Model& model);
// Lanes split evenly over `num_ranks`; kInvalidArgument when there are more ranks than lanes.
Result<ShardPlan> PlanShards(const Model& model, int num_ranks);
// The whole file (up to 256 MiB); kNotFound, kResourceExhausted.
Result<std::string> ReadTextFile(const std::string& path);

}  // namespace ds4
