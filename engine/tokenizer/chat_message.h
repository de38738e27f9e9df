// The values of a conversation, and how they are read from the JSON that chat APIs use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/base/status.h"

namespace ds4 {

struct ToolCall {
  std::string id;  // matches a tool message's tool_call_id; may be empty
  std::string name;
  std::string arguments;  // a JSON object, as text
};

struct Message {
  enum class Role { kSystem, kUser, kAssistant, kTool, kDeveloper, kLatestReminder };
  Role role = Role::kUser;
  std::string content;
  std::string reasoning;             // assistant
  std::vector<ToolCall> tool_calls;  // assistant
  std::string tool_call_id;          // tool
  std::vector<std::string> tools;    // system, developer: one JSON object each, {"name": ...}
  std::string response_format;       // system, developer: JSON, or empty
  std::string task;     // "action", "query", "authority", "domain", "read_url", "title"
  bool no_eos = false;  // assistant: the turn goes on, the model continues it
};

// Reads an array of messages as chat APIs send them, or an object with "messages" and perhaps
// "tools", which then belong to the first system message (an empty one is put in front when there
// is none).
//   content: text, null, or a list of parts {"type": "text", "text": ...}, joined by a blank line;
//   parts of other types become "[Unsupported TYPE]" in tool results and are an error elsewhere.
//   Other keys: reasoning_content, tool_calls, tool_call_id, tools, response_format, task, wo_eos.
// Keys that are none of these are left out. Errors: kInvalidArgument names message and key.
Result<std::vector<Message>> MessagesFromJson(std::string_view json);

// "assistant", ...
std::string_view RoleName(Message::Role role);

}  // namespace ds4
