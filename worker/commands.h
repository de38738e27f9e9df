// What the coordinator asks of this worker and what the worker tells it, as checked values: the
// language between worker_service (which knows protobuf) and rank_loop (which does not).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/base/status.h"
#include "engine/comm/lane_tree.h"
#include "engine/session/engine.h"
#include "engine/session/step_plan.h"
#include "proto/plan_codec.h"

namespace ds4 {

// How to reach one rank of the group.
struct PeerAddress {
  std::string host;
  uint16_t data_port = 0;       // transport tcp
  std::string control_address;  // transport grpc
};

// A group as this worker is to join it. Fields are checked against each other and the worker's
// limits (command_codec); the epoch and the plan are checked by the rank loop.
struct GroupSpec {
  uint64_t epoch = 0;
  int rank = 0;
  LaneLayout lanes;
  std::vector<PeerAddress> peers;  // [world_size], in rank order
  std::string transport;           // "tcp" or "grpc"
  std::string plan_digest;
  int64_t max_context = 0;
  int64_t max_batch_rows = 0;
  int max_sessions = 0;
  std::chrono::milliseconds timeout{0};       // of every wait inside a step
  std::chrono::milliseconds join_timeout{0};  // to connect with all peers

  int world_size() const { return lanes.world_size(); }
};

struct OpenSessionCommand {
  uint64_t session_id = 0;
  int64_t max_context = 0;
};
struct CloseSessionCommand {
  uint64_t session_id = 0;
};
using StepCommand = DecodedStep;
struct LeaveGroupCommand {};
// A command that could not be read. It takes its place in the order, so that its error comes out
// between the answers to its neighbours; a refused step uses up its sequence number.
struct RejectedCommand {
  Status why;
  std::optional<uint64_t> sequence;
};

using Command = std::variant<GroupSpec, OpenSessionCommand, CloseSessionCommand, StepCommand,
                             LeaveGroupCommand, RejectedCommand>;

struct LoadProgressEvent {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};
struct GroupReadyEvent {
  uint64_t epoch = 0;
  int rank = 0;
  EngineStats stats;
};
struct SessionOpenedEvent {
  uint64_t session_id = 0;
};
struct SessionClosedEvent {
  uint64_t session_id = 0;
};
struct TokenEvent {
  uint64_t sequence = 0;
  TokenOutput token;
};
struct StepDoneEvent {
  uint64_t sequence = 0;
  StepResult result;
  std::vector<uint64_t> state_hash;
};
struct LeftGroupEvent {};
struct ErrorEvent {
  Status status;
  int rank = -1;
  uint64_t epoch = 0;
  bool group_broken = false;  // false: one command was refused and nothing has changed
  uint64_t sequence = 0;      // of the step it answers, or 0
};

using Event =
    std::variant<LoadProgressEvent, GroupReadyEvent, SessionOpenedEvent, SessionClosedEvent,
                 TokenEvent, StepDoneEvent, LeftGroupEvent, ErrorEvent>;

// Where the rank loop's events go.
class EventSink {
 public:
  virtual ~EventSink() = default;
  // Any thread. Waits a bounded time for room. kCancelled: the coordinator is gone;
  // kDeadlineExceeded: it takes no events.
  virtual Status Send(const Event& event) = 0;
};

}  // namespace ds4
