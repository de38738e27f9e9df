// Exchange between the GPUs of one group, on the device's stream, graph-safe.
//
// Made from the host Communicator (which carries ids and handles between ranks). Transports, chosen
// by a probe at start: "push" (peers' buffers mapped into this device: each rank writes its vectors
// into every peer's slot, raises a flag, waits for the others' flags), "nccl" (all-gather), "host"
// (through pinned memory and the host Communicator; not graph-safe). Results never depend on it.
//
// Ranks that share one device (tests): the process needs CUDA_MODULE_LOADING=EAGER, because loading
// a kernel late may wait for a peer's kernel that waits for this rank.
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
    // push: messages up to this size carry their flags in every word, which takes one way over the
    // link instead of three, and twice the bytes.
    int64_t flagged_bytes = 64 << 10;
    // Longest wait of one gather for its peers, and of each step of Create.
    std::chrono::milliseconds timeout{10000};
  };
  // Collective. `comm` and `stream` outlive it, graphs with its gathers end before it. World size 1
  // gives a group that does nothing: Gathered(0) is `mine` itself. kAuto: the fastest graph-safe
  // kind that all ranks can use, else host. A kind asked for by name that cannot be: an error that
  // names the ranks and the reason, the same one on every rank. Device memory taken: push 3 *
  // world_size * max_bytes, the others 2 * world_size * max_bytes.
  static Result<std::unique_ptr<DeviceGroup>> Create(Communicator* comm, Stream& stream,
                                                     const Options& options);
  virtual ~DeviceGroup() = default;

  // Puts on the stream: all ranks' `bytes` bytes at `mine` (device) become readable on this device
  // at Gathered(r), valid until the second next AllGather or the next EvenUp, whichever comes first
  // on the stream. bytes a multiple of 16, equal on all ranks; `mine` 16-byte aligned. Readers use
  // plain loads after GridDependencyWait (peers wrote it: not LoadStream16, not CopyAsync16
  // before).
  virtual Status AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) = 0;
  // Of the last AllGather call; 16-byte aligned. Constant for the same place in a step (see
  // EvenUp), so it may be baked into a graph.
  virtual const std::byte* Gathered(int rank) const = 0;

  // Ends a step: call it as the last thing of every captured graph, and after eager gathers before
  // the next graph is captured or launched. The slots begin again with the first one, so that every
  // graph bakes the same slots that its replay finds free (at most one exchange without data is
  // added for that). Collective, in the order of the gathers.
  virtual Status EvenUp(const LaunchContext& launch) = 0;

  virtual bool graph_safe() const = 0;
  // First failure seen by the device or the transport: kDeadlineExceeded / kUnavailable naming the
  // rank waited for. Once broken it stays so, kernels in flight end within the timeout. What a step
  // computed counts only when this is OK after it: gathers of a broken group return stale bytes.
  // Any thread.
  virtual Status CheckHealth() = 0;
  // Any thread.
  virtual void Abort(Status why) = 0;
  virtual std::string Describe()
      const = 0;  // "push over peer memory (3.4 us for 16 KiB; nccl 16 us)"
};

// "auto", "push", "nccl", "host".
const char* DeviceGroupKindName(DeviceGroup::Kind kind);

}  // namespace ds4::cuda
