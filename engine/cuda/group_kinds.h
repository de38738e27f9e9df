// The transports behind DeviceGroup, and what they share. For device_group.cc and the transports'
// own files.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/device_group.h"

namespace ds4::cuda {

// A group that remembers why it was chosen.
class TransportGroup : public DeviceGroup {
 public:
  virtual std::string Name() const = 0;  // "push over peer memory"
  void set_note(std::string note) { note_ = std::move(note); }
  std::string Describe() const final { return note_.empty() ? Name() : Name() + " " + note_; }

 private:
  std::string note_;
};

// All are collective; all ranks get a group or all get an error, the same one.
using CreateGroup = Result<std::unique_ptr<TransportGroup>>(Communicator* comm, Stream& stream,
                                                            const DeviceGroup::Options& options);
CreateGroup CreatePushGroup;  // push_group.cc
CreateGroup CreateNcclGroup;  // nccl_group.cc, or no_nccl_group.cc without its header
CreateGroup CreateHostGroup;  // host_group.cc

// OK when `mine` is OK on all ranks, else the error of the first rank that has one, the same on
// every rank: "rank 1: why". Every rank calls it, whatever happened to it, so nobody waits for a
// rank that gave up.
Status AgreeOnStatus(Communicator* comm, const Status& mine);

inline int64_t RoundUpTo(int64_t n, int64_t grain) { return (n + grain - 1) / grain * grain; }

// kInvalidArgument unless `mine` and `bytes` can be gathered.
Status CheckMessage(const void* mine, int64_t bytes, int64_t max_bytes);

// The first reason why a group ended; OK before. Thread-safe.
class FirstError {
 public:
  Status Get() const {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  // Keeps an earlier one. Returns the one that counts.
  Status Set(Status status) {
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
    return status_;
  }

 private:
  mutable std::mutex mutex_;
  Status status_;
};

// Receive buffers of the transports in which only this rank's own stream writes: two generations
// used in turn.
class ReceiveBuffers {
 public:
  static Result<ReceiveBuffers> Allocate(int world_size, int64_t max_bytes);
  // Where the next gather puts rank 0's bytes; the others' follow, `bytes` apart.
  std::byte* Next(int64_t bytes);
  const std::byte* Gathered(int rank) const { return last_ + rank * last_bytes_; }
  void Restart() { generation_ = 0; }

 private:
  DeviceBuffer buffer_;
  int64_t generation_bytes_ = 0;
  int generation_ = 0;  // of the next gather
  std::byte* last_ = nullptr;
  int64_t last_bytes_ = 0;
};

// p50 of one gather of `bytes`, microseconds, the slowest rank's; the same value on all ranks.
// Collective. Graph-safe kinds: inside a graph, a few hundred gathers. Leaves no gather open.
Result<double> MeasureGather(Communicator* comm, Stream& stream, DeviceGroup& group, int64_t bytes);

}  // namespace ds4::cuda
