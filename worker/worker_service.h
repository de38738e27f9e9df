// The worker's gRPC server: check, convert, enqueue; no tensors. Serves one coordinator at a time,
// and answers grpc.health.v1.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/base/status.h"
#include "worker/parts.h"

namespace ds4 {

struct StreamTimeouts;

// Thread-safe.
class WorkerServer {
 public:
  // Listens on host:port (port 0: any free one) and serves from now on. kUnavailable: the address
  // is taken or not ours. `timeouts` null: the defaults.
  static Result<std::unique_ptr<WorkerServer>> Start(const std::string& host, uint16_t port,
                                                     WorkerParts parts, WorkerInfo info,
                                                     const StreamTimeouts* timeouts = nullptr);
  ~WorkerServer();  // Shutdown, with kCancelled
  WorkerServer(const WorkerServer&) = delete;
  WorkerServer& operator=(const WorkerServer&) = delete;

  uint16_t port() const;

  // Takes no more streams, tells the coordinator `why`, leaves its group, frees the weights. What
  // is not done within `grace` is cancelled. Harmless when repeated.
  void Shutdown(const Status& why, std::chrono::milliseconds grace);

 private:
  struct Impl;
  explicit WorkerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds4
