// Which engines this program was built with, and which one to use on this machine. The one place
// that knows of optional engines, so that programs need no build flags.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/session/backend.h"

namespace ds4 {

// Registers every engine that was built in; once, at a program's start.
void RegisterBuiltBackends();

struct DeviceSummary {
  std::string text;        // "NVIDIA H200, 139.8 GiB of memory, 139.0 GiB free, 132 SMs"
  int64_t free_bytes = 0;  // of its memory
};

// In the driver's order. kFailedPrecondition: built without CUDA; other errors: the driver cannot
// be asked (why). An empty list: it is there and has no device.
Result<std::vector<DeviceSummary>> CudaDevices();

struct BackendChoice {
  Backend backend = Backend::kCpu;
  std::string why;         // for people: "cuda, device 0: NVIDIA H200 ..." or why auto is cpu
  int64_t free_bytes = 0;  // of the device's memory; 0 on the CPU
};

// "cpu", "cuda", or "auto": cuda when it is registered and has a device, else cpu. `device` must be
// one of the devices when the choice is cuda. Errors: kInvalidArgument (both values), those of
// CudaDevices.
Result<BackendChoice> ChooseBackend(const std::string& text, int device);

// What one device kernel of a step took, until the next one had what it waits for.
struct KernelTime {
  std::string name;
  double us = 0.0;
};
// Before anything long is measured. kFailedPrecondition: not built with DS4_KERNEL_TIMES.
Status CheckKernelTimes();
// Of the calling thread's device, kernels from the first call to the second, in order of execution.
Status StartKernelTimes();
Result<std::vector<KernelTime>> StopKernelTimes();

}  // namespace ds4
