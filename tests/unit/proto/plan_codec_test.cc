// Goal: a step plan means the same on both sides of the wire, and no message, however hostile,
// becomes a plan that breaks a rule or asks for much memory. Method: round trips over the
// serialised bytes with every field set; then one hostile field at a time in an otherwise good
// message, with the error's words checked where they help the reader.
#include "proto/plan_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "proto/worker.pb.h"

namespace ds4 {
namespace {

using ::testing::HasSubstr;

StepPlan FullPlan() {
  StepPlan plan;
  plan.sequence = 0xfedcba9876543210u;
  plan.decode_steps = 7;
  StepPart prefill;
  prefill.session_id = UINT64_MAX;
  prefill.pos = 100;
  prefill.tokens = {0, 5, INT32_MAX};
  prefill.score_targets = {5, -1, 9};
  StepPart decode;
  decode.session_id = 2;
  decode.pos = 17;
  decode.tokens = {42};
  decode.sample = true;
  decode.sampling = {0.7f, 40, 0.95f, 0.05f, 0x123456789abcdefu};
  decode.stop_ids = {1, 2};
  decode.num_top = 5;
  plan.parts = {prefill, decode};
  return plan;
}

v1::Step Message(const StepPlan& plan) {
  v1::Step message;
  EncodeStep(plan, 12, plan.Digest(), true, &message);
  return message;
}

// Through the bytes, as on the wire.
v1::Step Resent(const v1::Step& message) {
  v1::Step copy;
  EXPECT_TRUE(copy.ParseFromString(message.SerializeAsString()));
  return copy;
}

TEST(PlanCodec, EveryFieldOfAStepSurvives) {
  const StepPlan plan = FullPlan();
  auto decoded = DecodeStep(Resent(Message(plan)));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->epoch, 12u);
  EXPECT_TRUE(decoded->want_state_hash);
  EXPECT_EQ(decoded->plan.sequence, plan.sequence);
  EXPECT_EQ(decoded->plan.decode_steps, plan.decode_steps);
  ASSERT_EQ(decoded->plan.parts.size(), plan.parts.size());
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const StepPart& want = plan.parts[i];
    const StepPart& got = decoded->plan.parts[i];
    EXPECT_EQ(got.session_id, want.session_id);
    EXPECT_EQ(got.pos, want.pos);
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.sample, want.sample);
    EXPECT_EQ(got.sampling, want.sampling);
    EXPECT_EQ(got.stop_ids, want.stop_ids);
    EXPECT_EQ(got.score_targets, want.score_targets);
    EXPECT_EQ(got.num_top, want.num_top);
  }
  // What ranks compare before they run.
  EXPECT_EQ(decoded->digest, plan.Digest());
  EXPECT_EQ(decoded->plan.Digest(), plan.Digest());
}

TEST(PlanCodec, APartWithoutSamplingGetsOurDefaultsNotZeros) {
  v1::Step message = Message(FullPlan());
  message.mutable_parts(1)->clear_sampling();
  auto decoded = DecodeStep(message);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->plan.parts[1].sampling, SamplingParams());
}

// One hostile change and a piece of the error it must give.
struct Hostile {
  const char* name;
  void (*change)(v1::Step*);
  const char* error;
};

class HostileStep : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileStep, IsRefusedInWords) {
  v1::Step message = Message(FullPlan());
  GetParam().change(&message);
  auto decoded = DecodeStep(Resent(message));
  ASSERT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(decoded.status().message(), HasSubstr(GetParam().error));
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    PlanCodec, HostileStep,
    ::testing::Values(
        Hostile{"no_parts", [](v1::Step* s) { s->clear_parts(); }, "has 0 parts"},
        Hostile{"too_many_parts",
                [](v1::Step* s) {
                  for (int i = 0; i < 5000; ++i) *s->add_parts() = s->parts(1);
                },
                "has 5002 parts, must be in [1, 4096]"},
        Hostile{"same_session_twice", [](v1::Step* s) { s->mutable_parts(0)->set_session_id(2); },
                "part 1: session 2 has another part"},
        Hostile{"no_tokens", [](v1::Step* s) { s->mutable_parts(1)->clear_tokens(); },
                "part 1: number of tokens is 0"},
        Hostile{"too_many_rows",
                [](v1::Step* s) {
                  for (int i = 0; i < 70000; ++i) s->mutable_parts(1)->add_tokens(1);
                },
                "70004 rows, the limit is 65536"},
        Hostile{"negative_token", [](v1::Step* s) { s->mutable_parts(0)->set_tokens(1, -1); },
                "part 0: token is -1"},
        Hostile{"negative_pos", [](v1::Step* s) { s->mutable_parts(0)->set_pos(-1); },
                "part 0: pos is -1"},
        Hostile{"huge_pos", [](v1::Step* s) { s->mutable_parts(0)->set_pos(INT64_MAX); },
                "part 0: pos is 9223372036854775807"},
        Hostile{"end_past_context",
                [](v1::Step* s) { s->mutable_parts(0)->set_pos((int64_t{1} << 30) - 1); },
                "3 tokens at pos 1073741823 go past the context limit 1073741824"},
        Hostile{"negative_decode_steps", [](v1::Step* s) { s->set_decode_steps(-1); },
                "decode_steps is -1"},
        Hostile{"huge_decode_steps", [](v1::Step* s) { s->set_decode_steps(INT32_MAX); },
                "decode_steps is 2147483647"},
        Hostile{"temperature_nan",
                [](v1::Step* s) { s->mutable_parts(1)->mutable_sampling()->set_temperature(kNan); },
                "temperature is nan"},
        Hostile{"temperature_infinite",
                [](v1::Step* s) {
                  s->mutable_parts(1)->mutable_sampling()->set_temperature(kInfinity);
                },
                "temperature is inf"},
        Hostile{"negative_top_k",
                [](v1::Step* s) { s->mutable_parts(1)->mutable_sampling()->set_top_k(-1); },
                "top_k is -1"},
        Hostile{"top_p_over_one",
                [](v1::Step* s) { s->mutable_parts(1)->mutable_sampling()->set_top_p(1.5f); },
                "top_p is 1.5, must be in [0, 1]"},
        Hostile{"top_p_nan",
                [](v1::Step* s) { s->mutable_parts(1)->mutable_sampling()->set_top_p(kNan); },
                "top_p is nan"},
        Hostile{"negative_min_p",
                [](v1::Step* s) { s->mutable_parts(1)->mutable_sampling()->set_min_p(-0.5f); },
                "min_p is -0.5"},
        Hostile{"negative_stop_id", [](v1::Step* s) { s->mutable_parts(1)->set_stop_ids(0, -7); },
                "stop_ids is -7"},
        Hostile{"too_many_stop_ids",
                [](v1::Step* s) {
                  for (int i = 0; i < 1025; ++i) s->mutable_parts(1)->add_stop_ids(i);
                },
                "number of stop_ids is 1027"},
        Hostile{"too_few_score_targets",
                [](v1::Step* s) { s->mutable_parts(0)->mutable_score_targets()->RemoveLast(); },
                "2 score_targets for 3 tokens"},
        Hostile{"score_target_below_minus_one",
                [](v1::Step* s) { s->mutable_parts(0)->set_score_targets(0, -2); },
                "score_targets is -2"},
        Hostile{"negative_num_top", [](v1::Step* s) { s->mutable_parts(1)->set_num_top(-1); },
                "num_top is -1"},
        Hostile{"huge_num_top", [](v1::Step* s) { s->mutable_parts(1)->set_num_top(1 << 30); },
                "num_top is 1073741824"}),
    [](const auto& test) { return test.param.name; });

TEST(PlanCodec, LimitsOfTheGroupAreKept) {
  PlanLimits limits;
  limits.max_rows = 3;
  auto decoded = DecodeStep(Message(FullPlan()), limits);
  ASSERT_FALSE(decoded.ok());
  EXPECT_THAT(decoded.status().message(), HasSubstr("has 4 rows, the limit is 3"));
}

TEST(PlanCodec, AnEmptyMessageIsRefused) {
  EXPECT_EQ(DecodeStep(v1::Step()).status().code(), StatusCode::kInvalidArgument);
}

TEST(PlanCodec, ATokenSurvives) {
  const TokenOutput token{1, 18, 777, -0.25f, true, {{777, 3.5f}, {2, -1.0f}}};
  v1::Token message;
  EncodeToken(9, token, &message);
  EXPECT_EQ(message.sequence(), 9u);
  auto decoded = DecodeToken(message, 2);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->part, 1);
  EXPECT_EQ(decoded->pos, 18);
  EXPECT_EQ(decoded->token, 777);
  EXPECT_EQ(decoded->logprob, -0.25f);
  EXPECT_TRUE(decoded->is_stop);
  ASSERT_EQ(decoded->top.size(), 2u);
  EXPECT_EQ(decoded->top[0].id, 777);
  EXPECT_EQ(decoded->top[1].logit, -1.0f);
}

TEST(PlanCodec, ATokenOfNoPartOrWithNoIdIsRefused) {
  v1::Token message;
  EncodeToken(9, TokenOutput{1, 18, 777, -0.25f, false, {}}, &message);
  EXPECT_FALSE(DecodeToken(message, 1).ok());
  message.set_part(-1);
  EXPECT_FALSE(DecodeToken(message, 2).ok());
  message.set_part(0);
  EXPECT_TRUE(DecodeToken(message, 2).ok());
  message.set_token(-1);
  EXPECT_FALSE(DecodeToken(message, 2).ok());
  message.set_token(1);
  message.set_logprob(kNan);
  EXPECT_FALSE(DecodeToken(message, 2).ok());
}

TEST(PlanCodec, StepDoneSurvivesAndItsCountsAreCheckedAgainstThePlan) {
  const StepPlan plan = FullPlan();
  StepResult result;
  result.nll = {{1.5f, 0.0f, 2.5f}, {}};
  result.seconds = 0.5;
  result.comm_seconds = 0.125;
  const uint64_t hashes[] = {11, 22};
  v1::StepDone message;
  EncodeStepDone(plan.sequence, result, hashes, &message);
  auto done = DecodeStepDone(message, plan);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(done->result.nll, result.nll);
  EXPECT_EQ(done->result.seconds, 0.5);
  EXPECT_EQ(done->result.comm_seconds, 0.125);
  EXPECT_EQ(done->state_hash, (std::vector<uint64_t>{11, 22}));

  v1::StepDone other_step = message;
  other_step.set_sequence(1);
  EXPECT_FALSE(DecodeStepDone(other_step, plan).ok());
  v1::StepDone few_scores = message;
  few_scores.mutable_scores(0)->mutable_nll()->RemoveLast();
  EXPECT_THAT(DecodeStepDone(few_scores, plan).status().message(),
              HasSubstr("2 scores for 3 targets"));
  v1::StepDone few_hashes = message;
  few_hashes.mutable_state_hash()->RemoveLast();
  EXPECT_FALSE(DecodeStepDone(few_hashes, plan).ok());
}

}  // namespace
}  // namespace ds4
