// A whole group inside this process: one engine for each rank, each on its own thread, over local
// transports. Steps run on all ranks at once, as a coordinator would have them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/local_transport.h"
#include "engine/comm/transport.h"
#include "engine/session/engine.h"

namespace ds4 {

class EngineGroup {
 public:
  // Wraps a rank's transport, to let it fail; may return its argument.
  using Wrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

  EngineGroup(EngineOptions options, int world_size, const Wrap& wrap = nullptr)
      : comms_(world_size), engines_(world_size), load_status_(world_size) {
    std::vector<std::unique_ptr<Transport>> transports = MakeLocalTransports(world_size);
    const LaneLayout layout = LaneLayout::Even(8, world_size);
    OnAll([&](int rank) {
      std::unique_ptr<Transport> transport = std::move(transports[rank]);
      if (wrap) transport = wrap(std::move(transport));
      comms_[rank] = MakeExchangeCommunicator(std::move(transport), layout);
      auto engine = Engine::Load(options, comms_[rank].get(), nullptr);
      load_status_[rank] = engine.status();
      if (engine.ok()) engines_[rank] = std::move(engine).value();
    });
  }

  int world_size() const { return static_cast<int>(engines_.size()); }
  Engine& engine(int rank) { return *engines_[rank]; }
  Communicator& comm(int rank) { return *comms_[rank]; }
  const Status& load_status(int rank) const { return load_status_[rank]; }

  // Calls body(rank) on a thread for each rank and waits for all.
  void OnAll(const std::function<void(int rank)>& body) {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < world_size(); ++rank) ranks.emplace_back([&, rank] { body(rank); });
  }

  std::vector<Result<StepResult>> RunAll(const StepPlan& plan,
                                         const Engine::TokenCallback& on_token = nullptr) {
    std::vector<Result<StepResult>> results(world_size(), CancelledError("did not run"));
    OnAll([&](int rank) {
      results[rank] = engines_[rank]->Run(plan, rank == 0 ? on_token : nullptr);
    });
    return results;
  }

 private:
  std::vector<std::unique_ptr<Communicator>> comms_;  // outlive the engines
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<Status> load_status_;
};

}  // namespace ds4
