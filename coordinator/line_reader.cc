#include "coordinator/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ds4 {
namespace {

constexpr int kAskEveryMs = 100;

}  // namespace

// True when bytes or the end came in; false when told to stop.
bool LineReader::Fill(const std::function<bool()>& stop) {
  while (!stop()) {
    pollfd waiting{fd_, POLLIN, 0};
    if (poll(&waiting, 1, kAskEveryMs) <= 0) continue;
    char bytes[4096];
    const ssize_t n = read(fd_, bytes, sizeof bytes);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) at_end_ = true;
    if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
    return true;
  }
  return false;
}

std::optional<std::string> LineReader::Next(const std::function<bool()>& stop) {
  while (buffer_.find('\n') == std::string::npos && !at_end_) {
    if (!Fill(stop)) return std::nullopt;
  }
  if (buffer_.empty()) return std::nullopt;
  const size_t newline = std::min(buffer_.find('\n'), buffer_.size());
  std::string line = buffer_.substr(0, newline);
  buffer_.erase(0, newline + 1);
  if (!line.empty() && line.back() == '\r') line.pop_back();
  return line;
}

}  // namespace ds4
