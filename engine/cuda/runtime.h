// The device as the rest of engine/cuda sees it: memory, streams, graphs, timing. Two
// implementations: runtime_cuda.cu (CUDA runtime) and emulator/runtime_emulator.cc (this host's
// CPU, for tests without a GPU). No CUDA header is needed to include this one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/status.h"

namespace ds4::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int num_sms = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  int64_t l2_bytes = 0;
};

// kUnavailable says why there is none (no driver, no device, driver too old).
Result<std::vector<DeviceInfo>> ListDevices();
// Makes `index` the calling thread's device. Every thread that uses this API calls it first.
Status UseDevice(int index);

enum class MemoryKind {
  kDevice,
  kPinned,  // page-locked host memory that the device can read and write at the same address
};

// Memory, zero-filled by Allocate. Move-only.
template <MemoryKind kKind>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) Free(data_);
  }
  // kResourceExhausted names the bytes asked for.
  static Result<Buffer> Allocate(int64_t bytes);
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  static void Free(std::byte* data);

  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};
using DeviceBuffer = Buffer<MemoryKind::kDevice>;
using PinnedBuffer = Buffer<MemoryKind::kPinned>;

template <>
Result<DeviceBuffer> DeviceBuffer::Allocate(int64_t bytes);
template <>
Result<PinnedBuffer> PinnedBuffer::Allocate(int64_t bytes);
template <>
void DeviceBuffer::Free(std::byte* data);
template <>
void PinnedBuffer::Free(std::byte* data);

// In-order queue of device work. Thread-compatible.
class Stream {
 public:
  Stream() = default;
  Stream(Stream&& other) noexcept { *this = std::move(other); }
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();
  static Result<Stream> Create();
  void* handle() const { return handle_; }  // a cudaStream_t

  // Asynchronous when the host side is pinned, else the call returns when the host side is free.
  Status CopyToDevice(void* device, const void* host, int64_t bytes);
  Status CopyToHost(void* host, const void* device, int64_t bytes);
  Status CopyOnDevice(void* to, const void* from, int64_t bytes);
  Status Fill(void* device, int value, int64_t bytes);
  // Waits for all work so far; the first error of any of it. kDeadlineExceeded after `limit`.
  Status Synchronize(std::chrono::milliseconds limit = std::chrono::minutes(10));

 private:
  void* handle_ = nullptr;
};

// A point in a stream. Thread-compatible.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  ~Event();
  static Result<Event> Create();
  Status Record(Stream& stream);
  Result<bool> Done() const;
  Status Wait(std::chrono::milliseconds limit) const;  // kDeadlineExceeded after `limit`
  // Milliseconds of device time from `start` to this one; both done.
  Result<float> MillisecondsSince(const Event& start) const;

 private:
  void* handle_ = nullptr;
};

// A recorded sequence of launches and copies that runs with one call.
class Graph {
 public:
  Graph() = default;
  Graph(Graph&& other) noexcept { *this = std::move(other); }
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();
  // Records what `work` puts on `stream`; nothing runs. Warm up once before: no allocation inside.
  static Result<Graph> Capture(Stream& stream, const std::function<Status()>& work);
  Status Launch(Stream& stream);
  bool empty() const { return handle_ == nullptr; }

 private:
  void* handle_ = nullptr;
};

// The first error of launches made by this thread since the last call (a launch returns nothing).
Status LaunchStatus();

}  // namespace ds4::cuda
