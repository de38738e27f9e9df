// An owned, connected, non-blocking stream socket: the few system calls of the data path, and the
// differences between systems in them.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "engine/base/status.h"

namespace ds4 {

// Move-only. Thread: one at a time, but Shutdown may come from any.
class Socket {
 public:
  Socket() = default;
  // Takes `fd` over; sets it non-blocking, without delay for small messages, closed on exec.
  static Result<Socket> Adopt(int fd);
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }

  // Bytes moved, 0 when the call would have to wait. kUnavailable when the connection is gone.
  Result<size_t> Send(std::span<const std::byte> head, std::span<const std::byte> body);
  Result<size_t> Receive(std::span<std::byte> data);  // data must not be empty

  // Ends the connection both ways; whoever polls or reads it on either side wakes.
  void Shutdown();

 private:
  explicit Socket(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace ds4
