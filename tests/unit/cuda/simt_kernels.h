// Small kernels that use the names of engine/cuda/simt.h one at a time; for simt_test.cc and
// runtime_test.cc. Device pointers.
#pragma once

#include <cstdint>

#include "engine/cuda/launch.h"

namespace ds4::cuda::testing {

// All 65,536 bit patterns: half_values, bf16_values [65536]; the same in pairs (pattern i, pattern
// 65535 - i): half_pairs, bf16_pairs [65536][2].
struct Widened {
  float* half_values;
  float* bf16_values;
  float* half_pairs;
  float* bf16_pairs;
};
void LaunchWiden(const LaunchContext& launch, const Widened& out);
// half, bf16 [count]; pairs [count]: bf16 of (x[i], x[count - 1 - i]).
void LaunchNarrow(const LaunchContext& launch, const float* x, int count, uint16_t* half,
                  uint16_t* bf16, uint32_t* pairs);

// out[i] = FastReciprocal(x[i]), i < count.
void LaunchReciprocal(const LaunchContext& launch, const float* x, int count, float* out);

// x: [32] of one warp. out [lane][kExchanges]: from lane 3i, from lane ^ 5, from lane + 7, ballot
// of x > 0, WarpSum, WarpMax, lane 2 of its four; of the bits of x the least, the greatest, their
// sum and that of ints.
inline constexpr int kExchanges = 11;
void LaunchExchange(const LaunchContext& launch, const float* x, float* out);

// One value a row of `out`, all of (a, b): see simt_test.cc.
inline constexpr int kIntegerResults = 14;
void LaunchIntegers(const LaunchContext& launch, const uint32_t* a, const uint32_t* b, int count,
                    uint32_t* out);

// d = c + a b, row-major: a [16][K], b [8][K] (column n at b + n K), c, d [16][8].
void LaunchMmaS8(const LaunchContext& launch, const int8_t* a, const int8_t* b, const int* c,
                 int* d);
void LaunchMmaBf16(const LaunchContext& launch, const uint16_t* a, const uint16_t* b,
                   const float* c, float* d);
void LaunchMmaF16(const LaunchContext& launch, const uint16_t* a, const uint16_t* b, const float* c,
                  float* d);

// matrices: [4][8][8]; plain, transposed: [32 lanes][4].
void LaunchLoadMatrix(const LaunchContext& launch, const uint16_t* matrices, uint32_t* plain,
                      uint32_t* transposed);

// out = x backwards within each block of 256, through dynamic shared memory of `shared_bytes` (at
// least 1 KB; the last 1 KB of it is used).
void LaunchReverse(const LaunchContext& launch, const float* x, int blocks, size_t shared_bytes,
                   float* out);
// x: [64 kTeams] of one block, a team each 64. Team k steps k + 3 times: every thread takes twice
// the value of the thread beside it in the team.
inline constexpr int kTeams = 4;
void LaunchTeams(const LaunchContext& launch, uint32_t* x);
// out[4 i + k] = table[64 * (byte k of words[i]) + i % 64], of 256 entries of 256 bytes that stand
// at a multiple of 64 KB in shared memory.
void LaunchLookUp(const LaunchContext& launch, const uint32_t* words, int count,
                  const uint32_t* table, uint32_t* out);
// out = x, `stages` times 2,240 bytes, by bulk copies to two places in turn.
void LaunchBulk(const LaunchContext& launch, const void* x, int stages, void* out);
// out[i] = sum over stages s of x[s * 128 + i] * (s + 1), i < 128, by a ring of three asynchronous
// copies in flight.
void LaunchPipeline(const LaunchContext& launch, const float* x, int stages, float* out);
// out = x, 16 bytes a thread, after a prefetch, by each kind of load. bytes: a multiple
// of 16.
void LaunchStreamCopy(const LaunchContext& launch, const void* x, int bytes, void* out);

// out[linear block][linear thread] = 1000 * linear block + linear thread, over a grid 3 x 2 x 2 of
// blocks 8 x 4 x 3.
void LaunchNumberThreads(const LaunchContext& launch, int* out);
// int, unsigned, float sums of 0..n-1, maximum, count of compare-and-swap wins, increments
// that start again after 99, then a bit for each of 0..n-1; out [6 + n / 32] as words.
void LaunchAtomics(const LaunchContext& launch, int n, uint32_t* out);
// out[i], i < 64: how often RehearseAndRun has called when it is the thread's turn.
void LaunchRehearse(const LaunchContext& launch, bool rehearse, int* out);
// The last of `blocks` blocks of 64 threads adds the sum of all threads' numbers, as integers and
// as floats, to *sum. counter: a word, 0; numbers, floats: [blocks * 64].
void LaunchArrive(const LaunchContext& launch, int blocks, uint32_t* counter, uint32_t* numbers,
                  float* floats, uint32_t* sum);
// x[i] = 3 x[i] + 1, i < count.
void LaunchStep(const LaunchContext& launch, uint32_t* x, int count);
// Sets flags[0] = 1, waits up to `limit_ms` for flags[1] == 2, then result = data + 1, or 0 when
// nobody came.
void LaunchHandshake(const LaunchContext& launch, uint32_t* flags, const uint32_t* data,
                     uint32_t limit_ms, uint32_t* result);
// Blocks of `threads` with `shared_bytes`: for launches that cannot be.
void LaunchNothing(const LaunchContext& launch, unsigned threads, size_t shared_bytes);

}  // namespace ds4::cuda::testing
