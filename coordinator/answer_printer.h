// Where the tokens of an answer go: whole characters of the answer to stdout as they come, the
// reasoning before it (with --think) dim to stderr.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/console.h"
#include "engine/tokenizer/tokenizer.h"

namespace ds4 {

class AnswerPrinter {
 public:
  // All outlive this. end_think: the token that ends the reasoning, or -1 when the answer starts at
  // once.
  AnswerPrinter(const Tokenizer& tokenizer, Console* console, int32_t end_think)
      : decoder_(tokenizer), console_(console), end_think_(end_think), reasoning_(end_think >= 0) {}

  void Push(int32_t token);
  // Text that is no token: straight to where tokens would go now.
  void Print(const std::string& text);
  // The rest of an incomplete character and, unless the text ends with one, a newline.
  void Finish();

  // False once stdout takes no more.
  bool ok() const { return ok_; }
  const std::string& answer() const { return answer_; }
  const std::string& reasoning() const { return reasoning_text_; }

 private:
  void WriteStdout(const std::string& text);

  StreamDecoder decoder_;
  Console* console_;
  int32_t end_think_;
  bool reasoning_;
  bool ok_ = true;
  std::string answer_;
  std::string reasoning_text_;
};

}  // namespace ds4
