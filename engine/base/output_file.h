// A file that appears under its name only when it is complete: bytes go to a temporary neighbour,
// which Commit renames. A crash or an error leaves an older file of that name as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/base/status.h"

namespace ds4 {

// Move-only; not thread-safe. The destructor removes the temporary file unless Commit succeeded.
class OutputFile {
 public:
  // Errors: kNotFound no such folder; kPermissionDenied; kInternal with the system's words.
  static Result<OutputFile> Create(const std::string& path);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) = delete;
  OutputFile(const OutputFile&) = delete;
  ~OutputFile();

  // Appends. Errors: kResourceExhausted the disk is full; kInternal.
  Status Write(std::span<const std::byte> bytes);
  int64_t bytes_written() const { return bytes_written_; }
  // Flushes to the disk, then renames. Nothing may be written afterwards.
  Status Commit();

 private:
  OutputFile(std::string path, std::string temporary, int fd);
  Status Flush();

  std::string path_;
  std::string temporary_;  // empty once committed or moved from
  int fd_ = -1;
  int64_t bytes_written_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace ds4
