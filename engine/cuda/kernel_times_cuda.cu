#include <cuda_runtime.h>

#include <mutex>
#include <utility>

#include "engine/cuda/kernel_times.h"
#include "engine/cuda/simt.h"

#pragma nv_diag_suppress 2810  // see runtime_cuda.cu

namespace ds4::cuda {

#if defined(DS4_KERNEL_TIMES)
namespace {

// What the host knows: kernels as they were put on the stream, in graphs or not.
struct Journal {
  std::mutex mutex;
  std::vector<const void*> logs;  // each source file's KernelLog
  std::vector<const void*> launched;
  DeviceBuffer memory;  // the counter, padded to 16 bytes, then the times
};
Journal& TheJournal() {
  static Journal journal;
  return journal;
}
// Other threads' devices are not watched.
thread_local bool noting = false;
thread_local std::vector<const void*>* captured = nullptr;

Status SetLogs(const Journal& journal, KernelLog log) {
  for (const void* symbol : journal.logs) {
    const cudaError_t error = cudaMemcpyToSymbol(symbol, &log, sizeof(log));
    if (error != cudaSuccess) return InternalError(cudaGetErrorString(error));
  }
  return OkStatus();
}

}  // namespace

namespace launch_internal {

bool RegisterKernelLog(const void* symbol) {
  Journal& journal = TheJournal();
  const std::lock_guard lock(journal.mutex);
  journal.logs.push_back(symbol);
  return true;
}
void NoteLaunch(const void* kernel) {
  if (captured != nullptr) {
    captured->push_back(kernel);
    return;
  }
  if (!noting) return;
  Journal& journal = TheJournal();
  const std::lock_guard lock(journal.mutex);
  journal.launched.push_back(kernel);
}
void NoteCapture(std::vector<const void*>* kernels) { captured = kernels; }
void NoteGraph(const std::vector<const void*>& kernels) {
  for (const void* kernel : kernels) NoteLaunch(kernel);
}

}  // namespace launch_internal

Status CheckKernelTimes() { return OkStatus(); }

Status StartKernelTimes() {
  Journal& journal = TheJournal();
  const std::lock_guard lock(journal.mutex);
  ASSIGN_OR_RETURN(journal.memory, DeviceBuffer::Allocate(16 + 8 * kMaxKernelTimes));
  journal.launched.clear();
  noting = true;
  return SetLogs(journal, {journal.memory.as<uint32_t>(),
                           reinterpret_cast<uint64_t*>(journal.memory.data() + 16),
                           static_cast<uint32_t>(kMaxKernelTimes)});
}

Result<std::vector<KernelTime>> StopKernelTimes() {
  Journal& journal = TheJournal();
  const std::lock_guard lock(journal.mutex);
  if (!noting) return FailedPreconditionError("kernel times were not started");
  noting = false;
  RETURN_IF_ERROR(SetLogs(journal, {}));
  std::vector<uint64_t> ns(2 + std::min<size_t>(journal.launched.size(), kMaxKernelTimes));
  const cudaError_t error =
      cudaMemcpy(ns.data(), journal.memory.data(), 8 * ns.size(), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) return InternalError(cudaGetErrorString(error));
  const uint32_t counted = static_cast<uint32_t>(ns[0]);
  if (counted != journal.launched.size()) {
    return InternalError(std::to_string(counted) + " kernels noted their time, " +
                         std::to_string(journal.launched.size()) + " were launched");
  }
  std::vector<KernelTime> times;
  for (size_t i = 0; i + 3 < ns.size(); ++i) {
    const char* name = nullptr;
    if (cudaFuncGetName(&name, journal.launched[i]) != cudaSuccess || name == nullptr) name = "?";
    times.push_back({name, static_cast<double>(ns[i + 3] - ns[i + 2]) / 1e3});
  }
  journal.memory = DeviceBuffer();
  return {std::move(times)};
}

#else

Status CheckKernelTimes() {
  return FailedPreconditionError(
      "this build's kernels note no times: configure with -DDS4_KERNEL_TIMES=ON");
}
Status StartKernelTimes() { return CheckKernelTimes(); }
Result<std::vector<KernelTime>> StopKernelTimes() { return CheckKernelTimes(); }

#endif

}  // namespace ds4::cuda
