// The names of simt.h for a plain C++ compiler: kernels run on the CPU, for tests without a GPU.
//
// A launch runs the blocks of the grid one after the other on the calling thread. Each CUDA thread
// of a block is a fiber; warp operations and __syncthreads() are meetings of fibers. What a GPU
// would leave undefined stops the program with the kernel, block and thread: lanes missing from a
// warp operation, different operations meeting, threads at different barriers, misaligned
// addresses, a kernel that ends without GridDependencyWait(). Dynamic shared memory starts as 0xff
// bytes, asynchronous copies happen at their CopyAsyncWait, and ASan sees every access.
// Shared variables are thread_local: launches from several OS threads do not disturb each other.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "engine/cuda/launch.h"
#include "engine/tensor/quant.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define DS4_DYNAMIC_SHARED(name) std::byte* name = ::ds4::cuda::emulator::DynamicShared()

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline thread_local constinit uint3 threadIdx{};
inline thread_local constinit uint3 blockIdx{};
inline thread_local constinit dim3 blockDim{};
inline thread_local constinit dim3 gridDim{};

namespace ds4::cuda::emulator {

enum class WarpOp : uint8_t {
  kNone,
  kShuffle,
  kShuffleXor,
  kShuffleDown,
  kBallot,
  kSyncWarp,
  kMmaS8,
  kMmaBf16,
  kMmaF16,
  kLoadMatrix,
  kLoadMatrixTrans,
};

// What one lane brings to a warp operation and takes from it.
struct Lane {
  uint32_t in[10];
  const void* address;
  uint32_t out[4];
};

std::byte* DynamicShared();
Lane& CurrentLane();
unsigned LaneIndex();
// Waits until all 32 lanes are at this operation; then every lane's `out` is filled.
void MeetWarp(WarpOp op, const char* file, int line);
void MeetBlock(const char* file, int line);
void MeetSome(int barrier, int threads, const char* file, int line);
// Lets the other fibers and OS threads run: for loops that wait for a flag.
void Yield();
void CopyAsync(void* shared, const void* global);
void CommitCopies();
void WaitCopies(size_t pending);
void CopyBulk(void* shared, const void* global, uint32_t bytes, const void* barrier);
// Does the copies that count on `barrier`: their bytes.
uint32_t FinishBulk(const void* barrier);
void MarkDependencyWait();
void FenceSystem();
uint64_t NowNs();
// Stops the program, naming the kernel, block and thread.
[[noreturn]] void Fail(const char* what);

struct KernelCall {
  const char* file;
  int line;
  dim3 grid, block;
  size_t dynamic_shared_bytes;
  void (*invoke)(const void* arguments);
  const void* arguments;
};
// Empty when a GPU would take the launch, else the reason.
std::string CheckLaunch(const KernelCall& call);
void RunGrid(const KernelCall& call);

// In runtime_emulator.cc: runs `work`, or records it while `stream` is being captured.
void Submit(Stream* stream, std::function<void()> work);
void RecordLaunchError(std::string what);

inline void CheckAligned(const void* address, size_t grain, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % grain != 0) Fail(what);
}

template <typename T>
T Shuffle(WarpOp op, unsigned mask, T value, unsigned source, const char* file, int line) {
  static_assert(sizeof(T) == 4 && std::is_trivially_copyable_v<T>, "32-bit types only");
  if (mask != 0xffffffffu) Fail("a shuffle without the full mask");
  Lane& lane = CurrentLane();
  lane.in[0] = std::bit_cast<uint32_t>(value);
  lane.in[1] = source;
  MeetWarp(op, file, line);
  return std::bit_cast<T>(lane.out[0]);
}

}  // namespace ds4::cuda::emulator

// Where a barrier or warp operation stands, for reports.
#define DS4_EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(DS4_EMULATOR_HERE) { ds4::cuda::emulator::MeetBlock(file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, DS4_EMULATOR_HERE) {
  if (mask != 0xffffffffu) ds4::cuda::emulator::Fail("__syncwarp without the full mask");
  ds4::cuda::emulator::MeetWarp(ds4::cuda::emulator::WarpOp::kSyncWarp, file, line);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, DS4_EMULATOR_HERE) {
  return ds4::cuda::emulator::Shuffle(ds4::cuda::emulator::WarpOp::kShuffle, mask, value,
                                      static_cast<unsigned>(source) % 32, file, line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, DS4_EMULATOR_HERE) {
  const unsigned own = ds4::cuda::emulator::LaneIndex();
  return ds4::cuda::emulator::Shuffle(ds4::cuda::emulator::WarpOp::kShuffleXor, mask, value,
                                      (own ^ static_cast<unsigned>(lane_mask)) % 32, file, line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, DS4_EMULATOR_HERE) {
  const unsigned own = ds4::cuda::emulator::LaneIndex();
  return ds4::cuda::emulator::Shuffle(ds4::cuda::emulator::WarpOp::kShuffleDown, mask, value,
                                      own + delta < 32 ? own + delta : own, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, DS4_EMULATOR_HERE) {
  if (mask != 0xffffffffu) ds4::cuda::emulator::Fail("__ballot_sync without the full mask");
  ds4::cuda::emulator::Lane& lane = ds4::cuda::emulator::CurrentLane();
  lane.in[0] = predicate != 0;
  ds4::cuda::emulator::MeetWarp(ds4::cuda::emulator::WarpOp::kBallot, file, line);
  return lane.out[0];
}

#define DS4_EMULATOR_REDUCE(T, name, combine)                         \
  inline T name(unsigned mask, T value, DS4_EMULATOR_HERE) {          \
    for (int lane = 1; lane < 32; lane *= 2) {                        \
      const T other = __shfl_xor_sync(mask, value, lane, file, line); \
      value = combine;                                                \
    }                                                                 \
    return value;                                                     \
  }
DS4_EMULATOR_REDUCE(unsigned, __reduce_min_sync, std::min(value, other))
DS4_EMULATOR_REDUCE(unsigned, __reduce_max_sync, std::max(value, other))
DS4_EMULATOR_REDUCE(unsigned, __reduce_add_sync, value + other)
DS4_EMULATOR_REDUCE(int, __reduce_add_sync, value + other)
#undef DS4_EMULATOR_REDUCE

// Plain: all blocks of a launch run on one OS thread.
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
                std::is_same_v<T, unsigned long long> || std::is_same_v<T, float>);
  return std::exchange(*address, *address + value);
}
inline int atomicMax(int* address, int value) {
  return std::exchange(*address, std::max(*address, value));
}
inline int atomicMin(int* address, int value) {
  return std::exchange(*address, std::min(*address, value));
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return std::exchange(*address, *address >= limit ? 0 : *address + 1);
}
inline unsigned atomicOr(unsigned* address, unsigned value) {
  return std::exchange(*address, *address | value);
}
inline unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
  return *address == expected ? std::exchange(*address, value) : *address;
}
inline void __threadfence() { ds4::cuda::emulator::FenceSystem(); }
inline void __threadfence_system() { ds4::cuda::emulator::FenceSystem(); }

inline int __popc(unsigned value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __ffs(int value) {
  return value == 0 ? 0 : std::countr_zero(static_cast<unsigned>(value)) + 1;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  if ((selector & 0x8888u) != 0) ds4::cuda::emulator::Fail("__byte_perm selector over 7");
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes >> (8 * pick) & 0xff) << (8 * i);
  }
  return result;
}
// c + the two int16 of a times two int8 of b: the lower two, the upper two.
inline int __dp2a_lo(int a, int b, int c) {
  const auto int8 = [b](int i) { return static_cast<int>(static_cast<int8_t>(b >> (8 * i))); };
  return c + static_cast<int16_t>(a) * int8(0) + static_cast<int16_t>(a >> 16) * int8(1);
}
inline int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }
// Past L1.
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int value) { return std::bit_cast<float>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }

inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
#if !defined(__GLIBC__)
inline void sincos(double angle, double* sine, double* cosine) {
  *sine = sin(angle);
  *cosine = cos(angle);
}
#endif

#define DS4_EMULATOR_MIN_MAX(T)                    \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
DS4_EMULATOR_MIN_MAX(int)
DS4_EMULATOR_MIN_MAX(unsigned)
DS4_EMULATOR_MIN_MAX(long)
DS4_EMULATOR_MIN_MAX(unsigned long)
DS4_EMULATOR_MIN_MAX(long long)
DS4_EMULATOR_MIN_MAX(unsigned long long)
#undef DS4_EMULATOR_MIN_MAX

namespace ds4::cuda {

inline float HalfToFloat(uint16_t bits) { return F16ToF32(bits); }
inline uint16_t FloatToHalf(float value) { return F32ToF16(value); }
inline float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t FloatToBf16(float value) { return F32ToBF16(value); }
inline float2 Half2ToFloat2(uint32_t bits) {
  return {F16ToF32(static_cast<uint16_t>(bits)), F16ToF32(static_cast<uint16_t>(bits >> 16))};
}
inline float2 Bf162ToFloat2(uint32_t bits) {
  return {std::bit_cast<float>(bits << 16), std::bit_cast<float>(bits & 0xffff0000u)};
}
inline uint32_t FloatsToBf162(float lo, float hi) {
  return FloatToBf16(lo) | static_cast<uint32_t>(FloatToBf16(hi)) << 16;
}

namespace emulator {

template <typename D>
void Mma(WarpOp op, D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file,
         int line) {
  Lane& lane = CurrentLane();
  std::memcpy(lane.in, a, sizeof a);
  std::memcpy(lane.in + 4, b, sizeof b);
  std::memcpy(lane.in + 6, d, sizeof d);
  MeetWarp(op, file, line);
  std::memcpy(d, lane.out, sizeof d);
}

inline void LoadMatrix(WarpOp op, uint32_t (&r)[4], const void* row, const char* file, int line) {
  CheckAligned(row, 16, "a matrix row that is not 16-byte aligned");
  Lane& lane = CurrentLane();
  lane.address = row;
  MeetWarp(op, file, line);
  std::memcpy(r, lane.out, sizeof r);
}

}  // namespace emulator

// Comments on all of these: simt.h.
inline void MmaS8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], DS4_EMULATOR_HERE) {
  emulator::Mma(emulator::WarpOp::kMmaS8, d, a, b, file, line);
}
inline void MmaBf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    DS4_EMULATOR_HERE) {
  emulator::Mma(emulator::WarpOp::kMmaBf16, d, a, b, file, line);
}
inline void MmaF16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                   DS4_EMULATOR_HERE) {
  emulator::Mma(emulator::WarpOp::kMmaF16, d, a, b, file, line);
}
inline void LoadMatrix4(uint32_t (&r)[4], const void* shared_row, DS4_EMULATOR_HERE) {
  emulator::LoadMatrix(emulator::WarpOp::kLoadMatrix, r, shared_row, file, line);
}
inline void LoadMatrix4Trans(uint32_t (&r)[4], const void* shared_row, DS4_EMULATOR_HERE) {
  emulator::LoadMatrix(emulator::WarpOp::kLoadMatrixTrans, r, shared_row, file, line);
}

inline void CopyAsync16(void* shared, const void* global) { emulator::CopyAsync(shared, global); }
inline void CopyAsyncCommit() { emulator::CommitCopies(); }
template <int kPending>
void CopyAsyncWait() {
  static_assert(kPending >= 0);
  emulator::WaitCopies(kPending);
}
inline void PrefetchL2(const void* global, uint32_t bytes) {
  emulator::CheckAligned(global, 16, "a prefetch address that is not 16-byte aligned");
  if (bytes % 16 != 0) emulator::Fail("a prefetch size that is no multiple of 16");
}
inline uint4 LoadStream16(const void* global) {
  emulator::CheckAligned(global, 16, "a 16-byte load that is not 16-byte aligned");
  return *static_cast<const uint4*>(global);
}
inline uint4 LoadEarly16(const void* global) { return LoadStream16(global); }
inline uint32_t LoadEarly4(const void* global) {
  emulator::CheckAligned(global, 4, "a 4-byte load that is not 4-byte aligned");
  return *static_cast<const uint32_t*>(global);
}
inline void GridDependencyWait() { emulator::MarkDependencyWait(); }
inline void LaunchDependents() {}
inline bool ArriveLast(uint32_t* counter, uint32_t count) {
  return atomicInc(counter, count - 1) == count - 1;
}
inline float LoadRelaxedDevice(const float* word) { return *word; }
inline void StoreRelaxedDevice(float* word, float value) { *word = value; }
uint32_t LoadAcquireSystem(const uint32_t* flag);
void StoreReleaseSystem(uint32_t* flag, uint32_t value);
struct alignas(16) WordPair {
  uint64_t first;
  uint64_t second;
};
WordPair LoadRelaxedSystem(const WordPair* words);
void StoreRelaxedSystem(WordPair* words, WordPair pair);
struct BulkBarrier {
  uint32_t expected;
  uint32_t phases;
};
inline void InitBulk(BulkBarrier* barrier) { *barrier = {0, 0}; }
inline void ExpectBulk(BulkBarrier* barrier, uint32_t bytes) { barrier->expected += bytes; }
inline void CopyBulk(void* shared, const void* global, uint32_t bytes, BulkBarrier* barrier) {
  emulator::CopyBulk(shared, global, bytes, barrier);
}
inline void WaitBulk(BulkBarrier* barrier, uint32_t parity) {
  // Until somebody has asked for the copies of the phase.
  for (int turn = 0; barrier->phases % 2 == parity && barrier->expected == 0; ++turn) {
    if (turn == 1 << 16) emulator::Fail("WaitBulk for copies that nobody asks for");
    emulator::Yield();
  }
  if (barrier->phases % 2 != parity) return;
  const uint32_t bytes = emulator::FinishBulk(barrier);
  if (bytes != barrier->expected) {
    emulator::Fail("WaitBulk for other bytes than are copied");
  }
  barrier->expected = 0;
  ++barrier->phases;
}
inline void FenceBulk() {}
inline void SyncThreads(int barrier, int threads, DS4_EMULATOR_HERE) {
  emulator::MeetSome(barrier, threads, file, line);
}
inline uint64_t GlobalTimerNs() { return emulator::NowNs(); }

// A LaunchContext, and where Launch was called: the name of a kernel in reports.
struct LaunchSite {
  LaunchSite(const LaunchContext& context, DS4_EMULATOR_HERE)
      : launch(context), launch_file(file), launch_line(line) {}
  const LaunchContext& launch;
  const char* launch_file;
  int launch_line;
};

template <typename... Params, typename... Args>
void Launch(const LaunchSite& site, dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            void (*kernel)(Params...), Args&&... args) {
  struct Bound {
    void (*kernel)(Params...);
    std::tuple<std::remove_cv_t<Params>...> arguments;
    static void Invoke(const void* self) {
      const Bound& bound = *static_cast<const Bound*>(self);
      std::apply(bound.kernel, bound.arguments);
    }
  };
  static_assert((0 + ... + sizeof(Params)) <= 4096, "kernel parameters over 4 KB");
  emulator::KernelCall call{site.launch_file,     site.launch_line, grid,   block,
                            dynamic_shared_bytes, &Bound::Invoke,   nullptr};
  if (std::string why = emulator::CheckLaunch(call); !why.empty()) {
    return emulator::RecordLaunchError(std::move(why));
  }
  emulator::Submit(site.launch.stream,
                   [call, bound = Bound{kernel, {std::forward<Args>(args)...}}]() mutable {
                     call.arguments = &bound;
                     emulator::RunGrid(call);
                   });
}

}  // namespace ds4::cuda

#undef DS4_EMULATOR_HERE
