// Exchange between the GPUs of one group, on the device's stream, graph-safe.
//
// Made from the host Communicator (which carries ids and handles between ranks). Transports, chosen
// by a probe at start: "push" (peers' buffers mapped into this device: each rank writes its vectors
// into every peer's slot, raises a flag, waits for the others' flags), "nccl" (all-gather), "host"
// (through pinned memory and the host Communicator; not graph-safe). Results never depend on it.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "engine/comm/communicator.h"
#include "engine/cuda/launch.h"

namespace ds4::cuda {

class DeviceGroup {
 public:
  enum class Kind { kAuto, kPush, kNccl, kHost };
  struct Options {
    Kind kind = Kind::kAuto;
    int64_t max_bytes = 0;  // largest message of one rank
    std::chrono::milliseconds timeout{10000};
  };
  // Collective. `comm` outlives it. World size 1 gives a group that does nothing.
  static Result<std::unique_ptr<DeviceGroup>> Create(Communicator* comm, Stream& stream,
                                                     const Options& options);
  virtual ~DeviceGroup() = default;

  // Puts on the stream: all ranks' `bytes` bytes at `mine` (device) become readable on this device
  // at Gathered(r), valid until the second next AllGather. bytes a multiple of 16.
  virtual Status AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) = 0;
  virtual const std::byte* Gathered(int rank) const = 0;

  virtual bool graph_safe() const = 0;
  // First failure seen by the device or the transport: kDeadlineExceeded / kUnavailable naming the
  // rank waited for. Once broken it stays so, kernels in flight end within the timeout.
  virtual Status CheckHealth() = 0;
  virtual void Abort(Status why) = 0;
  virtual std::string Describe() const = 0;  // "push over peer memory (3.4 us for 16 KiB; nccl 16 us)"
};

}  // namespace ds4::cuda
