// Goal: what a worker says about its machine can be used by others: an address that they can dial,
// a port file that is never half written, a queue that never waits for ever. Method: this machine's
// own values, checked for sense rather than for fixed numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "worker/host_info.h"
#include "worker/port_file.h"
#include "worker/queue.h"

namespace ds4 {
namespace {

using ::testing::HasSubstr;

TEST(HostInfo, KnowsThisMachine) {
  EXPECT_FALSE(HostName().empty());
  EXPECT_GE(UsableCores(), 1);
  EXPECT_LE(UsableCores(), static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_GT(FreeMemoryBytes(), int64_t{1} << 20);
}

TEST(HostInfo, ACallerFromThisHostReachesUsOnLoopback) {
  EXPECT_EQ(AddressTowards("ipv4:127.0.0.1:5555"), "127.0.0.1");
}

TEST(HostInfo, TheHostNameStandsInWhereThePeerTellsNothing) {
  for (const char* peer : {"", "unix:/tmp/socket", "ipv4:", "ipv4:not-an-address:1", "inproc"}) {
    EXPECT_EQ(AddressTowards(peer), HostName()) << peer;
  }
}

TEST(HostInfo, TellsAddressKindsApart) {
  EXPECT_TRUE(IsLoopback("127.0.0.1"));
  EXPECT_TRUE(IsLoopback("localhost"));
  EXPECT_TRUE(IsLoopback("::1"));
  EXPECT_FALSE(IsLoopback("10.0.0.1"));
  EXPECT_TRUE(IsWildcard("0.0.0.0"));
  EXPECT_TRUE(IsWildcard("::"));
  EXPECT_FALSE(IsWildcard("10.0.0.1"));
}

TEST(PortFile, HoldsOneLineAndLeavesNothingElse) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "ds4_port_file_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  const std::string path = (folder / "ports").string();
  ASSERT_TRUE(WritePortFile(path, 9911, 40123).ok());
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, "9911 40123");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  std::filesystem::remove_all(folder);
}

TEST(PortFile, AFolderThatIsNotThereIsAnError) {
  const Status status = WritePortFile("/no/such/folder/ports", 1, 2);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("--port-file /no/such/folder/ports"));
}

using IntQueue = BoundedQueue<int>;
constexpr std::chrono::milliseconds kNoWait{0};

TEST(BoundedQueue, KeepsOrderAndItsBound) {
  IntQueue queue(2);
  EXPECT_EQ(queue.Push(1, kNoWait), IntQueue::PushResult::kPushed);
  EXPECT_EQ(queue.Push(2, kNoWait), IntQueue::PushResult::kPushed);
  EXPECT_EQ(queue.Push(3, std::chrono::milliseconds(5)), IntQueue::PushResult::kFull);
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_EQ(queue.Pop(), 2);
}

TEST(BoundedQueue, AfterCloseItIsEmptiedButTakesNothing) {
  IntQueue queue(2);
  ASSERT_EQ(queue.Push(1, kNoWait), IntQueue::PushResult::kPushed);
  queue.Close();
  EXPECT_EQ(queue.Push(2, kNoWait), IntQueue::PushResult::kClosed);
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_EQ(queue.Pop(), std::nullopt);
}

TEST(BoundedQueue, CloseEndsAWaitOnBothSides) {
  IntQueue empty(1);
  IntQueue full(1);
  ASSERT_EQ(full.Push(1, kNoWait), IntQueue::PushResult::kPushed);
  std::jthread closer([&] {
    empty.Close();
    full.CloseAndClear();
  });
  EXPECT_EQ(empty.Pop(), std::nullopt);
  EXPECT_EQ(full.Push(2, std::chrono::seconds(10)), IntQueue::PushResult::kClosed);
  EXPECT_EQ(full.Pop(), std::nullopt);
}

}  // namespace
}  // namespace ds4
