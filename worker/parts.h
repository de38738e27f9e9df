// What a worker is made of, as functions: the real ones are in node.cc, the fakes in the tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "engine/base/status.h"
#include "engine/comm/transport.h"
#include "engine/session/engine.h"
#include "worker/commands.h"

namespace ds4 {

using EngineFactory = std::function<Result<std::unique_ptr<Engine>>(
    const EngineOptions& options, Communicator* comm, const Engine::LoadProgress& progress)>;

// Connects with all peers of the group within spec.join_timeout; kDeadlineExceeded names the
// missing ones. Ends early when a stop is asked for. Transport grpc is added by worker_service.
using TransportFactory =
    std::function<Result<std::unique_ptr<Transport>>(const GroupSpec& spec, std::stop_token stop)>;

// Digest of the plan that this worker makes from its own file for this layout.
using PlanDigestFunction = std::function<Result<std::string>(const LaneLayout& lanes)>;

struct WorkerParts {
  EngineFactory load_engine;
  TransportFactory connect;
  PlanDigestFunction plan_digest;
};

// What this worker is, for the hello; fixed after start.
struct WorkerInfo {
  std::string host;  // name of this machine
  std::string model_path;
  std::string model_digest;
  int64_t model_bytes = 0;
  int64_t max_context = 0;     // of one session
  int64_t max_batch_rows = 0;  // of one forward pass
  std::string backend = "cpu";
  std::string kernel_isa;      // of the CPU; "cuda" with that backend
  std::string arithmetic;      // hello.arithmetic: what else must be equal on all ranks
  int64_t device_bytes = 0;    // free on the device at start; 0: weights live in host memory
  bool uses_host_too = false;  // experts live in host memory
  int num_threads = 1;
  std::string advertise_host;  // where peers reach the data plane; empty: the address that the
                               // coordinator reached us at
  uint16_t data_port = 0;
};

}  // namespace ds4
