#include "coordinator/cluster.h"

#include <algorithm>

#include "engine/base/strings.h"
#include "proto/plan_codec.h"
#include "proto/protocol.h"
#include "proto/rpc_status.h"

namespace ds4 {
namespace {

// Between two attempts to reach a worker that is not there (yet).
constexpr milliseconds kRetryEvery{200};
// After the first failure of a step the other ranks get this long to say what they saw: they know
// the layer, while a broken stream knows nothing.
constexpr milliseconds kGrace{1500};
constexpr milliseconds kReplyLimit{10000};  // for small commands outside of steps

// Ranks notice a silent peer after `timeout`; we wait a little longer, so that their error, which
// names the layer, is here before ours.
milliseconds WithSlack(milliseconds timeout) { return timeout + timeout / 10 + kGrace; }

std::string Seconds(milliseconds time) {
  return StrCat(Fixed(static_cast<double>(time.count()) / 1000.0, 1), " s");
}

bool IsRetryable(const Status& why) { return why.ok() || why.code() == StatusCode::kUnavailable; }

// How much an error tells about the cause: an error that a rank reports about a peer or a layer
// beats the mere end of a stream, and that one beats ranks that only heard of the failure.
int Telling(const Status& failure, bool stream_ended) {
  if (failure.message().find("layer") != std::string::npos) return 3;
  if (stream_ended) return 2;
  return failure.code() == StatusCode::kAborted ? 0 : 1;
}

}  // namespace

// Where each worker stands while all are being reached.
struct Cluster::Joining {
  struct State {
    bool joined = false;
    bool refused = false;  // final: trying again would not help
    Status last;           // why the last attempt failed
    std::optional<TimePoint> retry_at;
  };
  std::vector<State> states;

  bool Settled() const {
    return std::all_of(states.begin(), states.end(),
                       [](const State& s) { return s.joined || s.refused; });
  }
  bool AllJoined() const {
    return std::all_of(states.begin(), states.end(), [](const State& s) { return s.joined; });
  }
  TimePoint NextRetry(TimePoint deadline) const {
    for (const State& s : states) {
      if (s.retry_at) deadline = std::min(deadline, *s.retry_at);
    }
    return deadline;
  }
};

Cluster::Cluster(ClusterOptions options, WorkerSource* source, RankClientFactory make_client,
                 ClusterObserver* observer, uint64_t first_epoch)
    : options_(std::move(options)),
      source_(source),
      make_client_(std::move(make_client)),
      observer_(observer),
      epoch_(first_epoch - 1) {}

Cluster::~Cluster() { Leave(); }

void Cluster::Leave() {
  ranks_.clear();  // closes the streams; the workers leave the group and wait for the next one
  queue_.reset();
  formed_ = false;
}

Status Cluster::Form() {
  Leave();
  broken_ = OkStatus();
  ++epoch_;
  sequence_ = 0;
  const TimePoint deadline = Now() + options_.join_timeout;
  Status status = Join(deadline);
  if (status.ok()) status = CheckMembers();
  if (status.ok()) status = FormGroup();
  if (status.ok()) status = OpenSession();
  if (!status.ok()) {
    Leave();
    return status;
  }
  formed_ = true;
  return OkStatus();
}

void Cluster::Connect(int rank) {
  Rank& r = ranks_[rank];
  r.ended = false;
  r.client.reset();
  r.client = make_client_(rank, r.address, queue_.get());
  v1::Command command;
  v1::Hello* hello = command.mutable_hello();
  hello->set_protocol_version(kProtocolVersion);
  hello->set_build(BuildVersion());
  hello->set_coordinator("ds4-coordinator");
  r.client->Send(std::move(command));
}

Status Cluster::Join(TimePoint deadline) {
  queue_ = std::make_unique<EventQueue>();
  ASSIGN_OR_RETURN(const std::vector<std::string> addresses, source_->EnsureRunning(deadline));
  if (static_cast<int>(addresses.size()) != world_size()) {
    return InternalError(
        StrCat("the plan has ", world_size(), " ranks, there are ", addresses.size(), " workers"));
  }
  ranks_.resize(addresses.size());
  members_.assign(addresses.size(), {});
  Joining joining{std::vector<Joining::State>(addresses.size())};
  for (int rank = 0; rank < world_size(); ++rank) {
    ranks_[rank].address = members_[rank].address = addresses[rank];
    Connect(rank);
  }
  while (!joining.Settled() && Now() < deadline) {
    std::optional<RankEvent> event = queue_->Pop(joining.NextRetry(deadline), stop_);
    if (stop_()) return CancelledError("interrupted while waiting for the workers");
    if (event) HandleJoinEvent(*std::move(event), &joining);
    for (int rank = 0; rank < world_size(); ++rank) {
      Joining::State& state = joining.states[rank];
      if (!state.retry_at || Now() < *state.retry_at) continue;
      state.retry_at.reset();
      Connect(rank);
    }
  }
  if (!joining.AllJoined()) return MissingReport(joining);
  observer_->OnJoined(members_);
  return OkStatus();
}

void Cluster::HandleJoinEvent(RankEvent event, Joining* joining) {
  const int rank = event.rank;
  Joining::State& state = joining->states[rank];
  if (event.ended) {
    ranks_[rank].ended = true;
    state.joined = false;
    if (state.refused) return;  // its error came before the end of the stream
    if (state.last.ok()) observer_->OnWaiting(RankName(rank, ranks_[rank].address));
    state.last = event.why.ok() ? UnavailableError("the worker closed the stream") : event.why;
    state.refused = !IsRetryable(event.why);
    if (!state.refused) state.retry_at = Now() + kRetryEvery;
    return;
  }
  if (event.event.has_hello()) {
    state.joined = true;
    members_[rank].hello = std::move(*event.event.mutable_hello());
    return;
  }
  state.refused = true;
  state.last = event.event.has_error()
                   ? DecodeError(event.event.error())
                   : InternalError("answers the hello with something else; not a ds4-worker?");
}

Status Cluster::MissingReport(const Joining& joining) const {
  std::vector<Status> missing;
  for (int rank = 0; rank < world_size(); ++rank) {
    const Joining::State& state = joining.states[rank];
    if (state.joined) continue;
    const std::string more = source_->WhyGone(rank);
    const std::string why =
        !more.empty()     ? more
        : state.last.ok() ? StrCat("no answer to the hello within ", Seconds(options_.join_timeout))
                          : state.last.message();
    const StatusCode code = state.refused     ? state.last.code()
                            : state.last.ok() ? StatusCode::kDeadlineExceeded
                                              : StatusCode::kUnavailable;
    missing.push_back(Status(code, StrCat(RankName(rank, ranks_[rank].address), ": ", why)));
    // A worker of ours that is silent is of no use to the next attempt either.
    if (!state.refused) source_->Suspect(rank);
  }
  return Combine(StrCat(missing.size(), " of ", world_size(), " workers did not join"), missing);
}

Status Cluster::CheckMembers() const {
  std::vector<Status> errors;
  for (int rank = 0; rank < world_size(); ++rank) {
    Status fits = CheckMember(rank, members_[rank], options_.requirements);
    if (fits.ok()) fits = CheckMemory(rank, members_[rank], options_.plan.ranks[rank]);
    errors.push_back(std::move(fits));
  }
  RETURN_IF_ERROR(Combine("the workers do not fit", errors));
  return CheckAlike(members_).WithContext("the workers do not fit together");
}

v1::FormGroup Cluster::GroupOf(int rank) const {
  v1::FormGroup group;
  group.set_epoch(epoch_);
  group.set_rank(rank);
  group.set_world_size(world_size());
  for (int r = 0; r < world_size(); ++r) {
    v1::Peer* peer = group.add_peers();
    peer->set_rank(r);
    peer->set_host(DataHost(members_[r]));
    peer->set_data_port(members_[r].hello.data_port());
    peer->set_control_address(members_[r].address);
  }
  group.set_transport(options_.transport);
  const LaneLayout& lanes = options_.plan.lanes;
  group.set_num_lanes(lanes.num_lanes);
  for (int begin : lanes.begin) group.add_lane_begin(begin);
  group.set_plan_digest(options_.plan.Digest());
  group.set_max_context(context_);
  group.set_max_batch_rows(options_.requirements.batch_rows);
  group.set_max_sessions(1);
  group.set_timeout_ms(static_cast<int32_t>(options_.timeout.count()));
  group.set_join_timeout_ms(static_cast<int32_t>(options_.join_timeout.count()));
  return group;
}

Status Cluster::FormGroup() {
  context_ = AgreeOnContext(options_.requirements.context, options_.preferred_context, members_);
  SendAll([this](int rank) {
    v1::Command command;
    *command.mutable_form_group() = GroupOf(rank);
    return command;
  });
  return AwaitAll(
      "forming the group", options_.join_timeout + kGrace,
      [this](int rank, const v1::Event& event) {
        if (event.has_load_progress()) {
          const v1::LoadProgress& load = event.load_progress();
          observer_->OnLoading(rank, load.bytes_done(), load.bytes_total());
          return Verdict::kProgress;
        }
        const v1::GroupReady& ready = event.group_ready();
        if (!event.has_group_ready() || ready.epoch() != epoch_ || ready.rank() != rank) {
          return Verdict::kWrong;
        }
        observer_->OnReady(rank, ready);
        return Verdict::kAnswer;
      });
}

Status Cluster::OpenSession() {
  SendAll([this](int) {
    v1::Command command;
    command.mutable_open_session()->set_session_id(kSessionId);
    command.mutable_open_session()->set_max_context(context_);
    return command;
  });
  return AwaitAll("opening the session", kReplyLimit, [](int, const v1::Event& event) {
    const bool fits =
        event.has_session_opened() && event.session_opened().session_id() == kSessionId;
    return fits ? Verdict::kAnswer : Verdict::kWrong;
  });
}

void Cluster::SendAll(const std::function<v1::Command(int rank)>& make) {
  for (int rank = 0; rank < world_size(); ++rank) {
    Rank& r = ranks_[rank];
    r.answered = false;
    if (!r.ended) r.failure = OkStatus();
    r.client->Send(make(rank));
  }
}

bool Cluster::AllSettled() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& r) { return r.answered || !r.failure.ok(); });
}

bool Cluster::AnyFailed() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.failure.ok(); });
}

void Cluster::HandleEvent(const RankEvent& event, const std::string& what, const Take& take,
                          bool* progress) {
  Rank& r = ranks_[event.rank];
  if (event.ended) {
    r.ended = true;
    // An error that came before says more than the end of the stream.
    if (r.failure.ok()) {
      r.failure = UnavailableError(
          StrCat("the connection is lost", event.why.ok() ? "" : ": " + event.why.message()));
    }
    return;
  }
  if (event.event.has_error()) {
    r.failure = DecodeError(event.event.error());
    return;
  }
  const Verdict verdict = r.answered ? Verdict::kWrong : take(event.rank, event.event);
  if (verdict == Verdict::kWrong) {
    r.failure = InternalError(StrCat("sent an event out of place while ", what, ": ",
                                     event.event.ShortDebugString().substr(0, 200)));
  }
  r.answered = verdict == Verdict::kAnswer;
  *progress = verdict != Verdict::kWrong;
}

Status Cluster::AwaitAll(const std::string& what, milliseconds limit, const Take& take) {
  TimePoint deadline = Now() + limit;
  bool failing = false;
  while (!AllSettled()) {
    const std::optional<RankEvent> event = queue_->Pop(deadline, stop_);
    if (!event && stop_()) return CancelledError(StrCat("interrupted while ", what));
    if (!event) break;
    bool progress = false;
    HandleEvent(*event, what, take, &progress);
    if (AnyFailed() && !failing) {
      failing = true;
      deadline = std::min(deadline, Now() + kGrace);
    } else if (progress && !failing) {
      deadline = Now() + limit;
    }
  }
  if (AllSettled() && !AnyFailed()) return OkStatus();
  return FailureReport(what, limit);
}

Status Cluster::FailureReport(const std::string& what, milliseconds waited) {
  struct Line {
    int telling;
    Status status;
  };
  std::vector<Line> lines;
  const bool failed = AnyFailed();
  for (int rank = 0; rank < world_size(); ++rank) {
    const Rank& r = ranks_[rank];
    const std::string who = RankName(rank, r.address);
    if (!r.failure.ok()) {
      std::string text = StrCat(who, ": ", r.failure.message());
      if (r.ended) {
        source_->Suspect(rank);
        if (const std::string more = source_->WhyGone(rank); !more.empty()) text += "; " + more;
      }
      lines.push_back({Telling(r.failure, r.ended), Status(r.failure.code(), std::move(text))});
    } else if (!r.answered) {
      source_->Suspect(rank);
      lines.push_back(
          {failed ? 1 : 2,
           DeadlineExceededError(StrCat(who, failed ? ": has not answered either"
                                                    : StrCat(": no progress for ", Seconds(waited),
                                                             "; --timeout-ms sets the limit")))});
    }
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.telling > b.telling; });
  std::vector<Status> errors;
  for (Line& line : lines) errors.push_back(std::move(line.status));
  return Combine(StrCat("epoch ", epoch_, ", ", what), errors);
}

Status Cluster::CompareStates(const std::vector<std::vector<uint64_t>>& hashes) const {
  for (int rank = 0; rank < world_size(); ++rank) {
    if (!hashes[rank].empty() && hashes[rank] == hashes[0]) continue;
    return InternalError(StrCat("epoch ", epoch_, ", step ", sequence_, ": the state of ",
                                RankName(rank, ranks_[rank].address), " has hash ",
                                hashes[rank].empty() ? 0 : hashes[rank][0], ", that of rank 0 ",
                                hashes[0].empty() ? 0 : hashes[0][0],
                                "; the ranks have computed different things"));
  }
  return OkStatus();
}

Status Cluster::Break(Status why) {
  broken_ = why;
  Leave();
  return why;
}

Status Cluster::CheckAlive() {
  if (!formed_) return broken_;
  const std::string what = "between two answers";
  const Take take = [](int, const v1::Event&) { return Verdict::kWrong; };
  while (const std::optional<RankEvent> event = queue_->Pop(Now(), stop_)) {
    bool progress = false;
    HandleEvent(*event, what, take, &progress);
  }
  return AnyFailed() ? Break(FailureReport(what, milliseconds(0))) : OkStatus();
}

Result<StepResult> Cluster::RunStep(StepPlan plan, const TokenCallback& on_token) {
  if (!formed_) {
    return FailedPreconditionError(broken_.ok() ? "no group is formed"
                                                : "the group is broken: " + broken_.message());
  }
  plan.sequence = ++sequence_;
  v1::Command command;
  EncodeStep(plan, epoch_, plan.Digest(), options_.check_state, command.mutable_step());
  SendAll([&command](int) { return command; });

  StepResult result;
  std::vector<std::vector<uint64_t>> hashes(world_size());
  const auto take = [&](int rank, const v1::Event& event) {
    if (rank == 0 && event.has_token() && event.token().sequence() == plan.sequence) {
      Result<TokenOutput> token = DecodeToken(event.token(), std::ssize(plan.parts));
      if (!token.ok() || token->token >= options_.vocab_size) return Verdict::kWrong;
      result.tokens.push_back(*std::move(token));
      on_token(result.tokens.back());
      return Verdict::kProgress;
    }
    if (!event.has_step_done()) return Verdict::kWrong;
    Result<DecodedStepDone> done = DecodeStepDone(event.step_done(), plan);
    if (!done.ok()) return Verdict::kWrong;
    hashes[rank] = std::move(done->state_hash);
    if (rank == 0) {
      done->result.tokens = std::move(result.tokens);
      result = std::move(done->result);
    }
    return Verdict::kAnswer;
  };
  Status status = AwaitAll(StrCat("step ", plan.sequence), WithSlack(options_.timeout), take);
  if (status.ok() && options_.check_state) status = CompareStates(hashes);
  if (!status.ok()) return Break(status);
  return result;
}

}  // namespace ds4
