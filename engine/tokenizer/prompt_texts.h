// The fixed English texts of the prompt format, from data/ (DeepSeek-AI, MIT; see data/README.md).
#pragma once

#include <string_view>

namespace ds4::prompt_texts {

std::string_view EffortAbsoluteMaximum();
std::string_view EffortBeyondMaximum();
std::string_view Tools();           // holds "{tool_schemas}" once
std::string_view ResponseFormat();  // holds "{schema}" once

}  // namespace ds4::prompt_texts
