// Free memory of a GPU from NVIDIA's management library. Asking the CUDA runtime would make a
// context on the device, some hundred megabytes of it, for every process that only looks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ds4::cuda {

// None when the library is not there, or means another thing than CUDA by that device (a part of a
// GPU, MIG): total_bytes is what CUDA says. pci_bus_id: "0000:0f:00.0". Thread-safe.
std::optional<int64_t> FreeBytesByNvml(const std::string& pci_bus_id, int64_t total_bytes);

}  // namespace ds4::cuda
