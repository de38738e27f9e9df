// Ctrl-C and termination: a signal sets a flag, whoever waits looks at it. The flag is the one
// global of this program, because a signal handler can reach nothing else.
#pragma once

namespace ds4 {

// SIGINT, SIGTERM and SIGHUP set the flag; a second one while the flag is still set ends the
// program at once (workers that it started end when they lose its pipe). SIGPIPE is ignored: a
// closed output shows up as a write error. Call once, before threads start.
void InstallSignalHandlers();

// The signal that asks us to stop, or 0.
int PendingSignal();
// SIGINT only: the answer has stopped, go on with the program.
void ClearInterrupt();

}  // namespace ds4
