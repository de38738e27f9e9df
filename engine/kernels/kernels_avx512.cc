// The kernels for x86 CPUs with AVX-512 F, BW, VL, DQ and VNNI.
#include "engine/kernels/isa.h"

#if defined(__x86_64__)

// g++ 12 warns about the "undefined" registers inside its own intrinsics (GCC bug 105593); can go
// with g++ 13.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define DS4_ISA_NAMESPACE isa_avx512
#include "engine/kernels/simd_avx512.h"
#include "engine/kernels/table_impl.h"

namespace ds4 {

const KernelTable* Avx512Kernels() {
  static constexpr KernelTable table = isa_avx512::MakeTable("avx512vnni");
  return &table;
}

}  // namespace ds4

#else

namespace ds4 {

const KernelTable* Avx512Kernels() { return nullptr; }

}  // namespace ds4

#endif
