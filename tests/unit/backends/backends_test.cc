// Goal: a backend is chosen by what was asked for and what is there, and never silently another.
// Method: this build's own engines; what depends on the machine is compared with what it says.

#include "engine/backends/backends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ds4 {
namespace {

using testing::HasSubstr;

TEST(BackendsTest, TheCpuIsAlwaysThere) {
  RegisterBuiltBackends();
  EXPECT_EQ(ChooseBackend("cpu", 0).value().backend, Backend::kCpu);
  EXPECT_EQ(ChooseBackend("cpu", 7).value().backend, Backend::kCpu);  // it has no devices to count
}

TEST(BackendsTest, AutoIsCudaExactlyWhereADeviceIs) {
  RegisterBuiltBackends();
  const auto devices = CudaDevices();
  const BackendChoice choice = ChooseBackend("auto", 0).value();
  if (devices.ok() && !devices->empty()) {
    EXPECT_EQ(choice.backend, Backend::kCuda);
    EXPECT_THAT(choice.why, HasSubstr((*devices)[0].text));
  } else {
    EXPECT_EQ(choice.backend, Backend::kCpu);
    EXPECT_THAT(choice.why, HasSubstr("because --backend is auto and "));
  }
}

TEST(BackendsTest, WhatIsNotThereIsAnError) {
  RegisterBuiltBackends();
  EXPECT_THAT(ChooseBackend("metal", 0).status().message(), HasSubstr("\"metal\" is no backend"));
  EXPECT_FALSE(ChooseBackend("cuda", 4096).ok());
  const auto devices = CudaDevices();
  if (!devices.ok()) {
    EXPECT_EQ(ChooseBackend("cuda", 0).status(), devices.status());
  }
}

}  // namespace
}  // namespace ds4
