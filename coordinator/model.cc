#include "coordinator/model.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/base/strings.h"
#include "engine/model/synthetic.h"

namespace ds4 {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{256} << 20;

}  // namespace

Result<Model> OpenModel(const std::string& path) {
  Model model;
  ASSIGN_OR_RETURN(model.file, GgufFile::Open(path));
  ASSIGN_OR_RETURN(model.config, ReadModelConfig(*model.file));
  return model;
}

Result<Model> OpenSyntheticModel(const std::string& preset, const std::string& quant,
                                 int64_t num_layers) {
  Model model;
  ASSIGN_OR_RETURN(model.file, MakeSyntheticFile(preset, quant, num_layers));
  ASSIGN_OR_RETURN(model.config, ReadModelConfig(*model.file));
  return model;
}

Result<std::unique_ptr<Tokenizer>> OpenTokenizer(const Model& model) {
  ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer, Tokenizer::FromGguf(*model.file));
  if (tokenizer->vocab_size() > model.config.vocab_size) {
    return InvalidArgumentError(StrCat(model.file->path(), ": the tokeniser has ",
                                       tokenizer->vocab_size(), " tokens, the model only ",
                                       model.config.vocab_size));
  }
  return tokenizer;
}

Result<ShardPlan> PlanShards(const Model& model, int num_ranks) {
  const int num_lanes = model.config.num_lanes;
  if (num_ranks < 1 || num_ranks > num_lanes) {
    return InvalidArgumentError(
        StrCat("this model can be split over 1 to ", num_lanes, " ranks, asked for ", num_ranks));
  }
  return MakeShardPlan(model.config, *model.file, LaneLayout::Even(num_lanes, num_ranks));
}

Result<std::string> ReadTextFile(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) return NotFoundError(StrCat("cannot read ", path, ": ", error.message()));
  if (static_cast<int64_t>(size) > kMaxTextBytes) {
    return ResourceExhaustedError(
        StrCat(path, " has ", size, " bytes, the limit is ", kMaxTextBytes));
  }
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    return NotFoundError(StrCat("cannot read all ", size, " bytes of ", path));
  }
  return text;
}

}  // namespace ds4
