// From a conversation to the prompt of DeepSeek V4, as text or as ids. The way back, from what the
// model wrote to a message, is in completion_parser.h.
//
//   BOS [effort text] [system text] ( <｜User｜>text
//   <｜Assistant｜>(<think>reasoning)</think>answer EOS )*
//
// - Thinking mode opens <think> for the answer to come; chat mode closes it at once with </think>.
// - Reasoning of turns before the last user message is dropped, unless the conversation has tools.
// - Tool results and consecutive user messages share one user turn, joined by blank lines; results
// come
//   in the order of their calls.
// Source: DeepSeek's description of the encoding and its test conversations (tests/data/encoding).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/status.h"
#include "engine/tokenizer/chat_message.h"
#include "engine/tokenizer/tokenizer.h"

namespace ds4 {

// The two published formats; they differ in the effort texts only.
enum class PromptVersion { kPreview, k0731 };
enum class ThinkingMode { kChat, kThinking };
// preview: high changes nothing, max asks for the most, low is an error. 0731: low changes nothing,
// high asks for much, max for the most. No level has an effect in chat mode.
enum class ReasoningEffort { kDefault, kLow, kHigh, kMax };

struct RenderOptions {
  PromptVersion version = PromptVersion::k0731;
  ThinkingMode thinking_mode = ThinkingMode::kThinking;
  ReasoningEffort effort = ReasoningEffort::kDefault;
  bool drop_thinking = true;
  bool add_bos = true;
  // So many messages at the front stand in the prompt already: what follows them is rendered, with
  // no BOS and no effort text.
  size_t num_context_messages = 0;
};

// Sets thinking mode and effort from the name that chat APIs send: none turns thinking off;
// minimal, low and medium are low; high; xhigh and max are max. The preview format has no low and
// takes kDefault, which is the same prompt. kInvalidArgument for any other name.
Status SetEffort(std::string_view name, RenderOptions* options);

// A stretch of the prompt: one special token, by its text, or plain text between two of them. Plain
// text holds what users, tools and the model wrote, so it is never searched for special tokens.
struct PromptSegment {
  std::string text;
  bool is_special = false;
  bool operator==(const PromptSegment&) const = default;
};

// Two special segments may be neighbours, two plain ones never are: text is tokenised in one go
// from one special token to the next. Errors: kInvalidArgument names the message and what is wrong
// with it.
Result<std::vector<PromptSegment>> RenderSegments(const std::vector<Message>& messages,
                                                  const RenderOptions& options);

// The segments' texts, joined.
Result<std::string> RenderPrompt(const std::vector<Message>& messages,
                                 const RenderOptions& options);

// The segments' ids. Further error: kFailedPrecondition when the vocabulary lacks a special token
// that the prompt needs.
Result<std::vector<int32_t>> RenderPromptIds(const Tokenizer& tokenizer,
                                             const std::vector<Message>& messages,
                                             const RenderOptions& options);

}  // namespace ds4
