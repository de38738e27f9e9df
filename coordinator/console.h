// What people see: everything but the answer goes to stderr through here. On a terminal with colour
// and progress bars, on a pipe as few plain lines.
// Thread: the main thread only.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace ds4 {

class Console {
 public:
  // Writes to `fd` (borrowed). Colour only on a terminal and without NO_COLOR.
  explicit Console(int fd);

  bool is_terminal() const { return is_terminal_; }
  int columns() const;

  void Line(const std::string& text);   // plain
  void Note(const std::string& text);   // dim: statistics, what is going on
  void Error(const std::string& text);  // "error: text", red
  void Write(const std::string& raw);   // as it is, no newline added
  std::string Dim(const std::string& text) const { return Paint("2", text); }

 private:
  std::string Paint(const char* code, const std::string& text) const;

  int fd_;
  bool is_terminal_;
  bool colour_;
};

// One bar for each label, redrawn in place. On a pipe it draws nothing: callers print one line at
// the end instead.
class ProgressBars {
 public:
  // `console` outlives this. unit: what done and total count ("tokens"); "bytes" prints as MiB.
  ProgressBars(Console* console, std::vector<std::string> labels, std::string unit);
  ~ProgressBars();  // Clear
  ProgressBars(const ProgressBars&) = delete;
  ProgressBars& operator=(const ProgressBars&) = delete;

  void Update(int index, int64_t done, int64_t total);
  // Takes the bars off the terminal.
  void Clear();

 private:
  void Draw();
  std::string Bar(int index) const;

  Console* console_;
  std::vector<std::string> labels_;
  std::string unit_;
  std::vector<int64_t> done_, total_;
  std::chrono::steady_clock::time_point last_draw_{};
  bool drawn_ = false;
};

// "[#####-----]" of `width` cells; total 0 is an empty bar.
std::string BarText(int64_t done, int64_t total, int width);

}  // namespace ds4
