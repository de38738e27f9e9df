// Goal: each row of each region runs exactly once, whatever the sizes, and nested calls stay on
// their thread. Method: ten thousand random regions that count their visits; run under TSan as
// well.
#include "engine/kernels/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, EveryRowRunsOnceInTenThousandRegions) {
  Random random(11);
  ThreadPool pool(GetParam());
  std::vector<int> visits;  // plain ints: two threads on one row would be a race for TSan to see
  for (int region = 0; region < 10000; ++region) {
    const int64_t rows = random.Int(0, 70);
    visits.assign(static_cast<size_t>(rows), 0);
    pool.ParallelFor(rows, random.Int(0, 40), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) ++visits[static_cast<size_t>(r)];
    });
    for (const int count : visits) ASSERT_EQ(count, 1) << "region " << region;
  }
}

// Pauses long enough for the workers to fall asleep, and regions right after one another.
TEST_P(ThreadPoolTest, SleepingWorkersMissNothing) {
  Random random(12);
  ThreadPool pool(GetParam());
  int64_t total = 0, expected = 0;
  for (int burst = 0; burst < 40; ++burst) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.Int(0, 400)));
    for (int i = 0; i < 25; ++i) {
      std::atomic<int64_t> sum = 0;
      pool.ParallelFor(100, 1, [&](int64_t begin, int64_t end) {
        if (begin > 0 && i == 0) std::this_thread::sleep_for(std::chrono::microseconds(120));
        sum += end - begin;
      });
      total += sum;
      expected += 100;
    }
  }
  EXPECT_EQ(total, expected);
}

TEST_P(ThreadPoolTest, SplitsIntoRangesOfCeilRowsByThreads) {
  ThreadPool pool(GetParam());
  for (int64_t rows = 2; rows < 30; ++rows) {
    std::mutex mutex;
    std::set<std::pair<int64_t, int64_t>> ranges;
    pool.ParallelFor(rows, 1, [&](int64_t begin, int64_t end) {
      std::lock_guard lock(mutex);
      ranges.insert({begin, end});
    });
    std::set<std::pair<int64_t, int64_t>> expected;
    const int64_t chunk = (rows + GetParam() - 1) / GetParam();
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      expected.insert({begin, std::min(rows, begin + chunk)});
    }
    EXPECT_EQ(ranges, expected) << rows << " rows";
  }
}

TEST_P(ThreadPoolTest, NestedCallsRunOnTheSameThread) {
  ThreadPool pool(GetParam()), other(GetParam());
  std::atomic<int> inner_calls = 0;
  pool.ParallelFor(8, 1, [&](int64_t begin, int64_t end) {
    const std::thread::id self = std::this_thread::get_id();
    for (int64_t r = begin; r < end; ++r) {
      for (ThreadPool* inner : {&pool, &other}) {
        inner->ParallelFor(1000, 1, [&](int64_t inner_begin, int64_t inner_end) {
          EXPECT_EQ(std::this_thread::get_id(), self);
          EXPECT_EQ(inner_begin, 0);
          EXPECT_EQ(inner_end, 1000);
          ++inner_calls;
        });
      }
    }
  });
  EXPECT_EQ(inner_calls, 16);
}

TEST_P(ThreadPoolTest, SmallWorkStaysWithTheCaller) {
  ThreadPool pool(GetParam());
  const std::thread::id self = std::this_thread::get_id();
  int calls = 0;
  pool.ParallelFor(99, 100, [&](int64_t begin, int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    EXPECT_EQ(end - begin, 99);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
  pool.ParallelFor(0, 0, [&](int64_t, int64_t) { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST_P(ThreadPoolTest, AnIdlePoolEndsAtOnce) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool pool(GetParam());
    EXPECT_EQ(pool.num_threads(), GetParam());
    if (i % 2 == 0) pool.ParallelFor(10, 1, [](int64_t, int64_t) {});
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace ds4
