#include "engine/comm/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "engine/base/check.h"

namespace ds4 {
namespace {

// A peer that is gone must be an error, not a signal: Linux says so in each send, macOS once for
// all.
#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_NOSIGNAL;
#else
constexpr int kSendFlags = 0;
#endif

std::string ErrorText(int error) { return std::generic_category().message(error); }

bool MustWait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

bool SetOption(int fd, int level, int option) {
  const int on = 1;
  return setsockopt(fd, level, option, &on, sizeof(on)) == 0;
}

bool Configure(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) return false;
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) return false;
#ifdef SO_NOSIGPIPE
  if (!SetOption(fd, SOL_SOCKET, SO_NOSIGPIPE)) return false;
#endif
  return SetOption(fd, IPPROTO_TCP, TCP_NODELAY);
}

iovec ToIovec(std::span<const std::byte> data) {
  return {const_cast<std::byte*>(data.data()), data.size()};
}

}  // namespace

Result<Socket> Socket::Adopt(int fd) {
  Socket socket(fd);
  if (!Configure(fd)) return UnavailableError("cannot set up the socket: " + ErrorText(errno));
  return socket;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Result<size_t> Socket::Send(std::span<const std::byte> head, std::span<const std::byte> body) {
  iovec parts[2] = {ToIovec(head), ToIovec(body)};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t sent = sendmsg(fd_, &message, kSendFlags);
  if (sent >= 0) return static_cast<size_t>(sent);
  if (MustWait(errno)) return size_t{0};
  return UnavailableError(ErrorText(errno));
}

Result<size_t> Socket::Receive(std::span<std::byte> data) {
  DCHECK(!data.empty());
  const ssize_t received = recv(fd_, data.data(), data.size(), 0);
  if (received > 0) return static_cast<size_t>(received);
  if (received == 0) return UnavailableError("it closed the connection");
  if (MustWait(errno)) return size_t{0};
  return UnavailableError(ErrorText(errno));
}

void Socket::Shutdown() {
  if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
}

}  // namespace ds4
