// Attention of a block of heads over one key list, and the indexer's scores.
#pragma once

#include "engine/kernels/rows_impl.h"

namespace ds4::DS4_ISA_NAMESPACE {

// scores[a][j] = scale * (q[a] . key[j]) for KT keys and all heads.
template <int KT, int HT>
inline void ScoreHeads(const AttendTask& task, int64_t j, int64_t a) {
  const float* const* next = task.keys + j;
  const float* keys[KT];
  for (int i = 0; i < KT; ++i) keys[i] = next[i];
  for (; a + HT <= task.num_heads; a += HT) {
    const float* q[HT];
    for (int h = 0; h < HT; ++h) q[h] = task.q + (a + h) * task.head_dim;
    float sums[HT][KT];
    DotTile<F32Values, KT, HT>(keys, q, task.head_dim, sums);
    for (int h = 0; h < HT; ++h) {
      for (int i = 0; i < KT; ++i)
        task.scores[(a + h) * task.num_keys + j + i] = task.scale * sums[h][i];
    }
  }
  if constexpr (HT > 1) {
    if (a < task.num_heads) ScoreHeads<KT, HT - 1>(task, j, a);
  }
}

inline void Scores(const AttendTask& task) {
  int64_t j = 0;
  for (; j + kDotW <= task.num_keys; j += kDotW) ScoreHeads<kDotW, kDotX>(task, j, 0);
  for (; j < task.num_keys; ++j) ScoreHeads<1, kDotX>(task, j, 0);
}

// Scores of one head to weights: e^(s - m) / (sum + e^(sink - m)), the sum in list order.
inline void SoftmaxWithSink(float* scores, int64_t n, float sink) {
  float top = sink;
  for (int64_t j = 0; j < n; ++j) top = Max(scores[j], top);
  const Vec m = Set1<Vec>(top);
  ForGroups(n, [&](int64_t k, int64_t len) {
    StoreN(scores + k, ExpOf(Sub(LoadN(scores + k, len), m)), len);
  });
  float sum = 0.0f;
  for (int64_t j = 0; j < n; ++j) sum = sum + scores[j];
  const Vec total = Set1<Vec>(sum + ExpOf(sink - top));
  ForGroups(n, [&](int64_t k, int64_t len) {
    StoreN(scores + k, Div(LoadN(scores + k, len), total), len);
  });
}

// out[a][d..] += p[a][j] key[j][d..], keys in list order, for HT heads and VT groups of 16
// channels.
template <int HT, int VT>
inline void SumTile(const AttendTask& task, int64_t a, int64_t d) {
  Vec acc[HT][VT];
  DS4_UNROLL
  for (int h = 0; h < HT; ++h) {
    DS4_UNROLL
    for (int v = 0; v < VT; ++v) acc[h][v] = Zero();
  }
  const float* p = task.scores + a * task.num_keys;
  for (int64_t j = 0; j < task.num_keys; ++j) {
    const float* key = task.keys[j] + d;
    Vec values[VT];
    DS4_UNROLL
    for (int v = 0; v < VT; ++v) values[v] = Load(key + v * kLanes);
    DS4_UNROLL
    for (int h = 0; h < HT; ++h) {
      const Vec weight = Set1<Vec>(p[h * task.num_keys + j]);
      DS4_UNROLL
      for (int v = 0; v < VT; ++v) acc[h][v] = Fma(weight, values[v], acc[h][v]);
    }
  }
  DS4_UNROLL
  for (int h = 0; h < HT; ++h) {
    DS4_UNROLL
    for (int v = 0; v < VT; ++v)
      Store(task.out + (a + h) * task.head_dim + d + v * kLanes, acc[h][v]);
  }
}

// The last channels, when head_dim is no multiple of 16.
inline void SumPart(const AttendTask& task, int64_t a, int64_t d) {
  const int64_t len = task.head_dim - d;
  Vec acc = Zero();
  for (int64_t j = 0; j < task.num_keys; ++j) {
    acc = Fma(Set1<Vec>(task.scores[a * task.num_keys + j]), LoadPart(task.keys[j] + d, len), acc);
  }
  StorePart(task.out + a * task.head_dim + d, acc, len);
}

template <int HT>
inline int64_t SumHeads(const AttendTask& task, int64_t a) {
  for (; a + HT <= task.num_heads; a += HT) {
    int64_t d = 0;
    for (; d + kSumVecs * kLanes <= task.head_dim; d += kSumVecs * kLanes) {
      SumTile<HT, kSumVecs>(task, a, d);
    }
    for (; d + kLanes <= task.head_dim; d += kLanes) SumTile<HT, 1>(task, a, d);
    if (d < task.head_dim) {
      for (int h = 0; h < HT; ++h) SumPart(task, a + h, d);
    }
  }
  return a;
}

inline void AttendHeads(const AttendTask& task) {
  Scores(task);
  for (int64_t a = 0; a < task.num_heads; ++a) {
    SoftmaxWithSink(task.scores + a * task.num_keys, task.num_keys, task.sinks[a]);
  }
  const int64_t a = SumHeads<kSumHeads>(task, 0);
  SumHeads<1>(task, a);
}

// Heads in rising order for each key: one fused multiply-add per head.
template <int KT, int HT>
inline void IndexerHeads(const float* q, const float* head_weights, int64_t h, int64_t num_heads,
                         int64_t dim, const float* const (&keys)[KT], float (&acc)[KT]) {
  for (; h + HT <= num_heads; h += HT) {
    const float* rows[HT];
    for (int i = 0; i < HT; ++i) rows[i] = q + (h + i) * dim;
    float sums[HT][KT];
    DotTile<F32Values, KT, HT>(keys, rows, dim, sums);
    for (int i = 0; i < HT; ++i) {
      for (int w = 0; w < KT; ++w) {
        const float relu = sums[i][w] < 0.0f ? 0.0f : sums[i][w];
        acc[w] = Fma(head_weights[h + i], relu, acc[w]);
      }
    }
  }
  if constexpr (HT > 1) {
    if (h < num_heads) IndexerHeads<KT, HT - 1>(q, head_weights, h, num_heads, dim, keys, acc);
  }
}

template <int KT>
inline void IndexerKeys(const float* q, const float* head_weights, int64_t num_heads, int64_t dim,
                        const float* keys, float scale, float* out) {
  const float* rows[KT];
  float acc[KT];
  for (int i = 0; i < KT; ++i) {
    rows[i] = keys + i * dim;
    acc[i] = 0.0f;
  }
  IndexerHeads<KT, kDotX>(q, head_weights, 0, num_heads, dim, rows, acc);
  for (int i = 0; i < KT; ++i) out[i] = scale * acc[i];
}

inline void IndexerScoreRows(const float* q, const float* head_weights, int64_t num_heads,
                             int64_t dim, const float* keys, int64_t num_keys, float scale,
                             float* out) {
  int64_t w = 0;
  for (; w + kDotW <= num_keys; w += kDotW) {
    IndexerKeys<kDotW>(q, head_weights, num_heads, dim, keys + w * dim, scale, out + w);
  }
  for (; w < num_keys; ++w) {
    IndexerKeys<1>(q, head_weights, num_heads, dim, keys + w * dim, scale, out + w);
  }
}

}  // namespace ds4::DS4_ISA_NAMESPACE
