// The collectives over any transport: which messages go where, and the additions.
//
//   full exchange: every rank sends all its roots to every other and adds everything itself; one
//     hop, for messages where latency counts
//   reduce-scatter and all-gather: rank r adds columns [count*r/N, count*(r+1)/N) for all, then
//     sends that sum to everyone; two hops, 1/N of the bytes and additions
// Both add the same values in the same order (lane_tree.h), so the choice changes no bit.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/comm/transport.h"

namespace ds4 {

class ExchangeCommunicator : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout{10'000};
  // Largest message of a full exchange: with three or more ranks all send to one link at once.
  static constexpr int64_t kFullExchangeBytes = 16 << 10;
  static constexpr int64_t kFullExchangeBytesOfTwo = 256 << 10;

  ExchangeCommunicator(std::unique_ptr<Transport> transport, LaneLayout layout);

  int rank() const override { return transport_->rank(); }
  int world_size() const override { return transport_->world_size(); }
  const LaneLayout& lanes() const override { return layout_; }

  Status AllReduceLanes(std::span<const float> roots, std::span<float> out) override;
  Status AllGather(std::span<const std::byte> mine, std::span<std::byte> all) override;
  Status Broadcast(int root, std::span<std::byte> data) override;
  Status Barrier() override;

  void set_site(int layer, const char* what) override;
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  double wait_seconds() const override;
  void Abort(Status why) override { transport_->Abort(std::move(why)); }

 private:
  using Clock = std::chrono::steady_clock;

  // Columns that `rank` adds in a reduce-scatter.
  int64_t ChunkBegin(int rank, int64_t count) const { return count * rank / world_size(); }
  int64_t ChunkSize(int rank, int64_t count) const {
    return ChunkBegin(rank + 1, count) - ChunkBegin(rank, count);
  }
  bool UsesFullExchange(int64_t count) const;

  // Opens a collective: the first error of the past, or OK and a fresh deadline.
  Status Begin();
  // Sends and receives what stands in sends_ and recvs_, and empties both.
  Status Exchange();

  void QueueAllRoots(std::span<const float> roots, int64_t count);
  void QueueChunks(std::span<const float> roots, int64_t count);
  // Room for the roots of all ranks over n columns: block of rank r at first_root_[r] * n.
  void QueueReceivedRoots(int64_t n);
  // out[n] = the sum of own roots (columns [first, first + n) of `count`) and the received ones.
  void AddReceived(std::span<const float> roots, int64_t count, int64_t first, int64_t n,
                   float* out);
  Status GatherChunks(std::span<float> out);

  std::string Site() const;

  const std::unique_ptr<Transport> transport_;
  const LaneLayout layout_;
  std::vector<int64_t> first_root_;  // [world_size + 1] where each rank's roots begin in lane order
  int64_t max_roots_ = 0;            // of any rank

  std::chrono::milliseconds timeout_ = kDefaultTimeout;
  Clock::time_point deadline_;
  Clock::duration waited_{};
  uint64_t sequence_ = 0;
  int site_layer_ = -1;
  const char* site_what_ = "";
  Status broken_;

  // Reused, so that a decode step allocates nothing.
  std::vector<SendOp> sends_;
  std::vector<RecvOp> recvs_;
  std::vector<float> received_;
  std::vector<float> packed_;
  std::vector<const float*> root_ptrs_;
};

}  // namespace ds4
