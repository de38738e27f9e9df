// peer_memory.h over the CUDA runtime.
#include <cuda_runtime.h>

#include <cstring>
#include <utility>

#include "engine/base/strings.h"
#include "engine/cuda/peer_memory.h"

namespace ds4::cuda {
namespace {

Status CudaError(const char* what, cudaError_t error) {
  (void)cudaGetLastError();  // so that a later launch does not report this one
  return UnavailableError(
      StrCat(what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error)));
}

Result<int> CurrentDevice() {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return CudaError("current device", error);
  }
  return device;
}

Result<DeviceUuid> UuidOf(int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device);
      error != cudaSuccess) {
    return CudaError("properties of the device", error);
  }
  DeviceUuid uuid;
  static_assert(sizeof(properties.uuid.bytes) == sizeof(uuid));
  std::memcpy(uuid.data(), properties.uuid.bytes, sizeof(uuid));
  return uuid;
}

}  // namespace

Result<DeviceUuid> CurrentDeviceUuid() {
  ASSIGN_OR_RETURN(const int device, CurrentDevice());
  return UuidOf(device);
}

Result<std::optional<int>> FindDevice(const DeviceUuid& uuid) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return CudaError("number of devices", error);
  }
  for (int device = 0; device < count; ++device) {
    ASSIGN_OR_RETURN(const DeviceUuid found, UuidOf(device));
    if (found == uuid) return std::optional<int>(device);
  }
  return std::optional<int>();
}

Status CheckPeerAccess(int peer) {
  ASSIGN_OR_RETURN(const int own, CurrentDevice());
  if (own == peer) return OkStatus();
  int can_access = 0;
  if (const cudaError_t error = cudaDeviceCanAccessPeer(&can_access, own, peer);
      error != cudaSuccess) {
    return CudaError("peer access", error);
  }
  if (can_access != 0) return OkStatus();
  return UnavailableError(
      StrCat("device ", own, " has no peer access to device ", peer, " of this host"));
}

Status EnablePeerAccess(int peer) {
  RETURN_IF_ERROR(CheckPeerAccess(peer));
  ASSIGN_OR_RETURN(const int own, CurrentDevice());
  if (own == peer) return OkStatus();
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
    return CudaError("enabling peer access", error);
  }
  (void)cudaGetLastError();
  return OkStatus();
}

Result<MemoryHandle> ExportMemory(const DeviceBuffer& buffer) {
  cudaIpcMemHandle_t ipc;
  if (const cudaError_t error = cudaIpcGetMemHandle(&ipc, buffer.data()); error != cudaSuccess) {
    return CudaError("exporting device memory", error);
  }
  MemoryHandle handle;
  static_assert(sizeof(ipc) == sizeof(handle));
  std::memcpy(handle.data(), &ipc, sizeof(handle));
  return handle;
}

Result<ImportedMemory> ImportedMemory::Open(const MemoryHandle& handle) {
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, handle.data(), sizeof(ipc));
  void* data = nullptr;
  if (const cudaError_t error = cudaIpcOpenMemHandle(&data, ipc, cudaIpcMemLazyEnablePeerAccess);
      error != cudaSuccess) {
    return CudaError("opening another process's device memory", error);
  }
  ImportedMemory memory;
  memory.data_ = static_cast<std::byte*>(data);
  return Result<ImportedMemory>(std::move(memory));  // EDG does not move here by itself
}

ImportedMemory& ImportedMemory::operator=(ImportedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

ImportedMemory::~ImportedMemory() {
  // It may fail when the exporter is gone; there is nothing to do about that here.
  if (data_ != nullptr && cudaIpcCloseMemHandle(data_) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace ds4::cuda
