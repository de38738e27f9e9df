// peer_memory.h without a GPU: one device, whose memory every thread of this process reaches.
#include <utility>

#include "engine/cuda/peer_memory.h"

namespace ds4::cuda {

Result<DeviceUuid> CurrentDeviceUuid() { return DeviceUuid{}; }

Result<std::optional<int>> FindDevice(const DeviceUuid& uuid) {
  return uuid == DeviceUuid{} ? std::optional<int>(0) : std::optional<int>();
}

Status CheckPeerAccess(int peer) {
  return peer == 0 ? OkStatus() : UnavailableError("the emulator has one device only");
}

Status EnablePeerAccess(int peer) { return CheckPeerAccess(peer); }

Result<MemoryHandle> ExportMemory(const DeviceBuffer& buffer) {
  (void)buffer;
  return UnavailableError("emulated device memory is private to its process");
}

Result<ImportedMemory> ImportedMemory::Open(const MemoryHandle& handle) {
  (void)handle;
  return UnavailableError("emulated device memory is private to its process");
}

ImportedMemory& ImportedMemory::operator=(ImportedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

ImportedMemory::~ImportedMemory() = default;

}  // namespace ds4::cuda
