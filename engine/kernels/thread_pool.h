// A fixed set of threads that split row ranges. The caller works too; nested calls run serially.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace ds4 {

// Thread-compatible: one thread at a time calls ParallelFor (the rank's own thread); the function
// it passes runs on all of them.
class ThreadPool {
 public:
  // num_threads counts the caller; 1 means no extra thread. Must be at least 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls fn(begin, end) on disjoint ranges of ceil(rows / threads) rows that cover [0, rows), and
  // returns when all are done. Below `min_parallel_rows` rows, or inside another ParallelFor, the
  // caller does everything alone. Results must not depend on the split.
  void ParallelFor(int64_t rows, int64_t min_parallel_rows,
                   const std::function<void(int64_t begin, int64_t end)>& fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ds4
