// Writes GGUF version 3 files as a stream: metadata and tensor directory first, then the data of
// the tensors in their order, in pieces of any size. The layout is drawn in gguf_reader.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/output_file.h"
#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/tensor/dtype.h"

namespace ds4 {

// Call order: Add* in any order, Begin, Append until every tensor is full, Finish. Not thread-safe.
// Without Finish no file appears under the path.
class GgufWriter {
 public:
  // Metadata. A key must be new (CHECK) and 1 to 65535 bytes long.
  void AddU32(std::string_view key, uint32_t value);
  void AddF32(std::string_view key, float value);
  void AddBool(std::string_view key, bool value);
  void AddString(std::string_view key, std::string_view value);
  void AddI32Array(std::string_view key, std::span<const int32_t> items);
  void AddF32Array(std::string_view key, std::span<const float> items);
  void AddStringArray(std::string_view key, std::span<const std::string> items);

  // dims in GGUF order. kInvalidArgument: the name is too long or known, a dim is below 1, the
  // first dim is no whole number of blocks, or the size overflows.
  Status AddTensor(const std::string& name, DType dtype, std::vector<int64_t> dims);

  // Header, metadata, tensor directory and the padding behind them: a whole file but for the data,
  // which is what GgufContent::kDirectory asks for.
  std::vector<std::byte> Directory() const;

  // Writes the header; from here on nothing can be added.
  Status Begin(const std::string& path);
  // The next bytes of tensor `name`, which must be the first one that is not full
  // (kInvalidArgument).
  Status Append(std::string_view name, std::span<const std::byte> bytes);
  // kFailedPrecondition: a tensor is not full (named, with both sizes).
  Status Finish();

  std::span<const TensorInfo> tensors() const { return tensors_; }  // offsets from the data section

 private:
  void AddKey(std::string_view key, GgufType type);
  template <typename T>
  void Put(T value);
  void PutString(std::string_view text);
  void PutDirectory(std::vector<std::byte>* out) const;
  Status Pad();

  std::vector<std::string> keys_;
  std::vector<std::byte> key_bytes_;
  std::vector<TensorInfo> tensors_;
  std::optional<OutputFile> file_;
  size_t current_ = 0;         // the first tensor that is not full
  int64_t current_bytes_ = 0;  // what it has so far
};

}  // namespace ds4
