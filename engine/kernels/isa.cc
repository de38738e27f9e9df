#include "engine/kernels/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "engine/kernels/matmul.h"

namespace ds4 {
namespace {

bool CpuHasAvx2() {
#if defined(__x86_64__)
  // clang's __builtin_cpu_supports does not know f16c. That the system saves the registers is part
  // of the answer for avx2.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool CpuHasAvx512Vnni() {
#if defined(__x86_64__)
  return CpuHasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

std::vector<const KernelTable*> FindKernels() {
  std::vector<const KernelTable*> tables = {GenericKernels()};
  if (Avx2Kernels() != nullptr && CpuHasAvx2()) tables.push_back(Avx2Kernels());
  if (Avx512Kernels() != nullptr && CpuHasAvx512Vnni()) tables.push_back(Avx512Kernels());
  return tables;
}

const KernelTable& ChooseKernels() {
  const std::span<const KernelTable* const> available = AvailableKernels();
  const char* wanted = std::getenv("DS4_ISA");
  if (wanted == nullptr || *wanted == '\0') return *available.back();
  std::string names;
  for (const KernelTable* table : available) {
    if (std::string_view(table->name) == wanted) return *table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  std::fprintf(stderr, "DS4_ISA=%s: this CPU and build have no such kernels; choose one of %s\n",
               wanted, names.c_str());
  std::exit(2);
}

}  // namespace

std::span<const KernelTable* const> AvailableKernels() {
  static const std::vector<const KernelTable*> tables = FindKernels();
  return tables;
}

const KernelTable& ActiveKernels() {
  static const KernelTable& table = ChooseKernels();
  return table;
}

std::string_view KernelIsa() { return ActiveKernels().name; }

}  // namespace ds4
