// Goal: the rank's thread answers every command once and in order, a wrong step stops the group
// with both values, and whatever breaks a group leaves a worker that can join the next one. Method:
// one or two rank loops in one process, with a scripted engine and ranks that talk through memory;
// the events are read from a recording sink.
#include "worker/rank_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "tests/unit/worker/fakes.h"

namespace ds4 {
namespace {

using ::testing::HasSubstr;

// One rank under test.
struct Rank {
  explicit Rank(FakeWorld* world) : loop(FakeParts(world), &sink) {}
  RecordingSink sink;
  RankLoop loop;

  void Do(Command command) { ASSERT_TRUE(loop.Enqueue(std::move(command)).ok()); }

  void Join(uint64_t epoch, int rank, int world_size) {
    Do(MakeSpec(epoch, rank, world_size));
    ASSERT_TRUE(sink.Next<GroupReadyEvent>());
    Do(OpenSessionCommand{1, 50});
    ASSERT_TRUE(sink.Next<SessionOpenedEvent>());
  }

  ErrorEvent NextError() { return sink.Next<ErrorEvent>().value_or(ErrorEvent()); }
};

class RankLoopTest : public ::testing::Test {
 protected:
  FakeWorld world_{1};
  Rank rank_{&world_};
};

TEST_F(RankLoopTest, JoinsLoadsAndRunsAStep) {
  rank_.Do(MakeSpec(3, 0, 1));
  auto progress = rank_.sink.Next<LoadProgressEvent>();
  ASSERT_TRUE(progress);
  EXPECT_EQ(progress->bytes_total, 1000);
  auto ready = rank_.sink.Next<GroupReadyEvent>();
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->epoch, 3u);
  EXPECT_EQ(ready->stats.weight_bytes, 1000);

  rank_.Do(OpenSessionCommand{1, 50});
  ASSERT_TRUE(rank_.sink.Next<SessionOpenedEvent>());
  StepCommand step = MakeStep(3, 1);
  step.want_state_hash = true;
  rank_.Do(step);
  auto token = rank_.sink.Next<TokenEvent>();
  ASSERT_TRUE(token);
  EXPECT_EQ(token->sequence, 1u);
  EXPECT_EQ(token->token.token, 100);
  auto done = rank_.sink.Next<StepDoneEvent>();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->sequence, 1u);
  EXPECT_EQ(done->state_hash, std::vector<uint64_t>{10});

  rank_.Do(CloseSessionCommand{1});
  ASSERT_TRUE(rank_.sink.Next<SessionClosedEvent>());
  rank_.Do(LeaveGroupCommand{});
  ASSERT_TRUE(rank_.sink.Next<LeftGroupEvent>());
  EXPECT_TRUE(world_.WaitForEngines(0));
}

TEST_F(RankLoopTest, ReportsLoadingAtMostTenTimesASecondAndTheEndAlways) {
  rank_.Do(MakeSpec(1, 0, 1));
  ASSERT_TRUE(rank_.sink.Next<GroupReadyEvent>());
  // 50 reports came within a few milliseconds: the first and the last are passed on, and one more
  // for each tenth of a second that this machine may have been slow.
  EXPECT_GE(rank_.sink.Count<LoadProgressEvent>(), 2);
  EXPECT_LE(rank_.sink.Count<LoadProgressEvent>(), 10);
}

TEST_F(RankLoopTest, CommandsThatNeedAGroupAreRefusedWithoutOne) {
  rank_.Do(MakeStep(1, 1));
  ErrorEvent error = rank_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(error.rank, -1);
  EXPECT_EQ(error.sequence, 1u);
  EXPECT_FALSE(error.group_broken);
  rank_.Do(OpenSessionCommand{1, 10});
  EXPECT_EQ(rank_.NextError().status.code(), StatusCode::kFailedPrecondition);
  // Leaving no group is a harmless repeat.
  rank_.Do(LeaveGroupCommand{});
  EXPECT_TRUE(rank_.sink.Next<LeftGroupEvent>());
}

TEST_F(RankLoopTest, AnotherPlanIsRefusedWithBothDigests) {
  GroupSpec spec = MakeSpec(1, 0, 1);
  spec.plan_digest = "plan-9999";
  rank_.Do(spec);
  const ErrorEvent error = rank_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(error.status.message(), HasSubstr("plan-9999"));
  EXPECT_THAT(error.status.message(), HasSubstr(kFakeDigest));
  EXPECT_TRUE(world_.WaitForEngines(0));
}

TEST_F(RankLoopTest, AnEpochThatDoesNotRiseIsRefusedAndTheGroupLivesOn) {
  rank_.Join(5, 0, 1);
  rank_.Do(MakeSpec(5, 0, 1));
  const ErrorEvent error = rank_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(error.status.message(), HasSubstr("epoch 5, it must be above the last one, 5"));
  EXPECT_FALSE(error.group_broken);
  rank_.Do(MakeStep(5, 1));
  EXPECT_TRUE(rank_.sink.Next<StepDoneEvent>());
}

TEST_F(RankLoopTest, ASessionThatDoesNotFitIsRefusedAndNothingBreaks) {
  rank_.Join(1, 0, 1);
  rank_.Do(OpenSessionCommand{2, 101});
  EXPECT_THAT(rank_.NextError().status.message(), HasSubstr("101, the group was formed with 100"));
  rank_.Do(OpenSessionCommand{1, 10});
  EXPECT_EQ(rank_.NextError().status.code(), StatusCode::kAlreadyExists);
  rank_.Do(MakeStep(1, 1));
  EXPECT_TRUE(rank_.sink.Next<StepDoneEvent>());
}

TEST_F(RankLoopTest, APlanThatDoesNotFitIsRefusedAndUsesUpItsSequenceNumber) {
  rank_.Join(1, 0, 1);
  StepCommand step = MakeStep(1, 1);
  step.plan.parts[0].session_id = 99;
  step.digest = step.plan.Digest();
  rank_.Do(step);
  const ErrorEvent error = rank_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(error.group_broken);
  EXPECT_EQ(error.sequence, 1u);
  // One that could not even be read does the same.
  rank_.Do(RejectedCommand{InvalidArgumentError("no tokens"), 2});
  EXPECT_EQ(rank_.NextError().sequence, 2u);
  rank_.Do(MakeStep(1, 3));
  EXPECT_TRUE(rank_.sink.Next<StepDoneEvent>());
}

// A wrong step stops the group: the error has both values, and later steps repeat the first cause.
class WrongStep : public RankLoopTest {
 protected:
  void ExpectStopped(const StepCommand& wrong, const std::string& both_values) {
    rank_.Join(4, 0, 1);
    rank_.Do(MakeStep(4, 10));
    ASSERT_TRUE(rank_.sink.Next<StepDoneEvent>());
    rank_.Do(wrong);
    const ErrorEvent error = rank_.NextError();
    EXPECT_EQ(error.status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(error.status.message(), HasSubstr(both_values));
    EXPECT_TRUE(error.group_broken);
    EXPECT_EQ(error.rank, 0);
    EXPECT_EQ(error.epoch, 4u);
    rank_.Do(MakeStep(4, 11));
    const ErrorEvent later = rank_.NextError();
    EXPECT_TRUE(later.group_broken);
    EXPECT_THAT(later.status.message(), HasSubstr(both_values));
    EXPECT_EQ(rank_.sink.Count<StepDoneEvent>(), 1);
  }
};

TEST_F(WrongStep, OfAnotherEpoch) {
  ExpectStopped(MakeStep(3, 11), "is of epoch 3, this group's epoch is 4");
}

TEST_F(WrongStep, OutOfSequence) {
  ExpectStopped(MakeStep(4, 12), "step 12 came where step 11 was expected");
}

TEST_F(WrongStep, WithAnotherDigest) {
  StepCommand step = MakeStep(4, 11);
  const uint64_t own = step.digest;
  step.digest = 42;
  ExpectStopped(step, StrCat("plan digest 42, this rank computes ", own));
}

TEST_F(RankLoopTest, ABrokenGroupIsHealedByANewOne) {
  rank_.Join(1, 0, 1);
  world_.set_run_hook(
      [](const StepPlan&, Communicator*) { return UnavailableError("rank 1 is gone"); });
  rank_.Do(MakeStep(1, 1));
  EXPECT_TRUE(rank_.NextError().group_broken);
  world_.set_run_hook(nullptr);
  rank_.Do(MakeStep(1, 2));
  EXPECT_THAT(rank_.NextError().status.message(), HasSubstr("first cause: rank 1 is gone"));
  rank_.Do(OpenSessionCommand{2, 10});
  EXPECT_EQ(rank_.NextError().status.code(), StatusCode::kUnavailable);
  rank_.Join(2, 0, 1);
  rank_.Do(MakeStep(2, 1));
  EXPECT_TRUE(rank_.sink.Next<StepDoneEvent>());
}

TEST_F(RankLoopTest, AThrownExceptionBecomesAnInternalErrorAndTheThreadLives) {
  rank_.Join(1, 0, 1);
  world_.set_run_hook([](const StepPlan&, Communicator*) -> Status {
    throw std::runtime_error("a library gave up");
  });
  rank_.Do(MakeStep(1, 1));
  const ErrorEvent error = rank_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kInternal);
  EXPECT_THAT(error.status.message(), HasSubstr("exception in Step: a library gave up"));
  EXPECT_TRUE(error.group_broken);
  world_.set_run_hook(nullptr);
  rank_.Join(2, 0, 1);
}

TEST_F(RankLoopTest, AFailedLoadIsReportedAndFreesTheGroup) {
  world_.set_load_status(ResourceExhaustedError("2 GiB asked, 1 GiB free"));
  rank_.Do(MakeSpec(1, 0, 1));
  const ErrorEvent error = rank_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(error.status.message(), HasSubstr("loading the weights: 2 GiB asked"));
  world_.set_load_status(OkStatus());
  rank_.Join(2, 0, 1);
}

TEST_F(RankLoopTest, LeaveGroupEndsALoadOnItsWay) {
  world_.set_endless_load(true);
  rank_.Do(MakeSpec(3, 0, 1));
  ASSERT_TRUE(rank_.sink.Next<LoadProgressEvent>());
  rank_.Do(LeaveGroupCommand{});
  auto error = rank_.sink.Next<ErrorEvent>();
  ASSERT_TRUE(error);
  EXPECT_THAT(error->status.message(), HasSubstr("LeaveGroup"));
  world_.set_endless_load(false);
  rank_.Do(MakeSpec(4, 0, 1));
  EXPECT_TRUE(rank_.sink.Next<GroupReadyEvent>());
}

TEST_F(RankLoopTest, TooManyWaitingCommandsAreRefused) {
  rank_.Join(1, 0, 1);
  std::atomic<bool> started = false;
  std::atomic<bool> go_on = false;
  world_.set_run_hook([&](const StepPlan&, Communicator*) {
    started = true;
    started.notify_all();
    go_on.wait(false);
    return OkStatus();
  });
  rank_.Do(MakeStep(1, 1));
  started.wait(false);  // it has left the queue
  for (size_t i = 0; i < RankLoop::kMaxQueuedCommands; ++i) rank_.Do(CloseSessionCommand{1});
  const Status status = rank_.loop.Enqueue(CloseSessionCommand{1});
  go_on = true;
  go_on.notify_all();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("256 commands wait already"));
  EXPECT_TRUE(rank_.sink.Next<StepDoneEvent>());
}

// Two ranks, of which rank 1 often stays away, so that rank 0 waits in the communicator.
class TwoRanks : public ::testing::Test {
 protected:
  void JoinBoth(uint64_t epoch) {
    first_.Do(MakeSpec(epoch, 0, 2));
    second_.Do(MakeSpec(epoch, 1, 2));
    for (Rank* rank : {&first_, &second_}) {
      ASSERT_TRUE(rank->sink.Next<GroupReadyEvent>());
      rank->Do(OpenSessionCommand{1, 50});
      ASSERT_TRUE(rank->sink.Next<SessionOpenedEvent>());
    }
  }

  FakeWorld world_{2};
  Rank first_{&world_};
  Rank second_{&world_};
};

TEST_F(TwoRanks, OnlyRankZeroReportsTokensAndAllReportTheEnd) {
  JoinBoth(1);
  first_.Do(MakeStep(1, 1));
  second_.Do(MakeStep(1, 1));
  EXPECT_TRUE(first_.sink.Next<StepDoneEvent>());
  EXPECT_TRUE(second_.sink.Next<StepDoneEvent>());
  EXPECT_EQ(first_.sink.Count<TokenEvent>(), 1);
  EXPECT_EQ(second_.sink.Count<TokenEvent>(), 0);
}

TEST_F(TwoRanks, LeaveGroupEndsAStepThatWaitsForAPeer) {
  JoinBoth(1);
  first_.Do(MakeStep(1, 1));  // rank 1 gets none, so rank 0 would wait for 5 s
  const auto start = std::chrono::steady_clock::now();
  first_.Do(LeaveGroupCommand{});
  const ErrorEvent error = first_.NextError();
  EXPECT_EQ(error.status.code(), StatusCode::kAborted);
  EXPECT_THAT(error.status.message(), HasSubstr("LeaveGroup"));
  EXPECT_TRUE(first_.sink.Next<LeftGroupEvent>());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2500));
}

TEST_F(TwoRanks, ANewGroupEndsAStepOfTheOldOneAndIsNotHurtByItsEnd) {
  JoinBoth(1);
  first_.Do(MakeStep(1, 1));
  JoinBoth(2);
  first_.Do(MakeStep(2, 1));
  second_.Do(MakeStep(2, 1));
  EXPECT_TRUE(first_.sink.Next<StepDoneEvent>());
  EXPECT_TRUE(second_.sink.Next<StepDoneEvent>());
}

TEST_F(TwoRanks, APeerThatBreaksIsReportedByTheOther) {
  JoinBoth(1);
  first_.Do(MakeStep(1, 1));
  second_.Do(MakeStep(7, 1));  // of another epoch: rank 1 stops the group
  EXPECT_TRUE(second_.NextError().group_broken);
  const ErrorEvent error = first_.NextError();
  EXPECT_TRUE(error.group_broken);
  EXPECT_EQ(error.rank, 0);
  EXPECT_THAT(error.status.message(), HasSubstr("rank 1"));
}

TEST_F(TwoRanks, StopEndsAWaitingStepAndFreesTheGroup) {
  auto rank = std::make_unique<Rank>(&world_);
  rank->Do(MakeSpec(9, 0, 2));
  ASSERT_TRUE(rank->sink.Next<GroupReadyEvent>());
  rank->Do(OpenSessionCommand{1, 50});
  ASSERT_TRUE(rank->sink.Next<SessionOpenedEvent>());
  rank->Do(MakeStep(9, 1));
  const auto start = std::chrono::steady_clock::now();
  rank.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2500));
  EXPECT_TRUE(world_.WaitForEngines(0));
}

TEST(RankLoopJoin, LeaveGroupEndsAJoinThatWaitsForPeers) {
  FakeWorld world(1);
  WorkerParts parts = FakeParts(&world);
  std::atomic<bool> joining = false;
  // As the real ones: waits for peers that do not come, until asked to stop.
  parts.connect = [&](const GroupSpec&,
                      std::stop_token stop) -> Result<std::unique_ptr<Transport>> {
    joining = true;
    joining.notify_all();
    const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
    while (!stop.stop_requested()) {
      if (std::chrono::steady_clock::now() > deadline)
        return DeadlineExceededError("never stopped");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return AbortedError("join stopped");
  };
  RecordingSink sink;
  RankLoop loop(parts, &sink);
  ASSERT_TRUE(loop.Enqueue(MakeSpec(1, 0, 1)).ok());
  joining.wait(false);
  ASSERT_TRUE(loop.Enqueue(LeaveGroupCommand{}).ok());
  auto error = sink.Next<ErrorEvent>();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->status.code(), StatusCode::kAborted);
  EXPECT_THAT(error->status.message(), HasSubstr("LeaveGroup"));
  EXPECT_TRUE(sink.Next<LeftGroupEvent>());
}

}  // namespace
}  // namespace ds4
