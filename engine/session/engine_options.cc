#include "engine/session/engine_options.h"

#include <array>

#include "engine/base/check.h"
#include "engine/base/strings.h"
#include "engine/model/synthetic.h"

namespace ds4 {
namespace {

constexpr std::array<std::string_view, 2> kBackendNames = {"cpu", "cuda"};
static_assert(kBackendNames.size() == static_cast<size_t>(Backend::kCount));
constexpr std::array<std::string_view, 3> kReplicatedWeightsNames = {"auto", "file", "q8_0"};

}  // namespace

std::string_view BackendName(Backend backend) {
  CHECK(backend < Backend::kCount) << static_cast<int>(backend);
  return kBackendNames[static_cast<size_t>(backend)];
}

Result<Backend> ParseBackend(std::string_view text) {
  for (size_t i = 0; i < kBackendNames.size(); ++i) {
    if (text == kBackendNames[i]) return static_cast<Backend>(i);
  }
  return InvalidArgumentError(StrCat("\"", text, "\" is no backend, must be cpu or cuda"));
}

// A device decodes all its weights for the tensor cores in every pass: many rows share that work.
int64_t DefaultBatchRows(Backend backend) { return backend == Backend::kCuda ? 2048 : 512; }

std::string_view ReplicatedWeightsName(ReplicatedWeights weights) {
  const auto index = static_cast<size_t>(weights);
  CHECK(index < kReplicatedWeightsNames.size()) << index;
  return kReplicatedWeightsNames[index];
}

Result<ReplicatedWeights> ParseReplicatedWeights(std::string_view text) {
  for (size_t i = 0; i < kReplicatedWeightsNames.size(); ++i) {
    if (text == kReplicatedWeightsNames[i]) return static_cast<ReplicatedWeights>(i);
  }
  return InvalidArgumentError(
      StrCat("\"", text, "\" is no type of replicated weights, must be auto, file or q8_0"));
}

Result<std::unique_ptr<GgufFile>> OpenEngineModel(const EngineOptions& options) {
  if (options.synthetic.empty()) return GgufFile::Open(options.model_path);
  return MakeSyntheticFile(options.synthetic, options.quant, options.synthetic_layers);
}

}  // namespace ds4
