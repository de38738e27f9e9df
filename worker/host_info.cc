#include "worker/host_info.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <thread>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

// The number after `key` in a file of "key: value kB" lines, in bytes.
std::optional<int64_t> ReadMeminfo(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    int64_t kib = 0;
    if (word == key && file >> kib) return kib * 1024;
  }
  return std::nullopt;
}

std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

// Of the control group, where there is one with a limit.
int64_t ContainerFreeBytes() {
  const auto limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const auto used = ReadNumber("/sys/fs/cgroup/memory.current");
  if (!limit || !used) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(*limit - *used, 0);
}

int ContainerCores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  int64_t quota = 0;
  int64_t period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0)
    return std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<int64_t>((quota + period - 1) / period, 1, 1 << 16));
}

// "ipv6:%5B::1%5D:80" is "::1"; nothing for other kinds of peer.
std::optional<std::string> PeerHost(const std::string& grpc_peer) {
  const size_t scheme = grpc_peer.find(':');
  const size_t port = grpc_peer.rfind(':');
  if (scheme == std::string::npos || port <= scheme) return std::nullopt;
  const std::string kind = grpc_peer.substr(0, scheme);
  std::string host = grpc_peer.substr(scheme + 1, port - scheme - 1);
  if (kind == "ipv4") return host;
  if (kind != "ipv6") return std::nullopt;
  for (const auto& bracket : {"%5B", "%5D", "[", "]"}) {
    const std::string text = bracket;
    if (const size_t at = host.find(text); at != std::string::npos) host.erase(at, text.size());
  }
  return host;
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList ParseNumeric(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) found = nullptr;
  return AddressList(found, &freeaddrinfo);
}

class DatagramSocket {
 public:
  explicit DatagramSocket(int family) : fd_(socket(family, SOCK_DGRAM, 0)) {}
  ~DatagramSocket() {
    if (fd_ >= 0) close(fd_);
  }
  DatagramSocket(const DatagramSocket&) = delete;
  DatagramSocket& operator=(const DatagramSocket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// A datagram socket that is connected sends nothing, but has chosen its own address.
std::optional<std::string> LocalAddressTowards(const std::string& host) {
  const AddressList target = ParseNumeric(host);
  if (target == nullptr) return std::nullopt;
  const DatagramSocket probe(target->ai_family);
  if (probe.fd() < 0 || connect(probe.fd(), target->ai_addr, target->ai_addrlen) != 0) {
    return std::nullopt;
  }
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (getsockname(probe.fd(), reinterpret_cast<sockaddr*>(&own), &size) != 0) return std::nullopt;
  std::array<char, 256> text{};
  if (getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text.data(), text.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return std::nullopt;
  }
  return std::string(text.data());
}

}  // namespace

std::string HostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  return name.data();
}

int UsableCores() {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(cores, ContainerCores()));
}

int64_t FreeMemoryBytes() {
  std::optional<int64_t> free = ReadMeminfo("MemAvailable:");
  if (!free) {
    // No /proc: all of the machine's memory is the best figure that every POSIX system gives.
    const long pages = sysconf(_SC_PHYS_PAGES);
    const long page_bytes = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page_bytes > 0) free = static_cast<int64_t>(pages) * page_bytes;
  }
  return free ? std::min(*free, ContainerFreeBytes()) : 0;
}

std::string AddressTowards(const std::string& grpc_peer) {
  const std::optional<std::string> host = PeerHost(grpc_peer);
  if (!host) return HostName();
  return LocalAddressTowards(*host).value_or(HostName());
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

bool IsWildcard(const std::string& host) {
  return host == "0.0.0.0" || host == "::" || host == "*";
}

}  // namespace ds4
