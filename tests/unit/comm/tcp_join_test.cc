// Goal: a group forms from exactly its own ranks: strays, silent callers and other epochs take no
// slot, and who is missing is said in words. Method: real listeners on loopback; the callers that
// do not belong are plain Asio sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio.hpp>
#include <thread>

#include "engine/base/strings.h"
#include "engine/comm/exchange_communicator.h"
#include "engine/comm/tcp_transport.h"
#include "tests/support/tcp_group.h"

namespace ds4 {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;
namespace asio = boost::asio;

// Connects to `port` on loopback and sends `bytes`.
asio::ip::tcp::socket Call(asio::io_context& io, uint16_t port, const std::string& bytes) {
  asio::ip::tcp::socket socket(io);
  socket.connect({asio::ip::make_address("127.0.0.1"), port});
  asio::write(socket, asio::buffer(bytes));
  return socket;
}

Status Join(TcpListeners& listeners, int rank, uint64_t epoch, milliseconds patience) {
  return ConnectTcpTransport(*listeners.listeners[rank], listeners.Group(rank, epoch, patience))
      .status();
}

TEST(TcpListenerTest, RefusesAHostThatIsNoneAndAPortThatIsTaken) {
  EXPECT_EQ(TcpListener::Listen("no such host", 0).status().code(), StatusCode::kInvalidArgument);
  const auto first = TcpListener::Listen("127.0.0.1", 0);
  ASSERT_TRUE(first.ok());
  const auto second = TcpListener::Listen("127.0.0.1", first.value()->port());
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(std::to_string(first.value()->port())));
}

TEST(TcpJoinTest, StrayAndSilentConnectionsDoNotDisturbTheJoin) {
  TcpListeners listeners(3);
  asio::io_context io;
  std::vector<asio::ip::tcp::socket> strays;
  for (int rank = 0; rank < 3; ++rank) {
    const uint16_t port = listeners.listeners[rank]->port();
    strays.push_back(Call(io, port, "GET / HTTP/1.1\r\nHost: someone\r\nAccept: */*\r\n\r\n"));
    strays.push_back(Call(io, port, ""));     // says nothing and stays
    strays.push_back(Call(io, port, "DS4"));  // half a hello
    Call(io, port, "");                       // gone at once
  }
  const auto start = std::chrono::steady_clock::now();
  auto transports = JoinAll(listeners, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(900));
  std::vector<std::jthread> threads;
  for (auto& transport : transports) {
    threads.emplace_back([&transport] {
      auto comm = MakeExchangeCommunicator(std::move(transport), LaneLayout::Even(8, 3));
      EXPECT_TRUE(comm->Barrier().ok());
    });
  }
}

TEST(TcpJoinTest, EveryMissingRankIsListedWithItsAddressAndWhy) {
  TcpListeners listeners(4);
  const uint16_t closed_port = listeners.addresses[0].port;
  listeners.listeners[0]
      .reset();  // nobody listens there; rank 2 listens, but does not join; 3 is silent
  std::jthread other([&] { (void)Join(listeners, 2, 1, milliseconds(300)); });
  const Status status = Join(listeners, 1, 1, milliseconds(300));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("rank 1/4 epoch 1: 2 of 3 peers missing"));
  EXPECT_THAT(status.message(),
              HasSubstr(StrCat("rank 0 (127.0.0.1:", closed_port, "): Connection refused")));
  EXPECT_THAT(status.message(), HasSubstr("): it has not called"));
  EXPECT_THAT(status.message(), Not(HasSubstr("rank 2 (")));
}

TEST(TcpJoinTest, APeerThatListensButDoesNotJoinIsSaidToNotAnswer) {
  TcpListeners listeners(2);
  const Status status = Join(listeners, 1, 1, milliseconds(200));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("does not answer"));
}

TEST(TcpJoinTest, AHostThatDoesNotResolveIsNamed) {
  TcpListeners listeners(2);
  listeners.addresses[0].host = "no such host";
  const Status status = Join(listeners, 1, 1, milliseconds(300));
  EXPECT_THAT(status.message(), HasSubstr("rank 0 (no such host:"));
}

TEST(TcpJoinTest, AStaleEpochIsRefusedAtOnceAndTakesNoSlot) {
  TcpListeners listeners(2);
  Status stale;
  std::jthread stale_rank([&] {
    const auto start = std::chrono::steady_clock::now();
    stale = Join(listeners, 1, 6, milliseconds(5000));
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
    // With the right epoch the same rank gets in.
    EXPECT_TRUE(Join(listeners, 1, 7, milliseconds(5000)).ok());
  });
  EXPECT_TRUE(Join(listeners, 0, 7, milliseconds(5000)).ok());
  stale_rank.join();
  EXPECT_EQ(stale.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(stale.message(), HasSubstr("epoch 7"));
  EXPECT_THAT(stale.message(), HasSubstr("epoch 6"));
}

TEST(TcpJoinTest, ARankThatIsAheadWaitsForOneThatIsStillInTheOldGroup) {
  TcpListeners listeners(2);
  std::jthread late([&] {
    EXPECT_EQ(Join(listeners, 0, 3, milliseconds(200)).code(), StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(Join(listeners, 0, 4, milliseconds(5000)).ok());
  });
  EXPECT_TRUE(Join(listeners, 1, 4, milliseconds(5000)).ok());
}

TEST(TcpJoinTest, TheListenerServesOneGroupAfterTheOther) {
  TcpListeners listeners(3);
  for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
    for (const auto& transport : JoinAll(listeners, epoch)) EXPECT_EQ(transport->world_size(), 3);
  }
}

TEST(TcpJoinTest, AJoinCanBeCalledOff) {
  TcpListeners listeners(2);
  std::stop_source stop;
  TcpGroup group = listeners.Group(0, 1, milliseconds(10'000));
  group.stop = stop.get_token();
  std::jthread stopper([&] {
    std::this_thread::sleep_for(milliseconds(50));
    stop.request_stop();
  });
  const auto start = std::chrono::steady_clock::now();
  const Status status = ConnectTcpTransport(*listeners.listeners[0], group).status();
  EXPECT_EQ(status.code(), StatusCode::kCancelled);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(1000));
}

TEST(TcpJoinTest, ARankOutsideTheGroupIsRefused) {
  TcpListeners listeners(2);
  TcpGroup group = listeners.Group(0, 1, milliseconds(100));
  group.rank = 2;
  EXPECT_EQ(ConnectTcpTransport(*listeners.listeners[0], group).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ds4
