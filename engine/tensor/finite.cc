#include "engine/tensor/finite.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

enum class ScaleKind { kNone, kF16, kF32, kF64, kBF16, kE8M0, kE4M3, kIQ1_M };

// Where the scales lie in a block: `count` of them from byte `offset`, side by side.
struct ScaleLayout {
  ScaleKind kind = ScaleKind::kNone;
  int offset = 0;
  int count = 1;
};

ScaleLayout LayoutOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kQ8_K:
      return {ScaleKind::kF32};
    case DType::kF64:
      return {ScaleKind::kF64};
    case DType::kBF16:
      return {ScaleKind::kBF16};
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ8_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {ScaleKind::kF16, 0, 2};
    case DType::kQ2_K:
      return {ScaleKind::kF16, 80, 2};
    case DType::kQ3_K:
      return {ScaleKind::kF16, 108};
    case DType::kQ6_K:
      return {ScaleKind::kF16, 208};
    case DType::kTQ1_0:
      return {ScaleKind::kF16, 52};
    case DType::kTQ2_0:
      return {ScaleKind::kF16, 64};
    case DType::kMXFP4:
      return {ScaleKind::kE8M0};
    case DType::kNVFP4:
      return {ScaleKind::kE4M3, 0, 4};
    case DType::kIQ1_M:
      return {ScaleKind::kIQ1_M, 48};
    case DType::kI8:
    case DType::kI16:
    case DType::kI32:
    case DType::kI64:
      return {ScaleKind::kNone};
    default:  // F16 itself, and the formats that start with their scale
      return {ScaleKind::kF16};
  }
}

// IQ1_M spreads the four nibbles of its f16 over the top of four u16.
uint16_t ScaleBitsIQ1_M(const std::byte* at) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    bits |= static_cast<uint32_t>(LoadLittleEndian<uint16_t>(at + 2 * i) >> 12) << (4 * i);
  }
  return static_cast<uint16_t>(bits);
}

// Bytes of one scale.
int ScaleBytes(ScaleKind kind) {
  switch (kind) {
    case ScaleKind::kF64:
      return 8;
    case ScaleKind::kF32:
      return 4;
    case ScaleKind::kF16:
    case ScaleKind::kBF16:
      return 2;
    default:
      return 1;
  }
}

double ScaleAt(ScaleKind kind, const std::byte* at) {
  switch (kind) {
    case ScaleKind::kF16:
      return F16ToF32(LoadLittleEndian<uint16_t>(at));
    case ScaleKind::kBF16:
      return BF16ToF32(LoadLittleEndian<uint16_t>(at));
    case ScaleKind::kF32:
      return LoadLittleEndian<float>(at);
    case ScaleKind::kF64:
      return LoadLittleEndian<double>(at);
    case ScaleKind::kE8M0:
      return *at == std::byte{0xff} ? std::nan("") : 0;
    case ScaleKind::kE4M3:
      return (*at & std::byte{0x7f}) == std::byte{0x7f} ? std::nan("") : 0;
    case ScaleKind::kIQ1_M:
      return F16ToF32(ScaleBitsIQ1_M(at));
    case ScaleKind::kNone:
      break;
  }
  return 0;
}

}  // namespace

Status CheckFinite(DType dtype, std::span<const std::byte> bytes) {
  const auto block_bytes = static_cast<size_t>(Info(dtype).block_bytes);
  if (bytes.size() % block_bytes != 0) {
    return InvalidArgumentError(StrCat(bytes.size(), " bytes are no whole number of blocks of ",
                                       Info(dtype).name, ", ", block_bytes, " bytes each"));
  }
  const ScaleLayout layout = LayoutOf(dtype);
  if (layout.kind == ScaleKind::kNone) return OkStatus();
  const int step = ScaleBytes(layout.kind);
  for (size_t block = 0; block < bytes.size() / block_bytes; ++block) {
    const std::byte* at = bytes.data() + block * block_bytes + layout.offset;
    for (int i = 0; i < layout.count; ++i) {
      const double scale = ScaleAt(layout.kind, at + i * step);
      if (std::isfinite(scale)) continue;
      return Status(StatusCode::kDataLoss,
                    StrCat("block ", block, " of ", Info(dtype).name, " holds ", scale,
                           " where a finite number must be"));
    }
  }
  return OkStatus();
}

}  // namespace ds4
