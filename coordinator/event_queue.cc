#include "coordinator/rank_client.h"

namespace ds4 {
namespace {

// How soon a wait sees that it should stop: signal handlers cannot wake a condition variable.
constexpr milliseconds kAskEvery{50};

}  // namespace

bool EventQueue::Push(RankEvent event) {
  {
    std::lock_guard lock(mutex_);
    if (events_.size() >= kMaxEvents && !event.ended) return false;
    events_.push_back(std::move(event));
  }
  not_empty_.notify_one();
  return true;
}

std::optional<RankEvent> EventQueue::Pop(TimePoint deadline, const std::function<bool()>& stop) {
  std::unique_lock lock(mutex_);
  while (events_.empty()) {
    const TimePoint now = Now();
    if (now >= deadline) return std::nullopt;
    not_empty_.wait_until(lock, std::min(deadline, now + kAskEvery));
    if (events_.empty() && stop()) return std::nullopt;
  }
  RankEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace ds4
