// Goal: the emulator stops, and says where, when a kernel does what a GPU leaves undefined; that is
// what makes its other tests worth something.
// Method: kernels with one mistake each die with the message for it. What the emulator computes is
// tested in tests/unit/cuda, by tests that hold on a GPU too.
#include "engine/cuda/emulator/emulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/unit/cuda/simt_kernels.h"
#include "tests/unit/cuda_emulator/misuse_kernels.h"

namespace ds4::cuda::testing {
namespace {

using ::testing::Each;

class EmulatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(UseDevice(0).ok());
    stream_ = std::move(Stream::Create()).value();
    launch_.stream = &stream_;
  }
  void Run(Misuse misuse) {
    alignas(16) static std::byte data[4096];
    LaunchMisuse(launch_, misuse, data);
  }
  Stream stream_;
  LaunchContext launch_;
};

using EmulatorDeathTest = EmulatorTest;

// Which kernel, which block, which thread.
TEST_F(EmulatorDeathTest, AThreadThatDoesNotWaitForTheKernelBefore) {
  EXPECT_DEATH(
      Run(Misuse::kNoDependencyWait),
      "ended without GridDependencyWait.*\n.*misuse_kernels.cu:[0-9]+, block \\(0, 0, 0\\) "
      "of \\(2, 1, 1\\), thread \\(5, 0, 0\\) of \\(64, 1, 1\\)");
}

TEST_F(EmulatorDeathTest, ALaneThatEndsWhileOthersExchange) {
  EXPECT_DEATH(Run(Misuse::kLaneMissing),
               "thread \\(0, 0, 0\\) waits in __shfl_xor_sync at .*simt.h:[0-9]+\n"
               "  thread \\(7, 0, 0\\) has ended\n"
               "  thread \\(8, 0, 0\\) waits");
}

TEST_F(EmulatorDeathTest, DifferentWarpOperationsMeet) {
  EXPECT_DEATH(Run(Misuse::kTwoOperationsMeet),
               "__shfl_sync at .*misuse_kernels.cu:[0-9]+ meets other lanes of its warp in "
               "__syncwarp");
}

TEST_F(EmulatorDeathTest, DifferentBarriersMeet) {
  EXPECT_DEATH(Run(Misuse::kTwoBarriersMeet),
               "__syncthreads at .*:[0-9]+ meets threads in the one at .*:[0-9]+");
}

TEST_F(EmulatorDeathTest, AThreadThatNeverComesToTheBarrier) {
  EXPECT_DEATH(Run(Misuse::kThreadMissing),
               "waits in __syncthreads at .*\n  thread \\(63, 0, 0\\) has ended");
  EXPECT_DEATH(Run(Misuse::kWarpAndBlockBarrier), "waits in __syncwarp");
}

TEST_F(EmulatorDeathTest, BarriersOfPartsOfABlock) {
  EXPECT_DEATH(Run(Misuse::kBarrierOfTooMany), "SyncThreads with such a number or so many threads");
  EXPECT_DEATH(Run(Misuse::kBarrierOfHalfWarps), "SyncThreads without some lanes of a warp");
}

TEST_F(EmulatorDeathTest, BulkCopiesThatDoNotCome) {
  EXPECT_DEATH(Run(Misuse::kBulkOfOtherSize), "WaitBulk for other bytes than are copied");
  EXPECT_DEATH(Run(Misuse::kBulkOfNobody), "WaitBulk for copies that nobody asks for");
}

TEST_F(EmulatorDeathTest, WarpsThatAreNotWhole) {
  EXPECT_DEATH(Run(Misuse::kPartOfAWarp), "\\(48, 1, 1\\) threads is no whole number of warps");
  EXPECT_DEATH(Run(Misuse::kPartOfTheMask), "without the full mask");
}

TEST_F(EmulatorDeathTest, AddressesThatAreNotAligned) {
  EXPECT_DEATH(Run(Misuse::kUnalignedCopy), "CopyAsync16 from an address that is not 16-byte");
  EXPECT_DEATH(Run(Misuse::kUnalignedLoad), "16-byte load that is not");
  EXPECT_DEATH(Run(Misuse::kUnalignedMatrixRow),
               "matrix row that is not .*\n.*thread \\(1, 0, 0\\)");
}

#if defined(__SANITIZE_ADDRESS__)
TEST_F(EmulatorDeathTest, AddressSanitizerSeesKernels) {
  const DeviceBuffer data = std::move(DeviceBuffer::Allocate(128)).value();
  uint32_t out = 0;
  EXPECT_DEATH(LaunchReadAt(launch_, data.as<uint32_t>(), 32, false, &out), "heap-buffer-overflow");
  EXPECT_DEATH(LaunchReadAt(launch_, data.as<uint32_t>(), 16, true, &out), "heap-buffer-overflow");
}
#endif

TEST_F(EmulatorTest, ReadingTooEarlyGivesNaNs) {
  std::vector<uint32_t> data(32), out(96);
  std::iota(data.begin(), data.end(), 100);
  const DeviceBuffer on_device = std::move(DeviceBuffer::Allocate(128)).value();
  ASSERT_TRUE(stream_.CopyToDevice(on_device.data(), data.data(), 128).ok());
  LaunchLookEarly(launch_, on_device.as<uint32_t>(), out.data());
  const auto part = [&](int i) {
    return std::vector<uint32_t>(out.begin() + 32 * i, out.begin() + 32 * (i + 1));
  };
  EXPECT_THAT(part(0), Each(0xffffffffu)) << "shared memory that nobody wrote";
  EXPECT_THAT(part(1), Each(0xffffffffu)) << "a copy that nobody waited for";
  EXPECT_EQ(part(2), data);
}

// Two ranks in one process launch at the same time, each from its own thread.
TEST_F(EmulatorTest, LaunchesFromSeveralThreads) {
  constexpr int kValues = 256;
  std::atomic<int> right{0};
  {
    std::vector<std::jthread> threads;
    for (int id = 0; id < 4; ++id) {
      threads.emplace_back([id, &right] {
        if (!UseDevice(0).ok()) return;
        Stream stream = std::move(Stream::Create()).value();
        LaunchContext launch;
        launch.stream = &stream;
        std::vector<float> x(kValues), out(kValues);
        std::iota(x.begin(), x.end(), static_cast<float>(1000 * id));
        for (int round = 0; round < 50; ++round) {
          LaunchReverse(launch, x.data(), 1, 2048, out.data());
          if (std::vector<float>(out.rbegin(), out.rend()) == x) ++right;
        }
      });
    }
  }
  EXPECT_EQ(right, 4 * 50);
}

}  // namespace
}  // namespace ds4::cuda::testing
