#include "coordinator/local_workers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "coordinator/membership.h"
#include "engine/base/strings.h"

extern char** environ;

namespace ds4 {
namespace {

namespace fs = std::filesystem;

constexpr milliseconds kPollEvery{5};
constexpr milliseconds kExitGrace{3000};
constexpr milliseconds kReapGrace{
    200};  // a stream breaks a little before its process can be reaped
constexpr size_t kLogTailBytes = 1000;

std::string Errno(const std::string& what) { return StrCat(what, ": ", strerror(errno)); }

bool IsProgram(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

// The folder that `program` was started from, or nothing.
std::optional<fs::path> FolderOf(const std::string& program) {
  std::error_code error;
  if (program.find('/') != std::string::npos) {
    const fs::path path = fs::canonical(program, error);
    return error ? std::nullopt : std::make_optional(path.parent_path());
  }
  const char* path_list = std::getenv("PATH");
  for (const std::string& folder : StrSplit(path_list ? path_list : "", ':')) {
    const fs::path path = fs::canonical(fs::path(folder) / program, error);
    if (!error && IsProgram(path)) return path.parent_path();
  }
  return std::nullopt;
}

// Everything that posix_spawn needs, freed at the end of the scope.
class SpawnSettings {
 public:
  SpawnSettings() {
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    sigset_t defaults, mask;
    sigemptyset(&mask);
    sigemptyset(&defaults);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) sigaddset(&defaults, signal);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setsigmask(&attributes, &mask);
    // A group of its own: Ctrl-C on the terminal is for us, not for the workers.
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(
        &attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

std::string EndText(pid_t pid, int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int signal = WTERMSIG(wait_status);
    return StrCat("process ", pid, " was killed by signal ", signal, " (", strsignal(signal), ")");
  }
  return StrCat("process ", pid, " exited with code ", WEXITSTATUS(wait_status));
}

// The control port in a port file ("4711 4712\n": control and data), or nothing when it is not
// there.
std::optional<int> ReadPort(const std::string& path) {
  std::ifstream file(path);
  int port = 0;
  if (!(file >> port) || port < 1 || port > 65535) return std::nullopt;
  return port;
}

// Both ends of a pipe, closed at the end of the scope; no child may hold them by accident.
class Pipe {
 public:
  Status Open() {
    if (pipe(ends_) != 0) return UnavailableError(Errno("cannot make a pipe"));
    for (int fd : ends_) fcntl(fd, F_SETFD, FD_CLOEXEC);
    return OkStatus();
  }
  ~Pipe() {
    CloseWriter();
    if (ends_[0] >= 0) close(ends_[0]);
  }
  int reader() const { return ends_[0]; }
  int writer() const { return ends_[1]; }
  void CloseWriter() {
    if (ends_[1] >= 0) close(std::exchange(ends_[1], -1));
  }

 private:
  int ends_[2] = {-1, -1};
};

constexpr size_t kMaxOutputBytes = 1 << 20;

// Everything until the other end closes.
Result<std::string> ReadToEnd(int fd, const std::string& who, TimePoint deadline) {
  std::string text;
  while (text.size() < kMaxOutputBytes) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Now()).count();
    pollfd ready{fd, POLLIN, 0};
    const int found = left <= 0 ? 0 : poll(&ready, 1, static_cast<int>(left));
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) return UnavailableError(Errno("cannot wait for " + who));
    if (found == 0) return DeadlineExceededError(StrCat(who, " did not answer in time"));
    char buffer[4096];
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return UnavailableError(Errno("cannot read from " + who));
    if (got == 0) return text;
    text.append(buffer, static_cast<size_t>(got));
  }
  return UnavailableError(StrCat(who, " says more than ", kMaxOutputBytes, " bytes"));
}

// What a program writes to its stdout and stderr until it ends, with an empty stdin.
Result<std::string> OutputOf(std::vector<std::string> args, milliseconds limit) {
  const std::string who = StrJoin(args, " ");
  Pipe pipe;
  RETURN_IF_ERROR(pipe.Open());
  SpawnSettings settings;
  posix_spawn_file_actions_addopen(&settings.actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&settings.actions, pipe.writer(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&settings.actions, pipe.writer(), STDERR_FILENO);
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, args[0].c_str(), &settings.actions, &settings.attributes,
                                argv.data(), environ);
  if (error != 0) return UnavailableError(StrCat("cannot start ", who, ": ", strerror(error)));
  pipe.CloseWriter();
  Result<std::string> text = ReadToEnd(pipe.reader(), who, Now() + limit);
  if (!text.ok()) kill(pid, SIGKILL);
  int wait_status = 0;
  while (waitpid(pid, &wait_status, 0) < 0 && errno == EINTR) {
  }
  if (text.ok() && !(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0)) {
    return UnavailableError(StrCat(who, ": ", EndText(pid, wait_status), "; it said: ", *text));
  }
  return text;
}

}  // namespace

Result<std::string> FindWorkerBinary(const std::string& given, const std::string& program) {
  if (!given.empty()) {
    if (IsProgram(given)) return given;
    return NotFoundError(StrCat("--worker-binary ", given, " is no program that can be run"));
  }
  const std::optional<fs::path> folder = FolderOf(program);
  if (!folder) {
    return NotFoundError(StrCat("cannot tell where '", program, "' lies; give --worker-binary"));
  }
  const fs::path path = *folder / "ds4-worker";
  if (IsProgram(path)) return path.string();
  return NotFoundError(StrCat("no program ", path.string(), "; build it or give --worker-binary"));
}

Result<int> CountGpus(const std::string& binary, milliseconds limit) {
  ASSIGN_OR_RETURN(const std::string text, OutputOf({binary, "--list-devices"}, limit));
  int count = 0;
  for (const std::string& line : StrSplit(text, '\n')) {
    if (line.starts_with("device ")) ++count;
  }
  if (count > 0) return count;
  return FailedPreconditionError(StrCat(binary, " --list-devices finds no GPU: ", text));
}

LocalWorkers::LocalWorkers(LocalWorkerOptions options)
    : options_(std::move(options)), children_(options_.count) {}

LocalWorkers::~LocalWorkers() {
  EndAll();
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

std::string LocalWorkers::File(int rank, const char* suffix) const {
  return StrCat(folder_, "/worker-", rank, suffix);
}

Status LocalWorkers::MakeFolder() {
  if (!folder_.empty()) return OkStatus();
  const char* base = std::getenv("TMPDIR");
  std::string name = StrCat(base && *base ? base : "/tmp", "/ds4-XXXXXX");
  if (mkdtemp(name.data()) == nullptr) return UnavailableError(Errno("cannot make folder " + name));
  folder_ = name;
  return OkStatus();
}

Status LocalWorkers::Start(int rank) {
  int ends[2];
  if (pipe(ends) != 0) return UnavailableError(Errno("cannot make a pipe for a worker"));
  for (int fd : ends) fcntl(fd, F_SETFD, FD_CLOEXEC);  // no sibling may hold this pipe open
  const std::string port_file = File(rank, ".port");
  const std::string log_file = File(rank, ".log");
  unlink(port_file.c_str());
  SpawnSettings settings;
  posix_spawn_file_actions_adddup2(&settings.actions, ends[0], STDIN_FILENO);
  if (options_.verbose) {
    posix_spawn_file_actions_adddup2(&settings.actions, STDERR_FILENO, STDOUT_FILENO);
  } else {
    posix_spawn_file_actions_addopen(&settings.actions, STDOUT_FILENO, log_file.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&settings.actions, STDOUT_FILENO, STDERR_FILENO);
  }
  std::vector<std::string> args = {
      options_.binary,          "--listen",    "127.0.0.1:0", "--threads",
      StrCat(options_.threads), "--port-file", port_file,     "--exit-with-parent"};
  args.insert(args.end(), options_.args.begin(), options_.args.end());
  if (options_.num_gpus > 0) {
    args.insert(args.end(), {"--device", StrCat(rank % options_.num_gpus)});
  }
  if (options_.context > 0) args.insert(args.end(), {"--ctx", StrCat(options_.context)});
  if (options_.max_rows > 0) args.insert(args.end(), {"--max-rows", StrCat(options_.max_rows)});
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  Child& child = children_[rank];
  const int error = posix_spawn(&child.pid, options_.binary.c_str(), &settings.actions,
                                &settings.attributes, argv.data(), environ);
  close(ends[0]);
  if (error != 0) {
    close(ends[1]);
    child.pid = -1;
    return UnavailableError(StrCat("cannot start ", options_.binary, ": ", strerror(error)));
  }
  child.stdin_fd = ends[1];
  child.address.clear();
  child.suspect = false;
  return OkStatus();
}

std::string LocalWorkers::LogTail(int rank) const {
  std::ifstream file(File(rank, ".log"));
  std::stringstream text;
  text << file.rdbuf();
  std::string tail = text.str();
  while (!tail.empty() && tail.back() == '\n') tail.pop_back();
  if (tail.size() > kLogTailBytes) tail = "..." + tail.substr(tail.size() - kLogTailBytes);
  return tail;
}

bool LocalWorkers::Reap(int rank) {
  Child& child = children_[rank];
  if (child.pid < 0) return true;
  int wait_status = 0;
  pid_t ended = 0;
  do {
    ended = waitpid(child.pid, &wait_status, WNOHANG);
  } while (ended < 0 && errno == EINTR);
  if (ended == 0) return false;
  std::string why = EndText(child.pid, wait_status);
  // A worker that was killed had no time for last words; what it logged before says nothing about
  // it.
  if (const std::string tail = LogTail(rank); WIFEXITED(wait_status) && !tail.empty()) {
    why += "; its last messages: " + tail;
  }
  Ended(rank, std::move(why));
  return true;
}

void LocalWorkers::Ended(int rank, std::string why) {
  Child& child = children_[rank];
  child.last_words = std::move(why);
  if (child.stdin_fd >= 0) close(std::exchange(child.stdin_fd, -1));
  child.pid = -1;
}

void LocalWorkers::Kill(int rank) {
  Child& child = children_[rank];
  if (Reap(rank)) return;
  kill(child.pid, SIGKILL);
  int wait_status = 0;
  while (waitpid(child.pid, &wait_status, 0) < 0 && errno == EINTR) {
  }
  Ended(rank, EndText(child.pid, wait_status));
}

Status LocalWorkers::AwaitPort(int rank, TimePoint deadline) {
  Child& child = children_[rank];
  while (child.address.empty()) {
    if (const std::optional<int> port = ReadPort(File(rank, ".port"))) {
      child.address = StrCat("127.0.0.1:", *port);
      options_.on_started(
          StrCat("local worker ", rank, ": process ", child.pid, " at ", child.address));
      return OkStatus();
    }
    if (Reap(rank)) {
      return UnavailableError(
          StrCat("local worker ", rank, " did not come up: ", child.last_words));
    }
    if (Now() >= deadline) {
      return DeadlineExceededError(
          StrCat("local worker ", rank, " (process ", child.pid,
                 ") said no port in time; --join-timeout-ms sets the limit"));
    }
    std::this_thread::sleep_for(kPollEvery);
  }
  return OkStatus();
}

Result<std::vector<std::string>> LocalWorkers::EnsureRunning(TimePoint deadline) {
  RETURN_IF_ERROR(MakeFolder());
  for (int rank = 0; rank < options_.count; ++rank) {
    if (children_[rank].suspect) Kill(rank);
    if (Reap(rank)) RETURN_IF_ERROR(Start(rank));
  }
  std::vector<std::string> addresses;
  for (int rank = 0; rank < options_.count; ++rank) {
    RETURN_IF_ERROR(AwaitPort(rank, deadline));
    addresses.push_back(children_[rank].address);
  }
  return addresses;
}

void LocalWorkers::Suspect(int rank) { children_[rank].suspect = true; }

std::string LocalWorkers::WhyGone(int rank) {
  const TimePoint limit = Now() + kReapGrace;
  while (!Reap(rank)) {
    if (Now() >= limit) return "";
    std::this_thread::sleep_for(kPollEvery);
  }
  return children_[rank].last_words;
}

void LocalWorkers::EndAll() {
  for (Child& child : children_) {
    if (child.pid >= 0 && child.stdin_fd >= 0) close(std::exchange(child.stdin_fd, -1));
  }
  const TimePoint limit = Now() + kExitGrace;
  for (int rank = 0; rank < options_.count; ++rank) {
    while (!children_[rank].suspect && !Reap(rank) && Now() < limit) {
      std::this_thread::sleep_for(kPollEvery);
    }
    Kill(rank);
  }
}

}  // namespace ds4
