#include "proto/plan_codec.h"

#include <cmath>
#include <unordered_set>

#include "engine/base/strings.h"
#include "proto/worker.pb.h"

namespace ds4 {
namespace {

// "part 3: top_k is -1, must be in [0, 2147483647]". The value is given as text by StrCat.
template <typename T>
Status OutOfBounds(int64_t part, const char* field, T value, const std::string& range) {
  return InvalidArgumentError(
      StrCat("part ", part, ": ", field, " is ", value, ", must be in ", range));
}

template <typename T>
std::string Closed(T low, T high) {
  return StrCat("[", low, ", ", high, "]");
}

Status CheckRange(int64_t part, const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return OkStatus();
  return OutOfBounds(part, field, value, Closed(low, high));
}

// NaN fails both comparisons, so it is refused too.
Status CheckUnit(int64_t part, const char* field, float value) {
  if (value >= 0.0f && value <= 1.0f) return OkStatus();
  return OutOfBounds(part, field, value, "[0, 1]");
}

template <typename Ids>
Status CheckIds(int64_t part, const char* field, const Ids& ids, int32_t low) {
  for (const int32_t id : ids) RETURN_IF_ERROR(CheckRange(part, field, id, low, INT32_MAX));
  return OkStatus();
}

Result<SamplingParams> DecodeSampling(int64_t part, const v1::Sampling& message) {
  if (!std::isfinite(message.temperature())) {
    return OutOfBounds(part, "temperature", message.temperature(), "the finite numbers");
  }
  RETURN_IF_ERROR(CheckRange(part, "top_k", message.top_k(), 0, INT32_MAX));
  RETURN_IF_ERROR(CheckUnit(part, "top_p", message.top_p()));
  RETURN_IF_ERROR(CheckUnit(part, "min_p", message.min_p()));
  return SamplingParams{message.temperature(), message.top_k(), message.top_p(), message.min_p(),
                        message.seed()};
}

Status CheckPositions(int64_t part, const v1::StepPart& message, const PlanLimits& limits) {
  RETURN_IF_ERROR(CheckRange(part, "number of tokens", message.tokens_size(), 1, limits.max_rows));
  RETURN_IF_ERROR(CheckRange(part, "pos", message.pos(), 0, limits.max_context - 1));
  if (message.tokens_size() <= limits.max_context - message.pos()) return OkStatus();
  return InvalidArgumentError(StrCat("part ", part, ": ", message.tokens_size(), " tokens at pos ",
                                     message.pos(), " go past the context limit ",
                                     limits.max_context));
}

Status CheckScoreTargets(int64_t part, const v1::StepPart& message) {
  const int count = message.score_targets_size();
  if (count != 0 && count != message.tokens_size()) {
    return InvalidArgumentError(StrCat("part ", part, ": ", count, " score_targets for ",
                                       message.tokens_size(), " tokens; give none or one each"));
  }
  return CheckIds(part, "score_targets", message.score_targets(), -1);
}

Result<StepPart> DecodePart(int64_t index, const v1::StepPart& message, const PlanLimits& limits) {
  RETURN_IF_ERROR(CheckPositions(index, message, limits));
  RETURN_IF_ERROR(CheckIds(index, "token", message.tokens(), 0));
  RETURN_IF_ERROR(
      CheckRange(index, "number of stop_ids", message.stop_ids_size(), 0, limits.max_stop_ids));
  RETURN_IF_ERROR(CheckIds(index, "stop_ids", message.stop_ids(), 0));
  RETURN_IF_ERROR(CheckScoreTargets(index, message));
  RETURN_IF_ERROR(CheckRange(index, "num_top", message.num_top(), 0, limits.max_top));
  StepPart part;
  // A part that does not say how to sample gets our defaults, not protobuf's zeros (top_p 0).
  if (message.has_sampling()) {
    ASSIGN_OR_RETURN(part.sampling, DecodeSampling(index, message.sampling()));
  }
  part.session_id = message.session_id();
  part.pos = message.pos();
  part.tokens.assign(message.tokens().begin(), message.tokens().end());
  part.sample = message.sample();
  part.stop_ids.assign(message.stop_ids().begin(), message.stop_ids().end());
  part.score_targets.assign(message.score_targets().begin(), message.score_targets().end());
  part.num_top = message.num_top();
  return part;
}

Status CheckCounts(const v1::Step& step, const PlanLimits& limits) {
  if (step.parts_size() < 1 || step.parts_size() > limits.max_parts) {
    return InvalidArgumentError(StrCat("step ", step.sequence(), " has ", step.parts_size(),
                                       " parts, must be in ",
                                       Closed<int64_t>(1, limits.max_parts)));
  }
  if (step.decode_steps() < 0 || step.decode_steps() > limits.max_decode_steps) {
    return InvalidArgumentError(StrCat("step ", step.sequence(), ": decode_steps is ",
                                       step.decode_steps(), ", must be in ",
                                       Closed(0, limits.max_decode_steps)));
  }
  // At most max_parts terms below 2^31 each: no overflow.
  int64_t rows = 0;
  for (const v1::StepPart& part : step.parts()) rows += part.tokens_size();
  if (rows > limits.max_rows) {
    return InvalidArgumentError(
        StrCat("step ", step.sequence(), " has ", rows, " rows, the limit is ", limits.max_rows));
  }
  return OkStatus();
}

void EncodeSampling(const SamplingParams& params, v1::Sampling* message) {
  message->set_temperature(params.temperature);
  message->set_top_k(params.top_k);
  message->set_top_p(params.top_p);
  message->set_min_p(params.min_p);
  message->set_seed(params.seed);
}

void EncodePart(const StepPart& part, v1::StepPart* message) {
  message->set_session_id(part.session_id);
  message->set_pos(part.pos);
  message->mutable_tokens()->Assign(part.tokens.begin(), part.tokens.end());
  message->set_sample(part.sample);
  EncodeSampling(part.sampling, message->mutable_sampling());
  message->mutable_stop_ids()->Assign(part.stop_ids.begin(), part.stop_ids.end());
  message->mutable_score_targets()->Assign(part.score_targets.begin(), part.score_targets.end());
  message->set_num_top(part.num_top);
}

}  // namespace

void EncodeStep(const StepPlan& plan, uint64_t epoch, uint64_t digest, bool want_state_hash,
                v1::Step* step) {
  step->Clear();
  step->set_epoch(epoch);
  step->set_sequence(plan.sequence);
  for (const StepPart& part : plan.parts) EncodePart(part, step->add_parts());
  step->set_decode_steps(plan.decode_steps);
  step->set_digest(digest);
  step->set_want_state_hash(want_state_hash);
}

Result<DecodedStep> DecodeStep(const v1::Step& step, const PlanLimits& limits) {
  RETURN_IF_ERROR(CheckCounts(step, limits));
  DecodedStep decoded;
  decoded.epoch = step.epoch();
  decoded.digest = step.digest();
  decoded.want_state_hash = step.want_state_hash();
  decoded.plan.sequence = step.sequence();
  decoded.plan.decode_steps = step.decode_steps();
  std::unordered_set<uint64_t> sessions;
  for (int i = 0; i < step.parts_size(); ++i) {
    if (!sessions.insert(step.parts(i).session_id()).second) {
      return InvalidArgumentError(StrCat("part ", i, ": session ", step.parts(i).session_id(),
                                         " has another part in the same step"));
    }
    ASSIGN_OR_RETURN(StepPart part, DecodePart(i, step.parts(i), limits));
    decoded.plan.parts.push_back(std::move(part));
  }
  return decoded;
}

void EncodeToken(uint64_t sequence, const TokenOutput& token, v1::Token* message) {
  message->Clear();
  message->set_sequence(sequence);
  message->set_part(token.part);
  message->set_pos(token.pos);
  message->set_token(token.token);
  message->set_logprob(token.logprob);
  message->set_is_stop(token.is_stop);
  for (const TopToken& top : token.top) {
    v1::TopToken* entry = message->add_top();
    entry->set_id(top.id);
    entry->set_logit(top.logit);
  }
}

Result<TokenOutput> DecodeToken(const v1::Token& message, int64_t num_parts,
                                const PlanLimits& limits) {
  const int32_t part = message.part();
  RETURN_IF_ERROR(CheckRange(part, "part of a token", part, 0, num_parts - 1));
  // A drawn token may stand one past the last position that a step may hold.
  RETURN_IF_ERROR(CheckRange(part, "pos of a token", message.pos(), 0, limits.max_context));
  RETURN_IF_ERROR(CheckRange(part, "token", message.token(), 0, INT32_MAX));
  RETURN_IF_ERROR(CheckRange(part, "length of top", message.top_size(), 0, limits.max_top));
  if (std::isnan(message.logprob())) return OutOfBounds(part, "logprob", "NaN", "the numbers");
  TokenOutput token;
  token.part = part;
  token.pos = message.pos();
  token.token = message.token();
  token.logprob = message.logprob();
  token.is_stop = message.is_stop();
  for (const v1::TopToken& top : message.top()) {
    RETURN_IF_ERROR(CheckRange(part, "id in top", top.id(), 0, INT32_MAX));
    token.top.push_back({top.id(), top.logit()});
  }
  return token;
}

void EncodeStepDone(uint64_t sequence, const StepResult& result,
                    std::span<const uint64_t> state_hash, v1::StepDone* message) {
  message->Clear();
  message->set_sequence(sequence);
  for (const std::vector<float>& rows : result.nll) {
    message->add_scores()->mutable_nll()->Assign(rows.begin(), rows.end());
  }
  message->set_seconds(result.seconds);
  message->set_comm_seconds(result.comm_seconds);
  message->mutable_state_hash()->Assign(state_hash.begin(), state_hash.end());
}

Result<DecodedStepDone> DecodeStepDone(const v1::StepDone& message, const StepPlan& plan) {
  const int num_parts = static_cast<int>(plan.parts.size());
  if (message.sequence() != plan.sequence) {
    return InvalidArgumentError(
        StrCat("answer to step ", message.sequence(), ", the step sent is ", plan.sequence));
  }
  if (message.scores_size() != 0 && message.scores_size() != num_parts) {
    return InvalidArgumentError(StrCat("step ", plan.sequence, ": scores for ",
                                       message.scores_size(), " parts, the step has ", num_parts));
  }
  if (message.state_hash_size() != 0 && message.state_hash_size() != num_parts) {
    return InvalidArgumentError(StrCat("step ", plan.sequence, ": state hashes for ",
                                       message.state_hash_size(), " parts, the step has ",
                                       num_parts));
  }
  DecodedStepDone done;
  done.sequence = message.sequence();
  for (int i = 0; i < message.scores_size(); ++i) {
    const v1::ScoredRows& rows = message.scores(i);
    if (rows.nll_size() != static_cast<int64_t>(plan.parts[i].score_targets.size())) {
      return InvalidArgumentError(StrCat("step ", plan.sequence, " part ", i, ": ", rows.nll_size(),
                                         " scores for ", plan.parts[i].score_targets.size(),
                                         " targets"));
    }
    done.result.nll.emplace_back(rows.nll().begin(), rows.nll().end());
  }
  done.result.seconds = message.seconds();
  done.result.comm_seconds = message.comm_seconds();
  done.state_hash.assign(message.state_hash().begin(), message.state_hash().end());
  return done;
}

}  // namespace ds4
