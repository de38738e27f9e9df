// Lets other threads end what the rank's thread is waiting for.
//
// Commands carry rising tickets. Trip(n, why) says: whatever belongs to commands before ticket n is
// to end with `why`, be it running, waiting in a collective, or still in the queue. Commands from n
// on are untouched, so that a group formed by command n cannot be hurt by the end of the one
// before.
#pragma once

#include <cstdint>
#include <mutex>
#include <stop_token>

#include "engine/base/status.h"
#include "engine/comm/communicator.h"

namespace ds4 {

// Thread-safe.
class AbortSwitch {
 public:
  // Any thread. The first reason for a ticket stays.
  void Trip(uint64_t before_ticket, Status why);

  // Rank thread: the command with this ticket forms a group. Returns the reason when it is to end
  // already. `stop` then ends its connecting.
  Status BeginJoin(uint64_t ticket, std::stop_source stop);
  // Rank thread: from now on Trip aborts `comm`, which must stay alive until Disarm. Returns the
  // reason when the group is to end already.
  Status Arm(Communicator* comm);
  void Disarm();

  // The reason why the command with this ticket is to end, or OK.
  Status Check(uint64_t ticket) const;

 private:
  mutable std::mutex mutex_;
  // All guarded by mutex_.
  uint64_t before_ticket_ = 0;
  Status why_;
  uint64_t group_ticket_ = 0;
  std::stop_source join_stop_{std::nostopstate};
  Communicator* comm_ = nullptr;
};

}  // namespace ds4
