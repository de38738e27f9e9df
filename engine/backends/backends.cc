#include "engine/backends/backends.h"

#include "engine/base/strings.h"

#ifdef DS4_HAVE_CUDA
#include "engine/cuda/cuda_backend.h"
#include "engine/cuda/kernel_times.h"
#endif

namespace ds4 {
namespace {

BackendChoice Cpu(const std::string& why) {
  return {Backend::kCpu, StrCat("cpu, because --backend is auto and ", why), 0};
}

Result<BackendChoice> Cuda(const std::vector<DeviceSummary>& devices, int device) {
  if (device < 0 || device >= std::ssize(devices)) {
    return InvalidArgumentError(StrCat("--device is ", device, ", this machine has ",
                                       devices.size(), " CUDA device(s), counted from 0"));
  }
  const DeviceSummary& chosen = devices[static_cast<size_t>(device)];
  return BackendChoice{Backend::kCuda, StrCat("cuda, device ", device, ": ", chosen.text),
                       chosen.free_bytes};
}

}  // namespace

void RegisterBuiltBackends() {
#ifdef DS4_HAVE_CUDA
  cuda::RegisterCudaBackend();
#endif
}

Result<std::vector<DeviceSummary>> CudaDevices() {
#ifdef DS4_HAVE_CUDA
  ASSIGN_OR_RETURN(const std::vector<cuda::DeviceInfo> infos, cuda::ListDevices());
  std::vector<DeviceSummary> devices;
  for (const cuda::DeviceInfo& info : infos) {
    devices.push_back({StrCat(info.name, ", ", HumanBytes(info.total_bytes), " of memory, ",
                              HumanBytes(info.free_bytes), " free, ", info.num_sms, " SMs"),
                       info.free_bytes});
  }
  return devices;
#else
  return MissingBackendError(Backend::kCuda);
#endif
}

Result<BackendChoice> ChooseBackend(const std::string& text, int device) {
  if (text == "auto") {
    if (FindBackend(Backend::kCuda) == nullptr) return Cpu("this build has no CUDA engine");
    const Result<std::vector<DeviceSummary>> devices = CudaDevices();
    if (!devices.ok()) return Cpu(devices.status().message());
    if (devices->empty()) return Cpu("this machine has no CUDA device");
    return Cuda(*devices, device);
  }
  ASSIGN_OR_RETURN(const Backend backend, ParseBackend(text));
  if (backend == Backend::kCpu) return BackendChoice{Backend::kCpu, "cpu", 0};
  ASSIGN_OR_RETURN(const std::vector<DeviceSummary> devices, CudaDevices());
  return Cuda(devices, device);
}

Status CheckKernelTimes() {
#ifdef DS4_HAVE_CUDA
  return cuda::CheckKernelTimes();
#else
  return MissingBackendError(Backend::kCuda);
#endif
}

Status StartKernelTimes() {
#ifdef DS4_HAVE_CUDA
  return cuda::StartKernelTimes();
#else
  return MissingBackendError(Backend::kCuda);
#endif
}

Result<std::vector<KernelTime>> StopKernelTimes() {
#ifdef DS4_HAVE_CUDA
  ASSIGN_OR_RETURN(const std::vector<cuda::KernelTime> found, cuda::StopKernelTimes());
  std::vector<KernelTime> times;
  for (const cuda::KernelTime& time : found) times.push_back({time.name, time.us});
  return times;
#else
  return MissingBackendError(Backend::kCuda);
#endif
}

}  // namespace ds4
