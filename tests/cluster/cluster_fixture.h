// What the cluster tests share: the binaries, the model, workers on free ports, and whole runs of
// the coordinator.
#pragma once

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/cluster/process.h"

namespace ds4 {

inline std::string Binary(const std::string& name) {
  return std::string(DS4_BINARY_DIR) + "/bin/" + name;
}

// The model that the project ships; DS4_TEST_MODEL names another one.
inline std::string ModelPath() {
  const char* given = std::getenv("DS4_TEST_MODEL");
  return given ? given : std::string(DS4_SOURCE_DIR) + "/models/ds4-tiny-stories.gguf";
}

// A folder of its own for each test, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string name = testing::TempDir() + "ds4-cluster-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(File(name), std::ios::binary) << text;
    return File(name);
  }

 private:
  std::string path_;
};

// A listening socket on a free loopback port that never answers: the kernel accepts, nobody reads.
class SilentPort {
 public:
  SilentPort() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(fd_, 16), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~SilentPort() { Close(); }
  // From now on the port is closed.
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int fd_;
  int port_ = 0;
};

// Whether something listens on the port.
inline bool IsOpen(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const bool open = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  return open;
}

inline bool WaitUntilClosed(int port, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (IsOpen(port)) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return true;
}

// A ds4-worker that the test started itself.
class Worker {
 public:
  explicit Worker(std::vector<std::string> more = {}, int port = 0,
                  std::string model = ModelPath()) {
    const std::string port_file = folder_.File("port");
    std::vector<std::string> args = {Binary("ds4-worker"),
                                     "--model",
                                     std::move(model),
                                     "--listen",
                                     "127.0.0.1:" + std::to_string(port),
                                     "--port-file",
                                     port_file,
                                     "--threads",
                                     "1",
                                     "--backend",
                                     "cpu"};
    args.insert(args.end(), more.begin(), more.end());
    process_ = std::make_unique<Process>(std::move(args));
    const auto deadline = Clock::now() + seconds(20);
    while (port_ == 0 && Clock::now() < deadline && process_->Wait(milliseconds(0)) < 0) {
      std::ifstream(port_file) >> port_;
      std::this_thread::sleep_for(milliseconds(2));
    }
    EXPECT_NE(port_, 0) << "the worker did not come up: " << process_->err().text();
  }
  Process& process() { return *process_; }
  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  TempFolder folder_;
  std::unique_ptr<Process> process_;
  int port_ = 0;
};

struct RunResult {
  int code = -1;
  std::string out;
  std::string err;
  double seconds = 0;
};

inline std::vector<std::string> CoordinatorArgs(std::vector<std::string> more) {
  std::vector<std::string> args = {Binary("ds4-coordinator"), "--model", ModelPath()};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

// A whole run of a program with an empty stdin. code -1: it did not end within `limit`.
inline RunResult RunProgram(std::vector<std::string> args, milliseconds limit = seconds(60)) {
  const auto start = Clock::now();
  Process process(std::move(args));
  process.CloseStdin();
  RunResult result;
  result.code = process.Wait(limit);
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  // The pipes end with the process; their readers may be a moment behind.
  process.out().WaitFor("\x01", milliseconds(500));
  process.err().WaitFor("\x01", milliseconds(500));
  result.out = process.out().text();
  result.err = process.err().text();
  return result;
}

// The coordinator with our model.
inline RunResult RunCoordinator(std::vector<std::string> more, milliseconds limit = seconds(60)) {
  return RunProgram(CoordinatorArgs(std::move(more)), limit);
}

// A text of about `num_words` words that the model can read.
inline std::string LongText(int num_words) {
  static const char* const kWords[] = {"the",    "little", "dog",   "ran", "to",  "a",
                                       "big",    "red",    "house", "and", "saw", "her",
                                       "friend", "sit",    "by",    "it."};
  std::ostringstream text;
  uint32_t state = 7;
  for (int i = 0; i < num_words; ++i) {
    state = state * 1664525u + 1013904223u;
    text << kWords[state >> 28] << " ";
  }
  return text.str();
}

}  // namespace ds4
