// Control messages to checked commands, and events to messages.
#pragma once

#include <cstdint>
#include <string>

#include "engine/base/status.h"
#include "worker/commands.h"

namespace ds4 {
namespace v1 {
class Command;
class Event;
class FormGroup;
class Hello;
}  // namespace v1

// What this worker can take.
struct CommandLimits {
  int64_t max_context = 0;
  int64_t max_batch_rows = 0;
};

// The coordinator's name, cut to printable ASCII. kFailedPrecondition: another protocol version.
Result<std::string> CheckHello(const v1::Hello& hello);

// kInvalidArgument names the field, its value and the range.
Result<GroupSpec> DecodeFormGroup(const v1::FormGroup& message, const CommandLimits& limits);

// Anything that cannot be read becomes a RejectedCommand, so that its error keeps its place.
Command DecodeCommand(const v1::Command& message, const CommandLimits& limits);

void EncodeEvent(const Event& event, v1::Event* message);

}  // namespace ds4
