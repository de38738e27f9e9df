// Shows how a group forms: whom we wait for, a loading bar for each rank, one line at the end.
#pragma once

#include <memory>
#include <string>

#include "coordinator/cluster.h"
#include "coordinator/console.h"

namespace ds4 {

class FormProgress final : public ClusterObserver {
 public:
  FormProgress(Console* console, bool verbose) : console_(console), verbose_(verbose) {}

  void OnWaiting(const std::string& for_whom) override;
  void OnJoined(const std::vector<Member>& members) override;
  void OnLoading(int rank, int64_t done_bytes, int64_t total_bytes) override;
  void OnReady(int rank, const v1::GroupReady& ready) override;

 private:
  Console* console_;
  bool verbose_;
  std::vector<Member> members_;
  std::unique_ptr<ProgressBars> bars_;
  int num_ready_ = 0;
  int64_t weight_bytes_ = 0;
  double load_seconds_ = 0.0;  // the slowest rank's
};

}  // namespace ds4
