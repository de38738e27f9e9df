// Latency of a gather between the GPUs of this host, for each transport, as CSV:
//   device_group_bench [kind=all] [ranks=0] [processes=0] [bytes=0] [timeout_ms=10000]
// ranks=0: one for each GPU; more ranks than GPUs share them. processes=N: N ranks, each a process
// of its own as workers are, not threads of this one. bytes=0: 8 KiB to 32 MiB. p50_us is the
// slowest rank's median, for push and nccl of gathers inside a replayed CUDA graph. gb_per_s: what
// one rank receives from each peer.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/strings.h"
#include "engine/comm/exchange_communicator.h"
#include "engine/comm/local_transport.h"
#include "engine/comm/tcp_transport.h"
#include "engine/cuda/device_group.h"
#include "engine/cuda/group_kinds.h"

namespace ds4::cuda {
namespace {

using Options = std::map<std::string, std::string>;

constexpr int64_t kMaxRanks = 16;

// What a line of the table measures. Push has two ways (push_group.cu); "push" is their mixture as
// it is used.
struct Variant {
  const char* name;
  DeviceGroup::Kind kind;
  int64_t flagged_bytes;
  int64_t max_bytes;
};
constexpr int64_t kUsedFlaggedBytes = DeviceGroup::Options{}.flagged_bytes;
constexpr int64_t kLargest = 32 << 20;
constexpr std::array<Variant, 6> kVariants = {{
    {"push_lines", DeviceGroup::Kind::kPush, 512 << 10, 512 << 10},
    {"push_blocks", DeviceGroup::Kind::kPush, 0, kLargest},
    {"nccl", DeviceGroup::Kind::kNccl, 0, kLargest},
    {"host", DeviceGroup::Kind::kHost, 0, kLargest},
    {"push", DeviceGroup::Kind::kPush, kUsedFlaggedBytes, kLargest},
    {"auto", DeviceGroup::Kind::kAuto, kUsedFlaggedBytes, kLargest},
}};
constexpr size_t kNumInAll = 4;

struct Settings {
  std::vector<Variant> variants;
  int ranks = 0;
  bool has_processes = false;
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

int NumDevices() {
  const auto devices = ListDevices();
  Check(devices.status());
  return static_cast<int>(devices->size());
}

// A variant that cannot be here is a line of its own, not the end.
void Measure(Communicator* comm, Stream& stream, const Variant& variant, const Settings& settings) {
  const bool speaks = comm->rank() == 0;
  auto group = DeviceGroup::Create(comm, stream,
                                   {.kind = variant.kind,
                                    .max_bytes = variant.max_bytes,
                                    .flagged_bytes = variant.flagged_bytes,
                                    .timeout = settings.timeout});
  if (speaks) {
    const std::string text = group.ok() ? (*group)->Describe() : group.status().ToString();
    std::printf("# %s: %s\n", variant.name, text.c_str());
  }
  for (const int64_t bytes : settings.bytes) {
    if (!group.ok() || bytes > variant.max_bytes) continue;
    const Result<double> micros = MeasureGather(comm, stream, **group, bytes);
    Check(micros.status());
    if (!speaks) continue;
    std::printf("%s,%d,%lld,%.2f,%.1f\n", variant.name, settings.ranks,
                static_cast<long long>(bytes), *micros, static_cast<double>(bytes) / *micros / 1e3);
    std::fflush(stdout);
  }
}

void RunRank(std::unique_ptr<Transport> transport, const Settings& settings) {
  const int rank = transport->rank();
  const auto comm =
      MakeExchangeCommunicator(std::move(transport), LaneLayout::Even(16, settings.ranks));
  comm->set_timeout(std::chrono::minutes(2));
  Check(UseDevice(rank % NumDevices()));
  Result<Stream> stream = Stream::Create();
  Check(stream.status());
  for (const Variant& variant : settings.variants) {
    Measure(comm.get(), *stream, variant, settings);
  }
  Check(comm->Barrier());
}

std::vector<Variant> VariantsOf(const std::string& text) {
  if (text == "all") return {kVariants.begin(), kVariants.begin() + kNumInAll};
  std::string names = "all";
  for (const Variant& variant : kVariants) {
    if (text == variant.name) return {variant};
    names += StrCat(", ", variant.name);
  }
  Fail(StrCat("kind=", text, ": must be one of ", names));
}

Settings Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::vector<std::string> parts = StrSplit(argv[i], '=');
    if (parts.size() != 2) Fail(StrCat("'", argv[i], "': options are name=value"));
    options[parts[0]] = parts[1];
  }
  Settings settings;
  settings.variants = VariantsOf(options.emplace("kind", "all").first->second);
  const int64_t ranks = Number(options, "ranks", "0");
  const int64_t processes = Number(options, "processes", "0");
  settings.has_processes = processes > 0;
  settings.ranks = static_cast<int>(std::min(std::max(ranks, processes), kMaxRanks));
  // With processes nothing may touch CUDA before they are forked.
  if (settings.ranks == 0) settings.ranks = NumDevices();
  const int64_t bytes = Number(options, "bytes", "0");
  for (const int64_t kib : {8, 16, 32, 64, 128, 512, 2048, 8192, 32768}) {
    settings.bytes.push_back(kib << 10);
  }
  if (bytes > kLargest) Fail(StrCat("bytes=", bytes, ": must be up to ", kLargest));
  if (bytes > 0) settings.bytes = {bytes};
  settings.timeout = std::chrono::milliseconds(Number(options, "timeout_ms", "10000"));
  if (options.size() != 5) Fail("options are kind, ranks, processes, bytes, timeout_ms");
  return settings;
}

void RunThreads(const Settings& settings) {
  std::vector<std::jthread> threads;
  for (auto& transport : MakeLocalTransports(settings.ranks)) {
    threads.emplace_back([&settings, transport = std::move(transport)]() mutable {
      RunRank(std::move(transport), settings);
    });
  }
}

using Ports = std::array<std::atomic<uint32_t>, kMaxRanks>;  // in memory that all processes share

void RunProcess(int rank, Ports& ports, const Settings& settings) {
  auto listener = TcpListener::Listen("127.0.0.1", 0);
  Check(listener.status());
  ports[rank] = (*listener)->port();
  TcpGroup group{.epoch = 1,
                 .rank = rank,
                 .peers = {},
                 .join_deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20),
                 .spin_us = 50,
                 .stop = {}};
  for (int r = 0; r < settings.ranks; ++r) {
    while (ports[r] == 0) {
      if (std::chrono::steady_clock::now() > group.join_deadline) Fail(StrCat("no rank ", r));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    group.peers.push_back({"127.0.0.1", static_cast<uint16_t>(ports[r])});
  }
  auto transport = ConnectTcpTransport(**listener, group);
  Check(transport.status());
  RunRank(std::move(transport).value(), settings);
}

void RunProcesses(const Settings& settings) {
  void* shared =
      mmap(nullptr, sizeof(Ports), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) Fail("no shared memory");
  Ports& ports = *new (shared) Ports();
  std::vector<pid_t> children;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    std::fflush(stdout);
    children.push_back(fork());
    if (children.back() == 0) {
      RunProcess(rank, ports, settings);
      std::exit(0);
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) < 0 || status != 0) Fail("a rank failed");
  }
}

int Main(int argc, char** argv) {
  // Ranks that share a device: see device_group.h. Before the first use of CUDA.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const Settings settings = Parse(argc, argv);
  std::printf("kind,ranks,bytes,p50_us,gb_per_s\n");
  settings.has_processes ? RunProcesses(settings) : RunThreads(settings);
  return 0;
}

}  // namespace
}  // namespace ds4::cuda

int main(int argc, char** argv) { return ds4::cuda::Main(argc, argv); }
