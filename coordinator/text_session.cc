#include "coordinator/text_session.h"

#include <algorithm>

#include "coordinator/deadline.h"
#include "engine/base/strings.h"
#include "engine/kv/session_position.h"

namespace ds4 {
namespace {

// What a step must give: tokens at rising positions, as many as asked for unless the last one
// stops.
Status CheckTokens(const StepPlan& plan, const std::vector<TokenOutput>& tokens) {
  const StepPart& part = plan.parts[0];
  const int64_t first = part.pos + std::ssize(part.tokens);
  const int64_t wanted = part.sample ? 1 + plan.decode_steps : 0;
  for (int64_t i = 0; i < std::ssize(tokens); ++i) {
    if (tokens[i].pos != first + i) {
      return InternalError(
          StrCat("rank 0 gave a token for position ", tokens[i].pos, ", expected ", first + i));
    }
  }
  const bool stopped = !tokens.empty() && tokens.back().is_stop;
  if (std::ssize(tokens) == wanted || (stopped && std::ssize(tokens) < wanted)) return OkStatus();
  return InternalError(
      StrCat("rank 0 gave ", tokens.size(), " tokens in one step, asked for ", wanted));
}

}  // namespace

Status TextSession::Fits(const std::vector<int32_t>& prompt, int64_t max_tokens) const {
  const int64_t length = std::ssize(prompt);
  if (length < 1) return InvalidArgumentError("the prompt has no tokens");
  if (length + max_tokens <= context_) return OkStatus();
  const int64_t room = context_ - length;
  return InvalidArgumentError(
      StrCat("the prompt has ", length, " tokens and the answer may have ", max_tokens,
             ", together ", length + max_tokens, "; the context holds ", context_, "; ",
             room > 0 ? StrCat("ask for at most ", room, " with --max-tokens, or ") : "",
             "raise --ctx or shorten the prompt"));
}

int64_t TextSession::Reusable(const std::vector<int32_t>& prompt, int64_t chunk) const {
  // The last token always runs: its row gives the first token of the answer.
  const int64_t limit = std::min(std::ssize(held_), std::ssize(prompt) - 1);
  const auto differs = std::mismatch(held_.begin(), held_.begin() + limit, prompt.begin());
  const int64_t same = differs.first - held_.begin();
  return same < most_held_ - RewindSlack(chunk) ? 0 : same;
}

StepPlan TextSession::PlanFor(std::vector<int32_t> tokens) const {
  StepPlan plan;
  StepPart& part = plan.parts.emplace_back();
  part.session_id = session_id_;
  part.pos = std::ssize(held_);
  part.tokens = std::move(tokens);
  return plan;
}

Status TextSession::Step(StepPlan plan, const GenerateCallbacks& callbacks, Answer* answer) {
  const StepPlan sent = plan;
  Result<StepResult> result = runner_->RunStep(std::move(plan), [&](const TokenOutput& token) {
    if (!token.is_stop) callbacks.on_token(token.token);
  });
  if (result.ok()) {
    if (Status status = CheckTokens(sent, result->tokens); !status.ok()) result = status;
  }
  if (!result.ok()) {
    Forget();
    return result.status();
  }
  const std::vector<int32_t>& rows = sent.parts[0].tokens;
  held_.insert(held_.end(), rows.begin(), rows.end());
  for (size_t i = 0; i < result->tokens.size(); ++i) {
    const TokenOutput& token = result->tokens[i];
    // Each token but the last became a row of the same step.
    if (i > 0) held_.push_back(result->tokens[i - 1].token);
    answer->tokens.push_back(token.token);
    if (token.is_stop) answer->reason = StopReason::kStopToken;
  }
  most_held_ = std::max<int64_t>(most_held_, std::ssize(held_));
  answer->stats.comm_seconds += result->comm_seconds;
  return OkStatus();
}

Status TextSession::Prefill(const std::vector<int32_t>& prompt, const GenerateOptions& options,
                            const GenerateCallbacks& callbacks, Answer* answer) {
  const int64_t length = std::ssize(prompt);
  for (int64_t pos = std::ssize(held_); pos < length;) {
    if (callbacks.interrupted()) {
      answer->reason = StopReason::kInterrupted;
      return OkStatus();
    }
    const int64_t end = std::min(pos + options.chunk, length);
    StepPlan plan = PlanFor({prompt.begin() + pos, prompt.begin() + end});
    if (end == length) {
      plan.parts[0].sample = true;
      plan.parts[0].sampling = options.sampling;
      plan.parts[0].stop_ids = options.stop_ids;
    }
    RETURN_IF_ERROR(Step(std::move(plan), callbacks, answer));
    callbacks.on_prefill(end, length);
    pos = end;
  }
  return OkStatus();
}

Status TextSession::Decode(const GenerateOptions& options, const GenerateCallbacks& callbacks,
                           Answer* answer) {
  while (answer->reason == StopReason::kMaxTokens &&
         std::ssize(answer->tokens) < options.max_tokens) {
    if (callbacks.interrupted()) {
      answer->reason = StopReason::kInterrupted;
      return OkStatus();
    }
    const int64_t left = options.max_tokens - std::ssize(answer->tokens);
    StepPlan plan = PlanFor({answer->tokens.back()});
    plan.parts[0].sample = true;
    plan.parts[0].sampling = options.sampling;
    plan.parts[0].stop_ids = options.stop_ids;
    plan.decode_steps = static_cast<int32_t>(std::min(left, options.burst) - 1);
    RETURN_IF_ERROR(Step(std::move(plan), callbacks, answer));
  }
  return OkStatus();
}

Result<Answer> TextSession::Generate(const std::vector<int32_t>& prompt,
                                     const GenerateOptions& options,
                                     const GenerateCallbacks& callbacks) {
  RETURN_IF_ERROR(Fits(prompt, options.max_tokens));
  Answer answer;
  answer.stats.prompt_tokens = std::ssize(prompt);
  answer.stats.reused_tokens = Reusable(prompt, options.chunk);
  held_.resize(answer.stats.reused_tokens);  // going back is setting the position
  if (held_.empty()) Forget();
  TimePoint start = Now();
  RETURN_IF_ERROR(Prefill(prompt, options, callbacks, &answer));
  answer.stats.prefill_seconds = SecondsSince(start);
  start = Now();
  RETURN_IF_ERROR(Decode(options, callbacks, &answer));
  answer.stats.decode_seconds = SecondsSince(start);
  answer.stats.decoded_tokens = std::max<int64_t>(0, std::ssize(answer.tokens) - 1);
  return answer;
}

}  // namespace ds4
