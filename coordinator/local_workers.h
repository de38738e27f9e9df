// Starts ds4-worker processes on this host and makes sure that none outlives us: each holds the
// read end of a pipe as its stdin and exits when the pipe breaks, even if we are killed.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coordinator/worker_source.h"

namespace ds4 {

struct LocalWorkerOptions {
  std::string binary;
  std::vector<std::string> args;  // of all: the model, the engine
  int count = 1;
  int num_gpus = 0;      // above 0: rank r takes GPU r mod this
  int threads = 1;       // of each
  int64_t context = 0;   // their --ctx; 0: the worker's own default
  int64_t max_rows = 0;  // their --max-rows; 0: the worker's own default
  bool verbose = false;  // their messages go to our stderr; otherwise to a file that WhyGone quotes
  std::function<void(const std::string&)> on_started = [](const std::string&) {};  // one line each
};

// The worker binary: `given`, or ds4-worker in the folder of `program` (argv[0], looked up in PATH
// when it has no slash). kNotFound names what was tried.
Result<std::string> FindWorkerBinary(const std::string& given, const std::string& program);

// How many GPUs this host has, as the worker binary says; takes at most `limit`.
// kFailedPrecondition: none, with the worker's own words; kUnavailable, kDeadlineExceeded: it
// cannot be asked.
Result<int> CountGpus(const std::string& binary, milliseconds limit);

class LocalWorkers final : public WorkerSource {
 public:
  explicit LocalWorkers(LocalWorkerOptions options);
  // Ends all workers and waits for them: stdin closes, after 3 s SIGKILL.
  ~LocalWorkers() override;
  LocalWorkers(const LocalWorkers&) = delete;
  LocalWorkers& operator=(const LocalWorkers&) = delete;

  // Errors: kUnavailable with the worker's last words when one does not come up.
  Result<std::vector<std::string>> EnsureRunning(TimePoint deadline) override;
  void Suspect(int rank) override;
  std::string WhyGone(int rank) override;

 private:
  struct Child {
    pid_t pid = -1;       // -1: not running
    int stdin_fd = -1;    // our end of its stdin
    std::string address;  // empty until its port is known
    bool suspect = false;
    std::string last_words;  // why the last process of this rank ended
  };

  Status MakeFolder();
  Status Start(int rank);
  Status AwaitPort(int rank, TimePoint deadline);
  bool Reap(int rank);  // true: the process has ended; says why in last_words
  void Kill(int rank);
  void Ended(int rank, std::string why);
  void EndAll();
  std::string File(int rank, const char* suffix) const;
  std::string LogTail(int rank) const;

  LocalWorkerOptions options_;
  std::string folder_;  // for port files and logs; removed at the end
  std::vector<Child> children_;
};

}  // namespace ds4
