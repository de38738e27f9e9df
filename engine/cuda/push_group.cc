// The push transport: peers' receive memory mapped into this device.
//
// A rank's receive memory ("arena"): slots [kNumPushSlots][source rank][slot_bytes], flagged lines
// [kNumPushSlots][source rank][line_bytes], flags [source rank][kMaxPushBlocks]. Rank r writes only
// the parts of source r; of a message that came as flagged lines the owner writes the slot.
//
// Why slots are free when they are written again. Gather n uses slot n mod 3 (counted from the last
// EvenUp). A rank begins to push gather n only when its own stream has passed gather n - 1, and
// that has seen the flags of all peers for n - 1; a peer raises those after its stream has passed
// everything ahead of its gather n - 1. So whatever a peer put on its stream before its gather n -
// 1 has been done, readers of slot n mod 3 (gather n - 3, read until the second next gather, n - 1)
// among it. With two slots readers would have to end before the next gather. A rank can never be
// more than one gather ahead, so flags that only count up are enough.
// (Flagged words order nothing but themselves. What they stand for here was done before the kernel
// that sent them began, and is used after the kernel that read them has ended.)
// EvenUp: the readers' time is over when it comes, so after one more meeting every slot is free. It
// is left out when the slots have come around by themselves.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "engine/base/strings.h"
#include "engine/cuda/group_kinds.h"
#include "engine/cuda/peer_memory.h"
#include "engine/cuda/push_kernel.h"

namespace ds4::cuda {
namespace {

constexpr int64_t kSlotAlignment = 256;
constexpr int64_t kArenaAlignment = 2 << 20;  // a mapping of its own, shared with nothing else

// Where things stand in an arena; the same on all ranks.
struct ArenaLayout {
  int64_t world_size = 0;
  int64_t slot_bytes = 0;
  int64_t line_bytes = 0;  // of one message as flagged lines

  static constexpr int64_t kFlagBytes =
      int64_t{kMaxPushBlocks} * kPushFlagWords * sizeof(uint32_t);  // of one source
  int64_t slot(uint32_t generation, int source) const {
    return (generation * world_size + source) * slot_bytes;
  }
  int64_t lines(uint32_t generation, int source) const {
    return slot(kNumPushSlots, 0) + (generation * world_size + source) * line_bytes;
  }
  int64_t flags(int source) const { return lines(kNumPushSlots, 0) + source * kFlagBytes; }
  int64_t bytes() const { return RoundUpTo(flags(static_cast<int>(world_size)), kArenaAlignment); }
};

using ArenaName = std::array<uint32_t, 4>;  // random

// The arenas of this process by name. Ranks of one process hold each other's: a peer that leaves
// must not take memory away that a kernel may still write to.
class ArenaRegistry {
 public:
  static ArenaRegistry& Get() {
    static ArenaRegistry registry;
    return registry;
  }
  void Add(const ArenaName& name, const std::shared_ptr<DeviceBuffer>& arena) {
    const std::lock_guard lock(mutex_);
    std::erase_if(arenas_, [](const auto& entry) { return entry.second.expired(); });
    arenas_[name] = arena;
  }
  // Null when this process has no arena of that name.
  std::shared_ptr<DeviceBuffer> Find(const ArenaName& name) {
    const std::lock_guard lock(mutex_);
    const auto it = arenas_.find(name);
    return it == arenas_.end() ? nullptr : it->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<ArenaName, std::weak_ptr<DeviceBuffer>> arenas_;
};

// What a rank tells the others about its arena; travels as plain bytes.
struct ArenaCard {
  ArenaName name = {};
  DeviceUuid uuid = {};
  MemoryHandle handle = {};
  int64_t bytes = 0;
  int32_t device_index = 0;  // in its own process
  int32_t is_exported = 0;   // `handle` is valid
  char host[64] = {};        // for messages only
  char why_not_exported[160] = {};
};
static_assert(std::is_trivially_copyable_v<ArenaCard>);

template <size_t kSize>
void PutText(const std::string& text, char (&out)[kSize]) {
  std::strncpy(out, text.c_str(), kSize - 1);
}
// From a peer: may lack its end.
template <size_t kSize>
std::string GetText(const char (&text)[kSize]) {
  return std::string(text, strnlen(text, kSize));
}

std::string Who(int rank, const ArenaCard& card) {
  return StrCat("rank ", rank, " (host ", GetText(card.host), ")");
}

uint32_t LoadAcquire(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

class PushGroup : public TransportGroup {
 public:
  PushGroup(Communicator* comm, Stream& stream, const Options& options)
      : comm_(*comm),
        stream_(stream),
        options_(options),
        layout_{comm->world_size(), RoundUpTo(options.max_bytes, kSlotAlignment),
                RoundUpTo(2 * std::min(options.flagged_bytes, options.max_bytes), kSlotAlignment)},
        shared_(comm->world_size()),
        imported_(comm->world_size()),
        arenas_(comm->world_size()) {}
  ~PushGroup() override;

  // Own memory, all of it.
  Status Allocate();
  // Takes all ranks' cards and maps their arenas.
  Status MapPeers();

  Status AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) override;
  const std::byte* Gathered(int rank) const override {
    return arenas_[comm_.rank()] + layout_.slot(last_slot_, rank);
  }
  Status EvenUp(const LaunchContext& launch) override;
  bool graph_safe() const override { return true; }
  Status CheckHealth() override;
  void Abort(Status why) override;
  std::string Name() const override;

 private:
  int rank() const { return comm_.rank(); }
  int world_size() const { return comm_.world_size(); }

  ArenaCard MakeCard() const;
  Status MapPeer(int peer, const ArenaCard& own, const ArenaCard& card);
  Status MapForeign(int peer, const ArenaCard& own, const ArenaCard& card);
  void Push(const LaunchContext& launch, const void* mine, int64_t bytes, uint32_t next_slot);
  Status DeviceFailure() const;

  Communicator& comm_;
  Stream& stream_;
  const Options options_;
  const ArenaLayout layout_;
  ArenaName name_ = {};
  DeviceBuffer state_;  // PushPlace [kMaxPushBlocks], then the broken word
  PinnedBuffer control_;
  std::vector<std::shared_ptr<DeviceBuffer>> shared_;  // of ranks of this process, own included
  std::vector<ImportedMemory> imported_;               // of ranks of other processes
  std::vector<std::byte*> arenas_;                     // all ranks', as this device sees them
  bool shares_device_ = false;
  uint32_t next_slot_ = 0;
  uint32_t last_slot_ = 0;
  FirstError error_;
};

Status PushGroup::Allocate() {
  std::random_device random;
  for (uint32_t& word : name_) word = random();
  ASSIGN_OR_RETURN(DeviceBuffer arena, DeviceBuffer::Allocate(layout_.bytes()));
  shared_[rank()] = std::make_shared<DeviceBuffer>(std::move(arena));
  arenas_[rank()] = shared_[rank()]->data();
  ASSIGN_OR_RETURN(state_,
                   DeviceBuffer::Allocate(kMaxPushBlocks * sizeof(PushPlace) + sizeof(uint32_t)));
  ASSIGN_OR_RETURN(control_, PinnedBuffer::Allocate(sizeof(PushControl)));
  // Peers may write as soon as they know the address: everything must be zero before that.
  RETURN_IF_ERROR(stream_.Fill(arenas_[rank()], 0, layout_.bytes()));
  RETURN_IF_ERROR(stream_.Fill(state_.data(), 0, state_.size()));
  RETURN_IF_ERROR(stream_.Synchronize(options_.timeout));
  ArenaRegistry::Get().Add(name_, shared_[rank()]);
  return OkStatus();
}

ArenaCard PushGroup::MakeCard() const {
  ArenaCard card;
  card.name = name_;
  card.bytes = layout_.bytes();
  if (gethostname(card.host, sizeof(card.host) - 1) != 0) PutText("?", card.host);
  if (const Result<DeviceUuid> uuid = CurrentDeviceUuid(); uuid.ok()) {
    card.uuid = *uuid;
    if (const auto index = FindDevice(*uuid); index.ok()) card.device_index = index->value_or(0);
  }
  const Result<MemoryHandle> handle = ExportMemory(*shared_[rank()]);
  card.is_exported = handle.ok();
  if (handle.ok()) {
    card.handle = *handle;
  } else {
    PutText(handle.status().message(), card.why_not_exported);
  }
  return card;
}

Status PushGroup::MapPeers() {
  const ArenaCard own = MakeCard();
  std::vector<ArenaCard> cards(world_size());
  RETURN_IF_ERROR(
      comm_.AllGather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(cards))));
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    if (cards[peer].bytes != own.bytes) {
      return InvalidArgumentError(StrCat(Who(peer, cards[peer]), " has ", cards[peer].bytes,
                                         " bytes of receive memory, ", Who(rank(), own), " ",
                                         own.bytes, ": max_bytes differs"));
    }
    RETURN_IF_ERROR(MapPeer(peer, own, cards[peer])
                        .WithContext(StrCat("cannot map the memory of ", Who(peer, cards[peer]))));
    shares_device_ |= cards[peer].uuid == own.uuid;
  }
  return OkStatus();
}

Status PushGroup::MapPeer(int peer, const ArenaCard& own, const ArenaCard& card) {
  shared_[peer] = ArenaRegistry::Get().Find(card.name);
  if (shared_[peer] == nullptr) return MapForeign(peer, own, card);
  if (shared_[peer]->size() != layout_.bytes()) {
    return InternalError(
        StrCat("an arena of ", shared_[peer]->size(), " bytes, must be ", layout_.bytes()));
  }
  if (card.uuid != own.uuid) RETURN_IF_ERROR(EnablePeerAccess(card.device_index));
  arenas_[peer] = shared_[peer]->data();
  return OkStatus();
}

Status PushGroup::MapForeign(int peer, const ArenaCard& own, const ArenaCard& card) {
  ASSIGN_OR_RETURN(const std::optional<int> device, FindDevice(card.uuid));
  if (!device) {
    return UnavailableError(
        GetText(own.host) == GetText(card.host)
            ? "its device is not visible to this process; let every worker see all devices"
            : "its device is not on this host");
  }
  if (card.is_exported == 0) return UnavailableError(GetText(card.why_not_exported));
  RETURN_IF_ERROR(CheckPeerAccess(*device));
  ASSIGN_OR_RETURN(imported_[peer], ImportedMemory::Open(card.handle));
  arenas_[peer] = imported_[peer].data();
  return OkStatus();
}

PushGroup::~PushGroup() {
  Abort(CancelledError("the group is gone"));
  // Kernels that still wait look at the abort word soon. If they do not end, their memory must not
  // be given back under them.
  if (stream_.Synchronize(options_.timeout).code() == StatusCode::kDeadlineExceeded) {
    new DeviceBuffer(std::move(state_));
    new PinnedBuffer(std::move(control_));
    new std::vector<std::shared_ptr<DeviceBuffer>>(std::move(shared_));
    new std::vector<ImportedMemory>(std::move(imported_));
  }
}

void PushGroup::Push(const LaunchContext& launch, const void* mine, int64_t bytes,
                     uint32_t next_slot) {
  PushGather gather;
  for (int r = 0; r < world_size(); ++r) {
    PushPeer& peer = gather.peers[r];
    peer.slot_there = arenas_[r] + layout_.slot(next_slot_, rank());
    peer.slot_here = arenas_[rank()] + layout_.slot(next_slot_, r);
    peer.lines_there = arenas_[r] + layout_.lines(next_slot_, rank());
    peer.lines_here = arenas_[rank()] + layout_.lines(next_slot_, r);
    peer.flags_there = reinterpret_cast<uint32_t*>(arenas_[r] + layout_.flags(rank()));
    peer.flags_here = reinterpret_cast<uint32_t*>(arenas_[rank()] + layout_.flags(r));
  }
  gather.mine = static_cast<const std::byte*>(mine);
  gather.units = bytes / kPushUnitBytes;
  gather.timeout_ns = std::chrono::nanoseconds(options_.timeout).count();
  gather.places = state_.as<PushPlace>();
  gather.broken = reinterpret_cast<uint32_t*>(gather.places + kMaxPushBlocks);
  gather.control = control_.as<PushControl>();
  gather.slot = next_slot_;
  gather.next_slot = next_slot;
  gather.rank = rank();
  gather.world_size = world_size();
  gather.shares_device = shares_device_;
  gather.is_flagged = bytes > 0 && bytes <= options_.flagged_bytes;
  LaunchPushGather(launch, gather);
  last_slot_ = next_slot_;
  next_slot_ = next_slot;
}

Status PushGroup::AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) {
  RETURN_IF_ERROR(CheckHealth());
  RETURN_IF_ERROR(CheckMessage(mine, bytes, options_.max_bytes));
  Push(launch, mine, bytes, (next_slot_ + 1) % kNumPushSlots);
  return OkStatus();
}

Status PushGroup::EvenUp(const LaunchContext& launch) {
  RETURN_IF_ERROR(CheckHealth());
  if (next_slot_ != 0) Push(launch, nullptr, 0, 0);
  return OkStatus();
}

Status PushGroup::CheckHealth() {
  if (Status failure = DeviceFailure(); !failure.ok()) return error_.Set(std::move(failure));
  return error_.Get();
}

Status PushGroup::DeviceFailure() const {
  const PushControl& control = *control_.as<PushControl>();
  const auto failure = static_cast<PushFailure>(LoadAcquire(control.failure));
  const std::string where = StrCat("rank ", rank(), ", gather ", control.sequence, ": ");
  switch (failure) {
    case PushFailure::kNone:
    case PushFailure::kAborted:
      return OkStatus();  // Abort has left its reason
    case PushFailure::kTimeout:
      return DeadlineExceededError(StrCat(where, "no bytes from rank ", control.peer, " for ",
                                          options_.timeout.count(), " ms"));
    case PushFailure::kOutOfStep:
      return InternalError(StrCat(where, "launched for another slot than ", control.peer,
                                  ", the next one on the device: a graph or a capture that did "
                                  "not end with EvenUp"));
  }
  return InternalError(StrCat(where, "failure ", static_cast<uint32_t>(failure)));
}

void PushGroup::Abort(Status why) {
  (void)error_.Set(std::move(why));
  if (control_.data() == nullptr) return;  // ended before it had begun
  __atomic_store_n(&control_.as<PushControl>()->abort, 1u, __ATOMIC_RELEASE);
}

std::string PushGroup::Name() const {
  int foreign = 0;
  for (const ImportedMemory& memory : imported_) foreign += memory.data() != nullptr;
  std::string text = "push over peer memory";
  if (foreign > 0) text += StrCat(" of ", foreign, " other process", foreign > 1 ? "es" : "");
  if (shares_device_) text += ", ranks share a device";
  return text;
}

}  // namespace

Result<std::unique_ptr<TransportGroup>> CreatePushGroup(Communicator* comm, Stream& stream,
                                                        const DeviceGroup::Options& options) {
  if (comm->world_size() > kMaxPushRanks) {
    return InvalidArgumentError(
        StrCat("push serves up to ", kMaxPushRanks, " ranks, not ", comm->world_size()));
  }
  auto group = std::make_unique<PushGroup>(comm, stream, options);
  RETURN_IF_ERROR(AgreeOnStatus(comm, group->Allocate()));
  RETURN_IF_ERROR(AgreeOnStatus(comm, group->MapPeers()));
  return std::unique_ptr<TransportGroup>(std::move(group));
}

}  // namespace ds4::cuda
