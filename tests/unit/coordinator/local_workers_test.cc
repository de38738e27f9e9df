// Goal: GPUs are counted by what the worker program says, and whatever goes wrong with asking is an
// error in words. Method: shell scripts in place of the program.
#include "coordinator/local_workers.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <fstream>

namespace ds4 {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Script(const std::string& name, const std::string& body) {
  const std::string path = testing::TempDir() + "ds4-" + name + ".sh";
  std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
  EXPECT_EQ(chmod(path.c_str(), 0700), 0);
  return path;
}

constexpr milliseconds kPatience{10000};

TEST(CountGpusTest, CountsTheLinesThatNameADevice) {
  const std::string two = Script("two",
                                 "test \"$1\" = --list-devices || exit 9\n"
                                 "echo 'device 0: NVIDIA H200, 139.8 GiB of memory'\n"
                                 "echo 'a word of the driver' >&2\n"
                                 "echo 'device 1: NVIDIA H200, 139.8 GiB of memory'");
  EXPECT_EQ(CountGpus(two, kPatience).value(), 2);
}

TEST(CountGpusTest, NoneIsAnErrorWithTheWorkersWords) {
  const Status status =
      CountGpus(Script("none", "echo 'no devices: no driver'"), kPatience).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("no devices: no driver"));
}

TEST(CountGpusTest, AProgramThatFailsOrHangsIsNamed) {
  const Status failed =
      CountGpus(Script("fails", "echo 'device 0: x'; exit 3"), kPatience).status();
  EXPECT_EQ(failed.code(), StatusCode::kUnavailable);
  EXPECT_THAT(failed.message(), AllOf(HasSubstr("exited with code 3"), HasSubstr("device 0: x")));
  const Status hangs = CountGpus(Script("hangs", "exec sleep 60"), milliseconds(200)).status();
  EXPECT_EQ(hangs.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(hangs.message(), HasSubstr("did not answer in time"));
  EXPECT_EQ(CountGpus("/no/such/ds4-worker", kPatience).status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ds4
