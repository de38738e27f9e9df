#include "engine/tensor/dtype.h"

#include <array>
#include <cctype>

#include "engine/base/check.h"

namespace ds4 {
namespace {

constexpr std::array<DTypeInfo, static_cast<size_t>(DType::kCount)> kTable = {{
    {DType::kF32, "F32", 0, 1, 4},
    {DType::kF16, "F16", 1, 1, 2},
    {DType::kBF16, "BF16", 30, 1, 2},
    {DType::kF64, "F64", 28, 1, 8},
    {DType::kI8, "I8", 24, 1, 1},
    {DType::kI16, "I16", 25, 1, 2},
    {DType::kI32, "I32", 26, 1, 4},
    {DType::kI64, "I64", 27, 1, 8},
    {DType::kQ4_0, "Q4_0", 2, 32, 18},
    {DType::kQ4_1, "Q4_1", 3, 32, 20},
    {DType::kQ5_0, "Q5_0", 6, 32, 22},
    {DType::kQ5_1, "Q5_1", 7, 32, 24},
    {DType::kQ8_0, "Q8_0", 8, 32, 34},
    {DType::kQ8_1, "Q8_1", 9, 32, 36},
    {DType::kQ2_K, "Q2_K", 10, 256, 84},
    {DType::kQ3_K, "Q3_K", 11, 256, 110},
    {DType::kQ4_K, "Q4_K", 12, 256, 144},
    {DType::kQ5_K, "Q5_K", 13, 256, 176},
    {DType::kQ6_K, "Q6_K", 14, 256, 210},
    {DType::kQ8_K, "Q8_K", 15, 256, 292},
    {DType::kIQ1_S, "IQ1_S", 19, 256, 50},
    {DType::kIQ1_M, "IQ1_M", 29, 256, 56},
    {DType::kIQ2_XXS, "IQ2_XXS", 16, 256, 66},
    {DType::kIQ2_XS, "IQ2_XS", 17, 256, 74},
    {DType::kIQ2_S, "IQ2_S", 22, 256, 82},
    {DType::kIQ3_XXS, "IQ3_XXS", 18, 256, 98},
    {DType::kIQ3_S, "IQ3_S", 21, 256, 110},
    {DType::kIQ4_NL, "IQ4_NL", 20, 32, 18},
    {DType::kIQ4_XS, "IQ4_XS", 23, 256, 136},
    {DType::kTQ1_0, "TQ1_0", 34, 256, 54},
    {DType::kTQ2_0, "TQ2_0", 35, 256, 66},
    {DType::kMXFP4, "MXFP4", 39, 32, 17},
    {DType::kNVFP4, "NVFP4", 40, 64, 36},
}};

constexpr bool InOrder() {
  for (size_t i = 0; i < kTable.size(); ++i) {
    if (static_cast<size_t>(kTable[i].dtype) != i) return false;
  }
  return true;
}
static_assert(InOrder(), "kTable is indexed by DType");

}  // namespace

const DTypeInfo& Info(DType dtype) {
  CHECK(dtype < DType::kCount);
  return kTable[static_cast<size_t>(dtype)];
}

std::optional<DType> DTypeFromGgmlId(uint32_t ggml_id) {
  for (const DTypeInfo& info : kTable) {
    if (info.ggml_id == ggml_id) return info.dtype;
  }
  return std::nullopt;
}

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const DTypeInfo& info : kTable) {
    if (info.name.size() != name.size()) continue;
    bool same = true;
    for (size_t i = 0; i < name.size(); ++i) {
      same = same && std::toupper(static_cast<unsigned char>(name[i])) == info.name[i];
    }
    if (same) return info.dtype;
  }
  return std::nullopt;
}

int64_t BytesFor(DType dtype, int64_t num_elems) {
  const DTypeInfo& info = Info(dtype);
  CHECK(num_elems >= 0 && num_elems % info.block_elems == 0)
      << num_elems << " values of " << info.name;
  return num_elems / info.block_elems * info.block_bytes;
}

}  // namespace ds4
