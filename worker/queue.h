// A bounded first-in, first-out queue whose waits have deadlines.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace ds4 {

// Thread-safe. After Close nothing goes in; what is inside can still be taken out.
template <typename T>
class BoundedQueue {
 public:
  enum class PushResult { kPushed, kFull, kClosed };

  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // Waits up to `timeout` for room.
  PushResult Push(T item, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const bool woken =
        changed_.wait_for(lock, timeout, [&] { return closed_ || items_.size() < capacity_; });
    if (closed_) return PushResult::kClosed;
    if (!woken) return PushResult::kFull;
    items_.push_back(std::move(item));
    changed_.notify_all();
    return PushResult::kPushed;
  }

  // The next item; nothing once the queue is closed and empty. Waits without a limit of its own:
  // the owner closes the queue to end it.
  std::optional<T> Pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    T item = std::move(items_.front());
    items_.pop_front();
    changed_.notify_all();
    return item;
  }

  void Close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // Close, and drop what has not been taken out.
  void CloseAndClear() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    items_.clear();
    changed_.notify_all();
  }

 private:
  const size_t capacity_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> items_;  // guarded by mutex_
  bool closed_ = false;  // guarded by mutex_
};

}  // namespace ds4
