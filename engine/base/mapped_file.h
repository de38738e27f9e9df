// A whole file mapped read-only: the one place that knows mmap. Bytes come from the page cache on
// first touch. The file must not shrink while it is mapped (the system would kill the process on a
// read past the end), so model files are replaced by rename, never rewritten in place.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "engine/base/status.h"

namespace ds4 {

// Move-only owner of the mapping. Thread-safe to read.
class MappedFile {
 public:
  // Errors: kNotFound no such file; kInvalidArgument not a regular file; kPermissionDenied;
  // kInternal.
  static Result<MappedFile> Open(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  // Empty for an empty file. Valid while this object lives.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> bytes_;
};

// Starts reading a part of a mapping into memory and returns at once; a hint, so it cannot fail.
// Without it a first touch anywhere reads as much as the device's read-ahead says, often megabytes.
void Prefetch(std::span<const std::byte> mapped);

}  // namespace ds4
