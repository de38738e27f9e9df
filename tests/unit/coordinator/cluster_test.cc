// Goal: joining, forming, stepping, breaking and forming anew keep to the protocol, and every
// failure comes back in bounded time with the most telling message first. Method: scripted workers
// in place of gRPC streams. Each answers like a right worker unless a test gives it another reply
// to one command.
#include "coordinator/cluster.h"

#include <gmock/gmock.h>

#include <map>

#include "proto/plan_codec.h"
#include "proto/protocol.h"
#include "proto/rpc_status.h"

namespace ds4 {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using Kind = v1::Command::KindCase;

RankEvent Said(v1::Event event) { return {0, std::move(event), false, {}}; }
RankEvent Ended(Status why) { return {0, {}, true, std::move(why)}; }
RankEvent SaidError(Status why) {
  v1::Event event;
  EncodeError(why, 0, 1, event.mutable_error());
  return Said(event);
}

// What a worker does on a command: the events that it sends back.
using Reply = std::function<std::vector<RankEvent>(int rank, const v1::Command&)>;

std::vector<RankEvent> GoodReply(int rank, const v1::Command& command) {
  std::vector<RankEvent> events;
  v1::Event event;
  switch (command.kind_case()) {
    case Kind::kHello:
      event.mutable_hello()->set_protocol_version(kProtocolVersion);
      event.mutable_hello()->set_model_digest("d");
      event.mutable_hello()->set_max_context(1000);
      event.mutable_hello()->set_max_batch_rows(512);
      event.mutable_hello()->set_data_port(9000 + rank);
      return {Said(event)};
    case Kind::kFormGroup:
      event.mutable_load_progress()->set_bytes_done(5);
      events.push_back(Said(event));
      event.mutable_group_ready()->set_rank(rank);
      event.mutable_group_ready()->set_epoch(command.form_group().epoch());
      events.push_back(Said(event));
      return events;
    case Kind::kOpenSession:
      event.mutable_session_opened()->set_session_id(command.open_session().session_id());
      return {Said(event)};
    case Kind::kStep: {
      const v1::StepPart& part = command.step().parts(0);
      if (rank == 0 && part.sample()) {
        const TokenOutput token{0, part.pos() + part.tokens_size(), 42, -0.5f, false, {}};
        EncodeToken(command.step().sequence(), token, event.mutable_token());
        events.push_back(Said(event));
      }
      event.mutable_step_done()->set_sequence(command.step().sequence());
      event.mutable_step_done()->set_comm_seconds(0.25);
      events.push_back(Said(event));
      return events;
    }
    default:
      return {};
  }
}

class FakeClient final : public RankClient {
 public:
  FakeClient(int rank, std::string address, EventQueue* queue, Reply reply,
             std::vector<v1::Command>* seen)
      : rank_(rank),
        address_(std::move(address)),
        queue_(queue),
        reply_(std::move(reply)),
        seen_(seen) {}
  const std::string& address() const override { return address_; }
  void Send(v1::Command command) override {
    if (ended_) return;
    seen_->push_back(command);
    for (RankEvent& event : reply_(rank_, command)) Push(std::move(event));
  }
  void Push(RankEvent event) {
    event.rank = rank_;
    ended_ = ended_ || event.ended;
    queue_->Push(std::move(event));
  }
  void Close() override { ended_ = true; }

 private:
  int rank_;
  std::string address_;
  EventQueue* queue_;
  Reply reply_;
  std::vector<v1::Command>* seen_;
  bool ended_ = false;
};

class Source final : public WorkerSource {
 public:
  explicit Source(int count) {
    for (int i = 0; i < count; ++i) addresses.push_back("host" + std::to_string(i) + ":1");
  }
  Result<std::vector<std::string>> EnsureRunning(TimePoint) override { return addresses; }
  void Suspect(int rank) override { suspects.push_back(rank); }
  std::string WhyGone(int rank) override { return gone[rank]; }
  std::vector<std::string> addresses;
  std::vector<int> suspects;
  std::map<int, std::string> gone;
};

// A cluster of `count` scripted workers.
struct Harness {
  explicit Harness(int count) : source(count), commands(count), clients(count) {
    options.requirements = {"ours.gguf", "d", 0, 64};
    options.plan.lanes = LaneLayout::Even(8, count);
    options.plan.ranks.resize(count);
    options.preferred_context = 4096;
    options.vocab_size = 100;
    options.timeout = milliseconds(100);
    options.join_timeout = milliseconds(400);
    for (int i = 0; i < count; ++i) replies[i] = GoodReply;
  }
  // Rank `rank` answers `kind` with `reply` from now on.
  void On(int rank, Kind kind, Reply reply) {
    replies[rank] = [kind, reply, before = replies[rank]](int r, const v1::Command& command) {
      return command.kind_case() == kind ? reply(r, command) : before(r, command);
    };
  }
  Cluster& Make() {
    cluster = std::make_unique<Cluster>(
        options, &source,
        [this](int rank, const std::string& address, EventQueue* queue) {
          auto client = std::make_unique<FakeClient>(
              rank, address, queue,
              [this](int r, const v1::Command& command) { return replies[r](r, command); },
              &commands[rank]);
          clients[rank] = client.get();
          return client;
        },
        &observer, 7);
    return *cluster;
  }

  ClusterOptions options;
  Source source;
  ClusterObserver observer;
  std::map<int, Reply> replies;
  std::vector<std::vector<v1::Command>> commands;
  std::vector<FakeClient*> clients;
  std::unique_ptr<Cluster> cluster;
};

StepPlan OneStep() {
  StepPlan plan;
  StepPart& part = plan.parts.emplace_back();
  part.session_id = Cluster::kSessionId;
  part.tokens = {1, 2, 3};
  part.sample = true;
  return plan;
}

const TokenCallback kIgnore = [](const TokenOutput&) {};

TEST(ClusterTest, FormsAGroupAndRunsSteps) {
  Harness h(3);
  Cluster& cluster = h.Make();
  ASSERT_TRUE(cluster.Form().ok());
  EXPECT_EQ(cluster.context(), 1000);  // the workers' limit, under the preferred 4096
  EXPECT_EQ(cluster.epoch(), 7u);
  // Hello, FormGroup, OpenSession, in this order, to every rank.
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(h.commands[rank].size(), 3u);
    const v1::FormGroup& group = h.commands[rank][1].form_group();
    EXPECT_EQ(group.rank(), rank);
    EXPECT_EQ(group.world_size(), 3);
    EXPECT_EQ(group.peers(2).data_port(), 9002u);
    EXPECT_EQ(group.peers(2).host(), "host2");
    EXPECT_THAT(group.lane_begin(), testing::ElementsAre(0, 3, 6, 8));
    EXPECT_EQ(group.max_context(), 1000);
  }
  std::vector<int32_t> seen;
  for (uint64_t step = 1; step <= 2; ++step) {
    const auto result =
        cluster.RunStep(OneStep(), [&](const TokenOutput& token) { seen.push_back(token.token); });
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->tokens.size(), 1u);
    EXPECT_EQ(result->tokens[0].pos, 3);
    EXPECT_EQ(result->comm_seconds, 0.25);
    // The same plan with the same digest to every rank, numbered from 1.
    StepPlan plan = OneStep();
    plan.sequence = step;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(h.commands[rank].back().step().sequence(), step);
      EXPECT_EQ(h.commands[rank].back().step().digest(), plan.Digest());
      EXPECT_EQ(h.commands[rank].back().step().epoch(), 7u);
    }
  }
  EXPECT_THAT(seen, testing::ElementsAre(42, 42));
}

TEST(ClusterTest, TriesAWorkerAgainUntilItIsThere) {
  Harness h(2);
  int attempts = 0;
  h.On(1, Kind::kHello, [&](int rank, const v1::Command& command) {
    if (++attempts < 2) return std::vector{Ended(UnavailableError("connection refused"))};
    return GoodReply(rank, command);
  });
  EXPECT_TRUE(h.Make().Form().ok());
  EXPECT_EQ(attempts, 2);
}

TEST(ClusterTest, ListsEveryMissingWorkerWithinTheLimit) {
  Harness h(3);
  h.On(0, Kind::kHello, [](int, const v1::Command&) {
    return std::vector{Ended(UnavailableError("connection refused"))};
  });
  h.On(2, Kind::kHello, [](int, const v1::Command&) { return std::vector<RankEvent>(); });
  const TimePoint start = Now();
  const Status status = h.Make().Form();
  EXPECT_LT(Now() - start, milliseconds(1000));
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("2 of 3 workers did not join"),
                    HasSubstr("rank 0 (host0:1): connection refused"),
                    HasSubstr("rank 2 (host2:1): no answer to the hello within 0.4 s"),
                    testing::Not(HasSubstr("host1:1"))));
}

TEST(ClusterTest, ARefusalIsFinalAndSaysWhy) {
  Harness h(2);
  h.options.join_timeout = milliseconds(5000);
  int attempts = 0;
  h.On(1, Kind::kHello, [&](int, const v1::Command&) {
    ++attempts;
    return std::vector{SaidError(FailedPreconditionError("serves coordinator X")),
                       Ended(FailedPreconditionError("serves coordinator X"))};
  });
  const TimePoint start = Now();
  const Status status = h.Make().Form();
  EXPECT_LT(Now() - start, milliseconds(1000));
  EXPECT_EQ(attempts, 1);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 (host1:1): serves coordinator X"));
}

TEST(ClusterTest, EveryWorkerThatDoesNotFitIsListed) {
  Harness h(3);
  h.options.requirements.model_digest = "other";
  const Status status = h.Make().Form();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  for (const char* address : {"host0:1", "host1:1", "host2:1"}) {
    EXPECT_THAT(status.message(), HasSubstr(address));
  }
}

TEST(ClusterTest, AFailureWhileLoadingNamesTheRank) {
  Harness h(2);
  h.On(1, Kind::kFormGroup, [](int, const v1::Command&) {
    return std::vector{SaidError(ResourceExhaustedError("no memory for 3 GiB"))};
  });
  h.On(0, Kind::kFormGroup, [](int, const v1::Command&) { return std::vector<RankEvent>(); });
  const Status status = h.Make().Form();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("forming the group"),
                                      HasSubstr("rank 1 (host1:1): no memory for 3 GiB")));
}

TEST(ClusterTest, TheErrorThatKnowsTheLayerComesFirst) {
  Harness h(3);
  Cluster& cluster = h.Make();
  ASSERT_TRUE(cluster.Form().ok());
  h.On(0, Kind::kStep, [](int, const v1::Command&) {
    return std::vector{SaidError(AbortedError("rank 1 broke the group"))};
  });
  h.On(1, Kind::kStep, [](int, const v1::Command&) {
    return std::vector{Ended(UnavailableError("Socket closed"))};
  });
  h.On(2, Kind::kStep, [](int, const v1::Command&) {
    return std::vector{SaidError(UnavailableError("layer 17, after attention: lost rank 1"))};
  });
  h.source.gone[1] = "process 9 was killed by signal 9";
  const auto result = cluster.RunStep(OneStep(), kIgnore);
  EXPECT_EQ(result.status().message(),
            "epoch 7, step 1:\n"
            "  rank 2 (host2:1): layer 17, after attention: lost rank 1\n"
            "  rank 1 (host1:1): the connection is lost: Socket closed; process 9 was killed by "
            "signal 9\n"
            "  rank 0 (host0:1): rank 1 broke the group");
  EXPECT_THAT(h.source.suspects, testing::ElementsAre(1));
}

TEST(ClusterTest, ABrokenGroupFailsAtOnceUntilItIsFormedAnew) {
  Harness h(2);
  Cluster& cluster = h.Make();
  ASSERT_TRUE(cluster.Form().ok());
  h.clients[1]->Push(Ended(UnavailableError("gone")));
  EXPECT_FALSE(cluster.RunStep(OneStep(), kIgnore).ok());
  EXPECT_FALSE(cluster.formed());
  const TimePoint start = Now();
  const auto again = cluster.RunStep(OneStep(), kIgnore);
  EXPECT_EQ(again.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(again.status().message(), HasSubstr("the group is broken"));
  EXPECT_LT(Now() - start, milliseconds(100));
  ASSERT_TRUE(cluster.Form().ok());
  EXPECT_EQ(cluster.epoch(), 8u);
  EXPECT_TRUE(cluster.RunStep(OneStep(), kIgnore).ok());
  EXPECT_EQ(h.commands[0].back().step().sequence(), 1u);
}

TEST(ClusterTest, ASilentRankIsNamedAfterTheLimit) {
  Harness h(2);
  Cluster& cluster = h.Make();
  ASSERT_TRUE(cluster.Form().ok());
  h.On(1, Kind::kStep, [](int, const v1::Command&) { return std::vector<RankEvent>(); });
  const TimePoint start = Now();
  const auto result = cluster.RunStep(OneStep(), kIgnore);
  EXPECT_EQ(result.status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(result.status().message(), AllOf(HasSubstr("rank 1 (host1:1): no progress for"),
                                               testing::Not(HasSubstr("rank 0"))));
  EXPECT_GE(Now() - start, milliseconds(100));
  EXPECT_LT(Now() - start, milliseconds(2500));
  EXPECT_THAT(h.source.suspects, testing::ElementsAre(1));
}

// Bytes from a worker that no right worker sends break the group and name it.
TEST(ClusterTest, EventsOutOfPlaceBreakTheGroup) {
  const auto token_event = [](const v1::Command& command, int32_t id) {
    v1::Event event;
    EncodeToken(command.step().sequence(), {0, 3, id, 0.0f, false, {}}, event.mutable_token());
    return std::vector{Said(event)};
  };
  const std::vector<std::pair<int, Reply>> wrong = {
      {1, [&](int, const v1::Command& c) { return token_event(c, 5); }},    // not rank 0
      {0, [&](int, const v1::Command& c) { return token_event(c, 100); }},  // not in the vocabulary
      {0,
       [](int, const v1::Command& c) {
         v1::Event event;
         event.mutable_step_done()->set_sequence(c.step().sequence() + 1);
         return std::vector{Said(event)};
       }},
      {1, [](int, const v1::Command&) { return std::vector{Said(v1::Event())}; }},
  };
  for (const auto& [rank, reply] : wrong) {
    Harness h(2);
    Cluster& cluster = h.Make();
    ASSERT_TRUE(cluster.Form().ok());
    h.On(rank, Kind::kStep, reply);
    const auto result = cluster.RunStep(OneStep(), kIgnore);
    EXPECT_EQ(result.status().code(), StatusCode::kInternal);
    EXPECT_THAT(result.status().message(),
                AllOf(HasSubstr("rank " + std::to_string(rank)), HasSubstr("out of place")));
  }
}

TEST(ClusterTest, ARankThatComputesSomethingElseIsFound) {
  Harness h(3);
  h.options.check_state = true;
  int wrong_rank = -1;
  for (int rank = 0; rank < 3; ++rank) {
    h.On(rank, Kind::kStep, [&](int r, const v1::Command& command) {
      std::vector<RankEvent> events = GoodReply(r, command);
      EXPECT_TRUE(command.step().want_state_hash());
      events.back().event.mutable_step_done()->add_state_hash(r == wrong_rank ? 5 : 4);
      return events;
    });
  }
  Cluster& cluster = h.Make();
  ASSERT_TRUE(cluster.Form().ok());
  EXPECT_TRUE(cluster.RunStep(OneStep(), kIgnore).ok());
  wrong_rank = 2;
  const auto result = cluster.RunStep(OneStep(), kIgnore);
  EXPECT_THAT(result.status().message(),
              AllOf(HasSubstr("rank 2 (host2:1) has hash 5"), HasSubstr("rank 0 4")));
  EXPECT_FALSE(cluster.formed());
}

TEST(ClusterTest, ALostWorkerIsNoticedBetweenTwoAnswers) {
  Harness h(2);
  Cluster& cluster = h.Make();
  ASSERT_TRUE(cluster.Form().ok());
  EXPECT_TRUE(cluster.CheckAlive().ok());
  h.clients[0]->Push(Ended(UnavailableError("Socket closed")));
  const Status status = cluster.CheckAlive();
  EXPECT_THAT(status.message(), HasSubstr("rank 0 (host0:1): the connection is lost"));
  EXPECT_FALSE(cluster.formed());
}

TEST(ClusterTest, WaitsEndWhenTheProgramIsAskedToStop) {
  Harness h(2);
  h.options.join_timeout = milliseconds(20000);
  h.On(1, Kind::kHello, [](int, const v1::Command&) { return std::vector<RankEvent>(); });
  Cluster& cluster = h.Make();
  const TimePoint start = Now();
  cluster.set_stop([&] { return Now() > start + milliseconds(100); });
  EXPECT_EQ(cluster.Form().code(), StatusCode::kCancelled);
  EXPECT_LT(Now() - start, milliseconds(2000));
}

TEST(EventQueueTest, IsBoundedButAlwaysTakesTheEnd) {
  EventQueue queue;
  for (size_t i = 0; i < EventQueue::kMaxEvents; ++i) ASSERT_TRUE(queue.Push(Said({})));
  EXPECT_FALSE(queue.Push(Said({})));
  EXPECT_TRUE(queue.Push(Ended(OkStatus())));
}

}  // namespace
}  // namespace ds4
