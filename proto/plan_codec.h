// Step plans and step results to and from their messages. Decoding checks every field, so that what
// comes out can be used without another look; only what needs the model (token ids against the
// vocabulary, sessions, positions against a session's context) is left to Engine::Run.
#pragma once

#include <cstdint>
#include <span>

#include "engine/base/status.h"
#include "engine/session/step_plan.h"

namespace ds4 {
namespace v1 {
class Step;
class StepDone;
class Token;
}  // namespace v1

// What a decoded plan may hold at most. The defaults bound what a message can make us allocate.
struct PlanLimits {
  int64_t max_parts = 4096;
  int64_t max_rows = 65536;                // tokens of all parts together
  int64_t max_context = int64_t{1} << 30;  // positions lie in [0, max_context)
  int32_t max_decode_steps = 1 << 20;
  int64_t max_stop_ids = 1024;  // of one part
  int32_t max_top = 1024;       // num_top, and entries of a token's top list
};

struct DecodedStep {
  uint64_t epoch = 0;
  StepPlan plan;
  uint64_t digest = 0;  // as the sender computed it: compare with plan.Digest()
  bool want_state_hash = false;
};

// digest: plan.Digest() (passed in, so that this folder needs no engine library).
void EncodeStep(const StepPlan& plan, uint64_t epoch, uint64_t digest, bool want_state_hash,
                v1::Step* step);

// kInvalidArgument names the part, the field, its value and the range.
Result<DecodedStep> DecodeStep(const v1::Step& step, const PlanLimits& limits = {});

void EncodeToken(uint64_t sequence, const TokenOutput& token, v1::Token* message);
// num_parts: of the step this token belongs to.
Result<TokenOutput> DecodeToken(const v1::Token& message, int64_t num_parts,
                                const PlanLimits& limits = {});

// Everything of a StepDone; tokens travel apart, so result.tokens stays empty.
struct DecodedStepDone {
  uint64_t sequence = 0;
  StepResult result;
  std::vector<uint64_t> state_hash;  // per part, or empty when not asked for
};

// result.nll may be empty (ranks other than 0).
void EncodeStepDone(uint64_t sequence, const StepResult& result,
                    std::span<const uint64_t> state_hash, v1::StepDone* message);
// Checks counts against the plan that was sent.
Result<DecodedStepDone> DecodeStepDone(const v1::StepDone& message, const StepPlan& plan);

}  // namespace ds4
