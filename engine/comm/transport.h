// One exchange of messages with peers; each transport (local, tcp, grpc) implements this, and
// ExchangeCommunicator builds the collectives on top, so that their additions are the same for all.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "engine/base/status.h"
#include "engine/comm/communicator.h"

namespace ds4 {

struct SendOp {
  int peer = 0;
  std::span<const std::byte> data;
};
struct RecvOp {
  int peer = 0;
  std::span<std::byte> data;
};

// Thread: as Communicator.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string name() const = 0;               // "local", "tcp", "grpc"
  virtual std::string peer_name(int peer) const = 0;  // "rank 2 (10.0.0.3:9911)"

  // Starts all sends and receives at once and returns when all are done. `sequence` goes into every
  // frame; a frame with another sequence or size is kInternal with both values. At most one send
  // and one receive per peer and call. kDeadlineExceeded, kUnavailable name the peers not done yet.
  virtual Status Exchange(uint64_t sequence, std::span<const SendOp> sends,
                          std::span<const RecvOp> recvs,
                          std::chrono::steady_clock::time_point deadline) = 0;
  // Any thread: makes an Exchange in flight and all later ones return `why`.
  virtual void Abort(Status why) = 0;
};

// The collectives over any transport. layout.world_size() == transport->world_size() (CHECK).
std::unique_ptr<Communicator> MakeExchangeCommunicator(std::unique_ptr<Transport> transport,
                                                       LaneLayout layout);

}  // namespace ds4
