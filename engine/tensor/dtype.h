// Element types of tensors: their names, ggml ids and block sizes (spec 4.2, 4.5).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ds4 {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF64,
  kI8,
  kI16,
  kI32,
  kI64,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ8_1,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ8_K,
  kIQ1_S,
  kIQ1_M,
  kIQ2_XXS,
  kIQ2_XS,
  kIQ2_S,
  kIQ3_XXS,
  kIQ3_S,
  kIQ4_NL,
  kIQ4_XS,
  kTQ1_0,
  kTQ2_0,
  kMXFP4,
  kNVFP4,
  kCount
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // "Q8_0"
  uint32_t ggml_id;       // as written in GGUF files
  int64_t block_elems;    // values in one block
  int64_t block_bytes;    // bytes of one block
};

const DTypeInfo& Info(DType dtype);
// The type with this ggml id, or nothing for an id we do not know.
std::optional<DType> DTypeFromGgmlId(uint32_t ggml_id);
// The type with this name in any case ("q8_0"), or nothing.
std::optional<DType> DTypeFromName(std::string_view name);
// Bytes of `num_elems` values; num_elems must be whole blocks (CHECK).
int64_t BytesFor(DType dtype, int64_t num_elems);

}  // namespace ds4
