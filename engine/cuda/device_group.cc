#include "engine/cuda/device_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/base/strings.h"
#include "engine/cuda/group_kinds.h"

namespace ds4::cuda {
namespace {

using GroupKind = DeviceGroup::Kind;
using GroupOptions = DeviceGroup::Options;

constexpr int64_t kGrain = 16;       // bytes of a message
constexpr int64_t kAlignment = 256;  // of what Gathered returns
constexpr int64_t kMaxMessage = int64_t{1} << 34;
constexpr int64_t kProbeBytes = 16 << 10;  // one decode row of 4096 float32
constexpr int kGraphGathers = 90;
constexpr int kGraphReplays = 8;
constexpr int kHostGathers = 40;

// World size 1.
class SoloGroup : public TransportGroup {
 public:
  explicit SoloGroup(int64_t max_bytes) : max_bytes_(max_bytes) {}
  Status AllGather(const LaunchContext&, const void* mine, int64_t bytes) override {
    RETURN_IF_ERROR(error_.Get());
    RETURN_IF_ERROR(CheckMessage(mine, bytes, max_bytes_));
    mine_ = static_cast<const std::byte*>(mine);
    return OkStatus();
  }
  const std::byte* Gathered(int) const override { return mine_; }
  Status EvenUp(const LaunchContext&) override { return error_.Get(); }
  bool graph_safe() const override { return true; }
  Status CheckHealth() override { return error_.Get(); }
  void Abort(Status why) override { (void)error_.Set(std::move(why)); }
  std::string Name() const override { return "none (one rank)"; }

 private:
  const int64_t max_bytes_;
  const std::byte* mine_ = nullptr;
  FirstError error_;
};

// A Status on its way between ranks.
struct WireStatus {
  int32_t code = 0;
  int32_t length = 0;
  char text[1016] = {};
};
static_assert(std::is_trivially_copyable_v<WireStatus>);

WireStatus ToWire(const Status& status) {
  std::string text = status.message();
  WireStatus wire;
  if (text.size() > sizeof(wire.text)) {
    text.resize(sizeof(wire.text) - 3);
    text += "...";
  }
  wire.code = static_cast<int32_t>(status.code());
  wire.length = static_cast<int32_t>(text.size());
  std::memcpy(wire.text, text.data(), text.size());
  return wire;
}

Status FromWire(const WireStatus& wire) {
  if (wire.code == 0) return OkStatus();
  const bool is_valid = wire.code > 0 && wire.code <= static_cast<int>(StatusCode::kDataLoss) &&
                        wire.length >= 0 && wire.length <= static_cast<int>(sizeof(wire.text));
  if (!is_valid) {
    return InternalError(StrCat("sent status code ", wire.code, ", length ", wire.length));
  }
  return Status(static_cast<StatusCode>(wire.code), std::string(wire.text, wire.length));
}

template <typename T>
Result<std::vector<T>> GatherValues(Communicator* comm, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(comm->world_size());
  RETURN_IF_ERROR(
      comm->AllGather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  return all;
}

Status CheckOptions(const GroupOptions& options) {
  const bool is_valid = options.max_bytes > 0 && options.max_bytes <= kMaxMessage &&
                        options.flagged_bytes >= 0 && options.flagged_bytes <= kMaxMessage &&
                        options.timeout.count() > 0;
  if (is_valid) return OkStatus();
  return InvalidArgumentError(StrCat("device group: max_bytes ", options.max_bytes, " (1 to ",
                                     kMaxMessage, "), flagged_bytes ", options.flagged_bytes,
                                     " (0 to ", kMaxMessage, "), timeout ", options.timeout.count(),
                                     " ms (more than 0)"));
}

Status CheckSameOptions(Communicator* comm, const GroupOptions& options) {
  const std::array<int64_t, 3> mine = {static_cast<int64_t>(options.kind), options.max_bytes,
                                       options.flagged_bytes};
  ASSIGN_OR_RETURN(const auto all, GatherValues(comm, mine));
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    const auto text = [](const std::array<int64_t, 3>& asked) {
      return StrCat("kind ", asked[0], ", max_bytes ", asked[1], ", flagged_bytes ", asked[2]);
    };
    return InvalidArgumentError(StrCat("device group: rank 0 asks for ", text(all[0]), "; rank ", r,
                                       " for ", text(all[r])));
  }
  return OkStatus();
}

uint32_t PatternWord(int rank, size_t i) {
  return (static_cast<uint32_t>(i) + 1) * 2654435761u ^ static_cast<uint32_t>(rank + 1) << 24;
}

Status CheckPattern(Stream& stream, const DeviceGroup& group, int rank, std::vector<uint32_t> words,
                    std::chrono::milliseconds timeout) {
  const auto bytes = static_cast<int64_t>(words.size() * sizeof(uint32_t));
  RETURN_IF_ERROR(stream.CopyToHost(words.data(), group.Gathered(rank), bytes));
  RETURN_IF_ERROR(stream.Synchronize(timeout));
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == PatternWord(rank, i)) continue;
    return DataLossError(StrCat("word ", i, " from rank ", rank, " arrived as ", words[i],
                                ", was sent as ", PatternWord(rank, i)));
  }
  return OkStatus();
}

Result<DeviceBuffer> MakePattern(Stream& stream, int rank, std::vector<uint32_t>& words) {
  for (size_t i = 0; i < words.size(); ++i) words[i] = PatternWord(rank, i);
  const auto bytes = static_cast<int64_t>(words.size() * sizeof(uint32_t));
  ASSIGN_OR_RETURN(DeviceBuffer pattern, DeviceBuffer::Allocate(bytes));
  RETURN_IF_ERROR(stream.CopyToDevice(pattern.data(), words.data(), bytes));
  RETURN_IF_ERROR(stream.Synchronize());
  return pattern;
}

Status ExchangePattern(Communicator* comm, Stream& stream, DeviceGroup& group,
                       const DeviceBuffer& pattern, int64_t bytes,
                       std::chrono::milliseconds timeout) {
  const LaunchContext launch{.stream = &stream};
  RETURN_IF_ERROR(group.AllGather(launch, pattern.data(), bytes));
  // The kernel's own limit names the peer, so it should come first.
  const std::chrono::milliseconds limit = timeout + std::chrono::seconds(2);
  RETURN_IF_ERROR(stream.Synchronize(limit));
  RETURN_IF_ERROR(LaunchStatus());
  RETURN_IF_ERROR(group.CheckHealth());
  std::vector<uint32_t> words(bytes / sizeof(uint32_t));
  for (int r = 0; r < comm->world_size(); ++r) {
    RETURN_IF_ERROR(CheckPattern(stream, group, r, words, limit));
  }
  RETURN_IF_ERROR(group.EvenUp(launch));
  RETURN_IF_ERROR(stream.Synchronize(limit));
  return group.CheckHealth();
}

// Some machines map peer memory but lose what is written there: so look once, before it matters.
// All memory is taken before the first gather here and below: where ranks share a device, taking or
// freeing it may wait for a peer's kernel that waits for this rank.
Status Verify(Communicator* comm, Stream& stream, DeviceGroup& group, const GroupOptions& options) {
  const int64_t large = std::min(options.max_bytes, options.flagged_bytes + kProbeBytes);
  std::vector<uint32_t> words(large / sizeof(uint32_t));
  const Result<DeviceBuffer> pattern = MakePattern(stream, comm->rank(), words);
  RETURN_IF_ERROR(AgreeOnStatus(comm, pattern.status()));
  for (const int64_t bytes : {std::min(options.max_bytes, kProbeBytes), large}) {
    RETURN_IF_ERROR(AgreeOnStatus(
        comm, ExchangePattern(comm, stream, group, *pattern, bytes, options.timeout)));
  }
  return OkStatus();
}

Result<std::unique_ptr<TransportGroup>> CreateKind(GroupKind kind, Communicator* comm,
                                                   Stream& stream, const GroupOptions& options) {
  CreateGroup* const create = kind == GroupKind::kPush   ? CreatePushGroup
                              : kind == GroupKind::kNccl ? CreateNcclGroup
                                                         : CreateHostGroup;
  ASSIGN_OR_RETURN(auto group, create(comm, stream, options));
  RETURN_IF_ERROR(Verify(comm, stream, *group, options));
  return group;
}

// Gathers of one message over and over, with what they need.
class GatherTimer {
 public:
  static Result<GatherTimer> Prepare(Stream& stream, DeviceGroup& group, int64_t bytes) {
    GatherTimer timer(stream, group, bytes);
    ASSIGN_OR_RETURN(timer.message_, DeviceBuffer::Allocate(bytes));
    if (!group.graph_safe()) return timer;
    ASSIGN_OR_RETURN(timer.graph_,
                     Graph::Capture(stream, [&] { return timer.Put(kGraphGathers); }));
    for (int i = 0; i <= kGraphReplays; ++i) {
      ASSIGN_OR_RETURN(Event event, Event::Create());
      timer.events_.push_back(std::move(event));
    }
    return timer;
  }

  // Median microseconds of one gather.
  Result<double> Run() {
    RETURN_IF_ERROR(group_->graph_safe() ? RunGraph() : RunEager());
    RETURN_IF_ERROR(LaunchStatus());
    RETURN_IF_ERROR(group_->CheckHealth());
    std::sort(micros_.begin(), micros_.end());
    return micros_[micros_.size() / 2];
  }

 private:
  GatherTimer(Stream& stream, DeviceGroup& group, int64_t bytes)
      : stream_(&stream), group_(&group), bytes_(bytes) {}

  Status Put(int count) {
    const LaunchContext launch{.stream = stream_};
    for (int i = 0; i < count; ++i) {
      RETURN_IF_ERROR(group_->AllGather(launch, message_.data(), bytes_));
    }
    return group_->EvenUp(launch);
  }

  // One replay behind the other; the first takes up the ranks' different starts and is not counted.
  Status RunGraph() {
    for (Event& event : events_) {
      RETURN_IF_ERROR(graph_.Launch(*stream_));
      RETURN_IF_ERROR(event.Record(*stream_));
    }
    RETURN_IF_ERROR(stream_->Synchronize());
    for (int i = 0; i < kGraphReplays; ++i) {
      ASSIGN_OR_RETURN(const float ms, events_[i + 1].MillisecondsSince(events_[i]));
      micros_.push_back(ms * 1e3 / kGraphGathers);
    }
    return OkStatus();
  }

  Status RunEager() {
    const LaunchContext launch{.stream = stream_};
    for (int i = 0; i < kHostGathers; ++i) {
      const auto start = std::chrono::steady_clock::now();
      RETURN_IF_ERROR(group_->AllGather(launch, message_.data(), bytes_));
      RETURN_IF_ERROR(stream_->Synchronize());
      const auto took = std::chrono::steady_clock::now() - start;
      micros_.push_back(std::chrono::duration<double, std::micro>(took).count());
    }
    return group_->EvenUp(launch);
  }

  Stream* stream_;
  DeviceGroup* group_;
  int64_t bytes_;
  DeviceBuffer message_;
  Graph graph_;
  std::vector<Event> events_;
  std::vector<double> micros_;
};

// What the probe of kAuto found out about one kind; the same on all ranks.
struct Candidate {
  GroupKind kind;
  Status status;
  double micros = 0;
  bool graph_safe = false;

  std::string Text() const {
    const char* name = DeviceGroupKindName(kind);
    return status.ok() ? StrCat(name, " ", Fixed(micros, 1), " us") : StrCat(name, ": ", status);
  }
  // Graph-safe ones first, then the fastest.
  bool IsBetterThan(const Candidate& other) const {
    if (status.ok() != other.status.ok()) return status.ok();
    if (graph_safe != other.graph_safe) return graph_safe;
    return micros < other.micros;
  }
};

Candidate Probe(GroupKind kind, Communicator* comm, Stream& stream, GroupOptions options) {
  options.max_bytes = std::min(options.max_bytes, kProbeBytes);
  Candidate candidate{.kind = kind, .status = {}};
  const auto measure = [&]() -> Status {
    ASSIGN_OR_RETURN(const auto group, CreateKind(kind, comm, stream, options));
    candidate.graph_safe = group->graph_safe();
    ASSIGN_OR_RETURN(candidate.micros, MeasureGather(comm, stream, *group, options.max_bytes));
    return OkStatus();
  };
  candidate.status = measure();
  return candidate;
}

Result<std::unique_ptr<DeviceGroup>> CreateBest(Communicator* comm, Stream& stream,
                                                const GroupOptions& options) {
  std::vector<Candidate> candidates;
  for (const GroupKind kind : {GroupKind::kPush, GroupKind::kNccl, GroupKind::kHost}) {
    candidates.push_back(Probe(kind, comm, stream, options));
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.IsBetterThan(b); });
  const Candidate& best = candidates[0];
  if (!best.status.ok()) return best.status;
  std::string note = StrCat("(", Fixed(best.micros, 1), " us for ",
                            HumanBytes(std::min(options.max_bytes, kProbeBytes)));
  for (size_t i = 1; i < candidates.size(); ++i) note += "; " + candidates[i].Text();
  ASSIGN_OR_RETURN(auto group, CreateKind(best.kind, comm, stream, options));
  group->set_note(note + ")");
  return std::unique_ptr<DeviceGroup>(std::move(group));
}

}  // namespace

const char* DeviceGroupKindName(GroupKind kind) {
  switch (kind) {
    case GroupKind::kAuto:
      return "auto";
    case GroupKind::kPush:
      return "push";
    case GroupKind::kNccl:
      return "nccl";
    case GroupKind::kHost:
      return "host";
  }
  return "unknown";
}

Status AgreeOnStatus(Communicator* comm, const Status& mine) {
  ASSIGN_OR_RETURN(const auto all, GatherValues(comm, ToWire(mine)));
  for (int r = 0; r < comm->world_size(); ++r) {
    RETURN_IF_ERROR(FromWire(all[r]).WithContext(StrCat("rank ", r)));
  }
  return OkStatus();
}

Status CheckMessage(const void* mine, int64_t bytes, int64_t max_bytes) {
  if (bytes <= 0 || bytes > max_bytes || bytes % kGrain != 0) {
    return InvalidArgumentError(StrCat("a gather of ", bytes, " bytes: must be a multiple of ",
                                       kGrain, " up to max_bytes, ", max_bytes));
  }
  if (mine == nullptr || reinterpret_cast<uintptr_t>(mine) % kGrain != 0) {
    return InvalidArgumentError(StrCat("a gather from ", mine, ": must be ", kGrain, "-aligned"));
  }
  return OkStatus();
}

Result<ReceiveBuffers> ReceiveBuffers::Allocate(int world_size, int64_t max_bytes) {
  ReceiveBuffers made;
  made.generation_bytes_ = RoundUpTo(world_size * RoundUpTo(max_bytes, kAlignment), kAlignment);
  ASSIGN_OR_RETURN(made.buffer_, DeviceBuffer::Allocate(2 * made.generation_bytes_));
  return made;
}

std::byte* ReceiveBuffers::Next(int64_t bytes) {
  last_ = buffer_.data() + generation_ * generation_bytes_;
  last_bytes_ = bytes;
  generation_ = 1 - generation_;
  return last_;
}

Result<double> MeasureGather(Communicator* comm, Stream& stream, DeviceGroup& group,
                             int64_t bytes) {
  Result<GatherTimer> timer = GatherTimer::Prepare(stream, group, bytes);
  RETURN_IF_ERROR(AgreeOnStatus(comm, timer.status()));
  const Result<double> mine = timer->Run();
  RETURN_IF_ERROR(AgreeOnStatus(comm, mine.status()));
  ASSIGN_OR_RETURN(const auto all, GatherValues(comm, *mine));
  return *std::max_element(all.begin(), all.end());
}

Result<std::unique_ptr<DeviceGroup>> DeviceGroup::Create(Communicator* comm, Stream& stream,
                                                         const GroupOptions& options) {
  RETURN_IF_ERROR(AgreeOnStatus(comm, CheckOptions(options)));
  GroupOptions rounded = options;
  rounded.max_bytes = RoundUpTo(options.max_bytes, kGrain);
  rounded.flagged_bytes = options.flagged_bytes / kGrain * kGrain;
  if (comm->world_size() == 1) {
    return std::unique_ptr<DeviceGroup>(std::make_unique<SoloGroup>(rounded.max_bytes));
  }
  RETURN_IF_ERROR(CheckSameOptions(comm, rounded));
  if (rounded.kind == GroupKind::kAuto) return CreateBest(comm, stream, rounded);
  ASSIGN_OR_RETURN(auto group, CreateKind(rounded.kind, comm, stream, rounded));
  return std::unique_ptr<DeviceGroup>(std::move(group));
}

}  // namespace ds4::cuda
