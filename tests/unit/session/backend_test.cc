// Goal: an engine of another kind is reached through the one Load, or the error says what the build
// lacks. Method: a factory that only notes what it was asked for.

#include "engine/session/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/comm/local_transport.h"
#include "engine/comm/transport.h"
#include "engine/model/model_config.h"

namespace ds4 {
namespace {

using testing::HasSubstr;

std::unique_ptr<Communicator> SingleRank() {
  return MakeExchangeCommunicator(std::move(MakeLocalTransports(1)[0]), LaneLayout::Even(8, 1));
}

Result<std::unique_ptr<Engine>> Noting(const EngineOptions& options, Communicator* comm,
                                       const Engine::LoadProgress&) {
  return UnavailableError("device " + std::to_string(options.device) + " of rank " +
                          std::to_string(comm->rank()) + " was asked");
}

// One test, because what is registered stays so for the whole program.
TEST(BackendTest, LoadAsksTheRegisteredEngineOrSaysWhatIsMissing) {
  const auto comm = SingleRank();
  EngineOptions options;
  options.backend = Backend::kCuda;
  options.device = 3;
  const Status missing = Engine::Load(options, comm.get(), nullptr).status();
  EXPECT_EQ(missing.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(missing.message(), HasSubstr("has no CUDA engine"));
  EXPECT_THAT(missing.message(), HasSubstr("--backend cpu"));

  RegisterBackend(Backend::kCuda, &Noting);
  const Status asked = Engine::Load(options, comm.get(), nullptr).status();
  EXPECT_EQ(asked.message(), "device 3 of rank 0 was asked");
}

TEST(BackendTest, NamesAreReadAsTheyAreWritten) {
  EXPECT_EQ(ParseBackend("cpu").value(), Backend::kCpu);
  EXPECT_EQ(ParseBackend("cuda").value(), Backend::kCuda);
  EXPECT_EQ(BackendName(Backend::kCuda), "cuda");
  EXPECT_THAT(ParseBackend("gpu").status().message(), HasSubstr("\"gpu\" is no backend"));
}

TEST(EngineOptionsTest, ADeviceTakesMoreRowsAtOnce) {
  EXPECT_EQ(DefaultBatchRows(Backend::kCpu), 512);
  EXPECT_EQ(DefaultBatchRows(Backend::kCuda), 2048);
}

TEST(EngineOptionsTest, ReplicatedWeightsHaveNames) {
  for (const auto weights :
       {ReplicatedWeights::kAuto, ReplicatedWeights::kFile, ReplicatedWeights::kQ8_0}) {
    EXPECT_EQ(ParseReplicatedWeights(ReplicatedWeightsName(weights)).value(), weights);
  }
  EXPECT_THAT(ParseReplicatedWeights("f16").status().message(),
              HasSubstr("\"f16\" is no type of replicated weights, must be auto, file or q8_0"));
}

TEST(EngineOptionsTest, ASyntheticModelStandsInForAFile) {
  EngineOptions options;
  options.synthetic = "tiny";
  options.quant = "q4";
  options.synthetic_layers = 3;
  const auto file = OpenEngineModel(options).value();
  EXPECT_EQ(ReadModelConfig(*file).value().num_layers, 3);
  options.synthetic.clear();
  options.model_path = "/no/such/file.gguf";
  EXPECT_THAT(OpenEngineModel(options).status().message(), HasSubstr("/no/such/file.gguf"));
}

TEST(EngineOptionsTest, TheCpuEngineRefusesWhatOnlyADeviceDoes) {
  const auto comm = SingleRank();
  EngineOptions options;
  options.synthetic = "tiny";
  options.quant = "q8";
  options.expert_memory = ExpertMemory::kHost;
  EXPECT_THAT(Engine::Load(options, comm.get(), nullptr).status().message(),
              HasSubstr("expert memory host"));
  options.expert_memory = ExpertMemory::kDevice;
  options.device_transport = "push";
  EXPECT_THAT(Engine::Load(options, comm.get(), nullptr).status().message(),
              HasSubstr("device transport is push"));
  options.device_transport = "auto";
  options.replicated_weights = ReplicatedWeights::kQ8_0;
  EXPECT_THAT(Engine::Load(options, comm.get(), nullptr).status().message(),
              HasSubstr("replicated weights q8_0"));
}

}  // namespace
}  // namespace ds4
