#include "coordinator/answer_printer.h"

#include <unistd.h>

#include <cerrno>

namespace ds4 {

void AnswerPrinter::Push(int32_t token) {
  if (reasoning_ && token == end_think_) {
    Print(decoder_.Finish());
    console_->Line("");
    reasoning_ = false;
    return;
  }
  Print(decoder_.Push(token));
}

void AnswerPrinter::Finish() {
  Print(decoder_.Finish());
  if (reasoning_) {
    console_->Line("");
  } else if (answer_.empty() || answer_.back() != '\n') {
    WriteStdout("\n");
  }
}

void AnswerPrinter::Print(const std::string& text) {
  if (reasoning_) {
    reasoning_text_ += text;
    console_->Write(console_->Dim(text));
  } else {
    answer_ += text;
    WriteStdout(text);
  }
}

void AnswerPrinter::WriteStdout(const std::string& text) {
  size_t done = 0;
  while (ok_ && done < text.size()) {
    const ssize_t n = write(STDOUT_FILENO, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    ok_ = n > 0;
    if (ok_) done += static_cast<size_t>(n);
  }
}

}  // namespace ds4
