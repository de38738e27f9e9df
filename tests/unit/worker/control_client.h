// A coordinator's end of one Control stream, as a test drives it. Every wait ends after ten
// seconds.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "engine/base/strings.h"
#include "proto/plan_codec.h"
#include "proto/protocol.h"
#include "proto/rpc_status.h"
#include "proto/worker.grpc.pb.h"
#include "tests/unit/worker/fakes.h"

namespace ds4 {

class ControlClient {
 public:
  explicit ControlClient(uint16_t port)
      : stub_(v1::Worker::NewStub(
            grpc::CreateChannel(StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()))) {
    context_.set_deadline(std::chrono::system_clock::now() + kTestPatience);
    stream_ = stub_->Control(&context_);
  }
  ~ControlClient() {
    context_.TryCancel();
    if (!finished_) static_cast<void>(Finish());
  }

  bool Send(const v1::Command& command) { return stream_->Write(command); }

  // The next event; nothing when the stream has ended.
  std::optional<v1::Event> Next() {
    v1::Event event;
    if (stream_->Read(&event)) return event;
    return std::nullopt;
  }
  // The next event of this kind; others are passed over.
  std::optional<v1::Event> Next(v1::Event::KindCase kind) {
    while (auto event = Next()) {
      if (event->kind_case() == kind) return event;
    }
    return std::nullopt;
  }
  // The next error as our status; OK when none came.
  Status NextError() {
    const auto event = Next(v1::Event::kError);
    return event ? DecodeError(event->error()) : OkStatus();
  }

  // Says hello under this name; the reply, or nothing when refused.
  std::optional<v1::HelloReply> Hello(const std::string& name,
                                      uint32_t version = kProtocolVersion) {
    v1::Command command;
    command.mutable_hello()->set_protocol_version(version);
    command.mutable_hello()->set_coordinator(name);
    Send(command);
    const auto event = Next();
    if (!event || !event->has_hello()) {
      if (event && event->has_error()) refusal_ = DecodeError(event->error());
      return std::nullopt;
    }
    return event->hello();
  }
  // Why Hello gave nothing.
  const Status& refusal() const { return refusal_; }

  // Forms a group, opens session 1.
  bool Join(uint64_t epoch, int rank, int world_size) {
    Send(FormGroup(epoch, rank, world_size));
    if (!Next(v1::Event::kGroupReady)) return false;
    v1::Command open;
    open.mutable_open_session()->set_session_id(1);
    open.mutable_open_session()->set_max_context(50);
    Send(open);
    return Next(v1::Event::kSessionOpened).has_value();
  }

  static v1::Command FormGroup(uint64_t epoch, int rank, int world_size) {
    v1::Command command;
    v1::FormGroup* group = command.mutable_form_group();
    group->set_epoch(epoch);
    group->set_rank(rank);
    group->set_world_size(world_size);
    for (int i = 0; i < world_size; ++i) {
      v1::Peer* peer = group->add_peers();
      peer->set_rank(i);
      peer->set_host("127.0.0.1");
      peer->set_data_port(9000 + i);
    }
    group->set_transport("tcp");
    const LaneLayout lanes = LaneLayout::Even(8, world_size);
    group->set_num_lanes(lanes.num_lanes);
    for (const int begin : lanes.begin) group->add_lane_begin(begin);
    group->set_plan_digest(kFakeDigest);
    group->set_max_context(100);
    group->set_max_batch_rows(16);
    group->set_max_sessions(2);
    group->set_timeout_ms(5000);
    group->set_join_timeout_ms(1000);
    return command;
  }

  static v1::Command Step(uint64_t epoch, uint64_t sequence) {
    const StepPlan plan = MakePlan(sequence);
    v1::Command command;
    EncodeStep(plan, epoch, plan.Digest(), false, command.mutable_step());
    return command;
  }

  // No more commands; waits for the worker's end of the stream.
  grpc::Status Finish() {
    stream_->WritesDone();
    while (Next()) {
    }
    finished_ = true;
    return stream_->Finish();
  }
  // As if the coordinator had been killed.
  void Break() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::Command, v1::Event>> stream_;
  Status refusal_;
  bool finished_ = false;
};

}  // namespace ds4
