#include "engine/tokenizer/prompt_texts.h"

namespace ds4::prompt_texts {
namespace {
#include "prompt_texts.inc"
}  // namespace

std::string_view EffortAbsoluteMaximum() { return k_effort_absolute_maximum; }
std::string_view EffortBeyondMaximum() { return k_effort_beyond_maximum; }
std::string_view Tools() { return k_tools; }
std::string_view ResponseFormat() { return k_response_format; }

}  // namespace ds4::prompt_texts
