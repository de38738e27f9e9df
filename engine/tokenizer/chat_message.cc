#include "engine/tokenizer/chat_message.h"

#include <iterator>
#include <utility>

#include "engine/base/strings.h"
#include "engine/tokenizer/json_value.h"
#include "engine/tokenizer/unicode.h"

namespace ds4 {
namespace {

constexpr std::pair<std::string_view, Message::Role> kRoles[] = {
    {"system", Message::Role::kSystem},       {"user", Message::Role::kUser},
    {"assistant", Message::Role::kAssistant}, {"tool", Message::Role::kTool},
    {"developer", Message::Role::kDeveloper}, {"latest_reminder", Message::Role::kLatestReminder},
};

// The member unless it is absent or null.
const JsonValue* Find(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.Find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

Status WrongType(std::string_view key, std::string_view wanted, const JsonValue& value) {
  return InvalidArgumentError(StrCat(key, " must be ", wanted, ", here it is ",
                                     ReplaceInvalidUtf8(DumpJson(value).substr(0, 80))));
}

// The string member, empty when absent.
Result<std::string> GetString(const JsonValue& object, std::string_view key) {
  const JsonValue* value = Find(object, key);
  if (value == nullptr) return std::string();
  if (!value->is_string()) return WrongType(key, "a string", *value);
  return value->text;
}

Result<std::string> PartText(const JsonValue& part, Message::Role role) {
  ASSIGN_OR_RETURN(const std::string type, GetString(part, "type"));
  if (type == "text") return GetString(part, "text");
  if (role == Message::Role::kTool) return StrCat("[Unsupported ", type, "]");
  return InvalidArgumentError(StrCat("content part of type '", type, "', only text is supported"));
}

Result<std::string> GetContent(const JsonValue& message, Message::Role role) {
  const JsonValue* content = Find(message, "content");
  if (content == nullptr) return std::string();
  if (content->is_string()) return content->text;
  if (!content->is_array()) return WrongType("content", "a string or a list of parts", *content);
  std::vector<std::string> parts;
  for (const JsonValue& part : content->items) {
    ASSIGN_OR_RETURN(parts.emplace_back(), PartText(part, role));
  }
  return StrJoin(parts, "\n\n");
}

// Tools come as {"type": "function", "function": {...}}; the prompt shows the inner object.
Result<std::vector<std::string>> GetTools(const JsonValue& object) {
  std::vector<std::string> result;
  const JsonValue* tools = Find(object, "tools");
  if (tools == nullptr) return result;
  if (!tools->is_array()) return WrongType("tools", "a list", *tools);
  for (const JsonValue& tool : tools->items) {
    const JsonValue* function = Find(tool, "function");
    if (function == nullptr || !function->is_object()) {
      return WrongType("tools", "a list of {\"type\": \"function\", \"function\": {...}}", tool);
    }
    result.push_back(DumpJson(*function));
  }
  return result;
}

// Arguments are a JSON text, as OpenAI's API sends them, or the object itself.
Result<std::vector<ToolCall>> GetToolCalls(const JsonValue& message) {
  std::vector<ToolCall> result;
  const JsonValue* calls = Find(message, "tool_calls");
  if (calls == nullptr) return result;
  if (!calls->is_array()) return WrongType("tool_calls", "a list", *calls);
  for (const JsonValue& call : calls->items) {
    const JsonValue* function = Find(call, "function");
    const JsonValue* name = function == nullptr ? nullptr : Find(*function, "name");
    if (name == nullptr || !name->is_string()) {
      return WrongType("tool_calls", "a list of {\"function\": {\"name\", \"arguments\"}}", call);
    }
    ToolCall& result_call = result.emplace_back();
    ASSIGN_OR_RETURN(result_call.id, GetString(call, "id"));
    result_call.name = name->text;
    const JsonValue* arguments = Find(*function, "arguments");
    if (arguments == nullptr) {
      result_call.arguments = "{}";
    } else {
      result_call.arguments = arguments->is_string() ? arguments->text : DumpJson(*arguments);
    }
  }
  return result;
}

Result<Message::Role> GetRole(const JsonValue& message) {
  ASSIGN_OR_RETURN(const std::string text, GetString(message, "role"));
  for (const auto& [name, role] : kRoles) {
    if (text == name) return role;
  }
  return InvalidArgumentError(StrCat("role '", text, "' is none of system, user, assistant, tool, ",
                                     "developer, latest_reminder"));
}

Result<Message> ReadMessage(const JsonValue& json) {
  if (!json.is_object()) return WrongType("a message", "an object", json);
  Message message;
  ASSIGN_OR_RETURN(message.role, GetRole(json));
  ASSIGN_OR_RETURN(message.content, GetContent(json, message.role));
  ASSIGN_OR_RETURN(message.reasoning, GetString(json, "reasoning_content"));
  ASSIGN_OR_RETURN(message.tool_calls, GetToolCalls(json));
  ASSIGN_OR_RETURN(message.tool_call_id, GetString(json, "tool_call_id"));
  ASSIGN_OR_RETURN(message.tools, GetTools(json));
  ASSIGN_OR_RETURN(message.task, GetString(json, "task"));
  if (const JsonValue* format = Find(json, "response_format"))
    message.response_format = DumpJson(*format);
  if (const JsonValue* no_eos = Find(json, "wo_eos")) message.no_eos = no_eos->boolean;
  return message;
}

void AddTools(std::vector<std::string> tools, std::vector<Message>* messages) {
  if (tools.empty()) return;
  auto system = messages->begin();
  while (system != messages->end() && system->role != Message::Role::kSystem) ++system;
  if (system == messages->end()) {
    system = messages->insert(messages->begin(), Message());
    system->role = Message::Role::kSystem;
  }
  system->tools.insert(system->tools.end(), std::make_move_iterator(tools.begin()),
                       std::make_move_iterator(tools.end()));
}

}  // namespace

Result<std::vector<Message>> MessagesFromJson(std::string_view json) {
  ASSIGN_OR_RETURN(const JsonValue root, ParseJson(json));
  const JsonValue* list = root.is_array() ? &root : Find(root, "messages");
  if (list == nullptr || !list->is_array()) return WrongType("messages", "a list", root);
  std::vector<Message> messages;
  for (size_t i = 0; i < list->items.size(); ++i) {
    auto message = ReadMessage(list->items[i]);
    if (!message.ok()) return message.status().WithContext(StrCat("message ", i));
    messages.push_back(std::move(message).value());
  }
  ASSIGN_OR_RETURN(std::vector<std::string> tools, GetTools(root));
  AddTools(std::move(tools), &messages);
  return messages;
}

std::string_view RoleName(Message::Role role) {
  for (const auto& [name, value] : kRoles) {
    if (value == role) return name;
  }
  return "unknown";
}

}  // namespace ds4
