// runtime.h on this host's memory. Streams run their work at once, so everything is done when a
// call returns.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/check.h"
#include "engine/cuda/emulator/emulator.h"
#include "engine/cuda/runtime.h"

namespace ds4::cuda {
namespace {

constexpr int64_t kTotalBytes = int64_t{4} << 30;
constexpr std::align_val_t kAlignment{256};  // what cudaMalloc promises

using Work = std::function<void()>;

struct StreamState {
  std::vector<Work>* recording = nullptr;  // not null while a graph is being captured
};
struct EventState {
  bool recorded = false;
  std::chrono::steady_clock::time_point time;
};
struct GraphState {
  std::vector<Work> work;
};

thread_local bool capturing = false;
thread_local Status launch_status;

StreamState* State(void* handle) { return static_cast<StreamState*>(handle); }

Status CheckOutsideCapture(const char* what) {
  if (!capturing) return OkStatus();
  return FailedPreconditionError(std::string(what) + " while a graph is captured");
}

Result<std::byte*> AllocateZeroed(const char* what, int64_t bytes) {
  RETURN_IF_ERROR(CheckOutsideCapture(what));
  if (bytes < 0) {
    return InvalidArgumentError(std::string(what) + ": " + std::to_string(bytes) + " bytes");
  }
  if (bytes > kTotalBytes) {
    return ResourceExhaustedError(std::string(what) + ": " + std::to_string(bytes) +
                                  " bytes asked for, the emulated device has " +
                                  std::to_string(kTotalBytes));
  }
  if (bytes == 0) return nullptr;  // as on a GPU
  auto* memory =
      static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlignment, std::nothrow));
  if (memory == nullptr) {
    return ResourceExhaustedError(std::string(what) + ": this host has no " +
                                  std::to_string(bytes) + " bytes left");
  }
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return memory;
}

void FreeAligned(std::byte* memory) { ::operator delete(memory, kAlignment); }

Status PutCopy(void* handle, const char* what, void* to, const void* from, int64_t bytes) {
  if (handle == nullptr) return FailedPreconditionError(std::string(what) + " on an empty stream");
  if (bytes < 0) {
    return InvalidArgumentError(std::string(what) + " of " + std::to_string(bytes) + " bytes");
  }
  Work work = [=] {
    if (bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
  };
  if (State(handle)->recording != nullptr) {
    State(handle)->recording->push_back(std::move(work));
  } else {
    work();
  }
  return OkStatus();
}

}  // namespace

namespace emulator {

void Submit(Stream* stream, std::function<void()> work) {
  CHECK(stream != nullptr && stream->handle() != nullptr) << "a launch without a stream";
  if (auto* recording = State(stream->handle())->recording; recording != nullptr) {
    recording->push_back(std::move(work));
  } else {
    work();
  }
}

void RecordLaunchError(std::string what) {
  if (launch_status.ok()) launch_status = InvalidArgumentError(std::move(what));
}

}  // namespace emulator

Result<std::vector<DeviceInfo>> ListDevices() {
  DeviceInfo info;
  info.name = "emulator";
  info.compute_capability = 90;
  info.num_sms = 4;
  info.total_bytes = kTotalBytes;
  info.free_bytes = kTotalBytes;
  info.l2_bytes = int64_t{1} << 20;
  return std::vector<DeviceInfo>{info};
}

Status UseDevice(int index) {
  if (index != 0) {
    return InvalidArgumentError("device " + std::to_string(index) +
                                " asked for, the emulator has only device 0");
  }
  return OkStatus();
}

template <>
void DeviceBuffer::Free(std::byte* data) {
  FreeAligned(data);
}
template <>
Result<DeviceBuffer> DeviceBuffer::Allocate(int64_t bytes) {
  DeviceBuffer buffer;
  ASSIGN_OR_RETURN(buffer.data_, AllocateZeroed("device memory", bytes));
  buffer.size_ = bytes;
  return buffer;
}

template <>
void PinnedBuffer::Free(std::byte* data) {
  FreeAligned(data);
}
template <>
Result<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes) {
  PinnedBuffer buffer;
  ASSIGN_OR_RETURN(buffer.data_, AllocateZeroed("pinned memory", bytes));
  buffer.size_ = bytes;
  return buffer;
}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Stream::~Stream() { delete State(handle_); }
Result<Stream> Stream::Create() {
  Stream stream;
  stream.handle_ = new StreamState();
  return stream;
}
Status Stream::CopyToDevice(void* device, const void* host, int64_t bytes) {
  return PutCopy(handle_, "copy to the device", device, host, bytes);
}
Status Stream::CopyToHost(void* host, const void* device, int64_t bytes) {
  return PutCopy(handle_, "copy to the host", host, device, bytes);
}
Status Stream::CopyOnDevice(void* to, const void* from, int64_t bytes) {
  return PutCopy(handle_, "copy on the device", to, from, bytes);
}
Status Stream::Fill(void* device, int value, int64_t bytes) {
  if (handle_ == nullptr) return FailedPreconditionError("fill on an empty stream");
  if (bytes < 0) return InvalidArgumentError("fill of " + std::to_string(bytes) + " bytes");
  emulator::Submit(this, [=] {
    if (bytes > 0) std::memset(device, value, static_cast<size_t>(bytes));
  });
  return OkStatus();
}
Status Stream::Synchronize(std::chrono::milliseconds) {
  if (handle_ == nullptr) return FailedPreconditionError("wait for an empty stream");
  return CheckOutsideCapture("wait for a stream");
}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Event::~Event() { delete static_cast<EventState*>(handle_); }
Result<Event> Event::Create() {
  Event event;
  event.handle_ = new EventState();
  return event;
}
Status Event::Record(Stream& stream) {
  if (handle_ == nullptr || stream.handle() == nullptr) {
    return FailedPreconditionError("record of an empty event or stream");
  }
  RETURN_IF_ERROR(CheckOutsideCapture("record of an event"));
  *static_cast<EventState*>(handle_) = {true, std::chrono::steady_clock::now()};
  return OkStatus();
}
Result<bool> Event::Done() const {
  if (handle_ == nullptr) return FailedPreconditionError("query of an empty event");
  return true;
}
Status Event::Wait(std::chrono::milliseconds) const { return Done().status(); }
Result<float> Event::MillisecondsSince(const Event& start) const {
  const auto* end_state = static_cast<const EventState*>(handle_);
  const auto* start_state = static_cast<const EventState*>(start.handle_);
  if (end_state == nullptr || start_state == nullptr || !end_state->recorded ||
      !start_state->recorded) {
    return FailedPreconditionError("time between events that were not recorded");
  }
  return std::chrono::duration<float, std::milli>(end_state->time - start_state->time).count();
}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}
Graph::~Graph() { delete static_cast<GraphState*>(handle_); }
Result<Graph> Graph::Capture(Stream& stream, const std::function<Status()>& work) {
  if (stream.handle() == nullptr) return FailedPreconditionError("capture of an empty stream");
  RETURN_IF_ERROR(CheckOutsideCapture("capture of another graph"));
  RETURN_IF_ERROR(LaunchStatus().WithContext("before the capture"));
  auto recorded = std::make_unique<GraphState>();
  State(stream.handle())->recording = &recorded->work;
  capturing = true;
  const Status status = work();
  capturing = false;
  State(stream.handle())->recording = nullptr;
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(LaunchStatus().WithContext("in the capture"));
  Graph graph;
  graph.handle_ = recorded.release();
  return graph;
}
Status Graph::Launch(Stream& stream) {
  if (handle_ == nullptr || stream.handle() == nullptr) {
    return FailedPreconditionError("launch of an empty graph or on an empty stream");
  }
  RETURN_IF_ERROR(CheckOutsideCapture("launch of a graph"));
  for (const Work& work : static_cast<GraphState*>(handle_)->work) work();
  return OkStatus();
}

Status LaunchStatus() { return std::exchange(launch_status, OkStatus()); }

}  // namespace ds4::cuda
