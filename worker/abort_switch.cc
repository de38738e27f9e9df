#include "worker/abort_switch.h"

namespace ds4 {

void AbortSwitch::Trip(uint64_t before_ticket, Status why) {
  std::lock_guard lock(mutex_);
  if (before_ticket <= before_ticket_) return;
  before_ticket_ = before_ticket;
  why_ = std::move(why);
  if (group_ticket_ >= before_ticket_) return;
  join_stop_.request_stop();
  // Under the lock, so that Disarm cannot return while the communicator is still in use here.
  if (comm_ != nullptr) comm_->Abort(why_);
}

Status AbortSwitch::BeginJoin(uint64_t ticket, std::stop_source stop) {
  std::lock_guard lock(mutex_);
  group_ticket_ = ticket;
  join_stop_ = std::move(stop);
  return ticket < before_ticket_ ? why_ : OkStatus();
}

Status AbortSwitch::Arm(Communicator* comm) {
  std::lock_guard lock(mutex_);
  comm_ = comm;
  if (group_ticket_ >= before_ticket_) return OkStatus();
  comm_->Abort(why_);
  return why_;
}

void AbortSwitch::Disarm() {
  std::lock_guard lock(mutex_);
  comm_ = nullptr;
  join_stop_ = std::stop_source(std::nostopstate);
}

Status AbortSwitch::Check(uint64_t ticket) const {
  std::lock_guard lock(mutex_);
  return ticket < before_ticket_ ? why_ : OkStatus();
}

}  // namespace ds4
