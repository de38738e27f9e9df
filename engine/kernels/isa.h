// The inner loops of all ops, once per instruction set. Each set is one file (kernels_generic.cc,
// kernels_avx2.cc, kernels_avx512.cc) built from the same templates (*_impl.h) over its own vector
// type (simd_*.h); all give the same bits. Ops call through ActiveKernels(); tests through
// AvailableKernels().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/tensor/dtype.h"

namespace ds4 {

// Weight rows [row_begin, row_end) times num_x input rows. Plain data: files built for another
// instruction set must not share inline functions with the rest. y points at column 0, row 0.
struct MatMulTask {
  DType dtype = DType::kF32;
  const std::byte* w = nullptr;
  int64_t w_stride = 0;  // bytes
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t cols = 0;
  int64_t num_x = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int8_t* q = nullptr;
  const float* q_scale = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
  bool accumulate = false;
};

// Heads [0, num_heads) of one row over num_keys keys; scores is scratch of num_heads * num_keys.
struct AttendTask {
  const float* q = nullptr;
  const float* sinks = nullptr;
  const float* const* keys = nullptr;
  int64_t num_keys = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  float* scores = nullptr;
  float* out = nullptr;
};

struct KernelTable {
  const char* name;
  void (*matmul)(const MatMulTask& task);
  void (*quantize_row)(const float* x, int64_t cols, int8_t* q, float* scale);
  float (*exp)(float x);
  float (*log)(float x);
  float (*sigmoid)(float x);
  float (*softplus)(float x);
  // The vector form of exp, in place; sums over the vocabulary use it.
  void (*exp_row)(float* x, int64_t n);
  float (*sum_of_squares)(const float* x, int64_t n);
  // y = (x * factor) * weight; weight may be null.
  void (*scale_row)(const float* x, const float* weight, float factor, int64_t n, float* y);
  void (*swiglu_row)(const float* gate, const float* up, float row_weight, int64_t n, float limit,
                     float* out);
  void (*attend)(const AttendTask& task);
  void (*pool_window)(const float* const* values, const float* const* scores, int64_t num_slots,
                      int64_t dim, float* out);
  void (*indexer_scores)(const float* q, const float* head_weights, int64_t num_heads, int64_t dim,
                         const float* keys, int64_t num_keys, float scale, float* out);
  // out = sum_h weights[h] * streams[h]; streams: [num_streams, dim].
  void (*collapse)(const float* streams, const float* weights, int64_t num_streams, int64_t dim,
                   float* out);
  // streams[k] = post[k] * result + sum_j comb[j][k] * streams[j], in place; num_streams <= 8.
  void (*expand)(float* streams, const float* result, const float* post, const float* comb,
                 int64_t num_streams, int64_t dim);
};

constexpr int64_t kMaxStreams = 8;

// The tables this CPU can run, plainest first; never empty.
std::span<const KernelTable* const> AvailableKernels();
// The best of them, or the one that the environment variable DS4_ISA names. Chosen once; an unknown
// or unsupported name ends the process with a message (no silent fallback).
const KernelTable& ActiveKernels();

// One per file; null where the file was built for another architecture.
const KernelTable* GenericKernels();
const KernelTable* Avx2Kernels();
const KernelTable* Avx512Kernels();

}  // namespace ds4
