// The kernels for x86 CPUs with AVX2, FMA and F16C.
#include "engine/kernels/isa.h"

#if defined(__x86_64__)

#define DS4_ISA_NAMESPACE isa_avx2
#include "engine/kernels/simd_avx2.h"
#include "engine/kernels/table_impl.h"

namespace ds4 {

const KernelTable* Avx2Kernels() {
  static constexpr KernelTable table = isa_avx2::MakeTable("avx2");
  return &table;
}

}  // namespace ds4

#else

namespace ds4 {

const KernelTable* Avx2Kernels() { return nullptr; }

}  // namespace ds4

#endif
