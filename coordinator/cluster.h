// One group of workers as seen from here: joining, forming, running steps, breaking, and forming
// anew.
//
//   Form:    hello to all at once -> compare -> FormGroup(epoch) -> GroupReady -> OpenSession
//   RunStep: the same plan to all ranks -> tokens from rank 0, StepDone from all
//   any error, lost stream or silence: the group is broken, every call fails at once until Form
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/membership.h"
#include "coordinator/rank_client.h"
#include "coordinator/step_runner.h"
#include "coordinator/worker_source.h"
#include "engine/shard/shard_plan.h"

namespace ds4 {

struct ClusterOptions {
  Requirements requirements;
  ShardPlan plan;                    // its lanes say how many ranks there are
  int64_t preferred_context = 4096;  // when requirements.context is 0
  int64_t vocab_size = 0;            // token ids from rank 0 are checked against it
  std::string transport = "tcp";     // "tcp" or "grpc"
  bool check_state = false;          // compare a hash of the ranks' state after each step
  milliseconds timeout{10000};       // of every wait for progress inside a step
  milliseconds join_timeout{10000};
};

// Told what is going on while a group forms. All calls come from inside Form.
class ClusterObserver {
 public:
  virtual ~ClusterObserver() = default;
  virtual void OnWaiting(const std::string& /*for_whom*/) {}
  virtual void OnJoined(const std::vector<Member>& /*members*/) {}
  virtual void OnLoading(int /*rank*/, int64_t /*done_bytes*/, int64_t /*total_bytes*/) {}
  virtual void OnReady(int /*rank*/, const v1::GroupReady& /*ready*/) {}
};

// Thread: one at a time.
class Cluster final : public StepRunner {
 public:
  static constexpr uint64_t kSessionId = 1;

  // `source` and `observer` outlive this. `first_epoch` must be above that of any earlier group of
  // these workers; each later group gets a higher one.
  Cluster(ClusterOptions options, WorkerSource* source, RankClientFactory make_client,
          ClusterObserver* observer, uint64_t first_epoch);
  ~Cluster() override;

  // While this returns true, waits end with kCancelled; asked about every 50 ms.
  void set_stop(std::function<bool()> stop) { stop_ = std::move(stop); }

  // Forms a group, after ending the present one if there is one. Takes at most the join limit to
  // hear from all workers, then as long as loading makes progress. Errors: kUnavailable,
  // kDeadlineExceeded list every worker that is missing and why; kFailedPrecondition,
  // kInvalidArgument every worker that does not fit; kCancelled.
  Status Form();
  bool formed() const { return formed_; }
  // Looks, without waiting, whether a worker was lost since the last step; if so the group is
  // broken and this says why.
  Status CheckAlive();
  // Of the group; valid once Form has succeeded.
  int64_t context() const { return context_; }
  uint64_t epoch() const { return epoch_; }

  // `plan.sequence` is set here. Errors break the group and name rank, address and, when a rank
  // could tell it, the layer.
  Result<StepResult> RunStep(StepPlan plan, const TokenCallback& on_token) override;

  // Ends the group and all streams.
  void Leave();

 private:
  struct Rank {
    std::string address;
    std::unique_ptr<RankClient> client;
    bool answered = false;  // the command in flight
    bool ended = false;     // its stream
    Status failure;         // of the command in flight or of the stream
  };
  struct Joining;
  // Looks at one event of a rank; says whether it is the answer, or progress, or out of place.
  enum class Verdict { kAnswer, kProgress, kWrong };
  using Take = std::function<Verdict(int rank, const v1::Event& event)>;

  Status Join(TimePoint deadline);
  void Connect(int rank);
  void HandleJoinEvent(RankEvent event, Joining* joining);
  Status MissingReport(const Joining& joining) const;
  Status CheckMembers() const;
  Status FormGroup();
  Status OpenSession();
  v1::FormGroup GroupOf(int rank) const;

  void SendAll(const std::function<v1::Command(int rank)>& make);
  Status AwaitAll(const std::string& what, milliseconds limit, const Take& take);
  bool AllSettled() const;
  bool AnyFailed() const;
  void HandleEvent(const RankEvent& event, const std::string& what, const Take& take,
                   bool* progress);
  Status CompareStates(const std::vector<std::vector<uint64_t>>& hashes) const;
  Status FailureReport(const std::string& what, milliseconds waited);
  Status Break(Status why);

  int world_size() const { return options_.plan.lanes.world_size(); }

  ClusterOptions options_;
  WorkerSource* source_;
  RankClientFactory make_client_;
  ClusterObserver* observer_;
  std::function<bool()> stop_ = [] { return false; };

  std::unique_ptr<EventQueue> queue_;
  std::vector<Rank> ranks_;  // their clients push into *queue_
  std::vector<Member> members_;
  bool formed_ = false;
  Status broken_;  // why, when a formed group broke
  uint64_t epoch_;
  uint64_t sequence_ = 0;
  int64_t context_ = 0;
};

}  // namespace ds4
