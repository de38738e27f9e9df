// One line per record on stderr, with rank and epoch where a group is formed.
#pragma once

#include <cstdint>
#include <string>

namespace ds4 {

// Whose record it is. rank -1: no group.
struct LogContext {
  int rank = -1;
  uint64_t epoch = 0;
};

// Call once at start, before the first record. verbose: debug records too. Colours on terminals
// only.
void InitLog(bool verbose);

// Thread-safe. Control characters in `text` (peers choose some of it) become spaces.
void LogDebug(const LogContext& who, const std::string& text);
void LogInfo(const LogContext& who, const std::string& text);
void LogWarning(const LogContext& who, const std::string& text);
void LogError(const LogContext& who, const std::string& text);

}  // namespace ds4
