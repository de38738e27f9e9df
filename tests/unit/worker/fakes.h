// A worker without a model: an engine whose behaviour a test scripts, ranks that talk through
// memory, and a sink that records events.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "engine/base/strings.h"
#include "engine/comm/local_transport.h"
#include "worker/commands.h"
#include "worker/parts.h"

namespace ds4 {

inline constexpr const char* kFakeDigest = "plan-1234";
inline constexpr std::chrono::milliseconds kTestPatience{10000};

// What the fake engines of one test do and what they saw. Thread-safe.
class FakeWorld {
 public:
  explicit FakeWorld(int world_size) : world_size_(world_size) {}

  // Called at the start of each Run, on the rank's thread; may throw, block or return an error.
  using RunHook = std::function<Status(const StepPlan&, Communicator*)>;
  void set_run_hook(RunHook hook) {
    std::lock_guard lock(mutex_);
    run_hook_ = std::move(hook);
  }
  RunHook run_hook() {
    std::lock_guard lock(mutex_);
    return run_hook_;
  }
  void set_load_status(Status status) {
    std::lock_guard lock(mutex_);
    load_status_ = std::move(status);
  }
  Status load_status() {
    std::lock_guard lock(mutex_);
    return load_status_;
  }
  // Loading goes on until it is called off.
  void set_endless_load(bool endless) { endless_load_ = endless; }
  bool endless_load() const { return endless_load_; }

  // Engines alive now: tells whether a group has been freed.
  void AddEngines(int change) {
    std::lock_guard lock(mutex_);
    num_engines_ += change;
    changed_.notify_all();
  }
  bool WaitForEngines(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kTestPatience, [&] { return num_engines_ == count; });
  }

  // This rank's transport of the epoch's hub; ranks of one epoch share a hub.
  std::unique_ptr<Transport> Connect(uint64_t epoch, int rank) {
    std::lock_guard lock(mutex_);
    auto [hub, is_new] = hubs_.try_emplace(epoch);
    if (is_new) hub->second = MakeLocalTransports(world_size_);
    return std::move(hub->second.at(rank));
  }

 private:
  const int world_size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  RunHook run_hook_;
  Status load_status_;
  std::atomic<bool> endless_load_ = false;
  int num_engines_ = 0;
  std::map<uint64_t, std::vector<std::unique_ptr<Transport>>> hubs_;
};

// Draws token 100 + rank for every part that samples, after all ranks have met at a barrier.
class FakeEngine : public Engine {
 public:
  FakeEngine(FakeWorld* world, Communicator* comm, const EngineOptions& options)
      : world_(world), comm_(comm), options_(options) {
    stats_ = {1000, 10, 0.5};
    world_->AddEngines(1);
  }
  ~FakeEngine() override { world_->AddEngines(-1); }

  Status OpenSession(uint64_t session_id, int64_t) override {
    if (static_cast<int>(sessions_.size()) >= options_.max_sessions) {
      return ResourceExhaustedError(StrCat(options_.max_sessions, " sessions are open"));
    }
    if (!sessions_.insert(session_id).second) {
      return Status(StatusCode::kAlreadyExists, StrCat("session ", session_id));
    }
    return OkStatus();
  }
  Status CloseSession(uint64_t session_id) override {
    if (sessions_.erase(session_id) == 1) return OkStatus();
    return InvalidArgumentError(StrCat("no session ", session_id));
  }

  Result<StepResult> Run(const StepPlan& plan, const TokenCallback& on_token) override {
    for (const StepPart& part : plan.parts) {
      if (sessions_.contains(part.session_id)) continue;
      return InvalidArgumentError(StrCat("no session ", part.session_id));
    }
    if (const FakeWorld::RunHook hook = world_->run_hook()) {
      RETURN_IF_ERROR(hook(plan, comm_));
    }
    RETURN_IF_ERROR(comm_->Barrier());
    StepResult result;
    for (size_t i = 0; i < plan.parts.size(); ++i) {
      if (!plan.parts[i].sample) continue;
      TokenOutput token;
      token.part = static_cast<int32_t>(i);
      token.pos = plan.parts[i].pos + static_cast<int64_t>(plan.parts[i].tokens.size());
      token.token = 100 + comm_->rank();
      on_token(token);
      result.tokens.push_back(token);
    }
    return result;
  }

  Result<uint64_t> StateHash(uint64_t session_id) override { return session_id * 10; }
  const EngineStats& stats() const override { return stats_; }

 private:
  FakeWorld* const world_;
  Communicator* const comm_;
  const EngineOptions options_;
  EngineStats stats_;
  std::set<uint64_t> sessions_;
};

// Progress comes in 50 quick reports, of which only a few may be passed on.
inline WorkerParts FakeParts(FakeWorld* world) {
  WorkerParts parts;
  parts.load_engine = [world](
                          const EngineOptions& options, Communicator* comm,
                          const Engine::LoadProgress& progress) -> Result<std::unique_ptr<Engine>> {
    RETURN_IF_ERROR(world->load_status());
    while (world->endless_load()) {
      if (!progress(1, 1000)) return CancelledError("called off");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (int i = 1; i <= 50; ++i) progress(20 * i, 1000);
    return std::unique_ptr<Engine>(std::make_unique<FakeEngine>(world, comm, options));
  };
  parts.connect = [world](const GroupSpec& spec,
                          std::stop_token) -> Result<std::unique_ptr<Transport>> {
    return world->Connect(spec.epoch, spec.rank);
  };
  parts.plan_digest = [](const LaneLayout&) -> Result<std::string> {
    return std::string(kFakeDigest);
  };
  return parts;
}

// Keeps every event and lets a test wait for the next of a kind.
class RecordingSink : public EventSink {
 public:
  Status Send(const Event& event) override {
    std::lock_guard lock(mutex_);
    events_.push_back(event);
    changed_.notify_all();
    return OkStatus();
  }

  // The next event of type T after those that earlier calls returned or passed over.
  template <typename T>
  std::optional<T> Next() {
    std::unique_lock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
    while (true) {
      while (next_ < events_.size()) {
        if (const T* found = std::get_if<T>(&events_[next_++])) return *found;
      }
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) return std::nullopt;
    }
  }

  template <typename T>
  int Count() {
    std::lock_guard lock(mutex_);
    int count = 0;
    for (const Event& event : events_) count += std::holds_alternative<T>(event) ? 1 : 0;
    return count;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  size_t next_ = 0;
};

inline GroupSpec MakeSpec(uint64_t epoch, int rank, int world_size) {
  GroupSpec spec;
  spec.epoch = epoch;
  spec.rank = rank;
  spec.lanes = LaneLayout::Even(8, world_size);
  spec.peers.resize(world_size);
  spec.transport = "tcp";
  spec.plan_digest = kFakeDigest;
  spec.max_context = 100;
  spec.max_batch_rows = 16;
  spec.max_sessions = 2;
  spec.timeout = std::chrono::milliseconds(5000);
  spec.join_timeout = std::chrono::milliseconds(1000);
  return spec;
}

// One row of session 1 that draws a token.
inline StepPlan MakePlan(uint64_t sequence) {
  StepPlan plan;
  plan.sequence = sequence;
  StepPart part;
  part.session_id = 1;
  part.tokens = {7};
  part.sample = true;
  plan.parts = {part};
  return plan;
}

inline StepCommand MakeStep(uint64_t epoch, uint64_t sequence) {
  StepCommand step;
  step.epoch = epoch;
  step.plan = MakePlan(sequence);
  step.digest = step.plan.Digest();
  return step;
}

}  // namespace ds4
