// A group of tcp transports inside one process, on loopback and ports that the system chooses.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/check.h"
#include "engine/comm/tcp_transport.h"

namespace ds4 {

struct TcpListeners {
  explicit TcpListeners(int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      listeners.push_back(TcpListener::Listen("127.0.0.1", 0).value());
      addresses.push_back({"127.0.0.1", listeners.back()->port()});
    }
  }
  TcpGroup Group(int rank, uint64_t epoch, std::chrono::milliseconds patience) const {
    return {.epoch = epoch,
            .rank = rank,
            .peers = addresses,
            .join_deadline = std::chrono::steady_clock::now() + patience,
            .spin_us = addresses.size() > 2 ? 0 : 50,
            .stop = {}};
  }

  std::vector<std::unique_ptr<TcpListener>> listeners;
  std::vector<TcpAddress> addresses;
};

// All ranks of `listeners` join at the same time; CHECKs that they succeed.
inline std::vector<std::unique_ptr<Transport>> JoinAll(TcpListeners& listeners, uint64_t epoch) {
  const auto world_size = static_cast<int>(listeners.addresses.size());
  std::vector<std::unique_ptr<Transport>> transports(world_size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const TcpGroup group = listeners.Group(rank, epoch, std::chrono::seconds(10));
      transports[rank] = ConnectTcpTransport(*listeners.listeners[rank], group).value();
    });
  }
  threads.clear();
  return transports;
}

inline std::vector<std::unique_ptr<Transport>> MakeTcpTransports(int world_size) {
  TcpListeners listeners(world_size);
  return JoinAll(listeners, 1);
}

}  // namespace ds4
