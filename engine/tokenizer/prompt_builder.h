// Collects a prompt's segments: joins neighbouring plain texts, and finds special tokens only in
// text that is our own.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "engine/tokenizer/chat_template.h"

namespace ds4 {

class PromptBuilder {
 public:
  void Special(std::string_view token);
  // Text from outside; stays plain whatever it holds.
  void Plain(std::string_view text);
  // Text of the format itself, in which <think>, </think> and ｜DSML｜ are special tokens.
  void Template(std::string_view text);
  // A template with one `hole` that takes `filling` from outside.
  void TemplateWith(std::string_view text, std::string_view hole, std::string_view filling);

  std::vector<PromptSegment> Take() { return std::move(segments_); }

 private:
  std::vector<PromptSegment> segments_;
};

}  // namespace ds4
