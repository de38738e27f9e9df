#include "engine/kernels/thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "engine/base/check.h"

namespace ds4 {
namespace {

// Above zero while this thread runs a task of any pool.
thread_local int task_depth = 0;

struct DepthGuard {
  DepthGuard() { ++task_depth; }
  ~DepthGuard() { --task_depth; }
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A decode step has hundreds of short regions one after the other: who spins this long before it
// sleeps meets the next one without a call to the system. Not with more threads than cores: there
// the spinning thread would keep the core from the one it waits for.
constexpr std::chrono::microseconds kSpin(40);

template <class Ready>
bool SpinUntil(bool may_spin, Ready ready) {
  if (ready()) return true;
  if (!may_spin) return false;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (true) {
    for (int i = 0; i < 64; ++i) {
      Pause();
      if (ready()) return true;
    }
    if (std::chrono::steady_clock::now() > end) return false;
  }
}

}  // namespace

// One region at a time. The caller writes task, rows and chunk, sets `pending` to the number of
// workers and then raises `generation`; each worker runs its own range once for each generation and
// lowers `pending`. No new generation starts before `pending` is 0, so a worker can neither take a
// task twice nor miss one.
//
// Sleeping: a thread counts itself in under the mutex and then looks once more at what it waits
// for; the other side changes that first and then looks at the count. Both in the single order of
// seq_cst, so one of them sees the other and no wake-up is lost. A region ends when its function
// does: there is no peer to lose here, so the waits have no deadline.
struct ThreadPool::Impl {
  explicit Impl(int threads)
      : num_threads(threads),
        may_spin(threads <= static_cast<int>(std::thread::hardware_concurrency())) {
    for (int i = 1; i < threads; ++i) workers.emplace_back([this, i] { Work(i); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void Run(int64_t total, const std::function<void(int64_t, int64_t)>& fn) {
    task = &fn;
    rows = total;
    chunk = (total + num_threads - 1) / num_threads;
    pending.store(num_threads - 1, std::memory_order_relaxed);
    generation.fetch_add(1);
    if (sleepers.load() > 0) {
      { std::lock_guard lock(mutex); }
      wake.notify_all();
    }
    RunRange(0);
    const auto all_done = [this] { return pending.load() == 0; };
    if (SpinUntil(may_spin, all_done)) return;
    std::unique_lock lock(mutex);
    caller_sleeps.store(true);
    while (!all_done()) done.wait(lock);
    caller_sleeps.store(false);
  }

  void RunRange(int index) {
    const int64_t begin = index * chunk;
    const int64_t end = begin + chunk < rows ? begin + chunk : rows;
    if (begin >= end) return;
    DepthGuard guard;
    (*task)(begin, end);
  }

  void Work(int index) {
    uint64_t seen = 0;
    while (true) {
      const auto called = [&] { return generation.load() != seen || stop.load(); };
      if (!SpinUntil(may_spin, called)) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        while (!called()) wake.wait(lock);
        sleepers.fetch_sub(1);
      }
      if (generation.load() == seen) return;  // stop, and no task left
      ++seen;
      RunRange(index);
      if (pending.fetch_sub(1) == 1 && caller_sleeps.load()) {
        { std::lock_guard lock(mutex); }
        done.notify_one();
      }
    }
  }

  const int num_threads;
  const bool may_spin;

  // Written by the caller between regions, read by workers after they saw the new generation.
  const std::function<void(int64_t, int64_t)>* task = nullptr;
  int64_t rows = 0;
  int64_t chunk = 0;

  alignas(64) std::atomic<uint64_t> generation{0};
  alignas(64) std::atomic<int> pending{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};

  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(int num_threads) {
  CHECK(num_threads >= 1) << "a pool of " << num_threads << " threads";
  impl_ = std::make_unique<Impl>(num_threads);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return impl_->num_threads; }

void ThreadPool::ParallelFor(int64_t rows, int64_t min_parallel_rows,
                             const std::function<void(int64_t begin, int64_t end)>& fn) {
  if (rows <= 0) return;
  if (impl_->num_threads == 1 || rows == 1 || rows < min_parallel_rows || task_depth > 0) {
    DepthGuard guard;
    fn(0, rows);
    return;
  }
  impl_->Run(rows, fn);
}

}  // namespace ds4
