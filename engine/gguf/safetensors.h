// Maps a safetensors file and parses its header. Knows no model.
//
//   u64 header_bytes (little-endian) | JSON header | data
// The header maps names to {"dtype", "shape", "data_offsets": [begin, end] from the start of the
// data}, plus "__metadata__", text to text. Checked like GGUF files: sizes agree with dtype and
// shape, tensors lie inside the file and apart from each other, names are unique.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/mapped_file.h"
#include "engine/base/status.h"

namespace ds4 {

struct SafetensorInfo {
  std::string name;
  std::string dtype;           // as in the file: "F32", "BF16", "I64"
  std::vector<int64_t> shape;  // row-major: the last one is contiguous; empty for a scalar
  int64_t offset = 0;          // in the file, absolute
  int64_t size_bytes = 0;
  int64_t num_elems() const;
};

// Owns the mapping. Immutable after Open, so thread-safe to read.
class SafetensorsFile {
 public:
  static Result<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  // The same for bytes in memory, which must outlive the result.
  static Result<std::unique_ptr<SafetensorsFile>> Parse(std::span<const std::byte> bytes,
                                                        const std::string& name);

  const std::string& path() const { return path_; }
  // In order of their place in the file.
  std::span<const SafetensorInfo> tensors() const { return tensors_; }
  const SafetensorInfo* Find(std::string_view name) const;
  std::span<const std::byte> data(const SafetensorInfo& tensor) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafetensorsFile() = default;
  Status ParseHeader();
  Status CheckPlaces() const;

  std::string path_;
  MappedFile mapping_;
  std::span<const std::byte> bytes_;
  std::vector<SafetensorInfo> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace ds4
