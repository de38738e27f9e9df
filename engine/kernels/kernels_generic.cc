// The kernels in plain C++, for any CPU: what the others are compared with.
#define DS4_ISA_NAMESPACE isa_generic
#include "engine/kernels/simd_generic.h"
#include "engine/kernels/table_impl.h"

namespace ds4 {

const KernelTable* GenericKernels() {
  static constexpr KernelTable table = isa_generic::MakeTable("generic");
  return &table;
}

}  // namespace ds4
