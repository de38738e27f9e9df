#include "engine/tokenizer/chat_template.h"

#include <algorithm>
#include <map>
#include <optional>

#include "engine/base/strings.h"
#include "engine/tokenizer/json_value.h"
#include "engine/tokenizer/prompt_builder.h"
#include "engine/tokenizer/prompt_texts.h"
#include "engine/tokenizer/special_text.h"

namespace ds4 {
namespace {

using Role = Message::Role;

constexpr std::string_view kBlankLine = "\n\n";

struct TaskToken {
  std::string_view task;
  std::string_view token;
};
constexpr TaskToken kTaskTokens[] = {
    {"action", "<｜action｜>"}, {"query", "<｜query｜>"}, {"authority", "<｜authority｜>"},
    {"domain", "<｜domain｜>"}, {"title", "<｜title｜>"}, {"read_url", "<｜read_url｜>"},
};

// One piece of a user turn.
struct UserBlock {
  bool is_tool_result = false;
  std::string text;
  std::string tool_call_id;
};

// A message after tool results and neighbouring user messages went into one user turn.
struct Turn {
  Message message;
  std::vector<UserBlock> blocks;  // of a user turn
};

std::optional<std::string_view> FindTaskToken(std::string_view task) {
  for (const TaskToken& entry : kTaskTokens) {
    if (entry.task == task) return entry.token;
  }
  return std::nullopt;
}

Status CheckMessage(const Message& message) {
  if (!message.task.empty() && !FindTaskToken(message.task)) {
    return InvalidArgumentError(StrCat("task '", message.task,
                                       "' is none of action, query, authority, ",
                                       "domain, title, read_url"));
  }
  if (message.role == Role::kDeveloper && message.content.empty()) {
    return InvalidArgumentError("a developer message needs content");
  }
  return OkStatus();
}

bool IsUserSide(Role role) { return role == Role::kUser || role == Role::kDeveloper; }

// Appends messages [begin, end) as turns; a turn of before `begin` is not added to.
void AppendTurns(const std::vector<Message>& messages, size_t begin, size_t end,
                 std::vector<Turn>* turns) {
  const size_t first_turn = turns->size();
  for (size_t i = begin; i < end; ++i) {
    const Message& message = messages[i];
    const bool is_tool = message.role == Role::kTool;
    if (!is_tool && message.role != Role::kUser) {
      turns->push_back({message, {}});
      continue;
    }
    const bool extends = turns->size() > first_turn && turns->back().message.role == Role::kUser &&
                         turns->back().message.task.empty();
    if (!extends) {
      turns->emplace_back();
      turns->back().message.role = Role::kUser;
    }
    turns->back().message.task = message.task;
    turns->back().blocks.push_back({is_tool, message.content, message.tool_call_id});
  }
}

// Results in the order of the calls that they answer; results of unknown calls count as first.
void SortToolResults(std::vector<Turn>* turns) {
  std::map<std::string, size_t> place;
  for (Turn& turn : *turns) {
    if (!turn.message.tool_calls.empty()) {
      place.clear();
      for (const ToolCall& call : turn.message.tool_calls) {
        if (!call.id.empty()) place.emplace(call.id, place.size());
      }
    }
    std::vector<UserBlock> results;
    for (UserBlock& block : turn.blocks) {
      if (block.is_tool_result) results.push_back(block);
    }
    const auto place_of = [&](const UserBlock& block) {
      const auto it = place.find(block.tool_call_id);
      return it == place.end() ? 0 : it->second;
    };
    std::stable_sort(results.begin(), results.end(), [&](const UserBlock& a, const UserBlock& b) {
      return place_of(a) < place_of(b);
    });
    size_t next = 0;
    for (UserBlock& block : turn.blocks) {
      if (block.is_tool_result) block = std::move(results[next++]);
    }
  }
}

// A tool result cannot close its own tag and go on as if the user spoke.
std::string ProtectClosingTag(std::string text) {
  constexpr std::string_view kTag = "</tool_result>";
  for (size_t pos = text.find(kTag); pos != std::string::npos; pos = text.find(kTag, pos)) {
    text.replace(pos, 1, "&lt;");
  }
  return text;
}

class Renderer {
 public:
  Renderer(std::vector<Turn> turns, const RenderOptions& options)
      : turns_(std::move(turns)), options_(options) {
    keeps_thinking_ = !options.drop_thinking;
    for (size_t i = 0; i < turns_.size(); ++i) {
      const Message& message = turns_[i].message;
      if (IsUserSide(message.role)) last_user_ = static_cast<int64_t>(i);
      if (!message.tools.empty() || !message.tool_calls.empty()) keeps_thinking_ = true;
      for (const UserBlock& block : turns_[i].blocks) keeps_thinking_ |= block.is_tool_result;
    }
  }

  Result<std::vector<PromptSegment>> Run(size_t first_turn) {
    if (options_.add_bos && options_.num_context_messages == 0) out_.Special(special_text::kBos);
    if (options_.num_context_messages == 0) out_.Template(EffortText());
    for (size_t i = first_turn; i < turns_.size(); ++i) {
      RETURN_IF_ERROR(RenderTurn(i));
      RenderTransition(i);
    }
    return out_.Take();
  }

 private:
  bool is_thinking() const { return options_.thinking_mode == ThinkingMode::kThinking; }

  std::string_view EffortText() const {
    if (!is_thinking()) return "";
    const bool is_preview = options_.version == PromptVersion::kPreview;
    switch (options_.effort) {
      case ReasoningEffort::kDefault:
      case ReasoningEffort::kLow:
        return "";
      case ReasoningEffort::kHigh:
        return is_preview ? "" : prompt_texts::EffortAbsoluteMaximum();
      case ReasoningEffort::kMax:
        return is_preview ? prompt_texts::EffortAbsoluteMaximum()
                          : prompt_texts::EffortBeyondMaximum();
    }
    return "";
  }

  Status RenderTurn(size_t index) {
    const Turn& turn = turns_[index];
    switch (turn.message.role) {
      case Role::kSystem:
        if (index > 0 && turns_[index - 1].message.role == Role::kSystem) out_.Plain(kBlankLine);
        RenderInstructions(turn.message);
        break;
      case Role::kDeveloper:
        out_.Special(special_text::kUser);
        RenderInstructions(turn.message);
        break;
      case Role::kUser:
        out_.Special(special_text::kUser);
        RenderUserBlocks(turn);
        break;
      case Role::kLatestReminder:
        out_.Special(special_text::kLatestReminder);
        out_.Plain(turn.message.content);
        break;
      case Role::kAssistant:
        return RenderAssistant(index);
      case Role::kTool:
        return InternalError("a tool message outside a user turn");
    }
    return OkStatus();
  }

  void RenderInstructions(const Message& message) {
    out_.Plain(message.content);
    if (!message.tools.empty()) {
      out_.Plain(kBlankLine);
      out_.TemplateWith(prompt_texts::Tools(), "{tool_schemas}", StrJoin(message.tools, "\n"));
    }
    if (!message.response_format.empty()) {
      out_.Plain(kBlankLine);
      out_.TemplateWith(prompt_texts::ResponseFormat(), "{schema}", message.response_format);
    }
  }

  void RenderUserBlocks(const Turn& turn) {
    for (size_t i = 0; i < turn.blocks.size(); ++i) {
      if (i > 0) out_.Plain(kBlankLine);
      const UserBlock& block = turn.blocks[i];
      if (!block.is_tool_result) {
        out_.Plain(block.text);
        continue;
      }
      out_.Plain("<tool_result>");
      out_.Plain(ProtectClosingTag(block.text));
      out_.Plain("</tool_result>");
    }
  }

  Status RenderAssistant(size_t index) {
    const Message& message = turns_[index].message;
    // After a task token the answer stands alone.
    const bool answers_task = index > 0 && !turns_[index - 1].message.task.empty();
    const bool shows_thinking = keeps_thinking_ || static_cast<int64_t>(index) > last_user_;
    if (is_thinking() && !answers_task && shows_thinking) {
      out_.Plain(message.reasoning);
      out_.Special(special_text::kEndThink);
    }
    out_.Plain(message.content);
    if (!message.tool_calls.empty()) RETURN_IF_ERROR(RenderToolCalls(message.tool_calls));
    if (!message.no_eos) out_.Special(special_text::kEos);
    return OkStatus();
  }

  Status RenderToolCalls(const std::vector<ToolCall>& calls) {
    out_.Template("\n\n<｜DSML｜tool_calls>\n");
    for (const ToolCall& call : calls) {
      out_.TemplateWith("<｜DSML｜invoke name=\"{name}\">\n", "{name}", call.name);
      RETURN_IF_ERROR(RenderArguments(call));
      out_.Template("\n</｜DSML｜invoke>\n");
    }
    out_.Template("</｜DSML｜tool_calls>");
    return OkStatus();
  }

  Status RenderArguments(const ToolCall& call) {
    auto arguments = ParseJson(call.arguments);
    if (!arguments.ok()) {
      return arguments.status().WithContext(StrCat("arguments of tool call '", call.name, "'"));
    }
    if (!arguments->is_object()) {
      return InvalidArgumentError(
          StrCat("arguments of tool call '", call.name, "' are no JSON object: ", call.arguments));
    }
    for (size_t i = 0; i < arguments->items.size(); ++i) {
      const JsonValue& value = arguments->items[i];
      if (i > 0) out_.Plain("\n");
      out_.TemplateWith("<｜DSML｜parameter name=\"{name}\" string=\"", "{name}",
                        arguments->keys[i]);
      out_.Plain(value.is_string() ? "true\">" : "false\">");
      out_.Plain(value.is_string() ? value.text : DumpJson(value));
      out_.Template("</｜DSML｜parameter>");
    }
    return OkStatus();
  }

  // What stands between a turn and the answer that follows it, or that is to be generated.
  void RenderTransition(size_t index) {
    if (index + 1 < turns_.size()) {
      const Role next = turns_[index + 1].message.role;
      if (next != Role::kAssistant && next != Role::kLatestReminder) return;
    }
    const Message& message = turns_[index].message;
    const std::optional<std::string_view> task = FindTaskToken(message.task);
    if (task && message.task != "action") {
      out_.Special(*task);
    } else if (task) {
      out_.Special(special_text::kAssistant);
      out_.Special(is_thinking() ? special_text::kThink : special_text::kEndThink);
      out_.Special(*task);
    } else if (IsUserSide(message.role)) {
      out_.Special(special_text::kAssistant);
      const bool opens =
          is_thinking() && (keeps_thinking_ || static_cast<int64_t>(index) >= last_user_);
      out_.Special(opens ? special_text::kThink : special_text::kEndThink);
    }
  }

  std::vector<Turn> turns_;
  const RenderOptions& options_;
  PromptBuilder out_;
  int64_t last_user_ = -1;  // index of the last user or developer turn
  bool keeps_thinking_ = false;
};

}  // namespace

Status SetEffort(std::string_view name, RenderOptions* options) {
  if (name == "none") {
    options->thinking_mode = ThinkingMode::kChat;
    options->effort = ReasoningEffort::kDefault;
    return OkStatus();
  }
  ReasoningEffort effort;
  if (name == "minimal" || name == "low" || name == "medium") {
    const bool has_low = options->version != PromptVersion::kPreview;
    effort = has_low ? ReasoningEffort::kLow : ReasoningEffort::kDefault;
  } else if (name == "high") {
    effort = ReasoningEffort::kHigh;
  } else if (name == "xhigh" || name == "max") {
    effort = ReasoningEffort::kMax;
  } else {
    return InvalidArgumentError(StrCat("reasoning effort '", name,
                                       "' is none of none, minimal, low, ",
                                       "medium, high, xhigh, max"));
  }
  options->thinking_mode = ThinkingMode::kThinking;
  options->effort = effort;
  return OkStatus();
}

Result<std::vector<PromptSegment>> RenderSegments(const std::vector<Message>& messages,
                                                  const RenderOptions& options) {
  if (options.version == PromptVersion::kPreview && options.effort == ReasoningEffort::kLow) {
    return InvalidArgumentError(
        "reasoning effort low is not known to the preview format, only high and max");
  }
  if (options.num_context_messages > messages.size()) {
    return InvalidArgumentError(StrCat(options.num_context_messages, " context messages of ",
                                       messages.size(), " messages"));
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const Status status = CheckMessage(messages[i]);
    if (!status.ok()) return status.WithContext(StrCat("message ", i));
  }
  std::vector<Turn> turns;
  AppendTurns(messages, 0, options.num_context_messages, &turns);
  const size_t first_turn = turns.size();
  AppendTurns(messages, options.num_context_messages, messages.size(), &turns);
  SortToolResults(&turns);
  return Renderer(std::move(turns), options).Run(first_turn);
}

Result<std::string> RenderPrompt(const std::vector<Message>& messages,
                                 const RenderOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<PromptSegment> segments, RenderSegments(messages, options));
  std::string prompt;
  for (const PromptSegment& segment : segments) prompt += segment.text;
  return prompt;
}

Result<std::vector<int32_t>> RenderPromptIds(const Tokenizer& tokenizer,
                                             const std::vector<Message>& messages,
                                             const RenderOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<PromptSegment> segments, RenderSegments(messages, options));
  std::vector<int32_t> ids;
  for (const PromptSegment& segment : segments) {
    if (!segment.is_special) {
      const std::vector<int32_t> plain = tokenizer.Encode(segment.text, /*parse_special=*/false);
      ids.insert(ids.end(), plain.begin(), plain.end());
      continue;
    }
    const std::optional<int32_t> id = tokenizer.SpecialId(segment.text);
    if (!id) {
      return FailedPreconditionError(StrCat("the vocabulary of ", tokenizer.vocab_size(),
                                            " tokens has no special token '", segment.text,
                                            "', which this prompt needs"));
    }
    ids.push_back(*id);
  }
  return ids;
}

}  // namespace ds4
