#include "engine/base/os_memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ds4 {
namespace {

constexpr size_t kAlignment = 64;

#if defined(__linux__)
// Blocks below this live in the heap: a mapping of their own would waste most of a huge page.
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMapFrom = 2 * kHugePage;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// A mapping that starts at a huge page boundary; what was mapped before and after it is given back.
std::byte* MapAligned(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  const size_t size = RoundUp(bytes, kHugePage);
  void* raw =
      mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* base = static_cast<std::byte*>(raw);
  const size_t skip =
      RoundUp(reinterpret_cast<uintptr_t>(base), kHugePage) - reinterpret_cast<uintptr_t>(base);
  if (skip > 0) munmap(base, skip);
  if (skip < kHugePage) munmap(base + skip + size, kHugePage - skip);
  // A wish only: without huge pages everything works, slower.
  madvise(base + skip, size, MADV_HUGEPAGE);
  return base + skip;
}
#endif

std::byte* HeapZeroed(size_t bytes) {
  if (bytes > SIZE_MAX - kAlignment) return nullptr;
  const size_t size = (bytes + kAlignment) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, size);
  if (memory != nullptr) std::memset(memory, 0, size);
  return static_cast<std::byte*>(memory);
}

}  // namespace

std::byte* AllocateZeroed(size_t bytes) {
#if defined(__linux__)
  if (bytes >= kMapFrom) return MapAligned(bytes);
#endif
  return HeapZeroed(bytes);
}

void FreeZeroed(std::byte* memory, size_t bytes) {
  if (memory == nullptr) return;
#if defined(__linux__)
  if (bytes >= kMapFrom) {
    munmap(memory, RoundUp(bytes, kHugePage));
    return;
  }
#else
  (void)bytes;
#endif
  std::free(memory);
}

}  // namespace ds4
