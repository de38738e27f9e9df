// The suite of tests/support/transport_suite.h over the transports of engine/comm.
#include "engine/comm/local_transport.h"
#include "tests/support/tcp_group.h"
#include "tests/support/transport_suite.h"

namespace ds4 {
namespace {

INSTANTIATE_TEST_SUITE_P(Local, TransportTest,
                         testing::Values(TransportKind{"local", MakeLocalTransports}));
INSTANTIATE_TEST_SUITE_P(Tcp, TransportTest,
                         testing::Values(TransportKind{"tcp", MakeTcpTransports}));

// Rank 2 is silent; rank 1 waits for it, rank 0 only for rank 1. Both errors name rank 2.
TEST(TcpTransportTest, ARankThatLeavesTellsItsPeersTheFirstCause) {
  auto transports = MakeTcpTransports(3);
  const auto now = std::chrono::steady_clock::now();
  std::vector<std::byte> data(100);
  const RecvOp from_silent{2, data};
  std::jthread rank1([&] {
    const Status status =
        transports[1]->Exchange(1, {}, {&from_silent, 1}, now + std::chrono::milliseconds(200));
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  });
  std::vector<std::byte> other(100);
  const RecvOp from_rank1{1, other};
  const Status status =
      transports[0]->Exchange(1, {}, {&from_rank1, 1}, now + std::chrono::seconds(10));
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), testing::StartsWith("lost rank 1 ("));
  EXPECT_THAT(status.message(), testing::ContainsRegex("it left the group: .*waiting for rank 2"));
}

}  // namespace
}  // namespace ds4
