// ds4-gguf inspect: what is in a file, for people.
#pragma once

#include <ostream>

#include "engine/gguf/gguf_reader.h"

namespace ds4 {

// Metadata, tensor table and totals per element type.
void PrintFile(const GgufFile& file, std::ostream& out);
// The same as one JSON object, for scripts.
void PrintFileJson(const GgufFile& file, std::ostream& out);

}  // namespace ds4
