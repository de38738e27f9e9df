// The host transport: through pinned memory and the host Communicator. Works everywhere; every
// gather waits for the stream, so it cannot be in a graph.
#include <memory>
#include <utility>

#include "engine/cuda/group_kinds.h"

namespace ds4::cuda {
namespace {

class HostGroup : public TransportGroup {
 public:
  HostGroup(Communicator* comm, const Options& options) : comm_(*comm), options_(options) {}

  Status Allocate();

  Status AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) override;
  const std::byte* Gathered(int rank) const override { return received_.Gathered(rank); }
  Status EvenUp(const LaunchContext&) override {
    received_.Restart();
    return CheckHealth();
  }
  bool graph_safe() const override { return false; }
  Status CheckHealth() override { return error_.Get(); }
  // Breaks the Communicator too: a gather in flight waits inside of it.
  void Abort(Status why) override { comm_.Abort(error_.Set(std::move(why))); }
  std::string Name() const override { return "host, through pinned memory"; }

 private:
  Status Exchange(Stream& stream, const void* mine, int64_t bytes);

  Communicator& comm_;
  const Options options_;
  PinnedBuffer sent_;  // [max_bytes]
  PinnedBuffer all_;   // [world_size][max_bytes]
  ReceiveBuffers received_;
  FirstError error_;
};

Status HostGroup::Allocate() {
  const int world_size = comm_.world_size();
  ASSIGN_OR_RETURN(sent_, PinnedBuffer::Allocate(options_.max_bytes));
  ASSIGN_OR_RETURN(all_, PinnedBuffer::Allocate(world_size * options_.max_bytes));
  ASSIGN_OR_RETURN(received_, ReceiveBuffers::Allocate(world_size, options_.max_bytes));
  return OkStatus();
}

Status HostGroup::AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) {
  RETURN_IF_ERROR(CheckHealth());
  RETURN_IF_ERROR(CheckMessage(mine, bytes, options_.max_bytes));
  if (Status status = Exchange(*launch.stream, mine, bytes); !status.ok()) {
    return error_.Set(std::move(status));
  }
  return OkStatus();
}

// The stream's wait also covers the last gather's copy out of `all_`.
Status HostGroup::Exchange(Stream& stream, const void* mine, int64_t bytes) {
  const int64_t all_bytes = comm_.world_size() * bytes;
  RETURN_IF_ERROR(stream.CopyToHost(sent_.data(), mine, bytes));
  RETURN_IF_ERROR(stream.Synchronize(options_.timeout));
  RETURN_IF_ERROR(comm_.AllGather(std::span(sent_.data(), static_cast<size_t>(bytes)),
                                  std::span(all_.data(), static_cast<size_t>(all_bytes))));
  return stream.CopyToDevice(received_.Next(bytes), all_.data(), all_bytes);
}

}  // namespace

Result<std::unique_ptr<TransportGroup>> CreateHostGroup(Communicator* comm, Stream&,
                                                        const DeviceGroup::Options& options) {
  auto group = std::make_unique<HostGroup>(comm, options);
  RETURN_IF_ERROR(AgreeOnStatus(comm, group->Allocate()));
  return std::unique_ptr<TransportGroup>(std::move(group));
}

}  // namespace ds4::cuda
