#include "engine/cuda/simt.h"
#include "tests/unit/cuda/simt_kernels.h"

namespace ds4::cuda::testing {
namespace {

__device__ unsigned GlobalIndex() { return blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void WidenKernel(Widened out) {
  LaunchDependents();
  GridDependencyWait();
  const uint32_t i = GlobalIndex();
  const uint32_t pair = i | (65535 - i) << 16;
  out.half_values[i] = HalfToFloat(static_cast<uint16_t>(i));
  out.bf16_values[i] = Bf16ToFloat(static_cast<uint16_t>(i));
  const float2 half = Half2ToFloat2(pair);
  const float2 bf16 = Bf162ToFloat2(pair);
  out.half_pairs[2 * i] = half.x;
  out.half_pairs[2 * i + 1] = half.y;
  out.bf16_pairs[2 * i] = bf16.x;
  out.bf16_pairs[2 * i + 1] = bf16.y;
}

__global__ void NarrowKernel(const float* x, int count, uint16_t* half, uint16_t* bf16,
                             uint32_t* pairs) {
  LaunchDependents();
  GridDependencyWait();
  const int i = static_cast<int>(GlobalIndex());
  if (i >= count) return;
  half[i] = FloatToHalf(x[i]);
  bf16[i] = FloatToBf16(x[i]);
  pairs[i] = FloatsToBf162(x[i], x[count - 1 - i]);
}

__global__ void ReciprocalKernel(const float* x, int count, float* out) {
  LaunchDependents();
  GridDependencyWait();
  const int i = static_cast<int>(GlobalIndex());
  if (i < count) out[i] = FastReciprocal(x[i]);
}

__global__ void ExchangeKernel(const float* x, float* out) {
  LaunchDependents();
  const int lane = static_cast<int>(threadIdx.x);
  const float* from = x + lane;
  KeepAddress(from);
  GridDependencyWait();
  const float own = *from;
  float* row = out + lane * kExchanges;
  row[0] = __shfl_sync(kFullMask, own, 3 * lane % 32);
  row[1] = __shfl_xor_sync(kFullMask, own, 5);
  row[2] = __shfl_down_sync(kFullMask, own, 7);
  row[3] = __uint_as_float(__ballot_sync(kFullMask, own > 0));
  row[4] = WarpSum(own);
  row[5] = WarpMax(own);
  row[6] = FromFour(own, 2);
  const unsigned bits = __float_as_uint(own);
  row[7] = __uint_as_float(__reduce_min_sync(kFullMask, bits));
  row[8] = __uint_as_float(__reduce_max_sync(kFullMask, bits));
  row[9] = __uint_as_float(__reduce_add_sync(kFullMask, bits));
  row[10] = __int_as_float(__reduce_add_sync(kFullMask, __float_as_int(own)));
}

__global__ void IntegersKernel(const uint32_t* a, const uint32_t* b, int count, uint32_t* out) {
  LaunchDependents();
  GridDependencyWait();
  const int i = static_cast<int>(GlobalIndex());
  if (i >= count) return;
  uint32_t* row = out + i * kIntegerResults;
  const int signed_a = static_cast<int>(a[i]);
  const int signed_b = static_cast<int>(b[i]);
  row[0] = static_cast<uint32_t>(__popc(a[i]));
  row[1] = static_cast<uint32_t>(__clz(signed_a));
  row[2] = static_cast<uint32_t>(__ffs(signed_a));
  row[3] = __byte_perm(a[i], b[i], 0x6240);
  row[4] = __byte_perm(a[i], b[i], 0x1357);
  row[5] = min(a[i], b[i]);
  row[6] = max(a[i], b[i]);
  row[7] = static_cast<uint32_t>(min(signed_a, signed_b));
  row[8] = static_cast<uint32_t>(max(signed_a, signed_b));
  row[9] = __float_as_uint(__uint_as_float(a[i] & 0xff7fffffu));
  // Sums of two products of 16 and 8 bits have room in 32.
  row[10] = static_cast<uint32_t>(__dp2a_lo(signed_a, signed_b, i));
  row[11] = static_cast<uint32_t>(__dp2a_hi(signed_a, signed_b, -i));
  row[12] = __ldcg(a + i);
  row[13] = *Kept(a + i) + Kept(b[i]);
}

// The 4-byte word of row `row`, elements from `column` on.
template <typename T>
__device__ uint32_t Word(const T* matrix, int columns, int row, int column) {
  uint32_t word = 0;
  for (int i = 0; i < static_cast<int>(4 / sizeof(T)); ++i) {
    const uint32_t bits = static_cast<uint32_t>(matrix[row * columns + column + i]) &
                          (sizeof(T) == 1 ? 0xffu : 0xffffu);
    word |= bits << (8 * static_cast<int>(sizeof(T)) * i);
  }
  return word;
}

// Fragments of the PTX manual: a word holds `per_word` elements of K, K = 8 words.
template <typename T, typename D,
          void (*kMma)(D (&)[4], const uint32_t (&)[4], const uint32_t (&)[2])>
__device__ void Multiply(const T* a, const T* b, const D* c, D* d) {
  constexpr int kPerWord = 4 / sizeof(T);
  constexpr int kColumns = 8 * kPerWord;
  const int g = static_cast<int>(threadIdx.x) / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const uint32_t a_words[4] = {
      Word(a, kColumns, g, t * kPerWord), Word(a, kColumns, g + 8, t * kPerWord),
      Word(a, kColumns, g, (t + 4) * kPerWord), Word(a, kColumns, g + 8, (t + 4) * kPerWord)};
  const uint32_t b_words[2] = {Word(b, kColumns, g, t * kPerWord),
                               Word(b, kColumns, g, (t + 4) * kPerWord)};
  D sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  kMma(sums, a_words, b_words);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

__device__ void CallMmaS8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaS8(d, a, b);
}
__device__ void CallMmaBf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaBf16(d, a, b);
}
__device__ void CallMmaF16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaF16(d, a, b);
}

__global__ void MmaS8Kernel(const int8_t* a, const int8_t* b, const int* c, int* d) {
  LaunchDependents();
  GridDependencyWait();
  Multiply<int8_t, int, CallMmaS8>(a, b, c, d);
}
__global__ void MmaBf16Kernel(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  LaunchDependents();
  GridDependencyWait();
  Multiply<uint16_t, float, CallMmaBf16>(a, b, c, d);
}
__global__ void MmaF16Kernel(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  LaunchDependents();
  GridDependencyWait();
  Multiply<uint16_t, float, CallMmaF16>(a, b, c, d);
}

__global__ void LoadMatrixKernel(const uint16_t* matrices, uint32_t* plain, uint32_t* transposed) {
  LaunchDependents();
  GridDependencyWait();
  constexpr int kStride = 24;  // elements: rows 48 bytes apart, to see that rows may lie anywhere
  __shared__ __align__(16) uint16_t rows[32 * kStride];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) rows[lane * kStride + i] = matrices[lane * 8 + i];
  __syncthreads();
  uint32_t r[4];
  LoadMatrix4(r, rows + lane * kStride);
  for (int i = 0; i < 4; ++i) plain[lane * 4 + i] = r[i];
  LoadMatrix4Trans(r, rows + lane * kStride);
  for (int i = 0; i < 4; ++i) transposed[lane * 4 + i] = r[i];
}

constexpr unsigned kReverseThreads = 256;
__global__ void __launch_bounds__(kReverseThreads)
    ReverseKernel(const float* x, uint32_t first_float, float* out) {
  LaunchDependents();
  DS4_DYNAMIC_SHARED(memory);
  float* shared = reinterpret_cast<float*>(memory) + first_float;
  GridDependencyWait();
  shared[threadIdx.x] = x[GlobalIndex()];
  __syncthreads();
  out[GlobalIndex()] = shared[kReverseThreads - 1 - threadIdx.x];
}

constexpr int kPipelineValues = 128;
constexpr int kPipelineDepth = 3;
__global__ void TeamsKernel(uint32_t* x) {
  __shared__ uint32_t values[64 * kTeams];
  LaunchDependents();
  GridDependencyWait();
  const int thread = static_cast<int>(threadIdx.x);
  const int team = thread / 64;
  values[thread] = x[thread];
  for (int step = 0; step < team + 3; ++step) {
    SyncThreads(team + 1, 64);
    const uint32_t twice = 2 * values[team * 64 + (thread + 1) % 64];
    SyncThreads(team + 1, 64);
    values[thread] = twice;
  }
  x[thread] = values[thread];
}

constexpr int kTableWords = 256 * 64;
constexpr int kBulkBytes = 2240;
__global__ void __launch_bounds__(32) BulkKernel(const std::byte* x, int stages, std::byte* out) {
  LaunchDependents();
  GridDependencyWait();
  __shared__ __align__(128) std::byte slots[2][kBulkBytes];
  __shared__ BulkBarrier full[2];
  const int lane = static_cast<int>(threadIdx.x);
  const auto put = [&](int stage) {
    if (lane != 0 || stage >= stages) return;
    // In two copies.
    BulkBarrier* barrier = &full[stage % 2];
    const std::byte* from = x + stage * kBulkBytes;
    ExpectBulk(barrier, kBulkBytes);
    CopyBulk(slots[stage % 2], from, 2048, barrier);
    CopyBulk(slots[stage % 2] + 2048, from + 2048, kBulkBytes - 2048, barrier);
  };
  if (lane == 0) {
    InitBulk(&full[0]);
    InitBulk(&full[1]);
    FenceBulk();
  }
  __syncwarp();
  put(0);
  put(1);
  for (int stage = 0; stage < stages; ++stage) {
    WaitBulk(&full[stage % 2], static_cast<uint32_t>(stage / 2 % 2));
    for (int i = lane; i < kBulkBytes; i += 32) {
      out[stage * kBulkBytes + i] = slots[stage % 2][i];
      slots[stage % 2][i] = std::byte{0};
    }
    FenceBulk();
    __syncwarp();
    put(stage + 2);
  }
}

__global__ void LookUpKernel(const uint32_t* words, int count, const uint32_t* table,
                             uint32_t* out) {
  LaunchDependents();
  GridDependencyWait();
  DS4_DYNAMIC_SHARED(memory);
  auto* aligned = reinterpret_cast<uint32_t*>(
      memory + (0u - static_cast<uint32_t>(AddressOfShared(memory))) % (4 * kTableWords));
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kTableWords; i += 64) aligned[i] = table[i];
  __syncthreads();
  const SharedWordAddress own = AddressOfShared(aligned) + 4 * static_cast<uint32_t>(thread);
  for (int i = thread; i < count; i += 64) {
    for (uint32_t k = 0; k < 4; ++k) out[4 * i + k] = LoadSharedWord(WithByte1(own, words[i], k));
  }
}

__global__ void __launch_bounds__(32) PipelineKernel(const float* x, int stages, float* out) {
  LaunchDependents();
  GridDependencyWait();
  __shared__ __align__(16) float ring[kPipelineDepth][kPipelineValues];
  const int lane = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int stage) {
    if (stage < stages) {
      CopyAsync16(&ring[stage % kPipelineDepth][4 * lane], x + stage * kPipelineValues + 4 * lane);
    }
    CopyAsyncCommit();
  };
  for (int stage = 0; stage < kPipelineDepth; ++stage) fetch(stage);
  float sums[4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    CopyAsyncWait<kPipelineDepth - 1>();
    __syncthreads();  // others' copies too: each lane reads a neighbour's values
    const float* values = &ring[stage % kPipelineDepth][4 * (lane ^ 1)];
    for (int i = 0; i < 4; ++i) sums[i] += values[i] * static_cast<float>(stage + 1);
    __syncthreads();
    fetch(stage + kPipelineDepth);
  }
  CopyAsyncWait<0>();
  for (int i = 0; i < 4; ++i) out[4 * (lane ^ 1) + i] = sums[i];
}

__global__ void StreamCopyKernel(const std::byte* x, int bytes, std::byte* out) {
  LaunchDependents();
  if (GlobalIndex() == 0) PrefetchL2(x, static_cast<uint32_t>(bytes));
  GridDependencyWait();
  const int at = static_cast<int>(GlobalIndex()) * 16;
  if (at >= bytes) return;
  uint4& to = *reinterpret_cast<uint4*>(out + at);
  if (threadIdx.x % 3 == 0) {
    to = LoadStream16(x + at);
  } else if (threadIdx.x % 3 == 1) {
    to = LoadEarly16(x + at);
  } else {
    to = make_uint4(LoadEarly4(x + at), LoadEarly4(x + at + 4), LoadEarly4(x + at + 8),
                    LoadEarly4(x + at + 12));
  }
}

__global__ void NumberThreadsKernel(int* out) {
  LaunchDependents();
  GridDependencyWait();
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = static_cast<int>(1000 * block + thread);
}

__global__ void AtomicsKernel(int n, uint32_t* out) {
  LaunchDependents();
  GridDependencyWait();
  const int i = static_cast<int>(GlobalIndex());
  if (i >= n) return;
  atomicAdd(reinterpret_cast<int*>(out), -i);
  atomicAdd(out + 1, static_cast<unsigned>(i));
  atomicAdd(reinterpret_cast<float*>(out + 2), static_cast<float>(i));
  atomicMax(reinterpret_cast<int*>(out + 3), i);
  // Takes turns: each thread once changes the word from even to odd and back.
  for (bool won = false; !won;) {
    const unsigned seen = atomicCAS(out + 4, 0u, 0u);
    won = atomicCAS(out + 4, seen, seen + 1) == seen;
  }
  atomicInc(out + 5, 99);
  atomicOr(out + 6 + i / 32, 1u << i % 32);
}

// Every thread leaves its number, twice; the last block adds all of them up.
__global__ void ArriveKernel(uint32_t* counter, uint32_t* numbers, float* floats, uint32_t* sum) {
  LaunchDependents();
  GridDependencyWait();
  __shared__ bool last;
  numbers[GlobalIndex()] = GlobalIndex();
  StoreRelaxedDevice(floats + GlobalIndex(), static_cast<float>(GlobalIndex()));
  __syncthreads();
  if (threadIdx.x == 0) last = ArriveLast(counter, gridDim.x);
  __syncthreads();
  if (!last) return;
  uint32_t own = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) {
    own += numbers[i] + static_cast<uint32_t>(LoadRelaxedDevice(floats + i));
  }
  atomicAdd(sum, own);
}

__global__ void RehearseKernel(bool rehearse, int* out) {
  LaunchDependents();
  int calls = 0;
  RehearseAndRun(rehearse, [&](bool turn) {
    ++calls;
    if (turn) out[GlobalIndex()] = calls;
  });
}

__global__ void StepKernel(uint32_t* x, int count) {
  LaunchDependents();
  GridDependencyWait();
  const int i = static_cast<int>(GlobalIndex());
  if (i < count) x[i] = 3 * x[i] + 1;
}

__global__ void HandshakeKernel(uint32_t* flags, const uint32_t* data, uint32_t limit_ms,
                                uint32_t* result) {
  LaunchDependents();
  GridDependencyWait();
  if (threadIdx.x != 0) return;
  StoreReleaseSystem(flags, 1);
  const uint64_t start = GlobalTimerNs();
  bool came = false;
  while (!came && GlobalTimerNs() - start < uint64_t{limit_ms} * 1000000) {
    came = LoadAcquireSystem(flags + 1) == 2;
  }
  *result = came ? *data + 1 : 0;
}

__global__ void NothingKernel() {
  LaunchDependents();
  GridDependencyWait();
}

unsigned BlocksFor(int count, unsigned threads) {
  return (static_cast<unsigned>(count) + threads - 1) / threads;
}

}  // namespace

void LaunchWiden(const LaunchContext& launch, const Widened& out) {
  Launch(launch, 65536 / 256, 256, 0, WidenKernel, out);
}
void LaunchNarrow(const LaunchContext& launch, const float* x, int count, uint16_t* half,
                  uint16_t* bf16, uint32_t* pairs) {
  Launch(launch, BlocksFor(count, 64), 64, 0, NarrowKernel, x, count, half, bf16, pairs);
}
void LaunchReciprocal(const LaunchContext& launch, const float* x, int count, float* out) {
  Launch(launch, BlocksFor(count, 64), 64, 0, ReciprocalKernel, x, count, out);
}
void LaunchExchange(const LaunchContext& launch, const float* x, float* out) {
  Launch(launch, 1, 32, 0, ExchangeKernel, x, out);
}
void LaunchIntegers(const LaunchContext& launch, const uint32_t* a, const uint32_t* b, int count,
                    uint32_t* out) {
  Launch(launch, BlocksFor(count, 32), 32, 0, IntegersKernel, a, b, count, out);
}
void LaunchMmaS8(const LaunchContext& launch, const int8_t* a, const int8_t* b, const int* c,
                 int* d) {
  Launch(launch, 1, 32, 0, MmaS8Kernel, a, b, c, d);
}
void LaunchMmaBf16(const LaunchContext& launch, const uint16_t* a, const uint16_t* b,
                   const float* c, float* d) {
  Launch(launch, 1, 32, 0, MmaBf16Kernel, a, b, c, d);
}
void LaunchMmaF16(const LaunchContext& launch, const uint16_t* a, const uint16_t* b, const float* c,
                  float* d) {
  Launch(launch, 1, 32, 0, MmaF16Kernel, a, b, c, d);
}
void LaunchLoadMatrix(const LaunchContext& launch, const uint16_t* matrices, uint32_t* plain,
                      uint32_t* transposed) {
  Launch(launch, 1, 32, 0, LoadMatrixKernel, matrices, plain, transposed);
}
void LaunchReverse(const LaunchContext& launch, const float* x, int blocks, size_t shared_bytes,
                   float* out) {
  const auto first = static_cast<uint32_t>(shared_bytes / sizeof(float)) - kReverseThreads;
  Launch(launch, static_cast<unsigned>(blocks), kReverseThreads, shared_bytes, ReverseKernel, x,
         first, out);
}
void LaunchTeams(const LaunchContext& launch, uint32_t* x) {
  Launch(launch, 1, 64 * kTeams, 0, TeamsKernel, x);
}
void LaunchLookUp(const LaunchContext& launch, const uint32_t* words, int count,
                  const uint32_t* table, uint32_t* out) {
  Launch(launch, 1, 64, 2 * 4 * kTableWords, LookUpKernel, words, count, table, out);
}
void LaunchBulk(const LaunchContext& launch, const void* x, int stages, void* out) {
  Launch(launch, 1, 32, 0, BulkKernel, static_cast<const std::byte*>(x), stages,
         static_cast<std::byte*>(out));
}
void LaunchPipeline(const LaunchContext& launch, const float* x, int stages, float* out) {
  Launch(launch, 1, 32, 0, PipelineKernel, x, stages, out);
}
void LaunchStreamCopy(const LaunchContext& launch, const void* x, int bytes, void* out) {
  Launch(launch, BlocksFor(bytes / 16, 64), 64, 0, StreamCopyKernel,
         static_cast<const std::byte*>(x), bytes, static_cast<std::byte*>(out));
}
void LaunchNumberThreads(const LaunchContext& launch, int* out) {
  Launch(launch, dim3(3, 2, 2), dim3(8, 4, 3), 0, NumberThreadsKernel, out);
}
void LaunchAtomics(const LaunchContext& launch, int n, uint32_t* out) {
  Launch(launch, BlocksFor(n, 64), 64, 0, AtomicsKernel, n, out);
}
void LaunchRehearse(const LaunchContext& launch, bool rehearse, int* out) {
  Launch(launch, 2, 32, 0, RehearseKernel, rehearse, out);
}
void LaunchArrive(const LaunchContext& launch, int blocks, uint32_t* counter, uint32_t* numbers,
                  float* floats, uint32_t* sum) {
  Launch(launch, static_cast<unsigned>(blocks), 64, 0, ArriveKernel, counter, numbers, floats, sum);
}
void LaunchStep(const LaunchContext& launch, uint32_t* x, int count) {
  Launch(launch, BlocksFor(count, 64), 64, 0, StepKernel, x, count);
}
void LaunchHandshake(const LaunchContext& launch, uint32_t* flags, const uint32_t* data,
                     uint32_t limit_ms, uint32_t* result) {
  Launch(launch, 1, 32, 0, HandshakeKernel, flags, data, limit_ms, result);
}
void LaunchNothing(const LaunchContext& launch, unsigned threads, size_t shared_bytes) {
  Launch(launch, 1, threads, shared_bytes, NothingKernel);
}

}  // namespace ds4::cuda::testing
