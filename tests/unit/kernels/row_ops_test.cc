// Goal: the ops that go row by row (rounding, norm, gate, pooling, indexer) follow their formulas
// and have one result for every instruction set, batch and thread count. Method: formulas in double
// with reasoned bounds; the tables compared bit by bit at odd sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/kernels/compressor.h"
#include "engine/kernels/indexer.h"
#include "engine/kernels/norm.h"
#include "engine/kernels/swiglu.h"
#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

constexpr int64_t kDims[] = {1, 7, 15, 16, 17, 31, 32, 33, 48, 100, 257};

TEST(QuantizeTest, RoundsHalvesAwayFromZero) {
  std::vector<float> x(32);
  x[0] = 127.0f;  // scale 1
  x[1] = 0.5f;
  x[2] = -0.5f;
  x[3] = 1.5f;
  x[4] = -2.5f;
  x[5] = 0.49999997f;  // adding 0.5 in float32 would make it 1
  x[6] = -126.5f;
  std::vector<int8_t> q(32);
  float scale;
  for (const KernelTable* table : AvailableKernels()) {
    table->quantize_row(x.data(), 32, q.data(), &scale);
    EXPECT_EQ(scale, 1.0f);
    EXPECT_EQ(std::vector<int8_t>(q.begin(), q.begin() + 8),
              (std::vector<int8_t>{127, 1, -1, 2, -3, 0, -127, 0}))
        << table->name;
  }
}

TEST(QuantizeTest, EveryInstructionSetRoundsAlike) {
  Random random(41);
  std::vector<float> x = random.Floats(32 * 40, -5.0f, 5.0f);
  for (size_t i = 0; i < 32; ++i) x[i] = 0.0f;
  for (size_t i = 32; i < 64; ++i) x[i] *= 1e-39f;  // too small for a scale
  for (size_t i = 64; i < 96; ++i) x[i] *= 1e37f;
  std::vector<int8_t> expected(x.size()), q(x.size());
  std::vector<float> expected_scale(40), scale(40);
  GenericKernels()->quantize_row(x.data(), 32 * 40, expected.data(), expected_scale.data());
  EXPECT_EQ(expected_scale[0], 0.0f);
  EXPECT_EQ(expected_scale[1], 0.0f);
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(expected[i] * expected_scale[i / 32], x[i],
                0.5001f * expected_scale[i / 32] + 1e-38f);
  }
  for (const KernelTable* table : AvailableKernels()) {
    table->quantize_row(x.data(), 32 * 40, q.data(), scale.data());
    EXPECT_EQ(q, expected) << table->name;
    EXPECT_EQ(Bits(scale), Bits(expected_scale)) << table->name;
  }
}

TEST(QuantizeTest, InfinityAndNanDoNotCrash) {
  std::vector<float> x(32, 1.0f);
  x[3] = std::numeric_limits<float>::infinity();
  x[7] = std::numeric_limits<float>::quiet_NaN();
  std::vector<int8_t> q(32);
  float scale;
  for (const KernelTable* table : AvailableKernels())
    table->quantize_row(x.data(), 32, q.data(), &scale);
}

TEST(RmsNormTest, FollowsTheFormulaWithAndWithoutWeight) {
  Random random(42);
  for (const int64_t dim : kDims) {
    const std::vector<float> x = random.Floats(3 * dim), weight = random.Floats(dim);
    ThreadPool pool(2);
    for (const float* w : {weight.data(), static_cast<const float*>(nullptr)}) {
      std::vector<float> y(x.size());
      RmsNorm(x.data(), w, 3, dim, 1e-6f, y.data(), pool);
      for (int64_t t = 0; t < 3; ++t) {
        double squares = 0.0;
        for (int64_t k = 0; k < dim; ++k) {
          const double v = x[static_cast<size_t>(t * dim + k)];
          squares += v * v;
        }
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dim) + 1e-6f);
        for (int64_t k = 0; k < dim; ++k) {
          const size_t i = static_cast<size_t>(t * dim + k);
          const double exact = x[i] * factor * (w != nullptr ? w[k] : 1.0);
          // at most 8 partial additions and 5 further roundings at these sizes
          EXPECT_NEAR(y[i], exact, 16 * 0x1p-24 * std::abs(exact) + 1e-30);
        }
      }
    }
  }
}

TEST(RmsNormTest, WorksInPlaceAndForAnySplit) {
  Random random(43);
  const int64_t rows = 400, dim = 257;
  const std::vector<float> x = random.Floats(rows * dim), weight = random.Floats(dim);
  std::vector<float> expected(x.size());
  ThreadPool one(1);
  for (int64_t t = 0; t < rows; ++t) {
    RmsNorm(x.data() + t * dim, weight.data(), 1, dim, 1e-6f, expected.data() + t * dim, one);
  }
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    std::vector<float> y = x;
    RmsNorm(y.data(), weight.data(), rows, dim, 1e-6f, y.data(), pool);
    EXPECT_EQ(Bits(y), Bits(expected));
  }
}

TEST(SwiGluTest, ClampsTheGateAboveOnly) {
  const std::vector<float> gate = {12.0f, -30.0f, 0.5f, 2.0f}, up = {1.0f, 2.0f, -50.0f, 40.0f};
  const std::vector<float> weight = {0.5f};
  std::vector<float> out(4);
  ThreadPool pool(1);
  SwiGlu(gate.data(), up.data(), weight.data(), 1, 4, 10.0f, out.data(), pool);
  const double g[] = {10.0, -30.0, 0.5, 2.0}, u[] = {1.0, 2.0, -10.0, 10.0};
  for (size_t i = 0; i < 4; ++i) {
    const double exact = g[i] / (1.0 + std::exp(-g[i])) * u[i] * 0.5;
    EXPECT_NEAR(out[i], exact, 6e-7 * std::abs(exact));
  }
  std::vector<float> in_place = gate;
  SwiGlu(in_place.data(), up.data(), nullptr, 1, 4, 10.0f, in_place.data(), pool);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(in_place[i] * 0.5f, out[i]);
}

TEST(SwiGluTest, NanIsNotClampedAway) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const KernelTable* table : AvailableKernels()) {
    const float gate[] = {nan, 1.0f}, up[] = {1.0f, nan};
    float out[2];
    table->swiglu_row(gate, up, 1.0f, 2, 10.0f, out);
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1])) << table->name;
  }
}

TEST(RowOpsTest, EveryInstructionSetHasTheSameBits) {
  Random random(44);
  const KernelTable& plain = *GenericKernels();
  for (const int64_t dim : kDims) {
    const size_t n = static_cast<size_t>(dim);
    const std::vector<float> a = random.Floats(4 * dim, -12.0f, 12.0f),
                             b = random.Floats(dim, -12.0f, 12.0f);
    const std::vector<float> post = random.Floats(4), comb = random.Floats(16);
    const float* rows[] = {a.data(), nullptr, a.data() + dim, a.data() + 2 * dim};
    const float* scores[] = {b.data(), nullptr, a.data() + 3 * dim, a.data()};
    for (const KernelTable* table : AvailableKernels()) {
      SCOPED_TRACE(testing::Message() << table->name << " dim " << dim);
      EXPECT_EQ(Bits({table->sum_of_squares(a.data(), dim)}),
                Bits({plain.sum_of_squares(a.data(), dim)}));
      std::vector<float> y(n), z(n);
      table->scale_row(a.data(), b.data(), 0.7f, dim, y.data());
      plain.scale_row(a.data(), b.data(), 0.7f, dim, z.data());
      EXPECT_EQ(Bits(y), Bits(z));
      table->swiglu_row(a.data(), b.data(), 0.3f, dim, 10.0f, y.data());
      plain.swiglu_row(a.data(), b.data(), 0.3f, dim, 10.0f, z.data());
      EXPECT_EQ(Bits(y), Bits(z));
      table->pool_window(rows, scores, 4, dim, y.data());
      plain.pool_window(rows, scores, 4, dim, z.data());
      EXPECT_EQ(Bits(y), Bits(z));
      table->collapse(a.data(), post.data(), 4, dim, y.data());
      plain.collapse(a.data(), post.data(), 4, dim, z.data());
      EXPECT_EQ(Bits(y), Bits(z));
      std::vector<float> s = a, t = a;
      table->expand(s.data(), b.data(), post.data(), comb.data(), 4, dim);
      plain.expand(t.data(), b.data(), post.data(), comb.data(), 4, dim);
      EXPECT_EQ(Bits(s), Bits(t));
    }
  }
}

TEST(PoolWindowTest, SoftmaxPerChannelSkipsEmptySlots) {
  Random random(45);
  const int64_t dim = 19;
  const std::vector<float> values = random.Floats(8 * dim),
                           scores = random.Floats(8 * dim, -20.0f, 20.0f);
  std::vector<const float*> value_rows(8), score_rows(8);
  for (size_t i = 4; i < 8; ++i) {  // the first window of a CSA layer has no previous one
    value_rows[i] = values.data() + static_cast<int64_t>(i) * dim;
    score_rows[i] = scores.data() + static_cast<int64_t>(i) * dim;
  }
  std::vector<float> out(static_cast<size_t>(dim));
  PoolWindow(value_rows, score_rows, dim, out.data());
  for (int64_t d = 0; d < dim; ++d) {
    double sum = 0.0, weighted = 0.0;
    for (size_t i = 4; i < 8; ++i) {
      const double e = std::exp(static_cast<double>(score_rows[i][d]));
      sum += e;
      weighted += e * value_rows[i][d];
    }
    // exponents up to 40 carry 40 * 2^-24 of relative error into a weight
    EXPECT_NEAR(out[static_cast<size_t>(d)], weighted / sum, 3e-6);
  }
  // One slot alone is taken as it is.
  std::vector<const float*> one_value = {nullptr, values.data()},
                            one_score = {nullptr, scores.data()};
  PoolWindow(one_value, one_score, dim, out.data());
  EXPECT_EQ(Bits(out), Bits(std::vector<float>(values.begin(), values.begin() + dim)));
}

TEST(IndexerTest, ScoresFollowTheFormulaInHeadOrder) {
  Random random(46);
  for (const auto& [heads, dim, keys] : {std::tuple{1, 8, 1}, {5, 24, 9}, {64, 128, 31}}) {
    const std::vector<float> q = random.Floats(heads * dim), w = random.Floats(heads);
    const std::vector<float> k = random.Floats(keys * dim);
    std::vector<float> expected(static_cast<size_t>(keys));
    GenericKernels()->indexer_scores(q.data(), w.data(), heads, dim, k.data(), keys, 0.25f,
                                     expected.data());
    for (int key = 0; key < keys; ++key) {
      double score = 0.0, size = 0.0;
      for (int h = 0; h < heads; ++h) {
        double dot = 0.0;
        for (int d = 0; d < dim; ++d) {
          dot += static_cast<double>(q[static_cast<size_t>(h * dim + d)]) *
                 k[static_cast<size_t>(key * dim + d)];
        }
        score += w[static_cast<size_t>(h)] * std::max(0.0, dot);
        size += std::abs(w[static_cast<size_t>(h)]) * dim;
      }
      EXPECT_NEAR(expected[static_cast<size_t>(key)], 0.25 * score,
                  0.25 * (heads + 12) * 0x1p-24 * size);
    }
    for (const KernelTable* table : AvailableKernels()) {
      std::vector<float> scores(static_cast<size_t>(keys));
      table->indexer_scores(q.data(), w.data(), heads, dim, k.data(), keys, 0.25f, scores.data());
      EXPECT_EQ(Bits(scores), Bits(expected)) << table->name;
    }
  }
}

std::vector<int32_t> TopK(const std::vector<float>& scores, int64_t k) {
  std::vector<int32_t> out(scores.size());
  out.resize(static_cast<size_t>(
      TopKIndices(scores.data(), static_cast<int64_t>(scores.size()), k, out.data())));
  return out;
}

TEST(TopKTest, TiesGoToTheLowerIndex) {
  EXPECT_EQ(TopK({1, 5, 5, 5, 2}, 2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(TopK({0.0f, -0.0f, 0.0f}, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(TopK({-0.0f, 0.0f, -1.0f}, 1), (std::vector<int32_t>{0}));
  EXPECT_EQ(TopK({-3, -1, -2}, 2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(TopK({3, 1}, 5), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(TopK({3, 1}, 0), (std::vector<int32_t>{}));
  EXPECT_EQ(TopK({}, 4), (std::vector<int32_t>{}));
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(TopK({nan, -inf, inf, -1}, 3), (std::vector<int32_t>{1, 2, 3}));
}

TEST(TopKTest, AgreesWithASortAtRandom) {
  Random random(47);
  for (int round = 0; round < 300; ++round) {
    std::vector<float> scores;
    const int64_t n = random.Int(1, 60);
    for (int64_t i = 0; i < n; ++i) scores.push_back(static_cast<float>(random.Int(-6, 6)));
    const int64_t k = random.Int(1, 40);
    std::vector<int32_t> order(scores.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(std::min(n, k)));
    std::sort(order.begin(), order.end());
    EXPECT_EQ(TopK(scores, k), order);
  }
}

}  // namespace
}  // namespace ds4
