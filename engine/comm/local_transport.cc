#include "engine/comm/local_transport.h"

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "engine/base/check.h"
#include "engine/comm/exchange_errors.h"

namespace ds4 {
namespace {

using Clock = std::chrono::steady_clock;

// A message that its sender holds out until the receiver has copied it.
struct Offer {
  bool waiting = false;
  uint64_t sequence = 0;
  std::span<const std::byte> data;
};

// What the ranks share. Everything below is guarded by `mutex`.
struct Hub {
  explicit Hub(int world) : world_size(world), offers(world * world), broken(world) {}
  Offer& offer(int from, int to) { return offers[from * world_size + to]; }

  const int world_size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Offer> offers;   // [from][to]
  std::vector<Status> broken;  // why a rank takes no part any more; OK while it does
};

std::string LocalPeerName(int peer) { return PeerName(peer, "local"); }

// One Exchange call of one rank. The hub's mutex is held during every method.
class LocalExchange {
 public:
  LocalExchange(Hub& hub, int rank, uint64_t sequence, std::span<const SendOp> sends,
                std::span<const RecvOp> recvs)
      : hub_(hub),
        rank_(rank),
        sequence_(sequence),
        sends_(sends),
        recvs_(recvs),
        received_(recvs.size(), false) {
    for (const SendOp& send : sends_) hub_.offer(rank_, send.peer) = {true, sequence_, send.data};
    hub_.changed.notify_all();
  }
  // What was not taken must not be read after the caller has its buffers back.
  ~LocalExchange() {
    for (const SendOp& send : sends_) hub_.offer(rank_, send.peer).waiting = false;
  }

  // Copies what has arrived; true in `moved` when anything did.
  Status TakeArrived(bool* moved) {
    for (size_t i = 0; i < recvs_.size(); ++i) {
      Offer& offer = hub_.offer(recvs_[i].peer, rank_);
      if (received_[i] || !offer.waiting) continue;
      RETURN_IF_ERROR(CheckFrame(LocalPeerName(recvs_[i].peer), offer.sequence, offer.data.size(),
                                 sequence_, recvs_[i].data.size()));
      if (!offer.data.empty()) {
        std::memcpy(recvs_[i].data.data(), offer.data.data(), offer.data.size());
      }
      offer.waiting = false;
      received_[i] = true;
      *moved = true;
    }
    return OkStatus();
  }

  // The ranks that have not sent or not taken yet, in rising order.
  std::vector<int> PendingPeers() const {
    std::vector<bool> pending(hub_.world_size, false);
    for (const SendOp& send : sends_) {
      if (hub_.offer(rank_, send.peer).waiting) pending[send.peer] = true;
    }
    for (size_t i = 0; i < recvs_.size(); ++i) {
      if (!received_[i]) pending[recvs_[i].peer] = true;
    }
    std::vector<int> peers;
    for (int peer = 0; peer < hub_.world_size; ++peer) {
      if (pending[peer]) peers.push_back(peer);
    }
    return peers;
  }

 private:
  Hub& hub_;
  const int rank_;
  const uint64_t sequence_;
  const std::span<const SendOp> sends_;
  const std::span<const RecvOp> recvs_;
  std::vector<bool> received_;
};

class LocalTransport : public Transport {
 public:
  LocalTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LocalTransport() override { Abort(UnavailableError("it left the group")); }

  int rank() const override { return rank_; }
  int world_size() const override { return hub_->world_size; }
  std::string name() const override { return "local"; }
  std::string peer_name(int peer) const override { return LocalPeerName(peer); }

  Status Exchange(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs,
                  Clock::time_point deadline) override {
    std::unique_lock lock(hub_->mutex);
    if (!hub_->broken[rank_].ok()) return hub_->broken[rank_];
    const Status status = Run(lock, sequence, sends, recvs, deadline);
    if (!status.ok()) Break(status);
    return status;
  }

  void Abort(Status why) override {
    const std::lock_guard lock(hub_->mutex);
    Break(std::move(why));
  }

 private:
  Status Run(std::unique_lock<std::mutex>& lock, uint64_t sequence, std::span<const SendOp> sends,
             std::span<const RecvOp> recvs, Clock::time_point deadline) {
    LocalExchange exchange(*hub_, rank_, sequence, sends, recvs);
    Clock::time_point last_progress = Clock::now();
    size_t num_pending = 0;
    while (true) {
      bool moved = false;
      RETURN_IF_ERROR(exchange.TakeArrived(&moved));
      if (moved) hub_->changed.notify_all();
      const std::vector<int> pending = exchange.PendingPeers();
      if (pending.empty()) return OkStatus();
      if (pending.size() != num_pending) last_progress = Clock::now();
      num_pending = pending.size();
      if (!hub_->broken[rank_].ok()) return hub_->broken[rank_];
      RETURN_IF_ERROR(CheckAlive(pending));
      if (Clock::now() >= deadline) return NoProgress(pending, last_progress);
      hub_->changed.wait_until(lock, deadline);
    }
  }

  Status CheckAlive(const std::vector<int>& peers) const {
    for (const int peer : peers) {
      const Status& broken = hub_->broken[peer];
      if (!broken.ok()) return LostPeerError(LocalPeerName(peer), broken.message());
    }
    return OkStatus();
  }

  static Status NoProgress(const std::vector<int>& peers, Clock::time_point last_progress) {
    std::vector<std::string> names;
    for (const int peer : peers) names.push_back(LocalPeerName(peer));
    return NoProgressError(Clock::now() - last_progress, names);
  }

  // Keeps the first reason. The hub's mutex is held.
  void Break(Status why) {
    if (hub_->broken[rank_].ok()) hub_->broken[rank_] = std::move(why);
    hub_->changed.notify_all();
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> MakeLocalTransports(int world_size) {
  CHECK(world_size >= 1) << "world_size " << world_size;
  auto hub = std::make_shared<Hub>(world_size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < world_size; ++rank) {
    transports.push_back(std::make_unique<LocalTransport>(hub, rank));
  }
  return transports;
}

}  // namespace ds4
