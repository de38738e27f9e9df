// Host code only. The library belongs to the driver, so it is looked for when the program runs; the
// few names used are declared here as NVML's documentation has them.
#include <dlfcn.h>

#include "engine/cuda/nvml.h"

namespace ds4::cuda {
namespace {

constexpr int kSuccess = 0;

struct MemoryInfo {
  unsigned long long total, free, used;
};

struct Nvml {
  using Init = int();
  using HandleByPciBusId = int(const char*, void**);
  using GetMemoryInfo = int(void*, MemoryInfo*);

  HandleByPciBusId* handle_by_pci_bus_id = nullptr;
  GetMemoryInfo* get_memory_info = nullptr;  // null: not usable
};

Nvml OpenNvml() {
  // Stays open: the driver's libraries do not like to be unloaded.
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  auto* init = reinterpret_cast<Nvml::Init*>(dlsym(library, "nvmlInit_v2"));
  Nvml nvml;
  nvml.handle_by_pci_bus_id =
      reinterpret_cast<Nvml::HandleByPciBusId*>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
  auto* get_memory_info =
      reinterpret_cast<Nvml::GetMemoryInfo*>(dlsym(library, "nvmlDeviceGetMemoryInfo"));
  if (init == nullptr || nvml.handle_by_pci_bus_id == nullptr || init() != kSuccess) return {};
  nvml.get_memory_info = get_memory_info;
  return nvml;
}

}  // namespace

std::optional<int64_t> FreeBytesByNvml(const std::string& pci_bus_id, int64_t total_bytes) {
  static const Nvml nvml = OpenNvml();
  if (nvml.get_memory_info == nullptr) return std::nullopt;
  void* device = nullptr;
  MemoryInfo info{};
  if (nvml.handle_by_pci_bus_id(pci_bus_id.c_str(), &device) != kSuccess ||
      nvml.get_memory_info(device, &info) != kSuccess) {
    return std::nullopt;
  }
  // NVML counts what the driver keeps for itself; a MIG part is half of the GPU or less.
  const auto total = static_cast<int64_t>(info.total);
  if (total < total_bytes || total - total_bytes > total / 10) return std::nullopt;
  return static_cast<int64_t>(info.free);
}

}  // namespace ds4::cuda
