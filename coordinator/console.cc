#include "coordinator/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

constexpr auto kRedrawEvery = std::chrono::milliseconds(50);
constexpr int kBarCells = 30;

}  // namespace

Console::Console(int fd)
    : fd_(fd),
      is_terminal_(isatty(fd) == 1),
      colour_(is_terminal_ && std::getenv("NO_COLOR") == nullptr) {}

int Console::columns() const {
  winsize size{};
  if (ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

std::string Console::Paint(const char* code, const std::string& text) const {
  return colour_ && !text.empty() ? StrCat("\x1b[", code, "m", text, "\x1b[0m") : text;
}

void Console::Line(const std::string& text) { Write(text + "\n"); }
void Console::Note(const std::string& text) { Write(Dim(text) + "\n"); }
void Console::Error(const std::string& text) { Write(Paint("1;31", "error:") + " " + text + "\n"); }

void Console::Write(const std::string& raw) {
  size_t done = 0;
  while (done < raw.size()) {
    const ssize_t n = write(fd_, raw.data() + done, raw.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nobody reads our messages any more; the work itself goes on
    done += static_cast<size_t>(n);
  }
}

std::string BarText(int64_t done, int64_t total, int width) {
  const int64_t shown = total > 0 ? std::clamp<int64_t>(done, 0, total) : 0;
  const int filled = total > 0 ? static_cast<int>(static_cast<double>(shown) * width / total) : 0;
  return "[" + std::string(filled, '#') + std::string(width - filled, '-') + "]";
}

ProgressBars::ProgressBars(Console* console, std::vector<std::string> labels, std::string unit)
    : console_(console),
      labels_(std::move(labels)),
      unit_(std::move(unit)),
      done_(labels_.size()),
      total_(labels_.size()) {}

ProgressBars::~ProgressBars() { Clear(); }

void ProgressBars::Update(int index, int64_t done, int64_t total) {
  done_[index] = done;
  total_[index] = total;
  if (!console_->is_terminal()) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - last_draw_ < kRedrawEvery && done < total) return;
  last_draw_ = now;
  Draw();
}

std::string ProgressBars::Bar(int index) const {
  if (total_[index] == 0) return labels_[index];
  const std::string count =
      unit_ == "bytes" ? StrCat(HumanBytes(done_[index]), " of ", HumanBytes(total_[index]))
                       : StrCat(done_[index], " of ", total_[index], " ", unit_);
  const int room = console_->columns() - static_cast<int>(labels_[index].size() + count.size()) - 5;
  const int cells = std::clamp(room, 0, kBarCells);
  std::string line = labels_[index];
  if (cells >= 5) line += " " + BarText(done_[index], total_[index], cells);
  return line + " " + count;
}

void ProgressBars::Draw() {
  std::string text;
  if (drawn_) text += StrCat("\x1b[", labels_.size(), "A");  // back to the first bar's line
  for (size_t i = 0; i < labels_.size(); ++i) {
    text += "\r\x1b[2K" + Bar(static_cast<int>(i)) + "\n";
  }
  console_->Write(text);
  drawn_ = true;
}

void ProgressBars::Clear() {
  if (!drawn_) return;
  console_->Write(StrCat("\x1b[", labels_.size(), "A\r\x1b[J"));
  drawn_ = false;
}

}  // namespace ds4
