// What every engine refuses, in the same words: a plan is checked as a whole before anything runs.
// Pure.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/base/status.h"
#include "engine/kv/session_position.h"
#include "engine/model/model_config.h"
#include "engine/session/engine_options.h"
#include "engine/session/step_plan.h"

namespace ds4 {

// Where the session of this id stands; nullptr when it is not open.
using FindPosition = std::function<const SessionPosition*(uint64_t session_id)>;

// kInvalidArgument names the step, the part and both values.
Status CheckPlan(const StepPlan& plan, int64_t vocab_size, int64_t max_batch_rows,
                 const FindPosition& find);

// kAlreadyExists, kResourceExhausted (max_sessions), kInvalidArgument (context over the limit).
Status CheckOpenSession(const EngineOptions& options, uint64_t session_id, int64_t max_context,
                        bool is_open, int64_t num_open);

// kNotFound, for CloseSession and StateHash.
Status SessionNotOpenError(uint64_t session_id);

// kInvalidArgument names the option, its value and the range. Checks what holds for every backend.
Status CheckEngineOptions(const EngineOptions& options, const ModelConfig& config);

}  // namespace ds4
