#include "coordinator/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace ds4 {
namespace {

std::atomic<int> pending_signal{0};
static_assert(std::atomic<int>::is_always_lock_free,
              "the handler may only touch lock-free atomics");

void OnSignal(int signal) {
  if (pending_signal.exchange(signal) != 0) _exit(128 + signal);
}

}  // namespace

void InstallSignalHandlers() {
  struct sigaction action {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  // No SA_RESTART: a read of the next chat line must return so that the program can look.
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

int PendingSignal() { return pending_signal.load(); }

void ClearInterrupt() {
  int expected = SIGINT;
  pending_signal.compare_exchange_strong(expected, 0);
}

}  // namespace ds4
