// Large zero-filled blocks for weights and caches; the one place that asks the system for huge
// pages (they are worth a quarter of the read bandwidth, since decode streams every weight once per
// token).
#pragma once

#include <cstddef>

namespace ds4 {

// `bytes` zero bytes at a 64-byte boundary, or null when the system has no memory. bytes may be 0.
std::byte* AllocateZeroed(size_t bytes);
// Gives back a block of AllocateZeroed with the size it was asked for; null is fine.
void FreeZeroed(std::byte* memory, size_t bytes);

}  // namespace ds4
