// Goal: no message, however hostile, becomes a group that breaks a rule, and the error says which
// field, which value and which range; events say the same after the wire. Method: one hostile field
// at a time in an otherwise good FormGroup, then each kind of command and event.
#include "worker/command_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/control_client.h"

namespace ds4 {
namespace {

using ::testing::HasSubstr;

constexpr CommandLimits kLimits{1000, 64};

v1::FormGroup GoodGroup() { return ControlClient::FormGroup(7, 1, 3).form_group(); }

TEST(FormGroup, EveryFieldArrives) {
  auto spec = DecodeFormGroup(GoodGroup(), kLimits);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->epoch, 7u);
  EXPECT_EQ(spec->rank, 1);
  EXPECT_EQ(spec->world_size(), 3);
  EXPECT_EQ(spec->lanes.num_lanes, 8);
  EXPECT_EQ(spec->lanes.begin, (std::vector<int>{0, 3, 6, 8}));
  ASSERT_EQ(spec->peers.size(), 3u);
  EXPECT_EQ(spec->peers[2].host, "127.0.0.1");
  EXPECT_EQ(spec->peers[2].data_port, 9002);
  EXPECT_EQ(spec->transport, "tcp");
  EXPECT_EQ(spec->plan_digest, kFakeDigest);
  EXPECT_EQ(spec->max_context, 100);
  EXPECT_EQ(spec->max_batch_rows, 16);
  EXPECT_EQ(spec->max_sessions, 2);
  EXPECT_EQ(spec->timeout, std::chrono::milliseconds(5000));
  EXPECT_EQ(spec->join_timeout, std::chrono::milliseconds(1000));
}

struct Hostile {
  const char* name;
  void (*change)(v1::FormGroup*);
  const char* error;
};

class HostileFormGroup : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileFormGroup, IsRefusedInWords) {
  v1::FormGroup message = GoodGroup();
  GetParam().change(&message);
  auto spec = DecodeFormGroup(message, kLimits);
  ASSERT_FALSE(spec.ok());
  EXPECT_EQ(spec.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(spec.status().message(), HasSubstr(GetParam().error));
}

INSTANTIATE_TEST_SUITE_P(
    Worker, HostileFormGroup,
    ::testing::Values(
        Hostile{"empty", [](v1::FormGroup* g) { g->Clear(); }, "num_lanes is 0"},
        Hostile{"negative_lanes", [](v1::FormGroup* g) { g->set_num_lanes(-8); },
                "num_lanes is -8"},
        Hostile{"huge_lanes", [](v1::FormGroup* g) { g->set_num_lanes(1 << 30); },
                "num_lanes is 1073741824, must be in [1, 1024]"},
        Hostile{"lanes_no_power_of_two", [](v1::FormGroup* g) { g->set_num_lanes(6); },
                "num_lanes is 6, must be a power of two"},
        Hostile{"world_of_none", [](v1::FormGroup* g) { g->set_world_size(0); }, "world_size is 0"},
        Hostile{"huge_world", [](v1::FormGroup* g) { g->set_world_size(INT32_MAX); },
                "world_size is 2147483647, must be in [1, 8]"},
        Hostile{"negative_rank", [](v1::FormGroup* g) { g->set_rank(-1); }, "rank is -1"},
        Hostile{"rank_outside", [](v1::FormGroup* g) { g->set_rank(3); },
                "rank is 3, must be in [0, 2]"},
        Hostile{"too_few_lane_begins",
                [](v1::FormGroup* g) { g->mutable_lane_begin()->RemoveLast(); },
                "lane_begin has 3 entries, a group of 3 needs 4"},
        Hostile{"rank_without_lanes", [](v1::FormGroup* g) { g->set_lane_begin(2, 3); },
                "lane_begin is 0, 3, 3, 8"},
        Hostile{"lanes_start_late", [](v1::FormGroup* g) { g->set_lane_begin(0, 1); },
                "must rise from 0 to num_lanes 8"},
        Hostile{"lanes_end_past", [](v1::FormGroup* g) { g->set_lane_begin(3, 9); },
                "lane_begin is 0, 3, 6, 9"},
        Hostile{"negative_lane_begin", [](v1::FormGroup* g) { g->set_lane_begin(1, -3); },
                "lane_begin is 0, -3, 6, 8"},
        Hostile{"other_transport", [](v1::FormGroup* g) { g->set_transport("pigeon"); },
                "transport is \"pigeon\""},
        Hostile{"too_few_peers", [](v1::FormGroup* g) { g->mutable_peers()->RemoveLast(); },
                "2 peers for a group of 3"},
        Hostile{"peers_out_of_order", [](v1::FormGroup* g) { g->mutable_peers(0)->set_rank(2); },
                "peers[0] is rank 2"},
        Hostile{"peer_without_host", [](v1::FormGroup* g) { g->mutable_peers(2)->clear_host(); },
                "peers[2].host is \"\""},
        Hostile{"peer_with_a_long_host",
                [](v1::FormGroup* g) { g->mutable_peers(2)->set_host(std::string(100000, 'a')); },
                "(100000 bytes)"},
        Hostile{"peer_with_a_control_character",
                [](v1::FormGroup* g) { g->mutable_peers(2)->set_host("a\nb"); }, "\"a?b\""},
        Hostile{"peer_port_zero", [](v1::FormGroup* g) { g->mutable_peers(1)->set_data_port(0); },
                "peers[1].data_port is 0"},
        Hostile{"peer_port_huge",
                [](v1::FormGroup* g) { g->mutable_peers(1)->set_data_port(UINT32_MAX); },
                "peers[1].data_port is 4294967295, must be in [1, 65535]"},
        Hostile{"grpc_peer_without_address", [](v1::FormGroup* g) { g->set_transport("grpc"); },
                "peers[0].control_address is \"\""},
        Hostile{"no_plan", [](v1::FormGroup* g) { g->clear_plan_digest(); }, "plan_digest is \"\""},
        Hostile{"context_over_the_limit", [](v1::FormGroup* g) { g->set_max_context(1001); },
                "max_context is 1001, must be in [1, 1000]"},
        Hostile{"negative_context", [](v1::FormGroup* g) { g->set_max_context(INT64_MIN); },
                "max_context is -9223372036854775808"},
        Hostile{"rows_over_the_limit", [](v1::FormGroup* g) { g->set_max_batch_rows(65); },
                "max_batch_rows is 65, must be in [1, 64]"},
        Hostile{"no_sessions", [](v1::FormGroup* g) { g->set_max_sessions(0); },
                "max_sessions is 0"},
        Hostile{"huge_sessions", [](v1::FormGroup* g) { g->set_max_sessions(INT32_MAX); },
                "max_sessions is 2147483647"},
        Hostile{"no_timeout", [](v1::FormGroup* g) { g->set_timeout_ms(0); }, "timeout_ms is 0"},
        Hostile{"negative_join_timeout", [](v1::FormGroup* g) { g->set_join_timeout_ms(-1); },
                "join_timeout_ms is -1"}),
    [](const auto& test) { return test.param.name; });

TEST(DecodeCommand, ARefusedStepKeepsItsSequenceNumber) {
  v1::Command message;
  message.mutable_step()->set_sequence(41);
  const Command command = DecodeCommand(message, kLimits);
  const auto* rejected = std::get_if<RejectedCommand>(&command);
  ASSERT_NE(rejected, nullptr);
  EXPECT_EQ(rejected->sequence, 41u);
}

TEST(DecodeCommand, AStepPastTheContextLimitIsRefused) {
  v1::Command message = ControlClient::Step(1, 1);
  message.mutable_step()->mutable_parts(0)->set_pos(1000);
  const Command command = DecodeCommand(message, kLimits);
  const auto* rejected = std::get_if<RejectedCommand>(&command);
  ASSERT_NE(rejected, nullptr);
  EXPECT_THAT(rejected->why.message(), HasSubstr("pos is 1000, must be in [0, 999]"));
}

TEST(DecodeCommand, ASessionWithANegativeContextIsRefused) {
  v1::Command message;
  message.mutable_open_session()->set_session_id(5);
  message.mutable_open_session()->set_max_context(-1);
  const Command command = DecodeCommand(message, kLimits);
  const auto* rejected = std::get_if<RejectedCommand>(&command);
  ASSERT_NE(rejected, nullptr);
  EXPECT_THAT(rejected->why.message(), HasSubstr("OpenSession 5: max_context is -1"));
}

TEST(CheckHello, ANameGoesIntoLogsSoItIsCutAndMadePrintable) {
  v1::Hello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_coordinator("a\x1b[31m" + std::string(1000, 'b'));
  auto name = CheckHello(hello);
  ASSERT_TRUE(name.ok());
  EXPECT_EQ(name->size(), 255u);
  EXPECT_TRUE(name->starts_with("a?[31mb"));
  hello.clear_coordinator();
  EXPECT_EQ(CheckHello(hello).value(), "(no name)");
}

TEST(EncodeEvent, AnErrorSaysWhoAndWhetherTheGroupLives) {
  v1::Event message;
  EncodeEvent(ErrorEvent{AbortedError("rank 1 is gone"), 2, 9, true, 33}, &message);
  EXPECT_EQ(DecodeError(message.error()), AbortedError("rank 1 is gone"));
  EXPECT_EQ(message.error().rank(), 2);
  EXPECT_EQ(message.error().epoch(), 9u);
  EXPECT_TRUE(message.error().group_broken());
  EXPECT_EQ(message.error().sequence(), 33u);
}

TEST(EncodeEvent, EachKindOfEventHasItsMessage) {
  v1::Event message;
  EncodeEvent(LoadProgressEvent{5, 10}, &message);
  EXPECT_EQ(message.load_progress().bytes_done(), 5);
  EXPECT_EQ(message.load_progress().bytes_total(), 10);
  EncodeEvent(GroupReadyEvent{3, 1, {100, 20, 0.5}}, &message);
  EXPECT_EQ(message.group_ready().epoch(), 3u);
  EXPECT_EQ(message.group_ready().rank(), 1);
  EXPECT_EQ(message.group_ready().weight_bytes(), 100);
  EXPECT_EQ(message.group_ready().kv_bytes_per_session(), 20);
  EXPECT_EQ(message.group_ready().load_seconds(), 0.5);
  EncodeEvent(SessionOpenedEvent{8}, &message);
  EXPECT_EQ(message.session_opened().session_id(), 8u);
  EncodeEvent(SessionClosedEvent{9}, &message);
  EXPECT_EQ(message.session_closed().session_id(), 9u);
  EncodeEvent(StepDoneEvent{4, StepResult(), {77}}, &message);
  EXPECT_EQ(message.step_done().sequence(), 4u);
  EXPECT_EQ(message.step_done().state_hash(0), 77u);
  EncodeEvent(LeftGroupEvent{}, &message);
  EXPECT_TRUE(message.has_left_group());
}

}  // namespace
}  // namespace ds4
