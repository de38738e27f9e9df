// ds4-gguf check: is this file complete and sane enough to serve.
#pragma once

#include <ostream>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {

// Reads every tensor: scales and plain floats must be finite, expert ids in range. For architecture
// deepseek4 also the configuration and that all its tensors are there with the right shapes; other
// architectures are reported as such and only read. Writes one line per problem, up to 20, and a
// summary to `out`; progress to `progress`.
// Errors: kDataLoss how many problems were found.
Status CheckModelFile(const GgufFile& file, std::ostream& out, std::ostream& progress);

}  // namespace ds4
