#include "worker/command_codec.h"

#include <algorithm>

#include "engine/base/strings.h"
#include "proto/plan_codec.h"
#include "proto/protocol.h"
#include "proto/rpc_status.h"
#include "proto/worker.pb.h"

namespace ds4 {
namespace {

constexpr int kMaxLanes = 1024;
constexpr int kMaxSessions = 4096;
constexpr int kMaxTimeoutMs = 3600 * 1000;
constexpr size_t kMaxNameBytes = 255;  // of a host, as DNS has it; enough for the other names

Status CheckRange(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return OkStatus();
  return InvalidArgumentError(
      StrCat("FormGroup: ", field, " is ", value, ", must be in [", low, ", ", high, "]"));
}

// Peers choose these bytes and they go into logs and errors.
std::string Printable(const std::string& text) {
  std::string out = text.substr(0, kMaxNameBytes);
  for (char& c : out) {
    if (c < 0x20 || c == 0x7f) c = '?';
  }
  return out;
}

bool IsName(const std::string& text) {
  return !text.empty() && text.size() <= kMaxNameBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

Status CheckName(const std::string& field, const std::string& value) {
  if (IsName(value)) return OkStatus();
  return InvalidArgumentError(StrCat("FormGroup: ", field, " is \"", Printable(value), "\" (",
                                     value.size(), " bytes), must be 1 to ", kMaxNameBytes,
                                     " printable characters"));
}

Result<LaneLayout> DecodeLanes(const v1::FormGroup& message) {
  const int num_lanes = message.num_lanes();
  RETURN_IF_ERROR(CheckRange("num_lanes", num_lanes, 1, kMaxLanes));
  if ((num_lanes & (num_lanes - 1)) != 0) {
    return InvalidArgumentError(
        StrCat("FormGroup: num_lanes is ", num_lanes, ", must be a power of two"));
  }
  RETURN_IF_ERROR(CheckRange("world_size", message.world_size(), 1, num_lanes));
  RETURN_IF_ERROR(CheckRange("rank", message.rank(), 0, message.world_size() - 1));
  if (message.lane_begin_size() != message.world_size() + 1) {
    return InvalidArgumentError(StrCat("FormGroup: lane_begin has ", message.lane_begin_size(),
                                       " entries, a group of ", message.world_size(), " needs ",
                                       message.world_size() + 1));
  }
  LaneLayout lanes;
  lanes.num_lanes = num_lanes;
  lanes.begin.assign(message.lane_begin().begin(), message.lane_begin().end());
  // Every rank owns at least one lane, and together they own all.
  const bool rising = std::adjacent_find(lanes.begin.begin(), lanes.begin.end(),
                                         std::greater_equal<>()) == lanes.begin.end();
  if (lanes.begin.front() != 0 || lanes.begin.back() != num_lanes || !rising) {
    std::vector<std::string> texts;
    for (const int begin : lanes.begin) texts.push_back(StrCat(begin));
    return InvalidArgumentError(StrCat("FormGroup: lane_begin is ", StrJoin(texts, ", "),
                                       "; it must rise from 0 to num_lanes ", num_lanes));
  }
  return lanes;
}

Result<PeerAddress> DecodePeer(const v1::FormGroup& message, int index) {
  const v1::Peer& peer = message.peers(index);
  const std::string where = StrCat("peers[", index, "]");
  if (peer.rank() != index) {
    return InvalidArgumentError(
        StrCat("FormGroup: ", where, " is rank ", peer.rank(), "; peers must come in rank order"));
  }
  PeerAddress address;
  if (message.transport() == "tcp") {
    RETURN_IF_ERROR(CheckName(where + ".host", peer.host()));
    RETURN_IF_ERROR(CheckRange((where + ".data_port").c_str(), peer.data_port(), 1, 65535));
    address.host = peer.host();
    address.data_port = static_cast<uint16_t>(peer.data_port());
  } else {
    RETURN_IF_ERROR(CheckName(where + ".control_address", peer.control_address()));
    address.control_address = peer.control_address();
  }
  return address;
}

Result<std::vector<PeerAddress>> DecodePeers(const v1::FormGroup& message) {
  if (message.transport() != "tcp" && message.transport() != "grpc") {
    return InvalidArgumentError(StrCat("FormGroup: transport is \"", Printable(message.transport()),
                                       "\", must be \"tcp\" or \"grpc\""));
  }
  if (message.peers_size() != message.world_size()) {
    return InvalidArgumentError(StrCat("FormGroup: ", message.peers_size(),
                                       " peers for a group of ", message.world_size()));
  }
  std::vector<PeerAddress> peers;
  for (int i = 0; i < message.peers_size(); ++i) {
    ASSIGN_OR_RETURN(PeerAddress peer, DecodePeer(message, i));
    peers.push_back(std::move(peer));
  }
  return peers;
}

Result<OpenSessionCommand> DecodeOpenSession(const v1::OpenSession& message,
                                             const CommandLimits& limits) {
  if (message.max_context() < 1 || message.max_context() > limits.max_context) {
    return InvalidArgumentError(StrCat("OpenSession ", message.session_id(), ": max_context is ",
                                       message.max_context(), ", must be in [1, ",
                                       limits.max_context, "]"));
  }
  return OpenSessionCommand{message.session_id(), message.max_context()};
}

Command DecodeStepCommand(const v1::Step& message, const CommandLimits& limits) {
  PlanLimits plan_limits;
  plan_limits.max_context = limits.max_context;
  auto step = DecodeStep(message, plan_limits);
  if (!step.ok()) return RejectedCommand{step.status(), message.sequence()};
  return std::move(step).value();
}

template <typename T>
Command OrRejected(Result<T> result) {
  if (!result.ok()) return RejectedCommand{result.status(), std::nullopt};
  return std::move(result).value();
}

// One overload for each event.
void Encode(const LoadProgressEvent& event, v1::Event* message) {
  message->mutable_load_progress()->set_bytes_done(event.bytes_done);
  message->mutable_load_progress()->set_bytes_total(event.bytes_total);
}

void Encode(const GroupReadyEvent& event, v1::Event* message) {
  v1::GroupReady* ready = message->mutable_group_ready();
  ready->set_epoch(event.epoch);
  ready->set_rank(event.rank);
  ready->set_weight_bytes(event.stats.weight_bytes);
  ready->set_kv_bytes_per_session(event.stats.kv_bytes_per_session);
  ready->set_load_seconds(event.stats.load_seconds);
  ready->set_backend(event.stats.backend);
  ready->set_device_bytes(event.stats.device_bytes);
}

void Encode(const SessionOpenedEvent& event, v1::Event* message) {
  message->mutable_session_opened()->set_session_id(event.session_id);
}

void Encode(const SessionClosedEvent& event, v1::Event* message) {
  message->mutable_session_closed()->set_session_id(event.session_id);
}

void Encode(const TokenEvent& event, v1::Event* message) {
  EncodeToken(event.sequence, event.token, message->mutable_token());
}

void Encode(const StepDoneEvent& event, v1::Event* message) {
  EncodeStepDone(event.sequence, event.result, event.state_hash, message->mutable_step_done());
}

void Encode(const LeftGroupEvent&, v1::Event* message) { message->mutable_left_group(); }

void Encode(const ErrorEvent& event, v1::Event* message) {
  v1::Error* error = message->mutable_error();
  EncodeError(event.status, event.rank, event.epoch, error);
  error->set_group_broken(event.group_broken);
  error->set_sequence(event.sequence);
}

}  // namespace

Result<std::string> CheckHello(const v1::Hello& hello) {
  std::string name = Printable(hello.coordinator());
  if (name.empty()) name = "(no name)";
  if (hello.protocol_version() != kProtocolVersion) {
    return FailedPreconditionError(
        StrCat("this worker (build ", BuildVersion(), ") speaks protocol version ",
               kProtocolVersion, ", coordinator ", name, " (build ", Printable(hello.build()),
               ") speaks ", hello.protocol_version(), "; run the same release on both"));
  }
  return name;
}

Result<GroupSpec> DecodeFormGroup(const v1::FormGroup& message, const CommandLimits& limits) {
  GroupSpec spec;
  ASSIGN_OR_RETURN(spec.lanes, DecodeLanes(message));
  ASSIGN_OR_RETURN(spec.peers, DecodePeers(message));
  RETURN_IF_ERROR(CheckName("plan_digest", message.plan_digest()));
  RETURN_IF_ERROR(CheckRange("max_context", message.max_context(), 1, limits.max_context));
  RETURN_IF_ERROR(CheckRange("max_batch_rows", message.max_batch_rows(), 1, limits.max_batch_rows));
  RETURN_IF_ERROR(CheckRange("max_sessions", message.max_sessions(), 1, kMaxSessions));
  RETURN_IF_ERROR(CheckRange("timeout_ms", message.timeout_ms(), 1, kMaxTimeoutMs));
  RETURN_IF_ERROR(CheckRange("join_timeout_ms", message.join_timeout_ms(), 1, kMaxTimeoutMs));
  spec.epoch = message.epoch();
  spec.rank = message.rank();
  spec.transport = message.transport();
  spec.plan_digest = message.plan_digest();
  spec.max_context = message.max_context();
  spec.max_batch_rows = message.max_batch_rows();
  spec.max_sessions = message.max_sessions();
  spec.timeout = std::chrono::milliseconds(message.timeout_ms());
  spec.join_timeout = std::chrono::milliseconds(message.join_timeout_ms());
  return spec;
}

Command DecodeCommand(const v1::Command& message, const CommandLimits& limits) {
  switch (message.kind_case()) {
    case v1::Command::kFormGroup:
      return OrRejected(DecodeFormGroup(message.form_group(), limits));
    case v1::Command::kOpenSession:
      return OrRejected(DecodeOpenSession(message.open_session(), limits));
    case v1::Command::kCloseSession:
      return CloseSessionCommand{message.close_session().session_id()};
    case v1::Command::kStep:
      return DecodeStepCommand(message.step(), limits);
    case v1::Command::kLeaveGroup:
      return LeaveGroupCommand{};
    case v1::Command::kHello:
      return RejectedCommand{InvalidArgumentError("Hello came a second time"), std::nullopt};
    case v1::Command::KIND_NOT_SET:
      break;
  }
  return RejectedCommand{
      InvalidArgumentError("a command of no kind that this build knows; it is empty or newer"),
      std::nullopt};
}

void EncodeEvent(const Event& event, v1::Event* message) {
  message->Clear();
  std::visit([message](const auto& value) { Encode(value, message); }, event);
}

}  // namespace ds4
