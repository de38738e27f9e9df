// What kernel sources (*.cu) may use of CUDA, for two compilers: nvcc, and a plain C++ compiler
// with the emulator of engine/cuda/emulator. Included by .cu files only. The only file with PTX.
//
// Global names are CUDA's own (threadIdx, __shared__, __syncthreads, __shfl_sync ...); the device
// helpers are in ds4::cuda. All 32 lanes of a warp take part in every warp operation, and all
// threads of a block reach the same __syncthreads().
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "engine/cuda/launch.h"

#if !defined(__CUDACC__)
#include "engine/cuda/emulator/emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(DS4_KERNEL_TIMES)
#include <vector>
#endif

// Declares `std::byte* name`: the block's dynamic shared memory, 128-byte aligned.
#define DS4_DYNAMIC_SHARED(name)                                   \
  extern __shared__ __align__(128) std::byte ds4_dynamic_shared[]; \
  std::byte* name = ds4_dynamic_shared

namespace ds4::cuda {

__device__ __forceinline__ float HalfToFloat(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ uint16_t FloatToHalf(float value) {  // nearest, ties to even
  return __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ float Bf16ToFloat(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ uint16_t FloatToBf16(float value) {  // nearest, ties to even
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ __forceinline__ float2 Half2ToFloat2(uint32_t bits) {
  return make_float2(HalfToFloat(static_cast<uint16_t>(bits)),
                     HalfToFloat(static_cast<uint16_t>(bits >> 16)));
}
__device__ __forceinline__ float2 Bf162ToFloat2(uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ uint32_t FloatsToBf162(float lo, float hi) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(lo, hi);
  return static_cast<uint32_t>(__bfloat16_as_ushort(both.x)) |
         static_cast<uint32_t>(__bfloat16_as_ushort(both.y)) << 16;
}

// d += a b, fragments as in the PTX manual (lane 4g + t).
// m16n8k32: a[0] row g, k 4t..4t+3; a[1] row g+8; a[2], a[3] the same at k + 16; b[0] column g,
// k 4t..4t+3; b[1] k + 16; d[0], d[1] row g, columns 2t, 2t+1; d[2], d[3] row g+8.
__device__ __forceinline__ void MmaS8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// m16n8k16: a[0] row g, k 2t, 2t+1; a[1] row g+8; a[2], a[3] the same at k + 8; b[0] column g,
// k 2t, 2t+1; b[1] k + 8; d as above. float32 sums.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void MmaF16(float (&d)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes from global to shared memory without registers; both 16-byte aligned. Readable by this
// thread after CopyAsyncWait, by others after a barrier more.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A hint: [global, global + bytes) to L2. Both multiples of 16. One thread speaks for the range.
__device__ __forceinline__ void PrefetchL2(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
#endif
}

// 16 bytes that nobody writes while the kernel runs and that are read once: past L1.
__device__ __forceinline__ uint4 LoadStream16(const void* global) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(global)));
  return v;
}

// 16 or 4 bytes by a load that the compiler leaves where it stands. It moves an ordinary load
// behind a branch that may leave it out, and there the load waits for what the branch waits for.
__device__ __forceinline__ uint4 LoadEarly16(const void* global) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(global)));
  return v;
}

__device__ __forceinline__ uint32_t LoadEarly4(const void* global) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(global)));
  return v;
}

// Four 8 x 8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8 (16
// bytes, aligned). r[j]: of matrix j, row lane / 4, elements 2 (lane % 4) and the next; Trans: of
// the transposed matrix.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(shared_row))
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(shared_row))
               : "memory");
}

// Copies of whole ranges to shared memory that one thread asks for, on sm_90. A barrier counts
// their bytes in phases: one thread says how many bytes a phase brings and asks for copies of so
// many; who waits for the phase (parity 0 the first time, then 1, 0, ...) sees them. Addresses and
// sizes are multiples of 16.
struct BulkBarrier {
  uint64_t state;
};
// By one thread, which then calls FenceBulk; others use the barrier after one of theirs.
__device__ __forceinline__ void InitBulk(BulkBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void ExpectBulk(BulkBarrier* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
#endif
}
__device__ __forceinline__ void CopyBulk(void* shared, const void* global, uint32_t bytes,
                                         BulkBarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
#endif
}
__device__ __forceinline__ void WaitBulk(BulkBarrier* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
#endif
}
// After a thread's own stores to shared memory, before bulk copies to the same place.
__device__ __forceinline__ void FenceBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A barrier of `threads` threads of the block, whole warps, who alone use number `barrier`, 1..15.
__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

#if defined(DS4_KERNEL_TIMES)
// Where kernels note the time (kernel_times.h); each source file has one.
struct KernelLog {
  uint32_t* count;
  uint64_t* ns;
  uint32_t capacity;
};
namespace {
__device__ KernelLog kernel_log;
}
#endif

// Waits for the kernels before this one, and makes what they wrote visible. Before sm_90 a kernel
// never starts early.
__device__ __forceinline__ void GridDependencyWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if defined(DS4_KERNEL_TIMES)
  const KernelLog log = kernel_log;
  if (log.ns != nullptr && (threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) == 0) {
    const uint32_t at = atomicAdd(log.count, 1u);
    if (at < log.capacity) log.ns[at] = GlobalTimerNs();
  }
#endif
}
// Lets the next kernel start as soon as there is room for it.
__device__ __forceinline__ void LaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// One of `count` arrivals at a counter in global memory: true for the last one, which also sets the
// counter back to 0. What this thread, and those that it met at a barrier, wrote before comes
// before what the last one, and those that it meets at a barrier, read after.
__device__ __forceinline__ bool ArriveLast(uint32_t* counter, uint32_t count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(count - 1)
               : "memory");
  return before == count - 1;
}

// Words that other blocks read or write at the same time: whole, but nothing else ordered by them.
__device__ __forceinline__ float LoadRelaxedDevice(const float* word) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];"
               : "=f"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}
__device__ __forceinline__ void StoreRelaxedDevice(float* word, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "f"(value)
               : "memory");
}

// Flags in memory that other devices or the host read or write.
__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void StoreReleaseSystem(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Words in memory that other devices read or write at the same time: each word whole, the two in no
// order, nothing else ordered by them.
struct alignas(16) WordPair {
  uint64_t first;
  uint64_t second;
};
__device__ __forceinline__ WordPair LoadRelaxedSystem(const WordPair* words) {
  WordPair pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(__cvta_generic_to_global(words))
               : "memory");
  return pair;
}
__device__ __forceinline__ void StoreRelaxedSystem(WordPair* words, WordPair pair) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(words)),
               "l"(pair.first), "l"(pair.second)
               : "memory");
}

// Internals of Launch, in runtime_cuda.cu.
namespace launch_internal {
// True when the thread's device can start a kernel before the one ahead of it has ended.
bool SupportsOverlap();
// Checks what a graph would notice too late, and lets `kernel` use that much dynamic shared memory;
// a cudaError_t.
int Prepare(const void* kernel, dim3 block, size_t shared_bytes);
void RecordError(int error, const void* kernel, dim3 grid, dim3 block, size_t shared_bytes);
#if defined(DS4_KERNEL_TIMES)
bool RegisterKernelLog(const void* symbol);
void NoteLaunch(const void* kernel);
void NoteCapture(std::vector<const void*>* kernels);
void NoteGraph(const std::vector<const void*>& kernels);
namespace {
const bool kernel_log_registered = RegisterKernelLog(&kernel_log);
}
#endif
}  // namespace launch_internal

// Puts kernel(args...) on launch.stream. Errors: LaunchStatus().
template <typename... Params, typename... Args>
void Launch(const LaunchContext& launch, dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            void (*kernel)(Params...), Args&&... args) {
  const void* symbol = reinterpret_cast<const void*>(kernel);
  int error = launch_internal::Prepare(symbol, block, dynamic_shared_bytes);
  if (error == cudaSuccess) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_shared_bytes;
    config.stream = static_cast<cudaStream_t>(launch.stream->handle());
    config.attrs = &overlap;
    config.numAttrs = launch.overlap && launch_internal::SupportsOverlap() ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
#if defined(DS4_KERNEL_TIMES)
    launch_internal::NoteLaunch(symbol);
#endif
  }
  if (error != cudaSuccess) {
    launch_internal::RecordError(error, symbol, grid, block, dynamic_shared_bytes);
  }
}

}  // namespace ds4::cuda
#endif  // __CUDACC__

namespace ds4::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kFullMask = 0xffffffffu;

// __byte_perm for selectors whose low four nibbles are known to be at most 7; it need not clear
// their top bits. Bits 16-31 of the selector do not count.
__device__ __forceinline__ uint32_t SelectBytes(uint32_t x, uint32_t y, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
  return bytes;
#else
  return __byte_perm(x, y, selector);
#endif
}

// The value, without its history: the compiler leaves it in a register where it would rather work
// it out again at each use.
__device__ __forceinline__ uint32_t Kept(uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}
template <typename T>
__device__ __forceinline__ T* Kept(T* pointer) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(pointer));
#endif
  return pointer;
}

// CopyAsync16 where `wanted`, without a branch.
#if defined(__CUDACC__)
__device__ __forceinline__ void CopyAsync16If(bool wanted, void* shared, const void* global) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}" ::"r"(SharedAddress(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(static_cast<int>(wanted))
      : "memory");
}
#else
inline void CopyAsync16If(bool wanted, void* shared, const void* global) {
  if (wanted) CopyAsync16(shared, global);
}
#endif

// 1 / x within 2^-22 of its size, in one instruction. 0 where that would be below 2^-126.
__device__ __forceinline__ float FastReciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// Has an address of global memory in a register from here on. Without it compilers leave the
// arithmetic until the address is used: behind a wait, where it costs time.
template <typename T>
__device__ __forceinline__ void KeepAddress([[maybe_unused]] T*& address) {
#if defined(__CUDA_ARCH__)
  size_t global = __cvta_generic_to_global(address);
  asm volatile("" : "+l"(global));
  address = static_cast<T*>(__cvta_global_to_generic(global));
#endif
}

// Words of shared memory by address: a plain number, so that kernels can leave parts of an address
// ready in a register. Only for words that nobody writes any more: the compiler may move the load.
#if defined(__CUDACC__)
using SharedWordAddress = uint32_t;
__device__ __forceinline__ SharedWordAddress AddressOfShared(const void* shared) {
  return SharedAddress(shared);
}
// `at` with its byte 1 replaced by byte `byte` of `word`: one instruction.
__device__ __forceinline__ SharedWordAddress WithByte1(SharedWordAddress at, uint32_t word,
                                                       uint32_t byte) {
  return SelectBytes(word, at, 0x7604u | byte << 4);
}
__device__ __forceinline__ uint32_t LoadSharedWord(SharedWordAddress at) {
  uint32_t word;
  asm("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
  return word;
}
#else
using SharedWordAddress = uintptr_t;
inline SharedWordAddress AddressOfShared(const void* shared) {
  return reinterpret_cast<uintptr_t>(shared);
}
inline SharedWordAddress WithByte1(SharedWordAddress at, uint32_t word, uint32_t byte) {
  return (at & ~SharedWordAddress{0xff00}) | (word >> (8 * byte) & 255u) << 8;
}
inline uint32_t LoadSharedWord(SharedWordAddress at) {
  return *reinterpret_cast<const uint32_t*>(at);
}
#endif

// What lane i (0..3) of the caller's four lanes has. As a shuffle with a width, the lane is part of
// the instruction.
__device__ __forceinline__ float FromFour(float value, int i) {
#if defined(__CUDACC__)
  return __shfl_sync(kFullMask, value, i, 4);
#else
  return __shfl_sync(kFullMask, value, static_cast<int>(threadIdx.x) % kWarpSize / 4 * 4 + i);
#endif
}

// The work of a kernel after its wait. A kernel that runs once in a layer finds none of its
// instructions near the SM, and fetching them can take longer than running them. One whose blocks
// start while the kernels ahead still run can go through its work once before its turn: work(false)
// loads nothing from memory that others write and stores nothing to memory, and work(true) is the
// real one. Every thread comes here.
template <typename Work>
__device__ __forceinline__ void RehearseAndRun(bool rehearse, Work work) {
#pragma unroll 1
  for (int turn = rehearse ? 0 : 1; turn < 2; ++turn) {
    if (turn == 1) GridDependencyWait();
    work(turn == 1);
  }
}

// `value`, the same in all lanes, in a way that shows the compiler that it is.
__device__ __forceinline__ int Uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// Every lane gets the sum (the same bits) in the fixed order of the tree 16, 8, 4, 2, 1.
__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(kFullMask, value, lane);
  return value;
}
__device__ __forceinline__ float WarpMax(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, lane));
  }
  return value;
}

}  // namespace ds4::cuda
