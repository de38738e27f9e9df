#include "worker/stop_signal.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

// A handler may only touch such things; one process has one set of handlers.
std::atomic<int> num_signals = 0;
std::array<int, 2> signal_pipe = {-1, -1};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void OnStopSignal(int signal) {
  const int saved_errno = errno;
  if (num_signals.fetch_add(1) > 0) _exit(128 + signal);
  const auto byte = static_cast<unsigned char>(signal);
  // The pipe is empty, so one byte always fits.
  [[maybe_unused]] const ssize_t written = write(signal_pipe[1], &byte, 1);
  errno = saved_errno;
}

Status SetHandler(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (sigaction(signal, &action, nullptr) == 0) return OkStatus();
  return InternalError(StrCat("sigaction for signal ", signal, ": ", std::strerror(errno)));
}

// True once standard input has ended. What is written to it means nothing and is dropped.
bool StdinEnded() {
  std::array<char, 256> ignored{};
  const ssize_t got = read(STDIN_FILENO, ignored.data(), ignored.size());
  return got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN);
}

}  // namespace

Status InstallStopSignals() {
  if (pipe(signal_pipe.data()) != 0) {
    return InternalError(StrCat("pipe: ", std::strerror(errno)));
  }
  for (const int fd : signal_pipe) fcntl(fd, F_SETFD, FD_CLOEXEC);
  RETURN_IF_ERROR(SetHandler(SIGPIPE, SIG_IGN));
  RETURN_IF_ERROR(SetHandler(SIGTERM, OnStopSignal));
  return SetHandler(SIGINT, OnStopSignal);
}

std::string WaitForStop(bool watch_stdin) {
  std::array<pollfd, 2> fds = {{{signal_pipe[0], POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}}};
  while (true) {
    if (poll(fds.data(), watch_stdin ? 2 : 1, -1) < 0) continue;  // EINTR
    if (fds[0].revents != 0) {
      unsigned char signal = 0;
      if (read(signal_pipe[0], &signal, 1) != 1) continue;
      return signal == SIGINT ? "SIGINT" : "SIGTERM";
    }
    if (watch_stdin && fds[1].revents != 0 && StdinEnded()) {
      return "standard input closed (--exit-with-parent)";
    }
  }
}

void ExitAfter(std::chrono::milliseconds limit) {
  // Detached on purpose: nothing may keep it from ending a process that hangs.
  std::thread([limit] {
    std::this_thread::sleep_for(limit);
    _exit(0);
  }).detach();
}

}  // namespace ds4
