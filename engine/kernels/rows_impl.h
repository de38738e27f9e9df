// Ops that go over the values of one row: rounding, norms, gates, pooling, streams.
#pragma once

#include "engine/kernels/math_impl.h"
#include "engine/kernels/matmul_impl.h"

namespace ds4::DS4_ISA_NAMESPACE {

// Calls f(k, n) for each group of 16 values: n = 16, and less for the last when dim is no multiple.
template <class F>
inline void ForGroups(int64_t dim, F f) {
  int64_t k = 0;
  for (; k + kLanes <= dim; k += kLanes) f(k, int64_t{kLanes});
  if (k < dim) f(k, dim - k);
}
inline Vec LoadN(const float* p, int64_t n) { return n == kLanes ? Load(p) : LoadPart(p, n); }
inline void StoreN(float* p, Vec v, int64_t n) {
  if (n == kLanes) {
    Store(p, v);
  } else {
    StorePart(p, v, n);
  }
}

inline void QuantizeRow(const float* x, int64_t cols, int8_t* q, float* scale) {
  const Vec limit = Set1<Vec>(127.0f), negative_limit = Set1<Vec>(-127.0f);
  for (int64_t b = 0; b < cols / 32; ++b) {
    const Vec lo = Load(x + 32 * b), hi = Load(x + 32 * b + 16);
    float d = HMax(Max(Abs(lo), Abs(hi))) / 127.0f;
    // Where 1/d is no finite number the block is as good as zero (|x| below 4e-37).
    if (d < 0x1p-126f) d = 0.0f;
    const Vec inverse = Set1<Vec>(d > 0.0f ? 1.0f / d : 0.0f);
    // Max and Min turn NaN (from infinite input) into a number, so the conversion stays defined.
    StoreRounded(q + 32 * b, Min(Max(Mul(lo, inverse), negative_limit), limit));
    StoreRounded(q + 32 * b + 16, Min(Max(Mul(hi, inverse), negative_limit), limit));
    scale[b] = d;
  }
}

inline float SumOfSquares(const float* x, int64_t n) {
  const float* const row[1] = {x};
  float sum[1][1];
  DotTile<F32Values, 1, 1>(row, row, n, sum);
  return sum[0][0];
}

inline void ScaleRow(const float* x, const float* weight, float factor, int64_t n, float* y) {
  const Vec f = Set1<Vec>(factor);
  ForGroups(n, [&](int64_t k, int64_t len) {
    Vec v = Mul(LoadN(x + k, len), f);
    if (weight != nullptr) v = Mul(v, LoadN(weight + k, len));
    StoreN(y + k, v, len);
  });
}

inline void SwiGluRow(const float* gate, const float* up, float row_weight, int64_t dim,
                      float limit, float* out) {
  const Vec top = Set1<Vec>(limit), bottom = Set1<Vec>(-limit), w = Set1<Vec>(row_weight);
  ForGroups(dim, [&](int64_t k, int64_t len) {
    const Vec g0 = LoadN(gate + k, len), u0 = LoadN(up + k, len);
    // NaN goes through the clamps: it must show, not become the limit.
    const Vec g = SelectLess(top, g0, top, g0);
    const Vec u = SelectLess(u0, bottom, bottom, SelectLess(top, u0, top, u0));
    StoreN(out + k, Mul(Mul(Mul(g, SigmoidOf(g)), u), w), len);
  });
}

inline void ExpRow(float* x, int64_t n) {
  ForGroups(n, [&](int64_t k, int64_t len) { StoreN(x + k, ExpOf(LoadN(x + k, len)), len); });
}

// Weights of one channel are e^(score - max); their sum divides at the end.
inline void PoolWindowRows(const float* const* values, const float* const* scores,
                           int64_t num_slots, int64_t dim, float* out) {
  ForGroups(dim, [&](int64_t k, int64_t len) {
    Vec top = Set1<Vec>(-__builtin_inff());
    for (int64_t i = 0; i < num_slots; ++i) {
      if (values[i] != nullptr) top = Max(LoadN(scores[i] + k, len), top);
    }
    Vec sum = Zero(), acc = Zero();
    for (int64_t i = 0; i < num_slots; ++i) {
      if (values[i] == nullptr) continue;
      const Vec e = ExpOf(Sub(LoadN(scores[i] + k, len), top));
      sum = Add(sum, e);
      acc = Fma(e, LoadN(values[i] + k, len), acc);
    }
    StoreN(out + k, Div(acc, sum), len);
  });
}

inline void Collapse(const float* streams, const float* weights, int64_t num_streams, int64_t dim,
                     float* out) {
  ForGroups(dim, [&](int64_t k, int64_t len) {
    Vec acc = Zero();
    for (int64_t h = 0; h < num_streams; ++h) {
      acc = Fma(Set1<Vec>(weights[h]), LoadN(streams + h * dim + k, len), acc);
    }
    StoreN(out + k, acc, len);
  });
}

inline void Expand(float* streams, const float* result, const float* post, const float* comb,
                   int64_t num_streams, int64_t dim) {
  ForGroups(dim, [&](int64_t i, int64_t len) {
    Vec old[kMaxStreams];
    for (int64_t j = 0; j < num_streams; ++j) old[j] = LoadN(streams + j * dim + i, len);
    const Vec s = LoadN(result + i, len);
    for (int64_t k = 0; k < num_streams; ++k) {
      Vec acc = Mul(Set1<Vec>(post[k]), s);
      for (int64_t j = 0; j < num_streams; ++j) {
        acc = Fma(Set1<Vec>(comb[j * num_streams + k]), old[j], acc);
      }
      StoreN(streams + k * dim + i, acc, len);
    }
  });
}

}  // namespace ds4::DS4_ISA_NAMESPACE
