// Goal: what cannot work is refused before it starts, in words that hold both values, in bounded
// time. Method: whole runs against workers that are missing, silent, different, or fakes that speak
// wrongly.
#include <grpcpp/grpcpp.h>

#include "proto/protocol.h"
#include "proto/worker.grpc.pb.h"
#include "tests/cluster/cluster_fixture.h"

namespace ds4 {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(RefusalTest, BadUsageExitsWithTwo) {
  EXPECT_EQ(RunCoordinator({}).code, 2);
  EXPECT_EQ(RunCoordinator({"--local", "2", "--no-such-flag"}).code, 2);
  EXPECT_EQ(RunCoordinator({"--help"}).code, 0);
}

TEST(RefusalTest, AModelThatIsNoneIsNamed) {
  const TempFolder folder;
  const std::string file = folder.Write("junk.gguf", "this is no model");
  Process process({Binary("ds4-coordinator"), "--model", file, "--local", "1", "--prompt", "x"});
  EXPECT_EQ(process.Wait(seconds(10)), 1);
  EXPECT_TRUE(process.err().WaitFor("junk.gguf", seconds(1)));
}

TEST(RefusalTest, APromptThatDoesNotFitIsRefusedWithBothNumbersBeforeAnythingStarts) {
  const RunResult run = RunCoordinator({"--local", "2", "--ctx", "64", "-n", "60", "--prompt",
                                        "Tell me a story about a little dog."});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr("needs room for 60"), HasSubstr("holds 64")));
  EXPECT_THAT(run.err, testing::Not(HasSubstr("ready")));
  EXPECT_EQ(run.out, "");
}

TEST(RefusalTest, AContextOverTheModelsIsRefusedWithBoth) {
  const RunResult run = RunCoordinator({"--local", "1", "--ctx", "1000000000", "--prompt", "x"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, HasSubstr("--ctx 1000000000 is more than the model's"));
}

TEST(RefusalTest, MoreRanksThanLanesAreRefused) {
  const RunResult run = RunCoordinator({"--local", "9", "--prompt", "x"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr("1 to 8"), HasSubstr("asked for 9")));
}

TEST(RefusalTest, EveryMissingWorkerIsListedWithItsReasonWithinTheJoinLimit) {
  Worker good;
  SilentPort closed, silent;
  closed.Close();
  const RunResult run =
      RunCoordinator({"--workers", closed.address() + "," + good.address() + "," + silent.address(),
                      "--prompt", "x", "--join-timeout-ms", "1500"});
  EXPECT_EQ(run.code, 1);
  EXPECT_LT(run.seconds, 5.0);
  EXPECT_THAT(run.err, AllOf(HasSubstr("2 of 3 workers did not join"),
                             HasSubstr("rank 0 (" + closed.address() + ")"), HasSubstr("refused"),
                             HasSubstr("rank 2 (" + silent.address() + "): no answer")));
  EXPECT_THAT(run.err, testing::Not(HasSubstr("error: rank 1 (" + good.address() + ")")));
}

TEST(RefusalTest, AWorkerThatComesUpALittleLateIsWaitedFor) {
  SilentPort later;
  later.Close();
  Worker first;
  Process coordinator(CoordinatorArgs({"--workers", first.address() + "," + later.address(),
                                       "--prompt", "Tell me a story.", "-n", "5"}));
  EXPECT_TRUE(coordinator.err().WaitFor("waiting for rank 1", seconds(10)));
  Worker second({}, later.port());
  EXPECT_EQ(coordinator.Wait(seconds(20)), 0) << coordinator.err().text();
}

TEST(RefusalTest, OtherModelBytesAreRefusedWithBothDigests) {
  const TempFolder folder;
  const std::string other = folder.File("other.gguf");
  std::filesystem::copy_file(ModelPath(), other);
  {
    std::fstream file(other, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-200, std::ios::end);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(-200, std::ios::end);
    file.put(byte);
  }
  Worker same, different({}, 0, other);
  const RunResult run =
      RunCoordinator({"--workers", same.address() + "," + different.address(), "--prompt", "x"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err,
              AllOf(HasSubstr("rank 1 (" + different.address() + ")"),
                    HasSubstr("other model bytes"), HasSubstr(other), HasSubstr(ModelPath())));
  EXPECT_THAT(run.err, testing::Not(HasSubstr("rank 0 (")));
}

TEST(RefusalTest, AContextOverAWorkersLimitIsRefusedWithBoth) {
  Worker small({"--ctx", "128"});
  const RunResult run =
      RunCoordinator({"--workers", small.address(), "--ctx", "256", "-n", "5", "--prompt", "x"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr(small.address()), HasSubstr("128"), HasSubstr("256")));
  // Without --ctx the worker's limit is simply the group's.
  EXPECT_EQ(RunCoordinator({"--workers", small.address(), "-n", "5", "--prompt", "x"}).code, 0);
}

// Answers the hello with another protocol version.
class OldWorker final : public v1::Worker::Service {
 public:
  OldWorker() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~OldWorker() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::Status Control(grpc::ServerContext*,
                       grpc::ServerReaderWriter<v1::Event, v1::Command>* stream) override {
    v1::Command command;
    if (!stream->Read(&command)) return grpc::Status::OK;
    v1::Event event;
    event.mutable_hello()->set_protocol_version(kProtocolVersion + 41);
    event.mutable_hello()->set_build("0.0.1 (old)");
    stream->Write(event);
    while (stream->Read(&command)) {
    }
    return grpc::Status::OK;
  }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST(RefusalTest, AnotherProtocolVersionIsRefusedWithBoth) {
  OldWorker old;
  const RunResult run = RunCoordinator({"--workers", old.address(), "--prompt", "x"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err,
              AllOf(HasSubstr(old.address()),
                    HasSubstr("protocol version " + std::to_string(kProtocolVersion + 41)),
                    HasSubstr("0.0.1 (old)"),
                    HasSubstr("this coordinator version " + std::to_string(kProtocolVersion))));
}

TEST(RefusalTest, ASecondCoordinatorIsToldWhoIsServed) {
  Worker worker;
  Process first(CoordinatorArgs({"--workers", worker.address()}));
  ASSERT_TRUE(first.err().WaitFor("1 rank ready", seconds(20))) << first.err().text();
  const RunResult run = RunCoordinator({"--workers", worker.address(), "--prompt", "x"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr(worker.address()), HasSubstr("serves coordinator")));
}

TEST(RefusalTest, DryRunPrintsThePlanAndContactsNobody) {
  SilentPort silent;
  const RunResult run =
      RunCoordinator({"--workers", silent.address() + ",nowhere.invalid:1", "--dry-run"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_LT(run.seconds, 3.0);
  EXPECT_THAT(run.out, AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("reads/token"),
                             HasSubstr("attn_output_b")));
  const RunResult local = RunCoordinator({"--local", "2", "--dry-run"});
  EXPECT_EQ(local.out, run.out);
  EXPECT_EQ(RunCoordinator({"--ranks", "2", "--dry-run"}).out, run.out);
}

}  // namespace
}  // namespace ds4
