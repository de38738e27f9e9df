// From what the model wrote to an assistant message: reasoning, answer, tool calls.
//
//   [reasoning </think>] answer [\n\n<｜DSML｜tool_calls>\n invoke... </｜DSML｜tool_calls>] EOS
//   invoke:    <｜DSML｜invoke name="NAME">\n parameter... </｜DSML｜invoke>\n
//   parameter: <｜DSML｜parameter name="NAME" string="true">text</｜DSML｜parameter>\n    or
//   "false": JSON
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/base/status.h"
#include "engine/tokenizer/chat_template.h"

namespace ds4 {

enum class ParseStrictness {
  // Exactly the form above; anything else is kInvalidArgument.
  kStrict,
  // Never fails: takes what is there. EOS, </think>, line breaks and the block's end may be
  // missing;
  // calls that are complete are kept, an unfinished one at the end is left out; a block that holds
  // no
  // call at all stays text; a "false" parameter that is no JSON becomes a string.
  kTolerant,
};

struct ParsedMessage {
  std::string content;
  std::string reasoning;
  std::vector<ToolCall> tool_calls;  // ids are empty
  bool is_complete = true;           // false when EOS, </think> or the end of the block was missing
};

Result<ParsedMessage> ParseCompletion(std::string_view text, ThinkingMode thinking_mode,
                                      ParseStrictness strictness = ParseStrictness::kStrict);

}  // namespace ds4
