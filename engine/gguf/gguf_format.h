// Constants of the GGUF format that reader and writer share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/gguf/gguf_reader.h"

namespace ds4 {

inline constexpr uint32_t kGgufMagic = 0x46554747;  // "GGUF", first byte lowest
inline constexpr std::string_view kAlignmentKey = "general.alignment";
inline constexpr int64_t kDefaultGgufAlignment = 32;
inline constexpr int64_t kMaxGgufAlignment = 1 << 20;
inline constexpr size_t kMaxKeyBytes = 65535;
inline constexpr size_t kMaxTensorNameBytes =
    63;  // other readers keep names in 64 bytes with a zero
inline constexpr uint32_t kMaxDims = 4;
// Far beyond any file, far enough from overflow for sums of a few sizes and offsets.
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 60;
// The least that one entry of each list takes: an empty string length, type and one-byte value; a
// string length, num_dims, one dim, type and offset.
inline constexpr int64_t kMinKeyBytes = 8 + 4 + 1;
inline constexpr int64_t kMinTensorBytes = 8 + 4 + 8 + 4 + 8;

// Bytes of one value of a fixed-size type; 0 for strings and arrays.
int64_t GgufItemBytes(GgufType type);

}  // namespace ds4
