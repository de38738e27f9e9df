// Whatever runs step plans: the cluster, or a script in tests.
#pragma once

#include <functional>

#include "engine/base/status.h"
#include "engine/session/step_plan.h"

namespace ds4 {

using TokenCallback = std::function<void(const TokenOutput&)>;

class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // Runs one step on all ranks. `on_token` sees each token as soon as it is here; the result holds
  // all.
  virtual Result<StepResult> RunStep(StepPlan plan, const TokenCallback& on_token) = 0;
};

}  // namespace ds4
