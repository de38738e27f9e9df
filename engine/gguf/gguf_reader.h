// Maps a GGUF file and parses its header, metadata and tensor directory. Knows no model.
//
//   offset 0   u32 magic "GGUF" | u32 version (2 or 3) | u64 num_tensors | u64 num_keys
//   then       num_keys times:    string key | u32 type | value
//   then       num_tensors times: string name | u32 num_dims | u64 dims[] | u32 type | u64 offset
//   then       zeros up to the next multiple of general.alignment (32 when absent): the data
//   section;
//              tensor offsets count from here and are multiples of the alignment; every tensor,
//              the last one too, is padded to it
// All little-endian. A string is a u64 length and its bytes; an array is u32 type, u64 count,
// items.
//
// Every count, length, offset and product is checked before use: a hostile file gives an error,
// never a crash, an allocation larger than the file justifies, or a tensor that points outside the
// file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/base/mapped_file.h"
#include "engine/base/status.h"
#include "engine/tensor/dtype.h"

namespace ds4 {

// Value types of metadata, with the numbers of the format.
enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
  kCount = 13
};
// "u32", "string", "array" and so on.
std::string_view GgufTypeName(GgufType type);

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;  // GGUF order: dims[0] contiguous; 1 to 4 of them, each at least 1
  int64_t offset = 0;         // in the file, absolute
  int64_t size_bytes = 0;
  int64_t num_elems() const;
};

// One metadata key for people to read.
struct GgufKeyText {
  std::string key;
  std::string type;   // "u32", "array of string"
  std::string value;  // long strings and arrays are cut, with the full length said
};

// Whether a file must hold the tensors' data, or may end after the directory: enough to plan with.
enum class GgufContent { kComplete, kDirectory };

// Owns the mapping. Immutable after Open, so thread-safe to read.
class GgufFile {
 public:
  // Errors: those of MappedFile::Open; kInvalidArgument names what is wrong in the file and where.
  static Result<std::unique_ptr<GgufFile>> Open(const std::string& path,
                                                GgufContent content = GgufContent::kComplete);
  // The same for bytes in memory, which must outlive the result; `name` stands in for the path.
  static Result<std::unique_ptr<GgufFile>> Parse(std::span<const std::byte> bytes,
                                                 const std::string& name,
                                                 GgufContent content = GgufContent::kComplete);

  // The same for bytes that the result takes over.
  static Result<std::unique_ptr<GgufFile>> Adopt(std::vector<std::byte> bytes,
                                                 const std::string& name,
                                                 GgufContent content = GgufContent::kComplete);

  const std::string& path() const { return path_; }
  int64_t file_bytes() const { return static_cast<int64_t>(bytes_.size()); }
  uint32_t version() const { return version_; }
  int64_t alignment() const { return alignment_; }
  // All bytes up to the end of the tensor directory: everything but the data.
  std::span<const std::byte> header() const {
    return bytes_.first(static_cast<size_t>(header_bytes_));
  }

  std::span<const TensorInfo> tensors() const { return tensors_; }
  // nullptr when absent.
  const TensorInfo* FindTensor(std::string_view name) const;
  // Into the mapping; valid while this object lives. `tensor` must be one of tensors(). Empty where
  // a file opened as kDirectory does not hold the tensor.
  std::span<const std::byte> data(const TensorInfo& tensor) const;

  bool HasKey(std::string_view key) const { return key_index_.contains(key); }
  // Integers accept any integer type that holds the value, floats f32 and f64.
  // Errors: kNotFound no such key; kInvalidArgument another type (both named) or out of range.
  Result<int64_t> GetInt(std::string_view key) const;
  Result<double> GetFloat(std::string_view key) const;
  Result<bool> GetBool(std::string_view key) const;
  Result<std::string> GetString(std::string_view key) const;
  Result<std::vector<int64_t>> GetIntArray(std::string_view key) const;
  Result<std::vector<double>> GetFloatArray(std::string_view key) const;
  Result<std::vector<std::string>> GetStringArray(std::string_view key) const;
  // True for a key that holds an array; false for others and for no such key.
  bool IsArray(std::string_view key) const;
  // Every key in file order.
  std::vector<GgufKeyText> KeyTexts() const;

 private:
  friend class GgufParser;

  // Values stay in the mapping, checked once at parse; `type` is the item type of an array.
  struct Value {
    GgufType type = GgufType::kU8;
    bool is_array = false;
    int64_t count = 1;
    int64_t offset = 0;  // of the first item, absolute
  };
  struct Key {
    std::string name;
    Value value;
  };

  GgufFile() = default;
  Result<const Value*> Find(std::string_view key, bool want_array, std::string_view wanted) const;
  Result<int64_t> ReadInt(std::string_view key, const Value& value, int64_t index) const;
  Result<double> ReadFloat(std::string_view key, const Value& value, int64_t index) const;
  std::string_view StringAt(int64_t offset) const;
  std::string ValueText(const Value& value) const;
  std::string ItemText(GgufType type, int64_t offset) const;

  std::string path_;
  MappedFile mapping_;            // empty unless made by Open
  std::vector<std::byte> owned_;  // empty unless made by Adopt
  std::span<const std::byte> bytes_;
  uint32_t version_ = 0;
  int64_t alignment_ = 0;
  int64_t header_bytes_ = 0;
  std::vector<Key> keys_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, size_t> key_index_;     // views into keys_
  std::unordered_map<std::string_view, size_t> tensor_index_;  // views into tensors_
};

}  // namespace ds4
