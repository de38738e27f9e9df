// Goal: an engine runs exactly what a plan says, or nothing; all ranks of any number give the same
// tokens, logits and state; a lost rank is named and ends the group. Method: the small random
// model, ranks as threads of this process over local transports.

#include "engine/session/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <random>
#include <set>

#include "engine/base/strings.h"
#include "tests/support/engine_group.h"
#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

constexpr int kVocab = 97;
constexpr uint64_t kSession = 7;

std::string ModelPath() {
  static const std::string path = WriteSmallModel("session", {.type = DType::kQ8_0, .seed = 3});
  return path;
}

EngineOptions Options() {
  EngineOptions options;
  options.model_path = ModelPath();
  options.max_context = 128;
  options.max_batch_rows = 32;
  options.max_sessions = 3;
  return options;
}

std::vector<int32_t> RandomIds(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % kVocab);
  return ids;
}

StepPart Part(uint64_t session, int64_t pos, std::vector<int32_t> tokens, bool sample = false) {
  StepPart part;
  part.session_id = session;
  part.pos = pos;
  part.tokens = std::move(tokens);
  part.sample = sample;
  return part;
}

StepPlan Plan(std::vector<StepPart> parts, int32_t decode_steps = 0) {
  StepPlan plan;
  plan.sequence = 12;
  plan.parts = std::move(parts);
  plan.decode_steps = decode_steps;
  return plan;
}

// One rank, one open session of 64 tokens with `prefilled` of them in place.
class OneRank {
 public:
  explicit OneRank(int64_t prefilled = 0) : group_(Options(), 1) {
    EXPECT_TRUE(group_.load_status(0).ok()) << group_.load_status(0);
    EXPECT_TRUE(engine().OpenSession(kSession, 64).ok());
    if (prefilled > 0) {
      EXPECT_TRUE(Run(Plan({Part(kSession, 0, RandomIds(prefilled, 1))})).ok());
    }
  }
  Engine& engine() { return group_.engine(0); }
  Result<StepResult> Run(const StepPlan& plan) { return engine().Run(plan, nullptr); }
  uint64_t Hash(uint64_t session = kSession) { return engine().StateHash(session).value(); }
  std::vector<int32_t> Tokens(const StepPlan& plan) {
    const Result<StepResult> result = Run(plan);
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<int32_t> tokens;
    if (result.ok()) {
      for (const TokenOutput& output : result->tokens) tokens.push_back(output.token);
    }
    return tokens;
  }

 private:
  EngineGroup group_;
};

// All logits of the row after `tokens`, by id.
std::vector<float> LogitsAfter(const std::vector<int32_t>& tokens) {
  OneRank rank;
  StepPart part = Part(kSession, 0, tokens, true);
  part.num_top = kVocab;
  const StepResult result = rank.Run(Plan({part})).value();
  std::vector<float> logits(kVocab);
  for (const TopToken& top : result.tokens[0].top) logits[top.id] = top.logit;
  return logits;
}

double LogSoftmax(const std::vector<float>& logits, int32_t id) {
  double sum = 0.0;
  for (float logit : logits) sum += std::exp(static_cast<double>(logit));
  return static_cast<double>(logits[id]) - std::log(sum);
}

// ---- What is refused

TEST(EngineTest, LoadRefusesOptionsThatCannotBeWithBothValues) {
  const auto error = [](const std::function<void(EngineOptions&)>& change) {
    EngineOptions options = Options();
    change(options);
    const Status status = EngineGroup(options, 1).load_status(0);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    return status.message();
  };
  EXPECT_THAT(error([](EngineOptions& o) { o.num_threads = 0; }), HasSubstr("threads is 0"));
  EXPECT_THAT(error([](EngineOptions& o) { o.max_context = 4097; }), HasSubstr("1 to 4096"));
  EXPECT_THAT(error([](EngineOptions& o) { o.max_context = 0; }), HasSubstr("a context of 0"));
  EXPECT_THAT(error([](EngineOptions& o) { o.max_batch_rows = 0; }), HasSubstr("batch rows is 0"));
  EXPECT_THAT(error([](EngineOptions& o) { o.max_batch_rows = 65537; }), HasSubstr("65537"));
  EXPECT_THAT(error([](EngineOptions& o) { o.max_sessions = 0; }), HasSubstr("sessions is 0"));
}

TEST(EngineTest, SessionsAreOpenedOnceWithinTheLimits) {
  OneRank rank;
  Engine& engine = rank.engine();
  EXPECT_EQ(engine.OpenSession(kSession, 64).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(engine.OpenSession(8, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(engine.OpenSession(8, 129).message(), HasSubstr("129 tokens"));
  EXPECT_THAT(engine.OpenSession(8, 129).message(), HasSubstr("1 to 128"));
  EXPECT_TRUE(engine.OpenSession(8, 128).ok());
  EXPECT_TRUE(engine.OpenSession(9, 1).ok());
  const Status full = engine.OpenSession(10, 1);
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(full.message(), HasSubstr("3 of 3"));
  EXPECT_TRUE(engine.CloseSession(8).ok());
  EXPECT_TRUE(engine.OpenSession(10, 1).ok());
  EXPECT_EQ(engine.CloseSession(8).code(), StatusCode::kNotFound);
  EXPECT_EQ(engine.StateHash(8).status().code(), StatusCode::kNotFound);
}

// A plan that does not fit is refused before anything has run: the state keeps its hash, and the
// same step without its fault runs afterwards.
TEST(EngineTest, APlanThatDoesNotFitRunsNothing) {
  struct Case {
    const char* says;
    std::function<void(StepPlan&)> change;
  };
  const Case cases[] = {
      {"step 12 has no parts", [](StepPlan& p) { p.parts.clear(); }},
      {"decode_steps is -1", [](StepPlan& p) { p.decode_steps = -1; }},
      {"has 33 rows, a batch holds 32", [](StepPlan& p) { p.parts[0].tokens = RandomIds(33, 5); }},
      {"step 12, part 0: session 5 is not open", [](StepPlan& p) { p.parts[0].session_id = 5; }},
      {"part 0 has no tokens", [](StepPlan& p) { p.parts[0].tokens.clear(); }},
      {"starts at position 61, the session is at 60", [](StepPlan& p) { p.parts[0].pos = 61; }},
      {"starts at position -1", [](StepPlan& p) { p.parts[0].pos = -1; }},
      {"goes back to 12 or 0", [](StepPlan& p) { p.parts[0].pos = 11; }},
      {"ends at position 65, the session's context is 64",
       [](StepPlan& p) { p.parts[0].tokens = RandomIds(5, 5); }},
      {"has 2 score targets for 1 tokens",
       [](StepPlan& p) {
         p.parts[0].score_targets = {1, 2};
       }},
      {"num_top is -1", [](StepPlan& p) { p.parts[0].num_top = -1; }},
      {"num_top is 98, must be from 0 to 97", [](StepPlan& p) { p.parts[0].num_top = 98; }},
      {"tokens[0] is 97, the vocabulary has ids 0 to 96",
       [](StepPlan& p) { p.parts[0].tokens[0] = 97; }},
      {"tokens[0] is -1", [](StepPlan& p) { p.parts[0].tokens[0] = -1; }},
      {"score_targets[0] is -2", [](StepPlan& p) { p.parts[0].score_targets = {-2}; }},
      {"score_targets[0] is 97", [](StepPlan& p) { p.parts[0].score_targets = {97}; }},
      {"stop_ids[1] is 97",
       [](StepPlan& p) {
         p.parts[0].stop_ids = {3, 97};
       }},
      {"temperature is nan", [](StepPlan& p) { p.parts[0].sampling.temperature = NAN; }},
      {"top_k is -1", [](StepPlan& p) { p.parts[0].sampling.top_k = -1; }},
      {"top_p is 0", [](StepPlan& p) { p.parts[0].sampling.top_p = 0.0f; }},
      {"min_p is 2", [](StepPlan& p) { p.parts[0].sampling.min_p = 2.0f; }},
      {"part 1: session 7 is in it twice", [](StepPlan& p) { p.parts.push_back(p.parts[0]); }},
      // The second part's fault must stop the first part too.
      {"part 1: session 5 is not open", [](StepPlan& p) { p.parts.push_back(Part(5, 0, {1})); }},
  };
  OneRank rank;
  for (int64_t pos = 0; pos < 60; pos += 12) {
    ASSERT_TRUE(rank.Run(Plan({Part(kSession, pos, RandomIds(12, 1))})).ok());
  }
  const uint64_t hash = rank.Hash();
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.says);
    StepPlan plan = Plan({Part(kSession, 60, {4}, true)});
    bad.change(plan);
    int tokens_seen = 0;
    const Status status =
        rank.engine().Run(plan, [&](const TokenOutput&) { ++tokens_seen; }).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(bad.says));
    EXPECT_EQ(rank.Hash(), hash);
    EXPECT_EQ(tokens_seen, 0);
  }
  EXPECT_TRUE(rank.Run(Plan({Part(kSession, 60, {4}, true)})).ok());
}

// ---- What a step does

TEST(EngineTest, ABurstOfDecodeStepsEqualsSingleSteps) {
  for (float temperature : {0.0f, 1.0f}) {
    OneRank burst(10);
    StepPart part = Part(kSession, 10, {5}, true);
    part.sampling.temperature = temperature;
    part.sampling.seed = 9;
    const std::vector<int32_t> at_once = burst.Tokens(Plan({part}, 20));
    ASSERT_EQ(at_once.size(), 21u);

    OneRank single(10);
    std::vector<int32_t> one_by_one;
    for (int i = 0; i <= 20; ++i) {
      const std::vector<int32_t> tokens = single.Tokens(Plan({part}));
      ASSERT_EQ(tokens.size(), 1u);
      one_by_one.push_back(tokens[0]);
      part.pos += 1;
      part.tokens = tokens;
    }
    EXPECT_EQ(at_once, one_by_one);
    EXPECT_EQ(burst.Hash(), single.Hash());
    EXPECT_GT(std::set<int32_t>(at_once.begin(), at_once.end()).size(), 1u);
  }
}

TEST(EngineTest, TokensAreReportedInOrderWithTheirPositions) {
  OneRank rank(10);
  std::vector<std::pair<int64_t, int32_t>> seen;
  const StepResult result =
      rank.engine()
          .Run(Plan({Part(kSession, 10, {5, 6}, true)}, 3),
               [&](const TokenOutput& out) { seen.emplace_back(out.pos, out.token); })
          .value();
  ASSERT_EQ(result.tokens.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(result.tokens[i].pos, 12 + i);
    EXPECT_EQ(seen[i], std::pair(result.tokens[i].pos, result.tokens[i].token));
  }
  EXPECT_GT(result.seconds, 0.0);
}

TEST(EngineTest, PartsOfOneStepDoNotTouchEachOther) {
  OneRank rank;
  ASSERT_TRUE(rank.engine().OpenSession(8, 64).ok());
  ASSERT_TRUE(rank.engine().OpenSession(9, 64).ok());
  const std::vector<StepPart> parts = {Part(kSession, 0, RandomIds(9, 21), true),
                                       Part(8, 0, RandomIds(3, 22), false),
                                       Part(9, 0, RandomIds(17, 23), true)};
  const StepResult together = rank.Run(Plan(parts, 6)).value();
  for (size_t i = 0; i < parts.size(); ++i) {
    OneRank alone;
    StepPart part = parts[i];
    part.session_id = kSession;
    std::vector<int32_t> expected = alone.Tokens(Plan({part}, 6));
    std::vector<int32_t> got;
    for (const TokenOutput& output : together.tokens) {
      if (output.part == static_cast<int32_t>(i)) got.push_back(output.token);
    }
    EXPECT_EQ(got, expected) << "part " << i;
    EXPECT_EQ(got.size(), part.sample ? 7u : 0u) << "part " << i;
    EXPECT_EQ(rank.Hash(parts[i].session_id), alone.Hash()) << "part " << i;
  }
}

TEST(EngineTest, AStopIdEndsItsPartAndNoOther) {
  OneRank plain(10);
  const std::vector<int32_t> tokens = plain.Tokens(Plan({Part(kSession, 10, {5}, true)}, 10));
  const int32_t stop = tokens[4];
  const auto first =
      static_cast<size_t>(std::find(tokens.begin(), tokens.end(), stop) - tokens.begin());
  OneRank rank(10);
  ASSERT_TRUE(rank.engine().OpenSession(8, 64).ok());
  StepPart part = Part(kSession, 10, {5}, true);
  part.stop_ids = {stop};
  const StepResult result = rank.Run(Plan({part, Part(8, 0, {1}, true)}, 10)).value();
  std::vector<TokenOutput> stopped;
  size_t others = 0;
  for (const TokenOutput& output : result.tokens) {
    if (output.part == 0) stopped.push_back(output);
    others += output.part == 1;
  }
  ASSERT_EQ(stopped.size(), first + 1);
  for (size_t i = 0; i < stopped.size(); ++i) {
    EXPECT_EQ(stopped[i].token, tokens[i]);
    EXPECT_EQ(stopped[i].is_stop, i == first);
  }
  EXPECT_EQ(others, 11u);
}

// The last position of a context holds a token; the one drawn after it has no row to run.
TEST(EngineTest, DecodingEndsWithTheContext) {
  OneRank rank(20);
  std::vector<int32_t> tokens =
      rank.Tokens(Plan({Part(kSession, 20, RandomIds(30, 2), true)}, 100));
  EXPECT_EQ(tokens.size(), 64u - 50u + 1u);
  const Status full = rank.Run(Plan({Part(kSession, 64, {1})})).status();
  EXPECT_THAT(full.message(), HasSubstr("ends at position 65, the session's context is 64"));
}

TEST(EngineTest, GoingBackGivesTheSameTokensAgain) {
  OneRank rank(20);
  const std::vector<int32_t> first = rank.Tokens(Plan({Part(kSession, 20, {5}, true)}, 10));
  (void)rank.Tokens(Plan({Part(kSession, 22, {50, 51}, true)}, 8));
  EXPECT_EQ(rank.Tokens(Plan({Part(kSession, 20, {5}, true)}, 10)), first);
}

TEST(EngineTest, ScoresAreMinusLogSoftmaxOfTheRow) {
  const std::vector<int32_t> ids = RandomIds(12, 31);
  OneRank rank;
  StepPart part = Part(kSession, 0, ids);
  part.score_targets.assign(ids.begin() + 1, ids.end());
  part.score_targets.push_back(-1);
  part.score_targets[3] = -1;
  const StepResult result = rank.Run(Plan({part})).value();
  ASSERT_EQ(result.nll.size(), 1u);
  ASSERT_EQ(result.nll[0].size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (part.score_targets[i] < 0) {
      EXPECT_EQ(result.nll[0][i], 0.0f) << i;
      continue;
    }
    const std::vector<float> logits = LogitsAfter({ids.begin(), ids.begin() + i + 1});
    // float32 logits of a few units: the sums differ by a few times 2^-23 of them.
    EXPECT_NEAR(result.nll[0][i], -LogSoftmax(logits, part.score_targets[i]), 2e-6) << i;
  }
}

TEST(EngineTest, GreedyTakesTheLargestLogitAndTellsItsLogProbability) {
  const std::vector<int32_t> ids = RandomIds(12, 32);
  const std::vector<float> logits = LogitsAfter(ids);
  OneRank rank;
  const StepResult result = rank.Run(Plan({Part(kSession, 0, ids, true)})).value();
  const auto best =
      static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  EXPECT_EQ(result.tokens[0].token, best);
  EXPECT_NEAR(result.tokens[0].logprob, LogSoftmax(logits, best), 2e-6);
  EXPECT_TRUE(result.tokens[0].top.empty());
}

TEST(EngineTest, TopTokensAreTheLargestBestFirst) {
  const std::vector<int32_t> ids = RandomIds(12, 33);
  const std::vector<float> logits = LogitsAfter(ids);
  OneRank rank;
  StepPart part = Part(kSession, 0, ids, true);
  part.num_top = 5;
  const StepResult result = rank.Run(Plan({part})).value();
  const std::vector<TopToken>& top = result.tokens[0].top;
  ASSERT_EQ(top.size(), 5u);
  std::vector<float> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(top[i].logit, sorted[i]);
    EXPECT_EQ(top[i].logit, logits[top[i].id]);
  }
}

// Asking for more to look at must not change what is drawn.
TEST(EngineTest, NumTopDoesNotChangeTheDraw) {
  std::vector<int32_t> expected;
  for (int32_t num_top : {0, 1, 40, kVocab}) {
    OneRank rank(10);
    StepPart part = Part(kSession, 10, {5}, true);
    part.sampling = {1.3f, 0, 0.9f, 0.0f, 77};
    part.num_top = num_top;
    const std::vector<int32_t> tokens = rank.Tokens(Plan({part}, 20));
    if (expected.empty()) expected = tokens;
    EXPECT_EQ(tokens, expected) << num_top;
  }
}

// ---- Any number of ranks

// Every world size, filter and seed: the same tokens, log probabilities, scores and state.
TEST(EngineTest, EveryWorldSizeGivesTheSameStep) {
  const SamplingParams samplings[] = {{0.0f, 0, 1.0f, 0.0f, 0},    {1.0f, 0, 1.0f, 0.0f, 5},
                                      {2.5f, 0, 1.0f, 0.0f, 6},    {0.8f, 20, 1.0f, 0.0f, 7},
                                      {1.2f, 0, 0.85f, 0.0f, 8},   {1.5f, 0, 1.0f, 0.05f, 9},
                                      {1.1f, 50, 0.95f, 0.02f, 10}};
  struct Seen {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<float> nll;
    uint64_t hash = 0;
    bool operator==(const Seen&) const = default;
  };
  std::vector<Seen> expected;
  for (int world : {1, 2, 3, 4, 5, 8}) {
    EngineOptions options = Options();
    options.num_threads = world <= 2 ? 2 : 1;
    EngineGroup group(options, world);
    group.OnAll([&](int rank) {
      ASSERT_TRUE(group.load_status(rank).ok()) << group.load_status(rank);
      ASSERT_TRUE(group.engine(rank).OpenSession(kSession, 64).ok());
    });
    for (size_t s = 0; s < std::size(samplings); ++s) {
      SCOPED_TRACE(StrCat(world, " ranks, sampling ", s));
      StepPart part = Part(kSession, 0, RandomIds(23, 40), true);
      part.score_targets = RandomIds(23, 41);
      part.sampling = samplings[s];
      part.num_top = 3;
      const auto results = group.RunAll(Plan({part}, 24));
      for (int rank = 0; rank < world; ++rank) {
        ASSERT_TRUE(results[rank].ok()) << results[rank].status();
        Seen seen;
        for (const TokenOutput& output : results[rank]->tokens) {
          seen.tokens.push_back(output.token);
          seen.logprobs.push_back(output.logprob);
        }
        seen.nll = results[rank]->nll[0];
        seen.hash = group.engine(rank).StateHash(kSession).value();
        if (world == 1) expected.push_back(seen);
        EXPECT_EQ(seen, expected[s]) << "rank " << rank;
      }
    }
  }
  // The settings differ in what they draw, so equality above means something.
  std::set<std::vector<int32_t>> different;
  for (const Seen& seen : expected) different.insert(seen.tokens);
  EXPECT_EQ(different.size(), std::size(samplings));
}

TEST(EngineTest, RanksHoldTheirShareOfTheWeights) {
  EngineGroup one(Options(), 1);
  EngineGroup four(Options(), 4);
  for (int rank = 0; rank < 4; ++rank) {
    const EngineStats& stats = four.engine(rank).stats();
    EXPECT_LT(stats.weight_bytes, one.engine(0).stats().weight_bytes);
    EXPECT_GT(stats.weight_bytes, one.engine(0).stats().weight_bytes / 4);
    EXPECT_EQ(stats.kv_bytes_per_session, one.engine(0).stats().kv_bytes_per_session);
  }
}

// ---- A rank is lost

// Fails its exchange number `fail_at` as a killed process would: the link is gone.
class LostRank : public Transport {
 public:
  LostRank(std::unique_ptr<Transport> inner, int fail_at)
      : inner_(std::move(inner)), fail_at_(fail_at) {}
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }
  std::string peer_name(int peer) const override { return inner_->peer_name(peer); }
  void Abort(Status why) override { inner_->Abort(std::move(why)); }
  Status Exchange(uint64_t sequence, std::span<const SendOp> sends, std::span<const RecvOp> recvs,
                  std::chrono::steady_clock::time_point deadline) override {
    if (num_exchanges_++ == fail_at_) inner_->Abort(UnavailableError("killed by the test"));
    return inner_->Exchange(sequence, sends, recvs, deadline);
  }

 private:
  const std::unique_ptr<Transport> inner_;
  const int fail_at_;
  int num_exchanges_ = 0;
};

// Eight shared sums a forward pass (four layers, two each), then the choice of a token.
TEST(EngineTest, ALostRankIsNamedByAllOthersWithThePlaceAndTheGroupStaysBroken) {
  struct Case {
    int fail_at;
    const char* site;
  };
  for (const Case& lost : {Case{0, "layer 0, after attention"}, Case{3, "layer 1, after experts"},
                           Case{8, "choosing a token"}}) {
    SCOPED_TRACE(lost.site);
    EngineGroup group(Options(), 3, [&](std::unique_ptr<Transport> transport) {
      if (transport->rank() != 1) return transport;
      return std::unique_ptr<Transport>(new LostRank(std::move(transport), lost.fail_at));
    });
    group.OnAll([&](int rank) {
      ASSERT_TRUE(group.engine(rank).OpenSession(kSession, 64).ok());
      group.comm(rank).set_timeout(5s);
    });
    const StepPlan plan = Plan({Part(kSession, 0, {1, 2, 3}, true)}, 4);
    const auto start = std::chrono::steady_clock::now();
    const auto results = group.RunAll(plan);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    for (int rank : {0, 2}) {
      ASSERT_FALSE(results[rank].ok());
      EXPECT_EQ(results[rank].status().code(), StatusCode::kUnavailable);
      EXPECT_THAT(results[rank].status().message(), HasSubstr("rank 1"));
      EXPECT_THAT(results[rank].status().message(), HasSubstr(lost.site));
    }
    EXPECT_FALSE(results[1].ok());
    const auto again = group.RunAll(plan);
    for (int rank : {0, 1, 2}) EXPECT_EQ(again[rank].status(), results[rank].status());
  }
}

// A rank that stalls is named once the time is over, not before and not much later.
TEST(EngineTest, AStalledRankIsNamedAfterTheTimeout) {
  EngineGroup group(Options(), 3);
  group.OnAll([&](int rank) {
    ASSERT_TRUE(group.engine(rank).OpenSession(kSession, 64).ok());
    group.comm(rank).set_timeout(200ms);
  });
  const auto start = std::chrono::steady_clock::now();
  group.OnAll([&](int rank) {
    if (rank == 2) return;  // never takes part
    const Status status = group.engine(rank).Run(Plan({Part(kSession, 0, {1})}), nullptr).status();
    // The first to run into the deadline says so; the other may hear of its end instead.
    EXPECT_TRUE(status.code() == StatusCode::kDeadlineExceeded ||
                status.code() == StatusCode::kUnavailable)
        << status;
    EXPECT_THAT(status.message(), HasSubstr("layer 0, after attention"));
    EXPECT_THAT(status.message(), HasSubstr("rank 2"));
  });
  const auto taken = std::chrono::steady_clock::now() - start;
  EXPECT_GE(taken, 200ms);
  EXPECT_LT(taken, 3s);
}

// Ranks that disagree on the plan must not mix their sums.
TEST(EngineTest, RanksWithPlansOfOtherShapesEndTheGroup) {
  EngineGroup group(Options(), 2);
  group.OnAll([&](int rank) {
    ASSERT_TRUE(group.engine(rank).OpenSession(kSession, 64).ok());
    group.comm(rank).set_timeout(2s);
    const StepPlan plan = Plan({Part(kSession, 0, RandomIds(rank + 1, 1))});
    EXPECT_FALSE(group.engine(rank).Run(plan, nullptr).ok());
  });
}

// ---- The plan itself

TEST(StepPlanTest, EveryFieldCountsInTheDigest) {
  const auto base = [] {
    StepPart part = Part(kSession, 4, {1, 2, 3}, true);
    part.stop_ids = {5};
    part.score_targets = {1, 2, -1};
    return Plan({part, Part(8, 0, {9})}, 3);
  };
  const std::function<void(StepPlan&)> changes[] = {
      [](StepPlan& p) { ++p.sequence; }, [](StepPlan& p) { ++p.decode_steps; },
      [](StepPlan& p) { p.parts.pop_back(); },
      [](StepPlan& p) { std::swap(p.parts[0], p.parts[1]); },
      [](StepPlan& p) { ++p.parts[0].session_id; }, [](StepPlan& p) { ++p.parts[0].pos; },
      [](StepPlan& p) { ++p.parts[0].tokens[2]; },
      [](StepPlan& p) { p.parts[0].tokens.push_back(0); },
      [](StepPlan& p) { p.parts[0].sample = false; },
      [](StepPlan& p) { p.parts[0].sampling.temperature = 1.0f; },
      [](StepPlan& p) { p.parts[0].sampling.top_k = 1; },
      [](StepPlan& p) { p.parts[0].sampling.top_p = 0.5f; },
      [](StepPlan& p) { p.parts[0].sampling.min_p = 0.5f; },
      [](StepPlan& p) { p.parts[0].sampling.seed = 1; },
      [](StepPlan& p) { p.parts[0].stop_ids.clear(); },
      [](StepPlan& p) { p.parts[0].score_targets[2] = 1; },
      [](StepPlan& p) { p.parts[0].num_top = 1; },
      // The same numbers, cut elsewhere: a token that becomes a stop id.
      [](StepPlan& p) {
        p.parts[0].tokens.pop_back();
        p.parts[0].stop_ids = {3, 5};
      }};
  std::set<uint64_t> digests = {base().Digest()};
  EXPECT_EQ(base().Digest(), base().Digest());
  for (const auto& change : changes) {
    StepPlan plan = base();
    change(plan);
    EXPECT_TRUE(digests.insert(plan.Digest()).second) << "change " << digests.size();
  }
  EXPECT_EQ(base().num_rows(), 4);
}

}  // namespace
}  // namespace ds4
