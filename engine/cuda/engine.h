// The engine of one rank on one GPU: the same plans and sessions as the CPU's, other kernels.
//
// A plan's parts of up to kFewPartRows rows (decode, verification) run together through the few-row
// kernels, whose results do not depend on the batch; longer parts (prefill) through the many-row
// kernels. So what a part computes depends on the part alone. Tokens are chosen on the device.
// Decoding is queued: a captured graph is one step, it leaves the token where the next one reads
// it, and the host reads records as they come, a few steps behind. Stopping early needs no undoing:
// sessions are set back by position.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "engine/cuda/transformer.h"
#include "engine/session/engine.h"
#include "engine/session/token_chooser.h"

namespace ds4::cuda {

inline constexpr int kFewPartRows = 16;

class CudaEngine : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> Load(const EngineOptions& options, Communicator* comm,
                                              const LoadProgress& progress);
  ~CudaEngine() override;

  Status OpenSession(uint64_t session_id, int64_t max_context) override;
  Status CloseSession(uint64_t session_id) override;
  Result<StepResult> Run(const StepPlan& plan, const TokenCallback& on_token) override;
  Result<uint64_t> StateHash(uint64_t session_id) override;
  const EngineStats& stats() const override { return stats_; }

 private:
  struct Session {
    int slot = 0;
    SessionPosition position;
  };
  // A row of a pass on the host.
  struct Row {
    int32_t token = 0;
    int32_t pos = 0;
    int32_t slot = -1;
  };
  // A part that sampled a token and may run further rows.
  struct Running {
    int32_t part = 0;
    Session* session = nullptr;
    int32_t token = 0;
  };
  struct Draw {
    int32_t part = 0;
    int32_t row = 0;  // of the pass
  };
  struct GraphKey {
    int rows = 0;
    int64_t max_pos = 0;
    bool draws = false;  // some row has a temperature
    auto operator<=>(const GraphKey&) const = default;
  };

  CudaEngine(const EngineOptions& options, Communicator* comm) : options_(options), comm_(comm) {}
  Status LoadModel(const LoadProgress& progress);
  int64_t ExchangeBytes() const;
  Status PlanMemory(const DeviceInfo& device, const GgufFile& file);
  Session& SessionOf(const StepPart& part) { return sessions_.at(part.session_id); }

  // Rows to the device, then one pass.
  Status Forward(const std::vector<Row>& rows, bool many);
  Status SetRows(const std::vector<Row>& rows, int padded);
  // Scores and draws of the rows that the last pass computed.
  Status Score(const StepPlan& plan, const std::vector<int>& parts, StepResult& result);
  Status Sample(const StepPlan& plan, const std::vector<Draw>& draws, int pass_rows,
                StepResult& result, const TokenCallback& on_token, std::vector<Running>& running);
  Status FetchLogits(const std::vector<int32_t>& rows, int pass_rows);
  // Chooses the tokens of the last pass's rows that `draws` names, one record each.
  Result<const TokenRecord*> ChooseTokens(const StepPlan& plan, std::span<const Draw> draws,
                                          int pass_rows);
  // Draw parameters of some parts to the device; whether any has a temperature.
  Result<bool> SetDraws(const StepPlan& plan, const std::vector<int32_t>& parts, int padded);
  DecodeQueue Queue() const;
  // A drawn token to the result and the callback; kInternal when its logit is no number.
  Status Emit(const StepPlan& plan, int32_t part, const TokenRecord& record, StepResult& result,
              const TokenCallback& on_token, TokenOutput& output);

  Status RunParts(const StepPlan& plan, const std::vector<int>& parts, bool many,
                  StepResult& result, const TokenCallback& on_token, std::vector<Running>& running);
  Status DecodeByHost(const StepPlan& plan, int32_t steps, StepResult& result,
                      const TokenCallback& on_token, std::vector<Running>& running);
  Status DecodeQueued(const StepPlan& plan, int32_t steps, StepResult& result,
                      const TokenCallback& on_token, std::vector<Running>& running);
  Result<Graph*> GraphFor(const GraphKey& wanted);
  Status WaitForRecord(uint32_t step);
  bool CanQueue(const StepPlan& plan, const std::vector<Running>& running) const;

  EngineOptions options_;
  Communicator* comm_;
  ModelConfig config_;
  ShardPlan plan_;
  Stream stream_;
  std::unique_ptr<DeviceGroup> group_;
  DeviceWeights weights_;
  std::unique_ptr<DeviceTransformer> transformer_;
  RankContext context_;
  std::unique_ptr<TokenChooser> chooser_;
  EngineStats stats_;

  std::map<uint64_t, Session> sessions_;
  std::vector<bool> slot_taken_;
  DeviceBuffer row_memory_, draw_memory_;
  StepRows step_;
  int32_t *token_ = nullptr, *pos_ = nullptr, *slot_ = nullptr, *row_index_ = nullptr,
          *identity_ = nullptr;
  uint32_t* step_counter_ = nullptr;
  PinnedBuffer staging_, draw_staging_, host_logits_, records_;
  TokenRecord* record_ = nullptr;
  uint32_t* record_flags_ = nullptr;
  uint32_t steps_launched_ = 0;
  std::map<GraphKey, Graph> graphs_;
};

}  // namespace ds4::cuda
