// Goal: whatever a coordinator does, or fails to do, gets an answer in words, and the worker stays
// ready for the next one. Method: the real gRPC server on a free loopback port with a scripted
// engine behind it, and clients in the same process. Deadlines of the server are shortened so that
// tests of silence take moments.
#include "worker/worker_service.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/unit/worker/control_client.h"
#include "worker/control_stream.h"
#include "worker/rank_loop.h"

namespace ds4 {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr StreamTimeouts kShort{milliseconds(200), milliseconds(2000), milliseconds(200),
                                milliseconds(3000)};

WorkerInfo FakeInfo() {
  WorkerInfo info;
  info.host = "node7";
  info.model_path = "tiny.gguf";
  info.model_digest = "full-00ff";
  info.model_bytes = 12345;
  info.max_context = 1000;
  info.max_batch_rows = 64;
  info.kernel_isa = "generic";
  info.num_threads = 3;
  info.data_port = 4711;
  return info;
}

class WorkerServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = WorkerServer::Start("127.0.0.1", 0, FakeParts(&world_), FakeInfo(), &kShort);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(server).value();
  }

  // A client that is past its hello.
  std::unique_ptr<ControlClient> Greeted(const std::string& name = "c1") {
    auto client = std::make_unique<ControlClient>(server_->port());
    EXPECT_TRUE(client->Hello(name)) << client->refusal();
    return client;
  }

  // The worker still serves: a whole life of a group works.
  void ExpectWorkerWell() {
    auto client = Greeted("the next one");
    ASSERT_TRUE(client->Join(1, 0, 1));
    client->Send(ControlClient::Step(1, 1));
    EXPECT_TRUE(client->Next(v1::Event::kStepDone));
    EXPECT_TRUE(client->Finish().ok());
  }

  FakeWorld world_{1};
  std::unique_ptr<WorkerServer> server_;
};

TEST_F(WorkerServiceTest, AWholeLife) {
  ControlClient client(server_->port());
  const auto reply = client.Hello("c1");
  ASSERT_TRUE(reply) << client.refusal();
  EXPECT_EQ(reply->protocol_version(), kProtocolVersion);
  EXPECT_EQ(reply->host(), "node7");
  EXPECT_EQ(reply->model_path(), "tiny.gguf");
  EXPECT_EQ(reply->model_digest(), "full-00ff");
  EXPECT_EQ(reply->model_bytes(), 12345);
  EXPECT_EQ(reply->max_context(), 1000);
  EXPECT_EQ(reply->max_batch_rows(), 64);
  EXPECT_EQ(reply->kernel_isa(), "generic");
  EXPECT_EQ(reply->num_threads(), 3);
  EXPECT_GT(reply->memory_bytes(), 0);
  // No --advertise: the address at which we reached it.
  EXPECT_EQ(reply->data_host(), "127.0.0.1");
  EXPECT_EQ(reply->data_port(), 4711u);
  EXPECT_EQ(reply->backend(), "cpu");

  ASSERT_TRUE(client.Join(1, 0, 1));
  client.Send(ControlClient::Step(1, 1));
  const auto token = client.Next(v1::Event::kToken);
  ASSERT_TRUE(token);
  EXPECT_EQ(token->token().sequence(), 1u);
  EXPECT_EQ(token->token().token(), 100);
  ASSERT_TRUE(client.Next(v1::Event::kStepDone));
  v1::Command leave;
  leave.mutable_leave_group();
  client.Send(leave);
  EXPECT_TRUE(client.Next(v1::Event::kLeftGroup));
  EXPECT_TRUE(client.Finish().ok());
  EXPECT_TRUE(world_.WaitForEngines(0));
}

TEST_F(WorkerServiceTest, HelloMustComeFirst) {
  ControlClient client(server_->port());
  client.Send(ControlClient::FormGroup(1, 0, 1));
  EXPECT_THAT(client.NextError().message(), HasSubstr("the first message must be a Hello"));
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ExpectWorkerWell();
}

TEST_F(WorkerServiceTest, SilenceEndsAtTheDeadline) {
  ControlClient client(server_->port());
  const Status error = client.NextError();
  EXPECT_EQ(error.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(error.message(), "no Hello within 200 ms of the stream's start");
  EXPECT_FALSE(client.Next());  // although we keep our side open
  ExpectWorkerWell();
}

TEST_F(WorkerServiceTest, SilenceTakesNoSlot) {
  ControlClient silent(server_->port());
  ExpectWorkerWell();
}

TEST_F(WorkerServiceTest, AnotherProtocolVersionIsRefusedNamingBoth) {
  ControlClient client(server_->port());
  EXPECT_FALSE(client.Hello("from the future", 77));
  EXPECT_EQ(client.refusal().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(client.refusal().message(), HasSubstr(StrCat("version ", kProtocolVersion)));
  EXPECT_THAT(client.refusal().message(), HasSubstr("from the future"));
  EXPECT_THAT(client.refusal().message(), HasSubstr("speaks 77"));
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  ExpectWorkerWell();
}

TEST_F(WorkerServiceTest, ASecondCoordinatorIsRefusedNamingTheFirst) {
  auto first = Greeted("kitchen");
  ControlClient second(server_->port());
  EXPECT_FALSE(second.Hello("attic"));
  EXPECT_EQ(second.refusal().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(second.refusal().message(), HasSubstr("serves coordinator kitchen (ipv4:127.0.0.1:"));
  EXPECT_EQ(second.Finish().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  // The first is not disturbed.
  EXPECT_TRUE(first->Join(1, 0, 1));
}

TEST_F(WorkerServiceTest, MalformedCommandsAreAnsweredInOrderAndTheStreamLivesOn) {
  auto client = Greeted();
  client->Send(v1::Command());
  client->Send(ControlClient::Step(1, 1));
  v1::Command hello;
  hello.mutable_hello()->set_protocol_version(kProtocolVersion);
  client->Send(hello);
  EXPECT_EQ(client->NextError().code(), StatusCode::kInvalidArgument);     // of no kind
  EXPECT_EQ(client->NextError().code(), StatusCode::kFailedPrecondition);  // no group
  EXPECT_EQ(client->NextError().message(), "Hello came a second time");
  ASSERT_TRUE(client->Join(1, 0, 1));
  v1::Command empty_step;
  empty_step.mutable_step()->set_epoch(1);
  empty_step.mutable_step()->set_sequence(1);
  client->Send(empty_step);
  EXPECT_EQ(client->NextError().code(), StatusCode::kInvalidArgument);
  client->Send(ControlClient::Step(1, 2));
  EXPECT_TRUE(client->Next(v1::Event::kStepDone));
}

TEST_F(WorkerServiceTest, AStepOfAnotherEpochBreaksTheGroupAndSaysSo) {
  auto client = Greeted();
  ASSERT_TRUE(client->Join(3, 0, 1));
  client->Send(ControlClient::Step(2, 1));
  const auto event = client->Next(v1::Event::kError);
  ASSERT_TRUE(event);
  EXPECT_TRUE(event->error().group_broken());
  EXPECT_EQ(event->error().rank(), 0);
  EXPECT_EQ(event->error().epoch(), 3u);
  EXPECT_EQ(event->error().sequence(), 1u);
}

// grpc.health.v1 by its bytes: the request names a service (field 1), the answer's field 1 is 1,
// SERVING.
TEST_F(WorkerServiceTest, AnswersHealthChecks) {
  grpc::GenericStub stub(grpc::CreateChannel(StrCat("127.0.0.1:", server_->port()),
                                             grpc::InsecureChannelCredentials()));
  for (const std::string service : {"", "ds4.v1.Worker"}) {
    std::string bytes;
    if (!service.empty())
      bytes = "\x0a" + std::string(1, static_cast<char>(service.size())) + service;
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kTestPatience);
    grpc::CompletionQueue queue;
    auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
    call->StartCall();
    grpc::ByteBuffer answer;
    grpc::Status status;
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    ASSERT_TRUE(status.ok()) << status.error_message();
    grpc::Slice reply;
    ASSERT_TRUE(answer.DumpToSingleSlice(&reply).ok());
    EXPECT_EQ(std::string(reply.begin(), reply.end()), "\x08\x01") << service;
  }
}

TEST_F(WorkerServiceTest, TransportGrpcJoinsThroughTheSamePortAsTheControlStream) {
  FakeWorld world(2);
  auto other = WorkerServer::Start("127.0.0.1", 0, FakeParts(&world), FakeInfo(), &kShort);
  ASSERT_TRUE(other.ok()) << other.status();
  ControlClient clients[] = {ControlClient(server_->port()), ControlClient((*other)->port())};
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(clients[rank].Hello("c1"));
    v1::Command form = ControlClient::FormGroup(1, rank, 2);
    v1::FormGroup* group = form.mutable_form_group();
    group->set_transport("grpc");
    group->set_join_timeout_ms(5000);
    group->mutable_peers(0)->set_control_address(StrCat("127.0.0.1:", server_->port()));
    group->mutable_peers(1)->set_control_address(StrCat("127.0.0.1:", (*other)->port()));
    clients[rank].Send(form);
  }
  for (ControlClient& client : clients) {
    ASSERT_TRUE(client.Next(v1::Event::kGroupReady));
    v1::Command open;
    open.mutable_open_session()->set_session_id(1);
    open.mutable_open_session()->set_max_context(50);
    client.Send(open);
    client.Send(ControlClient::Step(1, 1));
  }
  for (ControlClient& client : clients) EXPECT_TRUE(client.Next(v1::Event::kStepDone));
  for (ControlClient& client : clients) EXPECT_TRUE(client.Finish().ok());
}

TEST_F(WorkerServiceTest, TheServerRefusesATakenPort) {
  auto second =
      WorkerServer::Start("127.0.0.1", server_->port(), FakeParts(&world_), FakeInfo(), &kShort);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(), HasSubstr(StrCat("127.0.0.1:", server_->port())));
}

TEST_F(WorkerServiceTest, ShutdownTellsTheCoordinatorAndFreesTheGroup) {
  auto client = Greeted();
  ASSERT_TRUE(client->Join(1, 0, 1));
  const auto start = std::chrono::steady_clock::now();
  std::thread stopping([&] {
    server_->Shutdown(UnavailableError("the worker is stopping: SIGTERM"), milliseconds(500));
  });
  EXPECT_EQ(client->NextError(), UnavailableError("the worker is stopping: SIGTERM"));
  stopping.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
  EXPECT_TRUE(world_.WaitForEngines(0));
}

// Two ranks, of which the server has rank 0; rank 1 never runs a step, so that rank 0 waits for it.
class WaitingStep : public WorkerServiceTest {
 protected:
  void SetUp() override {
    WorkerServiceTest::SetUp();
    peer_loop_ = std::make_unique<RankLoop>(FakeParts(&two_), &peer_sink_);
    auto server = WorkerServer::Start("127.0.0.1", 0, FakeParts(&two_), FakeInfo(), &kShort);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(server).value();
    client_ = Greeted();
    ASSERT_TRUE(peer_loop_->Enqueue(MakeSpec(1, 1, 2)).ok());
    ASSERT_TRUE(client_->Join(1, 0, 2));
    ASSERT_TRUE(two_.WaitForEngines(2));
    client_->Send(ControlClient::Step(1, 1));
  }

  FakeWorld two_{2};
  RecordingSink peer_sink_;
  std::unique_ptr<RankLoop> peer_loop_;
  std::unique_ptr<ControlClient> client_;
};

TEST_F(WaitingStep, ABrokenStreamFreesTheGroupAndTheNextCoordinatorIsServed) {
  client_->Break();
  EXPECT_TRUE(two_.WaitForEngines(1));  // the peer's own is left
  auto next = Greeted("the next one");
  peer_loop_.reset();
  EXPECT_TRUE(two_.WaitForEngines(0));
}

TEST_F(WaitingStep, LeaveGroupEndsIt) {
  v1::Command leave;
  leave.mutable_leave_group();
  client_->Send(leave);
  EXPECT_EQ(client_->NextError().code(), StatusCode::kAborted);
  EXPECT_TRUE(client_->Next(v1::Event::kLeftGroup));
}

TEST_F(WaitingStep, ClosingTheStreamInGoodOrderEndsItToo) {
  EXPECT_TRUE(client_->Finish().ok());
  EXPECT_TRUE(two_.WaitForEngines(1));
}

TEST_F(WaitingStep, ShutdownEndsItWithinTwoSeconds) {
  const auto start = std::chrono::steady_clock::now();
  server_->Shutdown(UnavailableError("the worker is stopping"), milliseconds(500));
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
}

}  // namespace
}  // namespace ds4
