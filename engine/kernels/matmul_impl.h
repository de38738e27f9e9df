// Products of packed weight rows with input rows, in tiles whose partial sums stay in registers.
// Each (weight row, input row) pair has its own partial sums, added in the order of matmul.h, so
// the shape of the tile changes no bit.
#pragma once

#include "engine/kernels/isa.h"

namespace ds4::DS4_ISA_NAMESPACE {

// How 16 stored values become floats; Part reads n < 16 and fills with zeros.
struct F32Values {
  using Type = float;
  static Vec Full(const float* p) { return Load(p); }
  static Reg OneReg(const float* p) { return LoadReg(p); }
  static Vec Part(const float* p, int64_t n) { return LoadPart(p, n); }
};
struct F16Values {
  using Type = uint16_t;
  static Vec Full(const uint16_t* p) { return LoadF16(p); }
  static Reg OneReg(const uint16_t* p) { return LoadRegF16(p); }
  static Vec Part(const uint16_t* p, int64_t n) { return LoadPartF16(p, n); }
};
struct BF16Values {
  using Type = uint16_t;
  static Vec Full(const uint16_t* p) { return LoadBF16(p); }
  static Reg OneReg(const uint16_t* p) { return LoadRegBF16(p); }
  static Vec Part(const uint16_t* p, int64_t n) { return LoadPartBF16(p, n); }
};

// The first n values (any n) of the 16 at p; past the end everything is zero and nothing is read.
template <class Values>
inline Vec UpTo(const typename Values::Type* p, int64_t n) {
  if (n >= kLanes) return Values::Full(p);
  return n > 0 ? Values::Part(p, n) : Zero();
}

// The 32 partial sums of a pair of rows lie in kNumRegs registers. A tile keeps as many of them for
// all its pairs as fit (RegsAtOnce); where that is not all, it goes over a stretch of columns that
// stays in the L1 cache once for each group of registers.
constexpr int kNumRegs = 32 / kRegLanes;

template <int WT, int XT>
struct DotSums {
  Reg partial[kNumRegs][WT][XT];

  // Adds columns [begin, end), whole groups of 32. kMatrix: see DotTile.
  template <class Values, int kFirst, int kCount, bool kMatrix>
  DS4_INLINE void AddGroups(const typename Values::Type* const (&w)[WT],
                            const float* const (&x)[XT], int64_t begin, int64_t end) {
    Reg acc[kCount][WT][XT];
    DS4_UNROLL
    for (int g = 0; g < kCount; ++g) {
      DS4_UNROLL
      for (int i = 0; i < WT; ++i) {
        DS4_UNROLL
        for (int j = 0; j < XT; ++j) acc[g][i][j] = partial[kFirst + g][i][j];
      }
    }
    for (int64_t k = begin; k < end; k += 32) {
      Reg xv[kCount][XT];
      DS4_UNROLL
      for (int j = 0; j < XT; ++j) {
        DS4_UNROLL
        for (int g = 0; g < kCount; ++g) xv[g][j] = LoadReg(x[j] + k + (kFirst + g) * kRegLanes);
      }
      DS4_UNROLL
      for (int i = 0; i < WT; ++i) {
        Reg wv[kCount];
        DS4_UNROLL
        for (int g = 0; g < kCount; ++g) {
          wv[g] = Values::OneReg(w[i] + k + (kFirst + g) * kRegLanes);
        }
        if constexpr (kMatrix && WT > 1 && kFirst == 0) {
          const typename Values::Type* next = w[i] + k + WT * (w[1] - w[0]);
          Prefetch(next);
          if (sizeof(*next) == 4) Prefetch(next + 16);
        }
        DS4_UNROLL
        for (int j = 0; j < XT; ++j) {
          DS4_UNROLL
          for (int g = 0; g < kCount; ++g) acc[g][i][j] = FmaReg(wv[g], xv[g][j], acc[g][i][j]);
        }
      }
    }
    DS4_UNROLL
    for (int g = 0; g < kCount; ++g) {
      DS4_UNROLL
      for (int i = 0; i < WT; ++i) {
        DS4_UNROLL
        for (int j = 0; j < XT; ++j) partial[kFirst + g][i][j] = acc[g][i][j];
      }
    }
  }

  // All registers, kCount at a time.
  template <class Values, int kFirst, int kCount, bool kMatrix>
  DS4_INLINE void AddStretch(const typename Values::Type* const (&w)[WT],
                             const float* const (&x)[XT], int64_t begin, int64_t end) {
    AddGroups<Values, kFirst, kCount, kMatrix>(w, x, begin, end);
    if constexpr (kFirst + kCount < kNumRegs) {
      AddStretch<Values, kFirst + kCount, kCount, kMatrix>(w, x, begin, end);
    }
  }
};

// The n < 32 values at p, then zeros.
template <class Values>
DS4_INLINE void Widen(const typename Values::Type* p, int64_t n, float (&out)[32]) {
  Store(out, UpTo<Values>(p, n));
  Store(out + kLanes, n > kLanes ? UpTo<Values>(p + kLanes, n - kLanes) : Zero());
}

// The last columns, fewer than 32, as one group filled up with zeros.
template <class Values, int WT, int XT>
DS4_INLINE void AddTail(const typename Values::Type* const (&w)[WT], const float* const (&x)[XT],
                        int64_t k, int64_t n, DotSums<WT, XT>& sums) {
  float w_values[WT][32], x_values[XT][32];
  const float* w_rows[WT];
  const float* x_rows[XT];
  for (int i = 0; i < WT; ++i) {
    Widen<Values>(w[i] + k, n, w_values[i]);
    w_rows[i] = w_values[i];
  }
  for (int j = 0; j < XT; ++j) {
    Widen<F32Values>(x[j] + k, n, x_values[j]);
    x_rows[j] = x_values[j];
  }
  sums.template AddStretch<F32Values, 0, RegsAtOnce(WT * XT), false>(w_rows, x_rows, 0, 32);
}

// sums[j][i] = w[i] . x[j]. Columns past the end count as zeros. kMatrix: the rows at w are equally
// spaced, and those of the next tile follow.
template <class Values, int WT, int XT, bool kMatrix = false>
inline void DotTile(const typename Values::Type* const (&w)[WT], const float* const (&x)[XT],
                    int64_t cols, float (&sums)[XT][WT]) {
  constexpr int kAtOnce = RegsAtOnce(WT * XT);
  DotSums<WT, XT> dots;
  DS4_UNROLL
  for (int g = 0; g < kNumRegs; ++g) {
    DS4_UNROLL
    for (int i = 0; i < WT; ++i) {
      DS4_UNROLL
      for (int j = 0; j < XT; ++j) dots.partial[g][i][j] = ZeroReg();
    }
  }
  const int64_t whole = cols / 32 * 32;
  constexpr int64_t kStretch = 512;
  if constexpr (kAtOnce == kNumRegs) {
    dots.template AddStretch<Values, 0, kAtOnce, kMatrix>(w, x, 0, whole);
  } else {
    for (int64_t k = 0; k < whole; k += kStretch) {
      const int64_t end = k + kStretch < whole ? k + kStretch : whole;
      dots.template AddStretch<Values, 0, kAtOnce, kMatrix>(w, x, k, end);
    }
  }
  if (whole < cols) AddTail<Values, WT, XT>(w, x, whole, cols - whole, dots);
  DS4_UNROLL
  for (int j = 0; j < XT; ++j) {
    Vec column[WT];
    DS4_UNROLL
    for (int i = 0; i < WT; ++i) {
      Reg regs[kNumRegs];
      DS4_UNROLL
      for (int g = 0; g < kNumRegs; ++g) regs[g] = dots.partial[g][i][j];
      column[i] = AddHalves(regs);
    }
    HSums<WT>(column, sums[j]);
  }
}

// The tiles of one element type: Compute gives the sums of weight rows r.. with input rows t..
template <class Values>
struct DotKernel {
  static constexpr int kW = kDotW;
  static constexpr int kX = kDotX;
  static int64_t BytesPerInputRow(const MatMulTask& task) { return task.cols * 4; }

  template <int WT, int XT>
  static void Compute(const MatMulTask& task, int64_t r, int64_t t, float (&sums)[XT][WT]) {
    const typename Values::Type* w[WT];
    const float* x[XT];
    for (int i = 0; i < WT; ++i) {
      w[i] = reinterpret_cast<const typename Values::Type*>(task.w + (r + i) * task.w_stride);
    }
    for (int j = 0; j < XT; ++j) x[j] = task.x + (t + j) * task.x_stride;
    DotTile<Values, WT, XT, true>(w, x, task.cols, sums);
  }
};

struct Q8Kernel {
  static constexpr int kW = kQ8W;
  static constexpr int kX = kQ8X;
  static int64_t BytesPerInputRow(const MatMulTask& task) { return task.cols + task.cols / 8; }

  template <int WT, int XT>
  static void Compute(const MatMulTask& task, int64_t r, int64_t t, float (&sums)[XT][WT]) {
    const uint8_t* w[WT];
    const int8_t* q[XT];
    const float* scale[XT];
    for (int i = 0; i < WT; ++i) {
      w[i] = reinterpret_cast<const uint8_t*>(task.w + (r + i) * task.w_stride);
    }
    for (int j = 0; j < XT; ++j) {
      q[j] = task.q + (t + j) * task.cols;
      scale[j] = task.q_scale + (t + j) * (task.cols / 32);
    }
    Q8Tile<WT, XT>(w, q, scale, task.cols, sums);
  }
};

template <class Kernel, int WT, int XT>
inline void RunTile(const MatMulTask& task, int64_t r, int64_t t) {
  float sums[XT][WT];
  Kernel::template Compute<WT, XT>(task, r, t, sums);
  for (int j = 0; j < XT; ++j) {
    float* y = task.y + (t + j) * task.y_stride + r;
    for (int i = 0; i < WT; ++i) y[i] = task.accumulate ? y[i] + sums[j][i] : sums[j][i];
  }
}

// Input rows [t, t_end) in tiles of XT, then the rest in one smaller tile.
template <class Kernel, int WT, int XT>
inline void RunInputs(const MatMulTask& task, int64_t r, int64_t t, int64_t t_end) {
  for (; t + XT <= t_end; t += XT) RunTile<Kernel, WT, XT>(task, r, t);
  if constexpr (XT > 1) {
    if (t < t_end) RunInputs<Kernel, WT, XT - 1>(task, r, t, t_end);
  }
}

// One input row: one weight row after the other, for memory is read fastest in one stream (four
// rows side by side lost a quarter from memory, though they won a fifth from the L3 cache). Short
// rows go in tiles all the same: a few of them are one stream, and they share the last additions,
// which weigh more than the row itself. More input rows: blocks of them that stay in the L2 cache
// while all weight rows pass by in tiles.
template <class Kernel>
void RunMatMul(const MatMulTask& task) {
  constexpr int64_t kL2Bytes = 512 << 10;
  constexpr int64_t kShortColumns = 1024;
  int64_t r = task.row_begin;
  if (task.num_x == 1) {
    if (task.cols <= kShortColumns) {
      for (; r + Kernel::kW <= task.row_end; r += Kernel::kW)
        RunTile<Kernel, Kernel::kW, 1>(task, r, 0);
    }
    for (; r < task.row_end; ++r) RunInputs<Kernel, 1, Kernel::kX>(task, r, 0, task.num_x);
    return;
  }
  int64_t block = kL2Bytes / Kernel::BytesPerInputRow(task) / Kernel::kX * Kernel::kX;
  if (block < Kernel::kX) block = Kernel::kX;
  for (int64_t t = 0; t < task.num_x; t += block) {
    const int64_t t_end = t + block < task.num_x ? t + block : task.num_x;
    r = task.row_begin;
    for (; r + Kernel::kW <= task.row_end; r += Kernel::kW) {
      RunInputs<Kernel, Kernel::kW, Kernel::kX>(task, r, t, t_end);
    }
    for (; r < task.row_end; ++r) RunInputs<Kernel, 1, Kernel::kX>(task, r, t, t_end);
  }
}

inline void RunMatMulTask(const MatMulTask& task) {
  switch (task.dtype) {
    case DType::kF32:
      return RunMatMul<DotKernel<F32Values>>(task);
    case DType::kF16:
      return RunMatMul<DotKernel<F16Values>>(task);
    case DType::kBF16:
      return RunMatMul<DotKernel<BF16Values>>(task);
    case DType::kQ8_0:
      return RunMatMul<Q8Kernel>(task);
    default:
      __builtin_trap();  // MatMul checks the type before it comes here
  }
}

}  // namespace ds4::DS4_ISA_NAMESPACE
