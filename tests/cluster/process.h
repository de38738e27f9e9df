// A child process of a test: its output is collected while it runs, every wait has a limit, and it
// is gone when the object is.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern char** environ;

namespace ds4 {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// Everything that comes out of one descriptor.
class Output {
 public:
  explicit Output(int fd) : fd_(fd), reader_([this] { ReadAll(); }) {}
  ~Output() {
    reader_.join();
    close(fd_);
  }
  std::string text() {
    std::lock_guard lock(mutex_);
    return text_;
  }
  // True as soon as `what` stands in the text from `begin` on; false at the limit or the end of
  // output.
  bool WaitFor(const std::string& what, milliseconds limit, size_t begin = 0) {
    std::unique_lock lock(mutex_);
    const auto found = [&] { return text_.find(what, begin) != std::string::npos; };
    changed_.wait_for(lock, limit, [&] { return found() || ended_; });
    return found();
  }
  bool WaitForSize(size_t size, milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return text_.size() >= size || ended_; });
    return text_.size() >= size;
  }

 private:
  void ReadAll() {
    char bytes[4096];
    while (true) {
      const ssize_t n = read(fd_, bytes, sizeof bytes);
      if (n < 0 && errno == EINTR) continue;
      std::lock_guard lock(mutex_);
      if (n > 0) text_.append(bytes, static_cast<size_t>(n));
      ended_ = n <= 0;
      changed_.notify_all();
      if (ended_) return;
    }
  }

  const int fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string text_;    // guarded by mutex_
  bool ended_ = false;  // guarded by mutex_
  std::jthread reader_;
};

class Process {
 public:
  explicit Process(std::vector<std::string> args) {
    const auto [in_read, in_write] = Pipe();
    const auto [out_read, out_write] = Pipe();
    const auto [err_read, err_write] = Pipe();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in_read, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out_write, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, err_write, STDERR_FILENO);
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    const int error = posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
    EXPECT_EQ(error, 0) << "cannot start " << args[0];
    if (error != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
    for (int fd : {in_read, out_write, err_write}) close(fd);
    stdin_fd_ = in_write;
    out_ = std::make_unique<Output>(out_read);
    err_ = std::make_unique<Output>(err_read);
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait(seconds(10));
    }
    CloseStdin();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  Output& out() { return *out_; }
  Output& err() { return *err_; }

  void Say(const std::string& line) {
    const std::string text = line + "\n";
    EXPECT_EQ(write(stdin_fd_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  void CloseStdin() {
    if (stdin_fd_ >= 0) close(std::exchange(stdin_fd_, -1));
  }
  void Signal(int signal) { kill(pid_, signal); }

  // The exit code, 128 + signal when one ended it, or -1 when it still runs at the limit.
  int Wait(milliseconds limit) {
    const auto deadline = Clock::now() + limit;
    while (pid_ > 0) {
      int wait_status = 0;
      if (waitpid(pid_, &wait_status, WNOHANG) == pid_) {
        pid_ = -1;
        code_ = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
        break;
      }
      if (Clock::now() > deadline) return -1;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return code_;
  }

 private:
  static std::pair<int, int> Pipe() {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    for (int fd : ends) fcntl(fd, F_SETFD, FD_CLOEXEC);  // other children must not hold it open
    return {ends[0], ends[1]};
  }

  pid_t pid_ = -1;
  int stdin_fd_ = -1;
  int code_ = -1;
  std::unique_ptr<Output> out_;
  std::unique_ptr<Output> err_;
};

}  // namespace ds4
