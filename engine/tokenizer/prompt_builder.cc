#include "engine/tokenizer/prompt_builder.h"

#include "engine/base/check.h"
#include "engine/tokenizer/special_text.h"

namespace ds4 {

void PromptBuilder::Special(std::string_view token) {
  segments_.push_back({std::string(token), true});
}

void PromptBuilder::Plain(std::string_view text) {
  if (text.empty()) return;
  if (segments_.empty() || segments_.back().is_special) segments_.push_back({"", false});
  segments_.back().text += text;
}

void PromptBuilder::Template(std::string_view text) {
  while (!text.empty()) {
    size_t first = text.size();
    std::string_view found;
    for (const std::string_view token :
         {special_text::kThink, special_text::kEndThink, special_text::kDsml}) {
      const size_t pos = text.find(token);
      if (pos < first) {
        first = pos;
        found = token;
      }
    }
    Plain(text.substr(0, first));
    if (!found.empty()) Special(found);
    text.remove_prefix(first + found.size());
  }
}

void PromptBuilder::TemplateWith(std::string_view text, std::string_view hole,
                                 std::string_view filling) {
  const size_t pos = text.find(hole);
  CHECK(pos != std::string_view::npos) << "no " << hole << " in the template";
  Template(text.substr(0, pos));
  Plain(filling);
  Template(text.substr(pos + hole.size()));
}

}  // namespace ds4
