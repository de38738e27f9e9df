// Ranks on several hosts over TCP: one connection for each pair of ranks, driven by the rank
// thread.
//
//   set-up   the higher rank dials the lower one (Boost.Asio); both sides check a fixed hello
//   frame    magic u32, zero u32, sequence u64, size u64 (little-endian), then `size` bytes
//   goodbye  the same header with its own magic, then up to 512 bytes of text: why a rank leaves
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/comm/transport.h"

namespace ds4 {

struct TcpAddress {
  std::string host;  // name or address
  uint16_t port = 0;
};

// The port on which a worker takes its peers' connections; it outlives the groups that the worker
// joins. Thread: one join at a time.
class TcpListener {
 public:
  // port 0 takes a free one. kInvalidArgument for a host that does not resolve, kUnavailable for a
  // port that is taken.
  static Result<std::unique_ptr<TcpListener>> Listen(const std::string& host, uint16_t port);
  ~TcpListener();

  uint16_t port() const;

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  explicit TcpListener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct TcpGroup {
  uint64_t epoch = 0;
  int rank = 0;
  std::vector<TcpAddress> peers;  // of all ranks, in order; our own is not used
  std::chrono::steady_clock::time_point join_deadline;
  // How long a rank asks its sockets again and again before it sleeps: about 50 when each rank has
  // a core of its own (saves two wake-ups per exchange), 0 when ranks on this host outnumber cores.
  int spin_us = 50;
  std::stop_token stop;  // ends the join early (kCancelled)
};

// Connects with all peers of the group. A stray, silent or stale connection is refused and takes no
// slot. Errors: kDeadlineExceeded listing every missing rank, its address and why;
// kFailedPrecondition when a peer is at a later epoch; kInvalidArgument for a group that makes no
// sense.
Result<std::unique_ptr<Transport>> ConnectTcpTransport(TcpListener& listener,
                                                       const TcpGroup& group);

}  // namespace ds4
