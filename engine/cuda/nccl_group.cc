// The NCCL transport. The library is loaded when a group asks for it, so binaries start without it.
//
// Its kernels have no time limit of their own: a gather that waits for a dead peer ends when Abort
// is called (by whoever waits for the stream with a limit) or when CheckHealth finds that NCCL has
// noticed. Calls are non-blocking and polled; a communicator with an error is aborted, never
// destroyed, because destroying waits for the peers.
#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/strings.h"
#include "engine/cuda/group_kinds.h"
#include "engine/cuda/peer_memory.h"

namespace ds4::cuda {
namespace {

constexpr std::chrono::microseconds kPollEvery{50};
constexpr std::chrono::seconds kFinalizeLimit{5};

// The entry points of the library that we use.
struct Nccl {
  int version = 0;
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclCommInitRankConfig) init_rank;
  decltype(&ncclCommGetAsyncError) get_async_error;
  decltype(&ncclCommFinalize) finalize;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclAllGather) all_gather;

  std::string Version() const {
    return StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
  }
};

template <typename T>
Status FindSymbol(void* library, const char* name, T* symbol) {
  *symbol = reinterpret_cast<T>(dlsym(library, name));
  if (*symbol != nullptr) return OkStatus();
  return UnavailableError(StrCat("libnccl.so.2 has no ", name, ": NCCL 2.14 or newer is needed"));
}

Result<Nccl> LoadNccl() {
  // Never NVLink multicast: it is a resource of the whole host that a program which dies with it
  // can block for others, and messages as small as ours gain nothing. NCCL has no option in its
  // configuration for it and reads this variable once, in the first call.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return UnavailableError(StrCat("NCCL cannot be loaded: ", dlerror(),
                                   "; install it or put its folder into LD_LIBRARY_PATH"));
  }
  Nccl nccl;
  RETURN_IF_ERROR(FindSymbol(library, "ncclGetVersion", &nccl.get_version));
  RETURN_IF_ERROR(FindSymbol(library, "ncclGetUniqueId", &nccl.get_unique_id));
  RETURN_IF_ERROR(FindSymbol(library, "ncclGetErrorString", &nccl.get_error_string));
  RETURN_IF_ERROR(FindSymbol(library, "ncclGetLastError", &nccl.get_last_error));
  RETURN_IF_ERROR(FindSymbol(library, "ncclCommInitRankConfig", &nccl.init_rank));
  RETURN_IF_ERROR(FindSymbol(library, "ncclCommGetAsyncError", &nccl.get_async_error));
  RETURN_IF_ERROR(FindSymbol(library, "ncclCommFinalize", &nccl.finalize));
  RETURN_IF_ERROR(FindSymbol(library, "ncclCommDestroy", &nccl.destroy));
  RETURN_IF_ERROR(FindSymbol(library, "ncclCommAbort", &nccl.abort));
  RETURN_IF_ERROR(FindSymbol(library, "ncclAllGather", &nccl.all_gather));
  if (nccl.get_version(&nccl.version) != ncclSuccess) {
    return UnavailableError("NCCL does not tell its version");
  }
  return nccl;
}

// Loaded once; never unloaded, since its threads may outlive our groups.
const Result<Nccl>& LoadedNccl() {
  static const Result<Nccl> nccl = LoadNccl();
  return nccl;
}

class NcclGroup : public TransportGroup {
 public:
  NcclGroup(const Nccl& nccl, Communicator* comm, const Options& options)
      : nccl_(nccl), comm_(*comm), options_(options) {}
  ~NcclGroup() override;

  Status Allocate();
  // Starts the communicator and waits until it stands.
  Status Connect(const ncclUniqueId& id);

  Status AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) override;
  const std::byte* Gathered(int rank) const override { return received_.Gathered(rank); }
  Status EvenUp(const LaunchContext&) override {
    received_.Restart();
    return CheckHealth();
  }
  bool graph_safe() const override { return true; }
  Status CheckHealth() override;
  void Abort(Status why) override;
  std::string Name() const override { return "nccl " + nccl_.Version(); }

 private:
  using Clock = std::chrono::steady_clock;

  Status Failure(const char* what, ncclResult_t result) const;
  // What NCCL says of the communicator now. Handles' use is under the mutex: Abort may come from
  // any thread and ends the handle.
  ncclResult_t AsyncState();
  // Waits until nothing is in progress. Breaks the group on an error or at the deadline.
  Status Settle(const char* what, ncclResult_t result, Clock::time_point deadline);

  const Nccl& nccl_;
  Communicator& comm_;
  const Options options_;
  ReceiveBuffers received_;
  FirstError error_;
  std::mutex mutex_;
  ncclComm_t handle_ = nullptr;  // null before Connect and after an abort
};

Status NcclGroup::Allocate() {
  ASSIGN_OR_RETURN(received_, ReceiveBuffers::Allocate(comm_.world_size(), options_.max_bytes));
  return OkStatus();
}

Status NcclGroup::Failure(const char* what, ncclResult_t result) const {
  const char* detail = nccl_.get_last_error(nullptr);
  std::string text = StrCat("NCCL, ", what, ": ", nccl_.get_error_string(result));
  if (detail != nullptr && *detail != '\0') text += StrCat(" (", detail, ")");
  return UnavailableError(std::move(text));
}

ncclResult_t NcclGroup::AsyncState() {
  const std::lock_guard lock(mutex_);
  if (handle_ == nullptr) return ncclInvalidUsage;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = nccl_.get_async_error(handle_, &state);
  return result == ncclSuccess ? state : result;
}

Status NcclGroup::Settle(const char* what, ncclResult_t result, Clock::time_point deadline) {
  while (result == ncclInProgress) {
    if (Clock::now() > deadline) {
      Abort(DeadlineExceededError(
          StrCat("NCCL, ", what, ": not done after ", options_.timeout.count(), " ms")));
      return error_.Get();
    }
    std::this_thread::sleep_for(kPollEvery);
    result = AsyncState();
  }
  if (result != ncclSuccess) Abort(Failure(what, result));  // keeps an earlier reason
  return error_.Get();
}

Status NcclGroup::Connect(const ncclUniqueId& id) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    result = nccl_.init_rank(&handle_, comm_.world_size(), id, comm_.rank(), &config);
  }
  return Settle("connecting", result, Clock::now() + options_.timeout);
}

Status NcclGroup::AllGather(const LaunchContext& launch, const void* mine, int64_t bytes) {
  RETURN_IF_ERROR(CheckHealth());
  RETURN_IF_ERROR(CheckMessage(mine, bytes, options_.max_bytes));
  ncclResult_t result = ncclInvalidUsage;
  {
    const std::lock_guard lock(mutex_);
    if (handle_ != nullptr) {
      result = nccl_.all_gather(mine, received_.Next(bytes), static_cast<size_t>(bytes), ncclUint8,
                                handle_, static_cast<cudaStream_t>(launch.stream->handle()));
    }
  }
  return Settle("all-gather", result, Clock::now() + options_.timeout);
}

Status NcclGroup::CheckHealth() {
  RETURN_IF_ERROR(error_.Get());
  const ncclResult_t state = AsyncState();
  if (state != ncclSuccess && state != ncclInProgress) Abort(Failure("a peer or link", state));
  return error_.Get();
}

void NcclGroup::Abort(Status why) {
  (void)error_.Set(std::move(why));
  const std::lock_guard lock(mutex_);
  if (handle_ != nullptr) (void)nccl_.abort(std::exchange(handle_, nullptr));
}

NcclGroup::~NcclGroup() {
  if (error_.Get().ok() && handle_ != nullptr) {
    const Status finalized =
        Settle("closing", nccl_.finalize(handle_), Clock::now() + kFinalizeLimit);
    if (finalized.ok()) (void)nccl_.destroy(std::exchange(handle_, nullptr));
  }
  Abort(CancelledError("the group is gone"));
}

// NCCL's own words for this do not name the ranks.
Status CheckDistinctDevices(Communicator* comm) {
  ASSIGN_OR_RETURN(const DeviceUuid own, CurrentDeviceUuid());
  std::vector<DeviceUuid> all(comm->world_size());
  RETURN_IF_ERROR(
      comm->AllGather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all))));
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = a + 1; b < all.size(); ++b) {
      if (all[a] != all[b]) continue;
      return FailedPreconditionError(
          StrCat("NCCL needs a device for each rank, but ranks ", a, " and ", b, " share one"));
    }
  }
  return OkStatus();
}

Result<ncclUniqueId> ShareUniqueId(const Nccl& nccl, Communicator* comm) {
  ncclUniqueId id = {};
  Status made;
  if (comm->rank() == 0) {
    if (const ncclResult_t result = nccl.get_unique_id(&id); result != ncclSuccess) {
      made = UnavailableError(StrCat("NCCL makes no id: ", nccl.get_error_string(result), " (",
                                     nccl.get_last_error(nullptr), ")"));
    }
  }
  RETURN_IF_ERROR(AgreeOnStatus(comm, made));
  RETURN_IF_ERROR(comm->Broadcast(0, std::as_writable_bytes(std::span(&id, 1))));
  return id;
}

}  // namespace

Result<std::unique_ptr<TransportGroup>> CreateNcclGroup(Communicator* comm, Stream&,
                                                        const DeviceGroup::Options& options) {
  const Result<Nccl>& nccl = LoadedNccl();
  RETURN_IF_ERROR(AgreeOnStatus(comm, nccl.status()));
  RETURN_IF_ERROR(AgreeOnStatus(comm, CheckDistinctDevices(comm)));
  ASSIGN_OR_RETURN(const ncclUniqueId id, ShareUniqueId(*nccl, comm));
  auto group = std::make_unique<NcclGroup>(*nccl, comm, options);
  RETURN_IF_ERROR(AgreeOnStatus(comm, group->Allocate()));
  RETURN_IF_ERROR(AgreeOnStatus(comm, group->Connect(id)));
  return std::unique_ptr<TransportGroup>(std::move(group));
}

}  // namespace ds4::cuda
