// When the program is to end: SIGTERM, SIGINT, or its parent gone.
#pragma once

#include <chrono>
#include <string>

#include "engine/base/status.h"

namespace ds4 {

// Installs the handlers; once per process. From then on the first SIGTERM or SIGINT is kept for
// WaitForStop and a second one ends the process at once. SIGPIPE is ignored.
Status InstallStopSignals();

// Blocks until a signal came or, with `watch_stdin`, standard input is closed. Says which, in
// words.
std::string WaitForStop(bool watch_stdin);

// Ends the process with code 0 if it is still there after `limit`: the system frees what we could
// not.
void ExitAfter(std::chrono::milliseconds limit);

}  // namespace ds4
