// Rows of activations in the forms that products read. Device pointers, plain values.
//
// A row is one or more segments (an output group, a lane), each padded to 256 columns; `cols`
// counts all padded columns. Padding columns hold zeros in every form that is present.
//   f32    [rows][cols]
//   q      int8 in fragment order: for block kb of 32 columns, tile n of 8 rows, lane 4g + t: 8
//   bytes
//          = columns 32kb+8t..+7 of row 8n+g. q[(kb * tiles + n) * 32 + 4g + t], tiles =
//          ceil(rows/8). Values never -128: q = RoundToNearestEven(x * (127 / amax)), amax of the
//          block of 32.
//   scale  [cols/32][tiles*8], amax / 127 (0 for a block of zeros; amax below 2^-100 counts as
//   zeros;
//          NaN or infinite where a value is)
//   sums   [cols/16][tiles*8], scale * (sum of 16 int8): for formats with a minimum (Q4_K, Q2_K)
//   bf16   [rows][cols], raw bf16 bits: for the tensor-core products of prefill
// Forms that nobody asked for are null. Rows past `rows` in the last tile hold anything.
#pragma once

#include <cstdint>

namespace ds4::cuda {

struct ActivationView {
  int rows = 0;
  int64_t cols = 0;
  float* f32 = nullptr;
  uint64_t* q = nullptr;
  float* scale = nullptr;
  float* sums = nullptr;
  uint16_t* bf16 = nullptr;

  int tiles() const { return (rows + 7) / 8; }
};

enum ActivationForms : int { kFormF32 = 1, kFormQ8 = 2, kFormBF16 = 4 };

// Which form a product with weights of this type reads (decode kernels).
//   F32, F16, BF16: kFormF32; quantised types: kFormQ8.

}  // namespace ds4::cuda
