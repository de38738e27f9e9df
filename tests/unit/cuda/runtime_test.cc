// Goal: runtime.h keeps its promises on a GPU and on the emulator.
// Method: every call once as it is meant, once as it fails; counts and bytes, never times.
#include "engine/cuda/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/unit/cuda/device_fixture.h"
#include "tests/unit/cuda/simt_kernels.h"

namespace ds4::cuda::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class RuntimeTest : public DeviceTest {
 protected:
  // Adds one step (x = 3 x + 1) to the stream.
  void Step(const DeviceBuffer& x) {
    LaunchStep(launch, x.as<uint32_t>(), static_cast<int>(x.size() / 4));
  }
};

TEST_F(RuntimeTest, DevicesSayWhatTheyAre) {
  const Result<std::vector<DeviceInfo>> devices = ListDevices();
  ASSERT_TRUE(devices.ok()) << devices.status().ToString();
  ASSERT_FALSE(devices->empty());
  const DeviceInfo& info = devices->front();
  EXPECT_EQ(info.index, 0);
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.compute_capability, 80);
  EXPECT_GT(info.num_sms, 0);
  EXPECT_GT(info.total_bytes, 0);
  EXPECT_GT(info.free_bytes, 0);
  EXPECT_LE(info.free_bytes, info.total_bytes);
}

TEST_F(RuntimeTest, ADeviceThatIsNotThere) {
  EXPECT_EQ(UseDevice(1000).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(UseDevice(0).ok());
}

TEST_F(RuntimeTest, MemoryStartsAsZeros) {
  for (int round = 0; round < 2; ++round) {
    const DeviceBuffer buffer = Zeros(3001);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
    EXPECT_THAT(ToHost<uint8_t>(buffer), Each(0)) << "round " << round;
    ASSERT_TRUE(stream.Fill(buffer.data(), 0xab, buffer.size()).ok());
    EXPECT_THAT(ToHost<uint8_t>(buffer), Each(0xab));
  }
}

TEST_F(RuntimeTest, TooMuchMemoryIsRefused) {
  const Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(int64_t{1} << 50);
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(buffer.status().message(), HasSubstr("1125899906842624"));
  EXPECT_EQ(DeviceBuffer::Allocate(-1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PinnedBuffer::Allocate(-1).status().code(), StatusCode::kInvalidArgument);
  Step(Zeros(64));  // nothing is broken by it
  Finish();
}

TEST_F(RuntimeTest, BuffersMove) {
  DeviceBuffer one = Zeros(16);
  const std::byte* data = one.data();
  DeviceBuffer two = std::move(one);
  EXPECT_EQ(two.data(), data);
  EXPECT_EQ(two.size(), 16);
  DeviceBuffer three = Zeros(32);
  three = std::move(two);
  EXPECT_EQ(three.data(), data);
}

TEST_F(RuntimeTest, CopiesOfAllKinds) {
  std::vector<int> values(1000);
  std::iota(values.begin(), values.end(), 5);
  const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(int));
  Result<PinnedBuffer> pinned = PinnedBuffer::Allocate(bytes);
  ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
  std::memcpy(pinned->data(), values.data(), static_cast<size_t>(bytes));
  const DeviceBuffer first = Zeros(values.size() * 4), second = Zeros(values.size() * 4);
  ASSERT_TRUE(stream.CopyToDevice(first.data(), pinned->data(), bytes).ok());
  ASSERT_TRUE(stream.CopyOnDevice(second.data(), first.data(), bytes).ok());
  EXPECT_EQ(ToHost<int>(second), values);
  // Part of it, back into pinned memory.
  ASSERT_TRUE(stream.CopyToHost(pinned->data(), second.as<int>() + 10, 4).ok());
  Finish();
  EXPECT_EQ(*pinned->as<int>(), 15);
  EXPECT_TRUE(stream.CopyToHost(nullptr, second.data(), 0).ok());
  EXPECT_EQ(stream.CopyToHost(pinned->data(), second.data(), -1).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(RuntimeTest, KernelsReachPinnedMemory) {
  Result<PinnedBuffer> pinned = PinnedBuffer::Allocate(400);
  ASSERT_TRUE(pinned.ok()) << pinned.status().ToString();
  LaunchStep(launch, pinned->as<uint32_t>(), 100);
  Finish();
  EXPECT_THAT(std::vector<uint32_t>(pinned->as<uint32_t>(), pinned->as<uint32_t>() + 100),
              Each(1u));
}

TEST_F(RuntimeTest, EventsMeasureTheStream) {
  Result<Event> start = Event::Create(), end = Event::Create();
  ASSERT_TRUE(start.ok() && end.ok());
  EXPECT_FALSE(end->MillisecondsSince(*start).ok()) << "not recorded yet";
  const DeviceBuffer x = Zeros(4000);
  ASSERT_TRUE(start->Record(stream).ok());
  for (int i = 0; i < 10; ++i) Step(x);
  ASSERT_TRUE(end->Record(stream).ok());
  ASSERT_TRUE(end->Wait(std::chrono::seconds(10)).ok());
  const Result<bool> done = end->Done();
  ASSERT_TRUE(done.ok()) << done.status().ToString();
  EXPECT_TRUE(*done);
  const Result<float> ms = end->MillisecondsSince(*start);
  ASSERT_TRUE(ms.ok()) << ms.status().ToString();
  EXPECT_GT(*ms, 0);
}

TEST_F(RuntimeTest, AGraphReplaysLaunchesAndCopies) {
  const DeviceBuffer x = Zeros(1000), copy = Zeros(1000);
  Step(x);  // warm-up: x = 1
  Finish();
  Result<Graph> graph = Graph::Capture(stream, [&] {
    Step(x);
    RETURN_IF_ERROR(stream.CopyOnDevice(copy.data(), x.data(), x.size()));
    Step(x);
    return OkStatus();
  });
  ASSERT_TRUE(graph.ok()) << graph.status().ToString();
  EXPECT_FALSE(graph->empty());
  EXPECT_THAT(ToHost<uint32_t>(x), Each(1u)) << "a capture runs nothing";
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(graph->Launch(stream).ok());
  // 1 -> 4 -> 13 -> 40 -> 121 -> 364 -> 1093; the copy is one step behind.
  EXPECT_THAT(ToHost<uint32_t>(x), Each(1093u));
  EXPECT_THAT(ToHost<uint32_t>(copy), Each(364u));
  // Work outside of the graph goes on as before.
  Step(x);
  EXPECT_THAT(ToHost<uint32_t>(x), Each(3280u));
}

TEST_F(RuntimeTest, AFailedCaptureLeavesTheStreamUsable) {
  const DeviceBuffer x = Zeros(1000);
  const Result<Graph> graph = Graph::Capture(stream, [&] {
    Step(x);
    return AbortedError("by the caller");
  });
  ASSERT_FALSE(graph.ok());
  EXPECT_EQ(graph.status(), AbortedError("by the caller"));
  EXPECT_THAT(ToHost<uint32_t>(x), Each(0u));
  Step(x);
  EXPECT_THAT(ToHost<uint32_t>(x), Each(1u));
}

TEST_F(RuntimeTest, ACaptureDoesNotTakeABadLaunch) {
  const Result<Graph> graph = Graph::Capture(stream, [&] {
    LaunchNothing(launch, 2048, 0);
    return OkStatus();
  });
  EXPECT_FALSE(graph.ok());
  EXPECT_THAT(graph.status().message(), HasSubstr("2048"));
  EXPECT_TRUE(LaunchStatus().ok());
}

TEST_F(RuntimeTest, EmptyThingsAreRefused) {
  Graph graph;
  EXPECT_TRUE(graph.empty());
  EXPECT_EQ(graph.Launch(stream).code(), StatusCode::kFailedPrecondition);
  Stream none;
  EXPECT_EQ(none.Synchronize().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(none.Fill(nullptr, 0, 1).code(), StatusCode::kFailedPrecondition);
  Event event;
  EXPECT_EQ(event.Record(stream).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(event.Done().status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(RuntimeTest, ALaunchThatCannotBeIsReportedOnce) {
  LaunchNothing(launch, 2048, 0);
  const Status threads = LaunchStatus();
  EXPECT_EQ(threads.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(threads.message(), HasSubstr("2048"));
  EXPECT_TRUE(LaunchStatus().ok());
  LaunchNothing(launch, 32, 1000000);
  const Status shared = LaunchStatus();
  EXPECT_EQ(shared.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(shared.message(), HasSubstr("1000000"));
  const DeviceBuffer x = Zeros(64);
  Step(x);
  EXPECT_THAT(ToHost<uint32_t>(x), Each(1u));
}

}  // namespace
}  // namespace ds4::cuda::testing
