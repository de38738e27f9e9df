// Goal: the data plane over gRPC behaves as the other transports do, and only its own ranks get in.
// Method: the common suite, then joins with callers that do not belong, on servers in this process.
#include "worker/grpc_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/grpc_group.h"
#include "tests/support/transport_suite.h"

namespace ds4 {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

INSTANTIATE_TEST_SUITE_P(Grpc, TransportTest,
                         testing::Values(TransportKind{"grpc", MakeGrpcTransports}));

Status Join(GrpcNodes& nodes, int rank, uint64_t epoch, milliseconds patience) {
  return ConnectGrpcTransport(nodes.nodes[rank]->exchange(), nodes.Group(rank, epoch, patience))
      .status();
}

// A caller of Exchange that is no rank; `first` is its first message, if any.
class Stranger {
 public:
  Stranger(const std::string& address, const v1::ExchangeFrame* first)
      : stub_(
            v1::Worker::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))),
        stream_(stub_->Exchange(&context_)) {
    if (first != nullptr) stream_->Write(*first);
  }
  ~Stranger() { context_.TryCancel(); }
  // Waits until the call has ended.
  grpc::Status End() {
    v1::ExchangeFrame ignored;
    while (stream_->Read(&ignored)) {
    }
    return stream_->Finish();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ExchangeFrame, v1::ExchangeFrame>> stream_;
};

TEST(GrpcJoinTest, StrangersAndSilentCallersDoNotDisturbTheJoin) {
  GrpcNodes nodes(2);
  v1::ExchangeFrame garbage;
  garbage.set_frame(std::string(5000, 'x'));
  Stranger silent(nodes.addresses[0], nullptr);
  Stranger noisy(nodes.addresses[0], &garbage);
  const auto start = std::chrono::steady_clock::now();
  auto transports = JoinAll(nodes, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(900));
  EXPECT_EQ(transports.size(), 2u);
}

TEST(GrpcJoinTest, AFirstMessageThatIsNoHelloIsRefusedInWords) {
  GrpcNodes nodes(2);
  v1::ExchangeFrame garbage;
  garbage.set_frame("x");
  Stranger noisy(nodes.addresses[0], &garbage);
  EXPECT_EQ(Join(nodes, 0, 1, milliseconds(300)).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(noisy.End().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(GrpcJoinTest, EveryMissingRankIsListedWithItsAddressAndWhy) {
  GrpcNodes nodes(4);
  const std::string closed = nodes.addresses[0];
  nodes.nodes[0].reset();  // nobody listens there; rank 2 joins, rank 3 is silent
  std::jthread other([&] { (void)Join(nodes, 2, 1, milliseconds(500)); });
  const Status status = Join(nodes, 1, 1, milliseconds(500));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("rank 1/4 epoch 1: 2 of 3 peers missing"));
  EXPECT_THAT(status.message(), HasSubstr(StrCat("rank 0 (", closed, "): ")));
  EXPECT_THAT(status.message(), HasSubstr("Connection refused"));
  EXPECT_THAT(status.message(), HasSubstr("): it has not called"));
  EXPECT_THAT(status.message(), Not(HasSubstr("rank 2 (")));
}

TEST(GrpcJoinTest, APeerThatListensButDoesNotJoinIsSaidToNotAnswer) {
  GrpcNodes nodes(2);
  const Status status = Join(nodes, 1, 1, milliseconds(300));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("does not answer"));
}

TEST(GrpcJoinTest, AStaleEpochIsRefusedAtOnceAndTakesNoSlot) {
  GrpcNodes nodes(2);
  Status stale;
  std::jthread stale_rank([&] {
    const auto start = std::chrono::steady_clock::now();
    stale = Join(nodes, 1, 6, milliseconds(5000));
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
    EXPECT_TRUE(Join(nodes, 1, 7, milliseconds(5000)).ok());
  });
  EXPECT_TRUE(Join(nodes, 0, 7, milliseconds(5000)).ok());
  stale_rank.join();
  EXPECT_EQ(stale.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(stale.message(), HasSubstr("epoch 7"));
  EXPECT_THAT(stale.message(), HasSubstr("epoch 6"));
}

TEST(GrpcJoinTest, ARankThatIsAheadWaitsForOneThatIsStillInTheOldGroup) {
  GrpcNodes nodes(2);
  std::jthread late([&] {
    EXPECT_EQ(Join(nodes, 0, 3, milliseconds(300)).code(), StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(Join(nodes, 0, 4, milliseconds(5000)).ok());
  });
  EXPECT_TRUE(Join(nodes, 1, 4, milliseconds(5000)).ok());
}

TEST(GrpcJoinTest, ACallThatComesDuringAGroupIsHeardInTheNextJoin) {
  GrpcNodes nodes(2);
  auto transports = JoinAll(nodes, 1);
  v1::ExchangeFrame hello;
  hello.mutable_hello()->set_epoch(1);
  hello.mutable_hello()->set_rank(1);
  hello.mutable_hello()->set_world_size(2);
  Stranger early(nodes.addresses[0], &hello);
  {
    std::vector<std::jthread> threads;
    for (auto& transport : transports) {
      threads.emplace_back([&transport] {
        auto comm = MakeExchangeCommunicator(std::move(transport), LaneLayout::Even(8, 2));
        for (int round = 0; round < 50; ++round) EXPECT_TRUE(comm->Barrier().ok());
      });
    }
  }
  EXPECT_EQ(JoinAll(nodes, 2).size(), 2u);
  EXPECT_EQ(early.End().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST(GrpcJoinTest, TheServerServesOneGroupAfterTheOther) {
  GrpcNodes nodes(3);
  for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
    for (const auto& transport : JoinAll(nodes, epoch)) EXPECT_EQ(transport->world_size(), 3);
  }
}

TEST(GrpcJoinTest, AWorkerIsInOneGroupAtATime) {
  GrpcNodes nodes(2);
  const auto transports = JoinAll(nodes, 1);
  EXPECT_EQ(Join(nodes, 0, 2, milliseconds(100)).code(), StatusCode::kFailedPrecondition);
}

TEST(GrpcJoinTest, AJoinCanBeCalledOff) {
  GrpcNodes nodes(2);
  std::stop_source stop;
  GrpcGroup group = nodes.Group(0, 1, milliseconds(10'000));
  group.stop = stop.get_token();
  std::jthread stopper([&] {
    std::this_thread::sleep_for(milliseconds(50));
    stop.request_stop();
  });
  const auto start = std::chrono::steady_clock::now();
  const Status status = ConnectGrpcTransport(nodes.nodes[0]->exchange(), group).status();
  EXPECT_EQ(status.code(), StatusCode::kCancelled);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(1000));
}

TEST(GrpcJoinTest, AServerThatStopsLeavesNoCallBehind) {
  auto nodes = std::make_unique<GrpcNodes>(3);
  Stranger silent(nodes->addresses[0], nullptr);
  JoinAll(*nodes, 1).clear();
  nodes.reset();  // CHECKs inside that every call has ended
  EXPECT_FALSE(silent.End().ok());
}

TEST(GrpcJoinTest, AWorkerWithoutAServerCannotJoin) {
  GrpcExchange exchange;
  const GrpcGroup group{
      .epoch = 1, .rank = 0, .peers = {"a:1", "b:1"}, .join_deadline = {}, .stop = {}};
  const Status status = ConnectGrpcTransport(exchange, group).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("no gRPC server"));
}

}  // namespace
}  // namespace ds4
