// Latency of an all-reduce between ranks on this host, for each transport, as CSV:
//   comm_bench [transport=all] [bytes=16384] [rounds=20000] [ranks=2] [spin_us=50]
// local ranks are threads; tcp and grpc ranks are processes, as in a cluster. Every rank checks its
// sums; rank 0's times are printed. Numbers mean little while other work uses the cores.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/exchange_communicator.h"
#include "engine/comm/local_transport.h"
#include "engine/comm/tcp_transport.h"
#include "tests/support/grpc_group.h"

namespace ds4 {
namespace {

using Clock = std::chrono::steady_clock;
using Options = std::map<std::string, std::string>;

struct Settings {
  int64_t bytes = 0;
  int rounds = 0;
  int ranks = 0;
  int spin_us = 0;
};

void Fail(const std::string& message) {
  std::fprintf(stderr, "comm_bench: %s\n", message.c_str());
  std::exit(1);
}

double Percentile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1))];
}

void Report(const std::string& name, const Settings& settings, std::vector<double> micros) {
  std::sort(micros.begin(), micros.end());
  std::printf("%s,%d,%lld,%d,%.1f,%.1f,%.1f\n", name.c_str(), settings.ranks,
              static_cast<long long>(settings.bytes), settings.rounds, micros.front(),
              Percentile(micros, 0.5), Percentile(micros, 0.99));
  std::fflush(stdout);
}

// Every lane's value is 1 in round 0 and one more in each next, so a sum is 8 * (round + 1).
void RunRank(std::unique_ptr<Transport> transport, const Settings& settings) {
  const std::string name = transport->name();
  const auto comm =
      MakeExchangeCommunicator(std::move(transport), LaneLayout::Even(8, settings.ranks));
  const int64_t count = settings.bytes / static_cast<int64_t>(sizeof(float));
  const auto own =
      SubtreesOf(comm->lanes().begin[comm->rank()], comm->lanes().begin[comm->rank() + 1]);
  std::vector<float> roots(own.size() * count);
  std::vector<float> out(count);
  std::vector<double> micros;
  const int warm_up = settings.rounds / 10 + 1;
  for (int round = 0; round < warm_up + settings.rounds; ++round) {
    const auto lane = static_cast<float>(round % 1000 + 1);
    for (size_t i = 0; i < own.size(); ++i) {
      std::fill_n(roots.begin() + i * count, count, lane * static_cast<float>(own[i].size));
    }
    const Clock::time_point start = Clock::now();
    if (const Status status = comm->AllReduceLanes(roots, out); !status.ok()) {
      Fail(status.ToString());
    }
    const std::chrono::duration<double, std::micro> took = Clock::now() - start;
    if (round >= warm_up) micros.push_back(took.count());
    for (const float sum : out) {
      if (sum != 8 * lane) Fail(StrCat("sum ", sum, ", must be ", 8 * lane));
    }
  }
  if (!comm->Barrier().ok()) Fail("the last barrier failed");
  if (comm->rank() == 0) Report(name, settings, std::move(micros));
}

void RunLocal(const Settings& settings) {
  std::vector<std::jthread> threads;
  for (auto& transport : MakeLocalTransports(settings.ranks)) {
    threads.emplace_back([&settings, transport = std::move(transport)]() mutable {
      RunRank(std::move(transport), settings);
    });
  }
}

// A pipe for 16-bit port numbers.
struct PortPipe {
  PortPipe() {
    if (pipe(ends) != 0) Fail("no pipe");
  }
  void Put(uint16_t port) const {
    if (write(ends[1], &port, sizeof(port)) != sizeof(port)) Fail("a pipe is closed");
  }
  uint16_t Get() const {
    uint16_t port = 0;
    if (read(ends[0], &port, sizeof(port)) != sizeof(port)) Fail("a rank died early");
    return port;
  }
  int ends[2];
};

// What a rank does in its process: tells its port, is told all ports, runs.
class RankProcess {
 public:
  RankProcess(int rank, const PortPipe& up, const PortPipe& down, const Settings& settings)
      : rank_(rank), up_(up), down_(down), settings_(settings) {}

  void RunTcp() const {
    const auto listener = TcpListener::Listen("127.0.0.1", 0).value();
    TcpGroup group{.epoch = 1,
                   .rank = rank_,
                   .peers = {},
                   .join_deadline = Soon(),
                   .spin_us = settings_.spin_us,
                   .stop = {}};
    for (const uint16_t port : TradePorts(listener->port())) {
      group.peers.push_back({"127.0.0.1", port});
    }
    RunRank(ConnectTcpTransport(*listener, group).value(), settings_);
  }

  void RunGrpc() const {
    GrpcNode node;
    GrpcGroup group{.epoch = 1, .rank = rank_, .peers = {}, .join_deadline = Soon(), .stop = {}};
    const std::string address = node.address();
    const int own_port = std::atoi(address.substr(address.rfind(':') + 1).c_str());
    for (const uint16_t port : TradePorts(static_cast<uint16_t>(own_port))) {
      group.peers.push_back(StrCat("127.0.0.1:", port));
    }
    RunRank(ConnectGrpcTransport(node.exchange(), group).value(), settings_);
  }

 private:
  static Clock::time_point Soon() { return Clock::now() + std::chrono::seconds(10); }

  std::vector<uint16_t> TradePorts(uint16_t own) const {
    up_.Put(own);
    std::vector<uint16_t> ports;
    for (int rank = 0; rank < settings_.ranks; ++rank) ports.push_back(down_.Get());
    return ports;
  }

  const int rank_;
  const PortPipe& up_;
  const PortPipe& down_;
  const Settings& settings_;
};

void RunProcesses(const Settings& settings, void (RankProcess::*run)() const) {
  std::vector<PortPipe> up(settings.ranks);
  std::vector<PortPipe> down(settings.ranks);
  std::vector<pid_t> children;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    children.push_back(fork());
    if (children.back() == 0) {
      (RankProcess(rank, up[rank], down[rank], settings).*run)();
      std::exit(0);
    }
  }
  std::vector<uint16_t> ports;
  for (const PortPipe& pipe : up) ports.push_back(pipe.Get());
  for (const PortPipe& pipe : down) {
    for (const uint16_t port : ports) pipe.Put(port);
  }
  for (const pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) < 0 || status != 0) Fail("a rank failed");
  }
}

int Number(Options& options, const std::string& name, const std::string& fallback) {
  const std::string text = options.emplace(name, fallback).first->second;
  const int value = std::atoi(text.c_str());
  if (value < 0 || (value == 0 && text != "0")) Fail(StrCat(name, "=", text, " is no number"));
  return value;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::vector<std::string> parts = StrSplit(argv[i], '=');
    if (parts.size() != 2) Fail(StrCat("'", argv[i], "': options are name=value"));
    options[parts[0]] = parts[1];
  }
  const std::string transport = options.emplace("transport", "all").first->second;
  const Settings settings{.bytes = Number(options, "bytes", "16384"),
                          .rounds = std::max(1, Number(options, "rounds", "20000")),
                          .ranks = std::clamp(Number(options, "ranks", "2"), 1, 8),
                          .spin_us = Number(options, "spin_us", "50")};
  if (options.size() != 5) Fail("options are transport, bytes, rounds, ranks, spin_us");
  std::printf("transport,ranks,bytes,rounds,min_us,p50_us,p99_us\n");
  std::fflush(stdout);
  // The processes first: gRPC does not like a fork after it has started.
  if (transport == "tcp" || transport == "all") RunProcesses(settings, &RankProcess::RunTcp);
  if (transport == "grpc" || transport == "all") RunProcesses(settings, &RankProcess::RunGrpc);
  if (transport == "local" || transport == "all") RunLocal(settings);
  return 0;
}

}  // namespace
}  // namespace ds4

int main(int argc, char** argv) { return ds4::Main(argc, argv); }
