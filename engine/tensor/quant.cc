// One plain function per block format, in the notation of spec 4.5: block bytes in, floats out. The
// order of the float operations is that of ggml's reference, so results agree bit for bit.
#include "engine/tensor/quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/tensor/iq2_xxs_grid.h"

namespace ds4 {
namespace {

// FP4 E2M1, by code; a negative zero reads as zero.
constexpr float kE2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
// The 16 levels of IQ4_NL and IQ4_XS.
constexpr float kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

int Byte(const std::byte* at) { return std::to_integer<int>(*at); }
int SignedByte(const std::byte* at) { return static_cast<int8_t>(std::to_integer<uint8_t>(*at)); }
float F16At(const std::byte* at) { return F16ToF32(LoadLittleEndian<uint16_t>(at)); }

void DecodeF32(const std::byte* block, float* x) { *x = LoadLittleEndian<float>(block); }
void DecodeF16(const std::byte* block, float* x) { *x = F16At(block); }
void DecodeBF16(const std::byte* block, float* x) {
  *x = BF16ToF32(LoadLittleEndian<uint16_t>(block));
}

void DecodeQ8_0(const std::byte* block, float* x) {
  const float d = F16At(block);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(SignedByte(block + 2 + i)) * d;
}

void DecodeQ4_0(const std::byte* block, float* x) {
  const float d = F16At(block);
  for (int i = 0; i < 16; ++i) {
    const int b = Byte(block + 2 + i);
    x[i] = static_cast<float>((b & 15) - 8) * d;
    x[i + 16] = static_cast<float>((b >> 4) - 8) * d;
  }
}

void DecodeQ4_1(const std::byte* block, float* x) {
  const float d = F16At(block);
  const float m = F16At(block + 2);
  for (int i = 0; i < 16; ++i) {
    const int b = Byte(block + 4 + i);
    x[i] = static_cast<float>(b & 15) * d + m;
    x[i + 16] = static_cast<float>(b >> 4) * d + m;
  }
}

// The 5-bit code of value i: four bits in a nibble, the fifth in bit i of `high`.
int FiveBits(uint32_t high, const std::byte* nibbles, int i) {
  const int b = Byte(nibbles + i % 16);
  return (i < 16 ? b & 15 : b >> 4) | static_cast<int>(high >> i & 1) << 4;
}

void DecodeQ5_0(const std::byte* block, float* x) {
  const float d = F16At(block);
  const auto high = LoadLittleEndian<uint32_t>(block + 2);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(FiveBits(high, block + 6, i) - 16) * d;
}

void DecodeQ5_1(const std::byte* block, float* x) {
  const float d = F16At(block);
  const float m = F16At(block + 2);
  const auto high = LoadLittleEndian<uint32_t>(block + 4);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(FiveBits(high, block + 8, i)) * d + m;
}

void DecodeMXFP4(const std::byte* block, float* x) {
  const int exponent = Byte(block) - 127;
  for (int i = 0; i < 16; ++i) {
    const int b = Byte(block + 1 + i);
    x[i] = std::ldexp(kE2M1[b & 15], exponent);
    x[i + 16] = std::ldexp(kE2M1[b >> 4], exponent);
  }
}

// An unsigned E4M3 scale; 0x7f, the NaN of the format, reads as zero like in ggml.
float UE4M3(int bits) {
  if (bits == 0x7f) return 0;
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  if (exponent == 0) return std::ldexp(static_cast<float>(mantissa), -9);
  return std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

void DecodeNVFP4(const std::byte* block, float* x) {
  for (int sub = 0; sub < 4; ++sub) {
    const float d = UE4M3(Byte(block + sub));
    for (int i = 0; i < 8; ++i) {
      const int b = Byte(block + 4 + 8 * sub + i);
      x[16 * sub + i] = kE2M1[b & 15] * d;
      x[16 * sub + i + 8] = kE2M1[b >> 4] * d;
    }
  }
}

void DecodeQ2_K(const std::byte* block, float* x) {
  const std::byte* scales = block;
  const std::byte* codes = block + 16;
  const float d = F16At(block + 80);
  const float dmin = F16At(block + 82);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128;
    const int j = i / 32 % 4;
    const int code = Byte(codes + 32 * half + i % 32) >> (2 * j) & 3;
    const int s = Byte(scales + i / 16);
    const float scale = d * static_cast<float>(s & 15);
    const float min = dmin * static_cast<float>(s >> 4);
    x[i] = scale * static_cast<float>(code) - min;
  }
}

// Q3_K packs 16 signed 6-bit scales in 12 bytes: low nibbles first, then the upper bit pairs.
int ScaleQ3_K(const std::byte* scales, int b) {
  const int low = b < 8 ? Byte(scales + b) & 15 : Byte(scales + b - 8) >> 4;
  const int high = Byte(scales + 8 + b % 4) >> (2 * (b / 4)) & 3;
  return (low | high << 4) - 32;
}

void DecodeQ3_K(const std::byte* block, float* x) {
  const std::byte* high_bits = block;
  const std::byte* codes = block + 32;
  const std::byte* scales = block + 96;
  const float d = F16At(block + 108);
  for (int i = 0; i < 256; ++i) {
    const int low = Byte(codes + 32 * (i / 128) + i % 32) >> (2 * (i / 32 % 4)) & 3;
    const bool high = (Byte(high_bits + i % 32) >> (i / 32) & 1) != 0;
    const float scale = d * static_cast<float>(ScaleQ3_K(scales, i / 16));
    x[i] = scale * static_cast<float>(low - (high ? 0 : 4));
  }
}

struct ScaleMin {
  int scale;
  int min;
};

// Q4_K and Q5_K pack eight 6-bit scales and mins in 12 bytes.
ScaleMin ScaleMinK(const std::byte* s, int j) {
  if (j < 4) return {Byte(s + j) & 63, Byte(s + j + 4) & 63};
  return {(Byte(s + j + 4) & 15) | (Byte(s + j - 4) >> 6) << 4,
          (Byte(s + j + 4) >> 4) | (Byte(s + j) >> 6) << 4};
}

// Q4_K, and Q5_K where `high_bits` holds each value's fifth bit (nullptr: there is none).
void DecodeK45(const std::byte* block, const std::byte* high_bits, const std::byte* codes,
               float* x) {
  const float d = F16At(block);
  const float dmin = F16At(block + 2);
  for (int j = 0; j < 8; ++j) {
    const ScaleMin sm = ScaleMinK(block + 4, j);
    const float scale = d * static_cast<float>(sm.scale);
    const float min = dmin * static_cast<float>(sm.min);
    for (int l = 0; l < 32; ++l) {
      const int b = Byte(codes + 32 * (j / 2) + l);
      int code = j % 2 == 0 ? b & 15 : b >> 4;
      if (high_bits != nullptr) code += (Byte(high_bits + l) >> j & 1) * 16;
      x[32 * j + l] = scale * static_cast<float>(code) - min;
    }
  }
}

void DecodeQ4_K(const std::byte* block, float* x) { DecodeK45(block, nullptr, block + 16, x); }
void DecodeQ5_K(const std::byte* block, float* x) { DecodeK45(block, block + 16, block + 48, x); }

void DecodeQ6_K(const std::byte* block, float* x) {
  const float d = F16At(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128;
    const int quarter = i / 32 % 4;
    const int l = i % 32;
    const int low = Byte(block + 64 * half + l + 32 * (quarter % 2)) >> (quarter < 2 ? 0 : 4) & 15;
    const int high = Byte(block + 128 + 32 * half + l) >> (2 * quarter) & 3;
    const int scale = SignedByte(block + 192 + i / 16);
    x[i] = d * static_cast<float>(scale) * static_cast<float>((low | high << 4) - 32);
  }
}

void DecodeQ8_K(const std::byte* block, float* x) {
  const auto d = LoadLittleEndian<float>(block);
  for (int i = 0; i < 256; ++i) x[i] = d * static_cast<float>(SignedByte(block + 4 + i));
}

void DecodeIQ2_XXS(const std::byte* block, float* x) {
  const float d = F16At(block);
  for (int group = 0; group < 8; ++group) {
    const std::byte* indices = block + 2 + 8 * group;
    const auto packed = LoadLittleEndian<uint32_t>(indices + 4);
    const float scale = d * (0.5f + static_cast<float>(packed >> 28)) * 0.25f;
    for (int octet = 0; octet < 4; ++octet) {
      const uint64_t grid = kIq2XxsGrid[static_cast<size_t>(Byte(indices + octet))];
      const uint32_t code = packed >> (7 * octet) & 127;
      const uint32_t signs = code | static_cast<uint32_t>(std::popcount(code) & 1) << 7;
      for (int j = 0; j < 8; ++j) {
        const float magnitude = scale * static_cast<float>(grid >> (8 * j) & 255);
        x[32 * group + 8 * octet + j] = (signs >> j & 1) != 0 ? -magnitude : magnitude;
      }
    }
  }
}

void DecodeIQ4_NL(const std::byte* block, float* x) {
  const float d = F16At(block);
  for (int i = 0; i < 16; ++i) {
    const int b = Byte(block + 2 + i);
    x[i] = d * kIq4Levels[b & 15];
    x[i + 16] = d * kIq4Levels[b >> 4];
  }
}

void DecodeIQ4_XS(const std::byte* block, float* x) {
  const float d = F16At(block);
  const int scales_high = LoadLittleEndian<uint16_t>(block + 2);
  for (int sub = 0; sub < 8; ++sub) {
    const int low = Byte(block + 4 + sub / 2) >> (4 * (sub % 2)) & 15;
    const int high = scales_high >> (2 * sub) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    for (int i = 0; i < 16; ++i) {
      const int b = Byte(block + 8 + 16 * sub + i);
      x[32 * sub + i] = scale * kIq4Levels[b & 15];
      x[32 * sub + i + 16] = scale * kIq4Levels[b >> 4];
    }
  }
}

using DecodeBlock = void (*)(const std::byte* block, float* x);

// nullptr for a type without a conversion here.
DecodeBlock DecoderOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return DecodeF32;
    case DType::kF16:
      return DecodeF16;
    case DType::kBF16:
      return DecodeBF16;
    case DType::kQ4_0:
      return DecodeQ4_0;
    case DType::kQ4_1:
      return DecodeQ4_1;
    case DType::kQ5_0:
      return DecodeQ5_0;
    case DType::kQ5_1:
      return DecodeQ5_1;
    case DType::kQ8_0:
      return DecodeQ8_0;
    case DType::kQ2_K:
      return DecodeQ2_K;
    case DType::kQ3_K:
      return DecodeQ3_K;
    case DType::kQ4_K:
      return DecodeQ4_K;
    case DType::kQ5_K:
      return DecodeQ5_K;
    case DType::kQ6_K:
      return DecodeQ6_K;
    case DType::kQ8_K:
      return DecodeQ8_K;
    case DType::kIQ2_XXS:
      return DecodeIQ2_XXS;
    case DType::kIQ4_NL:
      return DecodeIQ4_NL;
    case DType::kIQ4_XS:
      return DecodeIQ4_XS;
    case DType::kMXFP4:
      return DecodeMXFP4;
    case DType::kNVFP4:
      return DecodeNVFP4;
    default:
      return nullptr;
  }
}

// Whole blocks, and the bytes they take.
Status CheckSizes(DType dtype, size_t num_elems, size_t num_bytes) {
  const DTypeInfo& info = Info(dtype);
  const auto block_elems = static_cast<size_t>(info.block_elems);
  const auto block_bytes = static_cast<size_t>(info.block_bytes);
  if (num_elems % block_elems == 0 && num_bytes % block_bytes == 0 &&
      num_elems / block_elems == num_bytes / block_bytes) {
    return OkStatus();
  }
  return InvalidArgumentError(StrCat(num_elems, " values and ", num_bytes, " bytes of ", info.name,
                                     " do not fit together: a block has ", block_elems,
                                     " values in ", block_bytes, " bytes"));
}

// One Q8_0 block. d is the scale before it is rounded to f16, as in ggml's reference.
Status EncodeQ8_0(const float* x, std::byte* block) {
  float amax = 0;
  bool finite = true;
  for (int i = 0; i < 32; ++i) {
    finite = finite && std::isfinite(x[i]);
    amax = std::max(amax, std::fabs(x[i]));
  }
  const float d = amax / 127.0f;
  const uint16_t scale = F32ToF16(d);
  if (!finite || !std::isfinite(F16ToF32(scale))) {
    return InvalidArgumentError(
        StrCat("Q8_0 holds finite values up to 127 * 65504, the block's largest is ",
               finite ? amax : std::numeric_limits<float>::infinity()));
  }
  const float inverse = d != 0 ? 1.0f / d : 0.0f;
  StoreLittleEndian(scale, block);
  for (int i = 0; i < 32; ++i) {
    // A subnormal d makes 1/d overflow; the clamp keeps the code in range (ggml's would be
    // undefined).
    const float code = std::clamp(std::round(x[i] * inverse), -127.0f, 127.0f);
    block[2 + i] = static_cast<std::byte>(static_cast<int8_t>(std::isnan(code) ? 0 : code));
  }
  return OkStatus();
}

}  // namespace

float F16ToF32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal or zero, exact
  return sign != 0 ? -magnitude : magnitude;
}

uint16_t F32ToF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {
    // Below 2^-14: adding 0.5 puts the result's last bit at 2^-24, so the addition does the
    // rounding.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfff + odd) >> 13);
}

float BF16ToF32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t F32ToBF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

Status Dequantize(DType dtype, std::span<const std::byte> src, std::span<float> out) {
  const DecodeBlock decode = DecoderOf(dtype);
  const DTypeInfo& info = Info(dtype);
  if (decode == nullptr)
    return UnimplementedError(StrCat("no conversion from ", info.name, " to F32"));
  RETURN_IF_ERROR(CheckSizes(dtype, out.size(), src.size()));
  const auto block_elems = static_cast<size_t>(info.block_elems);
  const auto block_bytes = static_cast<size_t>(info.block_bytes);
  for (size_t i = 0; i < out.size() / block_elems; ++i) {
    decode(src.data() + i * block_bytes, out.data() + i * block_elems);
  }
  return OkStatus();
}

Status Quantize(DType dtype, std::span<const float> src, std::span<std::byte> out) {
  RETURN_IF_ERROR(CheckSizes(dtype, src.size(), out.size()));
  switch (dtype) {
    case DType::kF32:
      for (size_t i = 0; i < src.size(); ++i) StoreLittleEndian(src[i], out.data() + 4 * i);
      return OkStatus();
    case DType::kF16:
      for (size_t i = 0; i < src.size(); ++i)
        StoreLittleEndian(F32ToF16(src[i]), out.data() + 2 * i);
      return OkStatus();
    case DType::kBF16:
      for (size_t i = 0; i < src.size(); ++i)
        StoreLittleEndian(F32ToBF16(src[i]), out.data() + 2 * i);
      return OkStatus();
    case DType::kQ8_0:
      for (size_t i = 0; i < src.size() / 32; ++i) {
        RETURN_IF_ERROR(EncodeQ8_0(src.data() + 32 * i, out.data() + 34 * i));
      }
      return OkStatus();
    default:
      return UnimplementedError(StrCat("no conversion from F32 to ", Info(dtype).name));
  }
}

}  // namespace ds4
