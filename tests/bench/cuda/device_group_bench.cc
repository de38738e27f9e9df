// Latency of a gather between the GPUs of this host, for each transport, as CSV:
//   device_group_bench [kind=all] [ranks=0] [bytes=0] [timeout_ms=10000]
// ranks=0: one for each GPU; more ranks than GPUs share them. bytes=0: 8 KiB to 32 MiB.
// Ranks are threads of this process. p50_us is the slowest rank's median, for push and nccl of
// gathers inside a replayed CUDA graph. gb_per_s: what one rank receives from each peer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/strings.h"
#include "engine/comm/exchange_communicator.h"
#include "engine/comm/local_transport.h"
#include "engine/cuda/device_group.h"
#include "engine/cuda/group_kinds.h"

namespace ds4::cuda {
namespace {

using Options = std::map<std::string, std::string>;

struct Settings {
  std::vector<DeviceGroup::Kind> kinds;
  int num_devices = 0;
  int ranks = 0;
  std::vector<int64_t> bytes;
  std::chrono::milliseconds timeout{0};
};

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "device_group_bench: %s\n", message.c_str());
  std::fflush(stdout);
  std::_Exit(1);  // other ranks may be waiting
}

void Check(const Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

int64_t Number(Options& options, const std::string& name, const std::string& fallback) {
  const std::string text = options.emplace(name, fallback).first->second;
  char* end = nullptr;
  const int64_t value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 0) Fail(StrCat(name, "=", text, " is no number"));
  return value;
}

// A kind that cannot be here is a line of its own, not the end.
void MeasureKind(Communicator* comm, Stream& stream, DeviceGroup::Kind kind,
                 const Settings& settings) {
  const bool speaks = comm->rank() == 0;
  const int64_t max_bytes = *std::max_element(settings.bytes.begin(), settings.bytes.end());
  auto group = DeviceGroup::Create(
      comm, stream, {.kind = kind, .max_bytes = max_bytes, .timeout = settings.timeout});
  if (!group.ok()) {
    if (speaks)
      std::printf("# %s: %s\n", DeviceGroupKindName(kind), group.status().ToString().c_str());
    return;
  }
  if (speaks) std::printf("# %s: %s\n", DeviceGroupKindName(kind), (*group)->Describe().c_str());
  for (const int64_t bytes : settings.bytes) {
    const Result<double> micros = MeasureGather(comm, stream, **group, bytes);
    Check(micros.status());
    if (!speaks) continue;
    std::printf("%s,%d,%lld,%.2f,%.1f\n", DeviceGroupKindName(kind), settings.ranks,
                static_cast<long long>(bytes), *micros, static_cast<double>(bytes) / *micros / 1e3);
    std::fflush(stdout);
  }
}

void RunRank(std::unique_ptr<Transport> transport, const Settings& settings) {
  const int rank = transport->rank();
  const auto comm =
      MakeExchangeCommunicator(std::move(transport), LaneLayout::Even(16, settings.ranks));
  comm->set_timeout(std::chrono::minutes(2));
  Check(UseDevice(rank % settings.num_devices));
  Result<Stream> stream = Stream::Create();
  Check(stream.status());
  for (const DeviceGroup::Kind kind : settings.kinds) {
    MeasureKind(comm.get(), *stream, kind, settings);
  }
  Check(comm->Barrier());
}

std::vector<DeviceGroup::Kind> KindsOf(const std::string& text) {
  std::vector<DeviceGroup::Kind> kinds;
  for (const auto kind : {DeviceGroup::Kind::kPush, DeviceGroup::Kind::kNccl,
                          DeviceGroup::Kind::kHost, DeviceGroup::Kind::kAuto}) {
    const bool in_all = text == "all" && kind != DeviceGroup::Kind::kAuto;
    if (in_all || text == DeviceGroupKindName(kind)) kinds.push_back(kind);
  }
  if (kinds.empty()) Fail(StrCat("kind=", text, ": must be all, push, nccl, host or auto"));
  return kinds;
}

Settings Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::vector<std::string> parts = StrSplit(argv[i], '=');
    if (parts.size() != 2) Fail(StrCat("'", argv[i], "': options are name=value"));
    options[parts[0]] = parts[1];
  }
  const auto devices = ListDevices();
  Check(devices.status());
  Settings settings;
  settings.kinds = KindsOf(options.emplace("kind", "all").first->second);
  settings.num_devices = static_cast<int>(devices->size());
  settings.ranks = static_cast<int>(std::min<int64_t>(Number(options, "ranks", "0"), 16));
  if (settings.ranks == 0) settings.ranks = settings.num_devices;
  const int64_t bytes = Number(options, "bytes", "0");
  for (int64_t kib = 8; kib <= 32 << 10; kib *= kib == 8 || kib == 16 ? 2 : 4) {
    settings.bytes.push_back(kib << 10);
  }
  if (bytes > 0) settings.bytes = {bytes};
  settings.timeout = std::chrono::milliseconds(Number(options, "timeout_ms", "10000"));
  if (options.size() != 4) Fail("options are kind, ranks, bytes, timeout_ms");
  return settings;
}

int Main(int argc, char** argv) {
  // Ranks that share a device: see device_group.h. Before the first use of CUDA.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const Settings settings = Parse(argc, argv);
  std::printf("kind,ranks,bytes,p50_us,gb_per_s\n");
  std::vector<std::jthread> threads;
  for (auto& transport : MakeLocalTransports(settings.ranks)) {
    threads.emplace_back([&settings, transport = std::move(transport)]() mutable {
      RunRank(std::move(transport), settings);
    });
  }
  return 0;
}

}  // namespace
}  // namespace ds4::cuda

int main(int argc, char** argv) { return ds4::cuda::Main(argc, argv); }
