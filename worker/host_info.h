// What this machine is: name, cores, memory, addresses. Everything here that differs between
// systems stays in host_info.cc.
#pragma once

#include <cstdint>
#include <string>

namespace ds4 {

std::string HostName();

// Cores that this process may use: of the machine or of its container's quota, at least 1.
int UsableCores();

// Memory that could be taken now without swapping, bounded by the container's limit; 0: not known.
int64_t FreeMemoryBytes();

// Our address on the way to a gRPC peer such as "ipv4:10.0.0.3:9911" or "ipv6:%5B::1%5D:80": what
// others on that network can dial. The host name when that cannot be told.
std::string AddressTowards(const std::string& grpc_peer);

bool IsLoopback(const std::string& host);
// "0.0.0.0", "::" and so on: all addresses, so none that a peer could dial.
bool IsWildcard(const std::string& host);

}  // namespace ds4
