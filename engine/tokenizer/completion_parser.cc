#include "engine/tokenizer/completion_parser.h"

#include <algorithm>
#include <optional>

#include "engine/base/strings.h"
#include "engine/tokenizer/json_value.h"
#include "engine/tokenizer/special_text.h"
#include "engine/tokenizer/unicode.h"

namespace ds4 {
namespace {

constexpr std::string_view kBlockBegin = "<｜DSML｜tool_calls>";
constexpr std::string_view kBlockEnd = "</｜DSML｜tool_calls>";
constexpr std::string_view kInvokeBegin = "<｜DSML｜invoke name=\"";
constexpr std::string_view kInvokeEnd = "</｜DSML｜invoke>";
constexpr std::string_view kParameterBegin = "<｜DSML｜parameter name=\"";
constexpr std::string_view kParameterEnd = "</｜DSML｜parameter>";

Status FormatError(std::string_view what, std::string_view rest) {
  return InvalidArgumentError(
      StrCat("completion: ", what, " at '", ReplaceInvalidUtf8(rest.substr(0, 40)), "'"));
}

struct Parameter {
  std::string name;
  std::string json;
};

// Reads the inside of a tool call block from the front of `rest`.
class CallReader {
 public:
  CallReader(std::string_view rest, ParseStrictness strictness)
      : rest_(rest), is_strict_(strictness == ParseStrictness::kStrict) {}

  std::string_view rest() const { return rest_; }
  bool AtInvoke() const { return rest_.starts_with(kInvokeBegin); }

  bool Accept(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }

  // Line breaks: at least one when strict.
  Status ReadLineEnd() {
    const size_t size =
        std::min(rest_.find_first_not_of(is_strict_ ? "\n" : " \t\r\n"), rest_.size());
    if (is_strict_ && size == 0) return FormatError("expected a line break", rest_);
    rest_.remove_prefix(size);
    return OkStatus();
  }

  Result<ToolCall> ReadInvoke() {
    if (!Accept(kInvokeBegin)) return FormatError("expected an invoke", rest_);
    ToolCall call;
    ASSIGN_OR_RETURN(call.name, ReadUntil("\">"));
    RETURN_IF_ERROR(ReadLineEnd());
    std::vector<Parameter> parameters;
    while (rest_.starts_with(kParameterBegin)) RETURN_IF_ERROR(ReadParameter(&parameters));
    if (!Accept(kInvokeEnd))
      return FormatError("expected a parameter or the end of the invoke", rest_);
    RETURN_IF_ERROR(ReadLineEnd());
    std::vector<std::string> members;
    for (const Parameter& p : parameters) members.push_back(QuoteJson(p.name) + ": " + p.json);
    call.arguments = "{" + StrJoin(members, ", ") + "}";
    return call;
  }

 private:
  Result<std::string> ReadUntil(std::string_view end) {
    const size_t pos = rest_.find(end);
    if (pos == std::string_view::npos) return FormatError(StrCat("no ", end, " after"), rest_);
    std::string text(rest_.substr(0, pos));
    rest_.remove_prefix(pos + end.size());
    return text;
  }

  Status ReadParameter(std::vector<Parameter>* parameters) {
    Accept(kParameterBegin);
    ASSIGN_OR_RETURN(const std::string name, ReadUntil("\" string=\""));
    ASSIGN_OR_RETURN(const std::string is_string, ReadUntil("\">"));
    if (is_string != "true" && is_string != "false") {
      return FormatError(StrCat("parameter '", name, "' has string=\"", is_string, "\""), rest_);
    }
    ASSIGN_OR_RETURN(const std::string value, ReadUntil(kParameterEnd));
    RETURN_IF_ERROR(ReadLineEnd());
    const auto same = std::find_if(parameters->begin(), parameters->end(),
                                   [&](const Parameter& p) { return p.name == name; });
    if (same == parameters->end()) {
      parameters->push_back({name, ToJson(value, is_string == "true")});
    } else if (is_strict_) {
      return FormatError(StrCat("parameter '", name, "' comes twice"), value);
    } else {
      same->json = ToJson(value, is_string == "true");
    }
    return OkStatus();
  }

  std::string ToJson(const std::string& value, bool is_string) const {
    if (!is_string && (is_strict_ || ParseJson(value).ok())) return value;
    return QuoteJson(ReplaceInvalidUtf8(value));
  }

  std::string_view rest_;
  bool is_strict_;
};

Status CheckPlain(std::string_view name, std::string_view text) {
  for (const std::string_view token : {special_text::kBos, special_text::kEos, special_text::kThink,
                                       special_text::kEndThink, special_text::kDsml}) {
    const size_t pos = text.find(token);
    if (pos != std::string_view::npos) {
      return FormatError(StrCat("unexpected ", token, " in the ", name), text.substr(pos));
    }
  }
  return OkStatus();
}

Result<ParsedMessage> ParseStrictly(std::string_view rest, ThinkingMode thinking_mode) {
  ParsedMessage message;
  if (thinking_mode == ThinkingMode::kThinking) {
    const size_t pos = rest.find(special_text::kEndThink);
    if (pos == std::string_view::npos) return FormatError("missing </think>", rest);
    message.reasoning = rest.substr(0, pos);
    rest.remove_prefix(pos + special_text::kEndThink.size());
  }
  const std::string block_begin = StrCat("\n\n", kBlockBegin);
  const size_t content_end = std::min(rest.find(special_text::kEos), rest.find(block_begin));
  if (content_end == std::string_view::npos) return FormatError("missing the end token", rest);
  message.content = rest.substr(0, content_end);
  RETURN_IF_ERROR(CheckPlain("reasoning", message.reasoning));
  RETURN_IF_ERROR(CheckPlain("answer", message.content));
  CallReader reader(rest.substr(content_end), ParseStrictness::kStrict);
  if (reader.Accept(block_begin)) {
    RETURN_IF_ERROR(reader.ReadLineEnd());
    while (reader.AtInvoke()) {
      ASSIGN_OR_RETURN(message.tool_calls.emplace_back(), reader.ReadInvoke());
    }
    if (!reader.Accept(kBlockEnd))
      return FormatError("expected an invoke or the block's end", reader.rest());
  }
  if (!reader.Accept(special_text::kEos))
    return FormatError("expected the end token", reader.rest());
  if (!reader.rest().empty())
    return FormatError("unexpected text after the end token", reader.rest());
  return message;
}

// Takes the calls of the block that `text` begins with; nothing when it holds no complete one.
struct ToleratedBlock {
  std::vector<ToolCall> calls;
  std::string_view rest;  // behind the block; empty when it was cut
  bool is_closed = false;
};

std::optional<ToleratedBlock> ParseBlockTolerantly(std::string_view text) {
  CallReader reader(text, ParseStrictness::kTolerant);
  reader.Accept(kBlockBegin);
  (void)reader.ReadLineEnd();  // cannot fail when tolerant
  ToleratedBlock block;
  while (reader.AtInvoke()) {
    auto call = reader.ReadInvoke();
    if (!call.ok()) break;
    block.calls.push_back(std::move(call).value());
  }
  if (block.calls.empty()) return std::nullopt;
  block.is_closed = reader.Accept(kBlockEnd);
  if (block.is_closed) block.rest = reader.rest();
  return block;
}

ParsedMessage ParseTolerantly(std::string_view text, ThinkingMode thinking_mode) {
  ParsedMessage message;
  const size_t eos = text.find(special_text::kEos);
  message.is_complete = eos != std::string_view::npos;
  std::string_view rest = text.substr(0, eos);
  if (thinking_mode == ThinkingMode::kThinking) {
    const size_t pos = rest.find(special_text::kEndThink);
    message.reasoning = rest.substr(0, pos);
    if (pos == std::string_view::npos) {
      message.is_complete = false;
      return message;
    }
    rest.remove_prefix(pos + special_text::kEndThink.size());
  }
  const size_t block_begin = rest.find(kBlockBegin);
  message.content = rest;
  if (block_begin == std::string_view::npos) return message;
  std::optional<ToleratedBlock> block = ParseBlockTolerantly(rest.substr(block_begin));
  if (!block) return message;
  std::string_view content = rest.substr(0, block_begin);
  for (int i = 0; i < 2 && content.ends_with('\n'); ++i) content.remove_suffix(1);
  message.content = StrCat(content, block->rest);
  message.tool_calls = std::move(block->calls);
  message.is_complete = message.is_complete && block->is_closed;
  return message;
}

}  // namespace

Result<ParsedMessage> ParseCompletion(std::string_view text, ThinkingMode thinking_mode,
                                      ParseStrictness strictness) {
  if (strictness == ParseStrictness::kStrict) return ParseStrictly(text, thinking_mode);
  return ParseTolerantly(text, thinking_mode);
}

}  // namespace ds4
