// One answer from prompt tokens to printed text, with progress and statistics around it.
#pragma once

#include <string>
#include <vector>

#include "coordinator/tasks.h"
#include "coordinator/text_session.h"

namespace ds4 {

struct ShownAnswer {
  std::string text;
  std::string reasoning;  // with --think
  StopReason reason = StopReason::kMaxTokens;
};

// --max-tokens, or, when it was not given, what fits of its default.
int64_t AnswerLimit(const Options& options, int64_t prompt_tokens, int64_t context);

// "prompt 12 tokens in 0.05 s (240.0 tokens/s); answer 64 tokens (105.3 tokens/s)".
std::string StatsText(const GenerateStats& stats, int num_ranks);

// Errors of TextSession::Generate; what was printed before an error stays.
Result<ShownAnswer> ShowAnswer(const Parts& parts, TextSession* session,
                               const std::vector<int32_t>& prompt);

}  // namespace ds4
