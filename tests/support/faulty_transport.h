// A transport that goes wrong at a seeded place: the tests' way to a broken link.
#pragma once

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "engine/base/strings.h"
#include "engine/comm/transport.h"

namespace ds4 {

enum class FaultKind { kNone, kFail, kStall, kWrongSequence };

struct FaultPlan {
  uint32_t seed = 1;
  FaultKind kind = FaultKind::kNone;
  int64_t fault_within = 1;      // the fault comes at a random exchange in [0, fault_within)
  double delay_probability = 0;  // of each exchange, at any time
  std::chrono::microseconds max_delay{0};
};

// Thread: as Transport.
class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan), rng_(plan.seed) {
    fault_at_ = std::uniform_int_distribution<int64_t>(0, plan_.fault_within - 1)(rng_);
  }

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return "faulty " + inner_->name(); }
  std::string peer_name(int peer) const override { return inner_->peer_name(peer); }
  void Abort(Status why) override { inner_->Abort(std::move(why)); }

  Status Exchange(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs,
                  std::chrono::steady_clock::time_point deadline) override {
    MaybeDelay();
    const bool is_faulty = num_exchanges_++ == fault_at_;
    if (is_faulty && plan_.kind == FaultKind::kFail) {
      const Status why = UnavailableError(StrCat("injected fault at exchange ", fault_at_));
      inner_->Abort(why);
      return why;
    }
    if (is_faulty && plan_.kind == FaultKind::kStall) {
      std::this_thread::sleep_until(deadline + std::chrono::milliseconds(50));
    }
    if (is_faulty && plan_.kind == FaultKind::kWrongSequence) ++sequence;
    return inner_->Exchange(sequence, sends, recvs, deadline);
  }

  int64_t fault_at() const { return fault_at_; }

 private:
  void MaybeDelay() {
    if (!std::bernoulli_distribution(plan_.delay_probability)(rng_)) return;
    std::uniform_int_distribution<int64_t> delay_us(0, plan_.max_delay.count());
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us(rng_)));
  }

  const std::unique_ptr<Transport> inner_;
  const FaultPlan plan_;
  std::mt19937 rng_;
  int64_t fault_at_ = 0;
  int64_t num_exchanges_ = 0;
};

}  // namespace ds4
