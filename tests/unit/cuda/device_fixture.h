// A test with device 0, a stream on it, and copies between vectors and device memory.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "engine/cuda/launch.h"
#include "engine/cuda/runtime.h"

namespace ds4::cuda::testing {

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Status used = UseDevice(0);
    ASSERT_TRUE(used.ok()) << used.ToString();
    Result<Stream> made = Stream::Create();
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    stream = std::move(made).value();
    launch.stream = &stream;
    launch.num_sms = 4;
  }
  void TearDown() override { Finish(); }

  // Waits; every launch and copy so far must have worked.
  void Finish() {
    const Status launched = LaunchStatus();
    EXPECT_TRUE(launched.ok()) << launched.ToString();
    const Status done = stream.Synchronize(std::chrono::minutes(1));
    EXPECT_TRUE(done.ok()) << done.ToString();
  }
  DeviceBuffer Zeros(size_t bytes) {
    Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(static_cast<int64_t>(bytes));
    EXPECT_TRUE(buffer.ok()) << buffer.status().ToString();
    return std::move(buffer).value();
  }
  template <typename T>
  DeviceBuffer ToDevice(const std::vector<T>& values) {
    DeviceBuffer buffer = Zeros(values.size() * sizeof(T));
    const Status copied = stream.CopyToDevice(buffer.data(), values.data(), buffer.size());
    EXPECT_TRUE(copied.ok()) << copied.ToString();
    return buffer;
  }
  // All of `buffer`, after the stream's work so far.
  template <typename T>
  std::vector<T> ToHost(const DeviceBuffer& buffer) {
    std::vector<T> values(static_cast<size_t>(buffer.size()) / sizeof(T));
    const Status copied = stream.CopyToHost(values.data(), buffer.data(), buffer.size());
    EXPECT_TRUE(copied.ok()) << copied.ToString();
    Finish();
    return values;
  }

  Stream stream;
  LaunchContext launch;
};

}  // namespace ds4::cuda::testing
