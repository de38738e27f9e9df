// Where the workers of a cluster come from: a fixed list, or processes that we start ourselves.
#pragma once

#include <string>
#include <vector>

#include "coordinator/deadline.h"
#include "engine/base/status.h"

namespace ds4 {

// Thread: one at a time.
class WorkerSource {
 public:
  virtual ~WorkerSource() = default;
  // Addresses in rank order, after starting what can be started and does not run.
  virtual Result<std::vector<std::string>> EnsureRunning(TimePoint deadline) = 0;
  // The rank broke its group: it is gone or says nothing. The next EnsureRunning replaces it if it
  // can.
  virtual void Suspect(int rank) = 0;
  // What is known of a rank's end beyond its broken stream ("process 17 was killed by signal 9"),
  // or "".
  virtual std::string WhyGone(int rank) = 0;
};

class FixedWorkers final : public WorkerSource {
 public:
  explicit FixedWorkers(std::vector<std::string> addresses) : addresses_(std::move(addresses)) {}
  Result<std::vector<std::string>> EnsureRunning(TimePoint) override { return addresses_; }
  void Suspect(int) override {}
  std::string WhyGone(int) override { return ""; }

 private:
  std::vector<std::string> addresses_;
};

}  // namespace ds4
