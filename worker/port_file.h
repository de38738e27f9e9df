// Tells a launcher which ports were taken.
#pragma once

#include <cstdint>
#include <string>

#include "engine/base/status.h"

namespace ds4 {

// Writes "control_port data_port\n" to `path` in one go: a reader sees the whole line or no file.
// kInvalidArgument: the file cannot be written there.
Status WritePortFile(const std::string& path, uint16_t control_port, uint16_t data_port);

}  // namespace ds4
