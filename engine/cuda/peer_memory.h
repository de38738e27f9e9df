// Device memory of one rank as the device of another rank reaches it. Two implementations:
// peer_memory_cuda.cu (CUDA runtime) and emulator/peer_memory_emulator.cc. Everything acts on the
// calling thread's device (UseDevice).
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "engine/base/status.h"
#include "engine/cuda/runtime.h"

namespace ds4::cuda {

using DeviceUuid = std::array<std::byte, 16>;  // the same for a device in every process
using MemoryHandle = std::array<std::byte, 64>;

Result<DeviceUuid> CurrentDeviceUuid();
// The index of that device in this process; none when it is not visible to it (another machine, or
// hidden by the environment).
Result<std::optional<int>> FindDevice(const DeviceUuid& uuid);

// kUnavailable when this device cannot reach the memory of device `peer`.
Status CheckPeerAccess(int peer);
// Lets this device's kernels use memory that this process has on device `peer`. Repeats do no harm.
Status EnablePeerAccess(int peer);

// A name under which another process can open `buffer`, which outlives all uses.
Result<MemoryHandle> ExportMemory(const DeviceBuffer& buffer);

// Memory of another process, mapped for this device. It may be on a peer (CheckPeerAccess): opening
// enables access, without a context of this process there. Move-only.
class ImportedMemory {
 public:
  ImportedMemory() = default;
  ImportedMemory(ImportedMemory&& other) noexcept { *this = std::move(other); }
  ImportedMemory& operator=(ImportedMemory&& other) noexcept;
  ~ImportedMemory();
  static Result<ImportedMemory> Open(const MemoryHandle& handle);
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

}  // namespace ds4::cuda
