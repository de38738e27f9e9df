// Lines of a descriptor, one at a time, giving way to signals: std::getline would restart or fail.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace ds4 {

class LineReader {
 public:
  explicit LineReader(int fd) : fd_(fd) {}
  // The next line without its newline; nothing at the end of input or when `stop` says so (asked
  // about every 100 ms). A last line without a newline counts.
  std::optional<std::string> Next(const std::function<bool()>& stop);
  bool at_end() const { return at_end_ && buffer_.empty(); }

 private:
  bool Fill(const std::function<bool()>& stop);

  int fd_;
  bool at_end_ = false;
  std::string buffer_;
};

}  // namespace ds4
