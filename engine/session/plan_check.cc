#include "engine/session/plan_check.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/base/strings.h"
#include "engine/sampling/sampler.h"

namespace ds4 {
namespace {

Status CheckTokens(const std::vector<int32_t>& tokens, int32_t lowest, int64_t vocab_size,
                   const std::string& where, const char* what) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < lowest || tokens[i] >= vocab_size) {
      return InvalidArgumentError(StrCat(where, ": ", what, "[", i, "] is ", tokens[i],
                                         ", the vocabulary has ids 0 to ", vocab_size - 1));
    }
  }
  return OkStatus();
}

Status CheckPositions(const StepPart& part, const SessionPosition& at, const std::string& where) {
  if (part.pos < 0 || part.pos > at.n() || (part.pos != 0 && part.pos < at.LowestRewind())) {
    return InvalidArgumentError(StrCat(where, " starts at position ", part.pos,
                                       ", the session is at ", at.n(), " and goes back to ",
                                       at.LowestRewind(), " or 0"));
  }
  const auto rows = static_cast<int64_t>(part.tokens.size());
  if (rows > at.max_context() - part.pos) {
    return InvalidArgumentError(StrCat(where, " ends at position ", part.pos + rows,
                                       ", the session's context is ", at.max_context()));
  }
  return OkStatus();
}

Status CheckPart(const StepPart& part, int64_t vocab_size, const FindPosition& find,
                 const std::string& where) {
  const SessionPosition* at = find(part.session_id);
  if (at == nullptr) {
    return InvalidArgumentError(StrCat(where, ": session ", part.session_id, " is not open"));
  }
  if (part.tokens.empty()) return InvalidArgumentError(StrCat(where, " has no tokens"));
  RETURN_IF_ERROR(CheckPositions(part, *at, where));
  if (!part.score_targets.empty() && part.score_targets.size() != part.tokens.size()) {
    return InvalidArgumentError(StrCat(where, " has ", part.score_targets.size(),
                                       " score targets for ", part.tokens.size(), " tokens"));
  }
  if (part.num_top < 0 || part.num_top > vocab_size) {
    return InvalidArgumentError(
        StrCat(where, ": num_top is ", part.num_top, ", must be from 0 to ", vocab_size));
  }
  RETURN_IF_ERROR(CheckTokens(part.tokens, 0, vocab_size, where, "tokens"));
  RETURN_IF_ERROR(CheckTokens(part.score_targets, -1, vocab_size, where, "score_targets"));
  RETURN_IF_ERROR(CheckTokens(part.stop_ids, 0, vocab_size, where, "stop_ids"));
  return ValidateSampling(part.sampling).WithContext(where);
}

}  // namespace

Status CheckPlan(const StepPlan& plan, int64_t vocab_size, int64_t max_batch_rows,
                 const FindPosition& find) {
  const std::string step = StrCat("step ", plan.sequence);
  if (plan.parts.empty()) return InvalidArgumentError(step + " has no parts");
  if (plan.decode_steps < 0) {
    return InvalidArgumentError(StrCat(step, ": decode_steps is ", plan.decode_steps));
  }
  if (plan.num_rows() > max_batch_rows) {
    return InvalidArgumentError(
        StrCat(step, " has ", plan.num_rows(), " rows, a batch holds ", max_batch_rows));
  }
  std::vector<uint64_t> seen;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    const std::string where = StrCat(step, ", part ", i);
    const StepPart& part = plan.parts[i];
    RETURN_IF_ERROR(CheckPart(part, vocab_size, find, where));
    if (std::find(seen.begin(), seen.end(), part.session_id) != seen.end()) {
      return InvalidArgumentError(StrCat(where, ": session ", part.session_id, " is in it twice"));
    }
    seen.push_back(part.session_id);
  }
  return OkStatus();
}

Status CheckOpenSession(const EngineOptions& options, uint64_t session_id, int64_t max_context,
                        bool is_open, int64_t num_open) {
  if (is_open) {
    return {StatusCode::kAlreadyExists, StrCat("session ", session_id, " is open already")};
  }
  if (num_open >= options.max_sessions) {
    return ResourceExhaustedError(StrCat("session ", session_id, " is one too many: ", num_open,
                                         " of ", options.max_sessions,
                                         " are open; close one first"));
  }
  if (max_context < 1 || max_context > options.max_context) {
    return InvalidArgumentError(StrCat("session ", session_id, " asks for a context of ",
                                       max_context, " tokens, this group was formed for 1 to ",
                                       options.max_context));
  }
  return OkStatus();
}

Status SessionNotOpenError(uint64_t session_id) {
  return NotFoundError(StrCat("session ", session_id, " is not open"));
}

Status CheckEngineOptions(const EngineOptions& options, const ModelConfig& config) {
  if (options.num_threads < 1) {
    return InvalidArgumentError(StrCat("threads is ", options.num_threads, ", must be at least 1"));
  }
  if (options.max_context < 1 || options.max_context > config.context_length) {
    return InvalidArgumentError(StrCat("a context of ", options.max_context,
                                       " tokens was asked for, the model was made for 1 to ",
                                       config.context_length));
  }
  if (options.max_batch_rows < 1 || options.max_batch_rows > 65536) {
    return InvalidArgumentError(
        StrCat("batch rows is ", options.max_batch_rows, ", must be from 1 to 65536"));
  }
  if (options.max_sessions < 1) {
    return InvalidArgumentError(
        StrCat("sessions is ", options.max_sessions, ", must be at least 1"));
  }
  return OkStatus();
}

}  // namespace ds4
