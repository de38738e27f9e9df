// runtime.h and the launch internals of simt.h on the CUDA runtime. Host code only.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/cuda/nvml.h"
#include "engine/cuda/runtime.h"
#include "engine/cuda/simt.h"

// nvcc 13.0 takes the assignment of a [[nodiscard]] class for a call whose result is dropped. Its
// copy of "return local;" into a Result is not the implicit move that C++20 asks for: hence the
// braces and std::move below.
#pragma nv_diag_suppress 2810

namespace ds4::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(20);  // then sleep between two looks
constexpr auto kSleep = std::chrono::microseconds(50);
constexpr uint64_t kMaxBlockThreads = 1024;
constexpr int kOverlapCapability = 90;

thread_local int thread_device = 0;
thread_local Status launch_status;
#if defined(DS4_KERNEL_TIMES)
std::mutex graph_mutex;
std::map<const void*, std::vector<const void*>> graph_kernels;  // of every graph
#endif

std::string ErrorText(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return StatusCode::kResourceExhausted;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDevice:
      return StatusCode::kInvalidArgument;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNoKernelImageForDevice:
      return StatusCode::kUnavailable;
    default:
      return StatusCode::kInternal;
  }
}

// OK, or an error that names the call.
Status ToStatus(cudaError_t error, const std::string& call) {
  if (error == cudaSuccess) return OkStatus();
  (void)cudaGetLastError();  // else a later launch would report this one
  return Status(CodeOf(error), call + ": " + ErrorText(error));
}

cudaStream_t StreamOf(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t EventOf(void* handle) { return static_cast<cudaEvent_t>(handle); }
cudaGraphExec_t GraphOf(void* handle) { return static_cast<cudaGraphExec_t>(handle); }

// Asks `query` again and again until it says something else than "not ready".
template <typename Query>
Status PollUntil(Query query, std::chrono::milliseconds limit, const std::string& what) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    const cudaError_t error = query();
    if (error != cudaErrorNotReady) return ToStatus(error, what);
    const auto waited = Clock::now() - start;
    if (waited > limit) {
      return DeadlineExceededError(what + ": the device is not done after " +
                                   std::to_string(limit.count()) + " ms");
    }
    if (waited > kSpin) std::this_thread::sleep_for(kSleep);
  }
}

Status CheckSize(const char* what, int64_t bytes) {
  if (bytes >= 0) return OkStatus();
  return InvalidArgumentError(std::string(what) + ": " + std::to_string(bytes) + " bytes");
}

int Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return value;
}

Result<int64_t> FreeBytes(const DeviceInfo& info) {
  char pci_bus_id[32] = {};
  RETURN_IF_ERROR(ToStatus(cudaDeviceGetPCIBusId(pci_bus_id, sizeof pci_bus_id, info.index),
                           "cudaDeviceGetPCIBusId"));
  if (const auto bytes = FreeBytesByNvml(pci_bus_id, info.total_bytes)) return *bytes;
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(info.index), "cudaSetDevice"));
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(thread_device), "cudaSetDevice"));
  RETURN_IF_ERROR(ToStatus(error, "cudaMemGetInfo"));
  return static_cast<int64_t>(free_bytes);
}

Result<DeviceInfo> DescribeDevice(int index) {
  cudaDeviceProp properties;
  RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties"));
  DeviceInfo info;
  info.index = index;
  info.name = properties.name;
  info.compute_capability = properties.major * 10 + properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.l2_bytes = properties.l2CacheSize;
  ASSIGN_OR_RETURN(info.free_bytes, FreeBytes(info));
  return info;
}

std::string FreeMemoryText() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    return "unknown how many are free";
  }
  return std::to_string(free_bytes) + " of " + std::to_string(total_bytes) + " free";
}

}  // namespace

namespace {

// By default the driver loads a kernel when it is first launched, and waits for the kernels that
// run on every device of the process to do so: a rank whose kernel waits for another rank of this
// process would wait for ever. Must come before the first call of CUDA.
void LoadModulesAtOnce() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0); });
}

}  // namespace

Result<std::vector<DeviceInfo>> ListDevices() {
  LoadModulesAtOnce();
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaGetLastError();
    return UnavailableError(
        driver == 0 ? "no NVIDIA driver on this machine"
                    : "the NVIDIA driver is for CUDA " + std::to_string(driver / 1000) + "." +
                          std::to_string(driver % 1000 / 10) + ", this program needs CUDA " +
                          std::to_string(CUDART_VERSION / 1000) + "." +
                          std::to_string(CUDART_VERSION % 1000 / 10));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    (void)cudaGetLastError();
    return UnavailableError(
        "no NVIDIA GPU is visible on this machine (is CUDA_VISIBLE_DEVICES set?)");
  }
  RETURN_IF_ERROR(ToStatus(error, "cudaGetDeviceCount"));
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(DeviceInfo info, DescribeDevice(i));
    devices.push_back(std::move(info));
  }
  return devices;
}

Status UseDevice(int index) {
  LoadModulesAtOnce();
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(index), "cudaSetDevice " + std::to_string(index)));
  thread_device = index;
  return OkStatus();
}

template <>
void DeviceBuffer::Free(std::byte* data) {
  (void)cudaFree(data);
}
template <>
Result<DeviceBuffer> DeviceBuffer::Allocate(int64_t bytes) {
  RETURN_IF_ERROR(CheckSize("device memory", bytes));
  DeviceBuffer buffer;
  if (bytes == 0) return {std::move(buffer)};
  void* memory = nullptr;
  if (const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
      error != cudaSuccess) {
    (void)cudaGetLastError();
    return Status(CodeOf(error), "device memory: " + std::to_string(bytes) + " bytes asked for, " +
                                     FreeMemoryText() + ": " + ErrorText(error));
  }
  buffer.data_ = static_cast<std::byte*>(memory);
  buffer.size_ = bytes;
  RETURN_IF_ERROR(ToStatus(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "cudaMemset"));
  // Our streams do not wait for the default stream, where that memset runs.
  RETURN_IF_ERROR(PollUntil([] { return cudaStreamQuery(cudaStreamLegacy); },
                            std::chrono::minutes(1), "zeroing device memory"));
  return {std::move(buffer)};
}

template <>
void PinnedBuffer::Free(std::byte* data) {
  (void)cudaFreeHost(data);
}
template <>
Result<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes) {
  RETURN_IF_ERROR(CheckSize("pinned memory", bytes));
  PinnedBuffer buffer;
  if (bytes == 0) return {std::move(buffer)};
  void* memory = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&memory, static_cast<size_t>(bytes),
                                         cudaHostAllocMapped | cudaHostAllocPortable),
                           "cudaHostAlloc of " + std::to_string(bytes) + " bytes"));
  buffer.data_ = static_cast<std::byte*>(memory);
  buffer.size_ = bytes;
  void* on_device = nullptr;
  RETURN_IF_ERROR(
      ToStatus(cudaHostGetDevicePointer(&on_device, memory, 0), "cudaHostGetDevicePointer"));
  if (on_device != memory) {
    return UnimplementedError(
        "the device sees pinned host memory at another address than the host");
  }
  std::fill_n(buffer.data_, bytes, std::byte{0});
  return {std::move(buffer)};
}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Stream::~Stream() {
  if (handle_ != nullptr) (void)cudaStreamDestroy(StreamOf(handle_));
}
Result<Stream> Stream::Create() {
  cudaStream_t handle = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking),
                           "cudaStreamCreateWithFlags"));
  Stream stream;
  stream.handle_ = handle;
  return {std::move(stream)};
}

namespace {
Status PutCopy(void* stream, const char* what, void* to, const void* from, int64_t bytes,
               cudaMemcpyKind kind) {
  if (stream == nullptr) return FailedPreconditionError(std::string(what) + " on an empty stream");
  RETURN_IF_ERROR(CheckSize(what, bytes));
  if (bytes == 0) return OkStatus();
  return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, StreamOf(stream)),
                  std::string(what) + " of " + std::to_string(bytes) + " bytes, cudaMemcpyAsync");
}
}  // namespace

Status Stream::CopyToDevice(void* device, const void* host, int64_t bytes) {
  return PutCopy(handle_, "copy to the device", device, host, bytes, cudaMemcpyHostToDevice);
}
Status Stream::CopyToHost(void* host, const void* device, int64_t bytes) {
  return PutCopy(handle_, "copy to the host", host, device, bytes, cudaMemcpyDeviceToHost);
}
Status Stream::CopyOnDevice(void* to, const void* from, int64_t bytes) {
  return PutCopy(handle_, "copy on the device", to, from, bytes, cudaMemcpyDeviceToDevice);
}
Status Stream::Fill(void* device, int value, int64_t bytes) {
  if (handle_ == nullptr) return FailedPreconditionError("fill on an empty stream");
  RETURN_IF_ERROR(CheckSize("fill", bytes));
  if (bytes == 0) return OkStatus();
  return ToStatus(cudaMemsetAsync(device, value, static_cast<size_t>(bytes), StreamOf(handle_)),
                  "cudaMemsetAsync");
}
Status Stream::Synchronize(std::chrono::milliseconds limit) {
  if (handle_ == nullptr) return FailedPreconditionError("wait for an empty stream");
  return PollUntil([this] { return cudaStreamQuery(StreamOf(handle_)); }, limit,
                   "wait for the stream, cudaStreamQuery");
}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Event::~Event() {
  if (handle_ != nullptr) (void)cudaEventDestroy(EventOf(handle_));
}
Result<Event> Event::Create() {
  cudaEvent_t handle = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaEventCreate(&handle), "cudaEventCreate"));
  Event event;
  event.handle_ = handle;
  return {std::move(event)};
}
Status Event::Record(Stream& stream) {
  if (handle_ == nullptr || stream.handle() == nullptr) {
    return FailedPreconditionError("record of an empty event or stream");
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  RETURN_IF_ERROR(ToStatus(cudaStreamIsCapturing(StreamOf(stream.handle()), &capture),
                           "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) {
    return FailedPreconditionError("record of an event while a graph is captured");
  }
  return ToStatus(cudaEventRecord(EventOf(handle_), StreamOf(stream.handle())), "cudaEventRecord");
}
Result<bool> Event::Done() const {
  if (handle_ == nullptr) return FailedPreconditionError("query of an empty event");
  const cudaError_t error = cudaEventQuery(EventOf(handle_));
  if (error == cudaErrorNotReady) return false;
  RETURN_IF_ERROR(ToStatus(error, "cudaEventQuery"));
  return true;
}
Status Event::Wait(std::chrono::milliseconds limit) const {
  if (handle_ == nullptr) return FailedPreconditionError("wait for an empty event");
  return PollUntil([this] { return cudaEventQuery(EventOf(handle_)); }, limit,
                   "wait for an event, cudaEventQuery");
}
Result<float> Event::MillisecondsSince(const Event& start) const {
  if (handle_ == nullptr || start.handle_ == nullptr) {
    return FailedPreconditionError("time between events that were not recorded");
  }
  float milliseconds = 0;
  RETURN_IF_ERROR(
      ToStatus(cudaEventElapsedTime(&milliseconds, EventOf(start.handle_), EventOf(handle_)),
               "cudaEventElapsedTime"));
  return milliseconds;
}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Graph::~Graph() {
  if (handle_ != nullptr) (void)cudaGraphExecDestroy(GraphOf(handle_));
}
Result<Graph> Graph::Capture(Stream& stream, const std::function<Status()>& work) {
  if (stream.handle() == nullptr) return FailedPreconditionError("capture of an empty stream");
  RETURN_IF_ERROR(LaunchStatus().WithContext("before the capture"));
  const cudaStream_t on = StreamOf(stream.handle());
  RETURN_IF_ERROR(ToStatus(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal),
                           "cudaStreamBeginCapture"));
#if defined(DS4_KERNEL_TIMES)
  std::vector<const void*> kernels;
  launch_internal::NoteCapture(&kernels);
#endif
  const Status worked = work();
#if defined(DS4_KERNEL_TIMES)
  launch_internal::NoteCapture(nullptr);
#endif
  const Status launched = LaunchStatus().WithContext("in the capture");
  cudaGraph_t recorded = nullptr;
  const Status ended = ToStatus(cudaStreamEndCapture(on, &recorded), "cudaStreamEndCapture");
  Graph graph;
  Status made = !worked.ok() ? worked : !launched.ok() ? launched : ended;
  if (made.ok()) {
    cudaGraphExec_t executable = nullptr;
    made = ToStatus(cudaGraphInstantiate(&executable, recorded, 0), "cudaGraphInstantiate");
    graph.handle_ = executable;
  }
  if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
  RETURN_IF_ERROR(made);
  RETURN_IF_ERROR(ToStatus(cudaGraphUpload(GraphOf(graph.handle_), on), "cudaGraphUpload"));
#if defined(DS4_KERNEL_TIMES)
  {
    const std::lock_guard lock(graph_mutex);
    graph_kernels[graph.handle_] = std::move(kernels);
  }
#endif
  return {std::move(graph)};
}
Status Graph::Launch(Stream& stream) {
  if (handle_ == nullptr || stream.handle() == nullptr) {
    return FailedPreconditionError("launch of an empty graph or on an empty stream");
  }
#if defined(DS4_KERNEL_TIMES)
  {
    const std::lock_guard lock(graph_mutex);
    launch_internal::NoteGraph(graph_kernels[handle_]);
  }
#endif
  return ToStatus(cudaGraphLaunch(GraphOf(handle_), StreamOf(stream.handle())), "cudaGraphLaunch");
}

Status LaunchStatus() { return std::exchange(launch_status, OkStatus()); }

namespace launch_internal {

bool SupportsOverlap() {
  // One look a thread and device; a launch must cost next to nothing.
  thread_local int asked_device = -1;
  thread_local bool answer = false;
  if (asked_device != thread_device) {
    const int capability = 10 * Attribute(cudaDevAttrComputeCapabilityMajor, thread_device) +
                           Attribute(cudaDevAttrComputeCapabilityMinor, thread_device);
    answer = capability >= kOverlapCapability;
    asked_device = thread_device;
  }
  return answer;
}

int Prepare(const void* kernel, dim3 block, size_t bytes) {
  if (uint64_t{block.x} * block.y * block.z > kMaxBlockThreads)
    return cudaErrorInvalidConfiguration;
  // The limit belongs to kernel and device; it only ever grows. Without asking it is 48 KiB less
  // what the kernel declares itself, so ask always.
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> allowed;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = allowed.emplace(std::pair(thread_device, kernel), 0);
  size_t& limit = place->second;
  if (is_new) {
    // All kernels ask for the same division of an SM's memory: one that differs cannot start before
    // the SM is empty, which would undo the overlap of a kernel with the one before it.
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  if (bytes <= limit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) limit = bytes;
  return error;
}

void RecordError(int error, const void* kernel, dim3 grid, dim3 block, size_t shared_bytes) {
  (void)cudaGetLastError();
  if (!launch_status.ok()) return;
  const char* name = nullptr;
  if (cudaFuncGetName(&name, kernel) != cudaSuccess || name == nullptr) name = "a kernel";
  const auto size = [](const dim3& d) {
    return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z);
  };
  const auto code = static_cast<cudaError_t>(error);
  launch_status =
      Status(CodeOf(code), "launch of " + std::string(name) + ", grid " + size(grid) + ", block " +
                               size(block) + ", " + std::to_string(shared_bytes) +
                               " bytes of shared memory: " + ErrorText(code));
}

}  // namespace launch_internal

}  // namespace ds4::cuda
