// Goal: the streams' mixing follows spec 2.2 step by step, above all the order of the Sinkhorn
// steps. Method: a plain double-precision copy of the spec's text with the order as a parameter:
// the right order must agree, wrong ones must not.
#include "engine/kernels/hyper_connection.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

using Doubles = std::vector<double>;

double Logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

enum class Order { kSpec, kRowsLast, kNoEps };

void DivideByLineSums(Doubles& c, size_t n, bool columns, double eps) {
  for (size_t a = 0; a < n; ++a) {
    double sum = eps;
    for (size_t b = 0; b < n; ++b) sum += c[columns ? b * n + a : a * n + b];
    for (size_t b = 0; b < n; ++b) c[columns ? b * n + a : a * n + b] /= sum;
  }
}

Doubles SinkhornInWords(Doubles c, size_t n, int iterations, double eps, Order order) {
  for (size_t i = 0; i < n; ++i) {
    double sum = 0.0;
    for (size_t j = 0; j < n; ++j) sum += c[i * n + j] = std::exp(c[i * n + j]);
    for (size_t j = 0; j < n; ++j) c[i * n + j] /= sum;
  }
  if (order != Order::kNoEps) {
    for (double& v : c) v += eps;
  }
  const double line_eps = order == Order::kNoEps ? 0.0 : eps;
  const bool first = order != Order::kRowsLast;
  DivideByLineSums(c, n, first, line_eps);
  for (int i = 1; i < iterations; ++i) {
    DivideByLineSums(c, n, !first, line_eps);
    DivideByLineSums(c, n, first, line_eps);
  }
  return c;
}

struct Site {
  Site(int64_t streams_in, int64_t dim_in, int64_t rows_in, int64_t mix_rows, DType dtype,
       Random& random)
      : h(streams_in),
        dim(dim_in),
        rows(rows_in),
        fn(RandomMatrix(dtype, mix_rows, h * dim, random)),
        base(random.Floats(mix_rows, -2.0f, 2.0f)),
        scale(random.Floats(3, 0.2f, 0.6f)),
        streams(random.Floats(rows * h * dim, -2.0f, 2.0f)) {
    params.num_streams = h;
    params.hidden_dim = dim;
  }
  HyperConnectionWeights weights() const { return {fn.view(), base.data(), scale.data()}; }
  // fn times the normalised streams of row t.
  Doubles Mixes(int64_t t) const {
    const int64_t flat = h * dim;
    double squares = 0.0;
    for (int64_t k = 0; k < flat; ++k) {
      const double v = streams[static_cast<size_t>(t * flat + k)];
      squares += v * v;
    }
    const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(flat) + params.norm_eps);
    Doubles mixes(static_cast<size_t>(fn.rows()));
    std::vector<float> row(static_cast<size_t>(flat));
    for (int64_t r = 0; r < fn.rows(); ++r) {
      fn.DequantizeRow(r, row.data());
      for (int64_t k = 0; k < flat; ++k) {
        mixes[static_cast<size_t>(r)] += static_cast<double>(row[static_cast<size_t>(k)]) *
                                         streams[static_cast<size_t>(t * flat + k)] * inverse;
      }
    }
    return mixes;
  }

  int64_t h, dim, rows;
  Matrix fn;
  std::vector<float> base, scale, streams;
  HyperConnectionParams params;
};

struct PreResult {
  PreResult(const Site& site, ThreadPool& pool)
      : collapsed(static_cast<size_t>(site.rows * site.dim)),
        post(static_cast<size_t>(site.rows * site.h)),
        comb(static_cast<size_t>(site.rows * site.h * site.h)) {
    HyperConnectionPre(site.streams.data(), site.rows, site.params, site.weights(),
                       collapsed.data(), post.data(), comb.data(), pool);
  }
  std::vector<float> collapsed, post, comb;
};

double WorstCombError(const Site& site, const PreResult& result, Order order) {
  const size_t n = static_cast<size_t>(site.h);
  double worst = 0.0;
  for (int64_t t = 0; t < site.rows; ++t) {
    const Doubles m = site.Mixes(t);
    Doubles c(n * n);
    for (size_t i = 0; i < n * n; ++i) c[i] = m[2 * n + i] * site.scale[2] + site.base[2 * n + i];
    c = SinkhornInWords(c, n, site.params.sinkhorn_iterations, site.params.hc_eps, order);
    for (size_t i = 0; i < n * n; ++i) {
      worst = std::max(worst, std::abs(result.comb[static_cast<size_t>(t) * n * n + i] - c[i]));
    }
  }
  return worst;
}

TEST(HyperConnectionTest, PreFollowsTheSpec) {
  Random random(61);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Site site(4, 40, 5, 24, dtype, random);
    ThreadPool pool(2);
    const PreResult result(site, pool);
    for (int64_t t = 0; t < site.rows; ++t) {
      const Doubles m = site.Mixes(t);
      for (size_t h = 0; h < 4; ++h) {
        const double post = 2.0 * Logistic(m[4 + h] * site.scale[1] + site.base[4 + h]);
        EXPECT_NEAR(result.post[static_cast<size_t>(t) * 4 + h], post, 1e-5);
      }
      for (int64_t d = 0; d < site.dim; ++d) {
        double sum = 0.0;
        for (size_t h = 0; h < 4; ++h) {
          const double pre = Logistic(m[h] * site.scale[0] + site.base[h]) + 1e-6;
          sum +=
              pre *
              site.streams[static_cast<size_t>((t * 4 + static_cast<int64_t>(h)) * site.dim + d)];
        }
        EXPECT_NEAR(result.collapsed[static_cast<size_t>(t * site.dim + d)], sum, 2e-5);
      }
    }
    EXPECT_LT(WorstCombError(site, result, Order::kSpec), 1e-5);
  }
}

// With few iterations and an eps of visible size each wrong order stands out.
TEST(HyperConnectionTest, SinkhornOrderMatters) {
  Random random(62);
  Site site(4, 24, 6, 24, DType::kF32, random);
  site.params.sinkhorn_iterations = 2;
  site.params.hc_eps = 1e-2f;
  ThreadPool pool(1);
  const PreResult result(site, pool);
  EXPECT_LT(WorstCombError(site, result, Order::kSpec), 1e-5);
  EXPECT_GT(WorstCombError(site, result, Order::kRowsLast), 1e-3);
  EXPECT_GT(WorstCombError(site, result, Order::kNoEps), 1e-3);
  // The last step is over columns: their sums are near 1 (short by the eps), those of rows need not
  // be.
  for (size_t t = 0; t < 6; ++t) {
    for (size_t j = 0; j < 4; ++j) {
      float sum = 0.0f;
      for (size_t i = 0; i < 4; ++i) sum += result.comb[t * 16 + i * 4 + j];
      EXPECT_NEAR(sum, 1.0f, 0.02f);
    }
  }
}

TEST(HyperConnectionTest, PostMixesStreamsWithTheResult) {
  Random random(63);
  Site site(4, 37, 3, 24, DType::kF32, random);
  const std::vector<float> result = random.Floats(3 * 37), post = random.Floats(3 * 4),
                           comb = random.Floats(3 * 16);
  const std::vector<float> before = site.streams;
  ThreadPool pool(2);
  HyperConnectionPost(site.streams.data(), result.data(), post.data(), comb.data(), 3, site.params,
                      pool);
  for (size_t t = 0; t < 3; ++t) {
    for (size_t k = 0; k < 4; ++k) {
      for (size_t d = 0; d < 37; ++d) {
        double sum = static_cast<double>(post[t * 4 + k]) * result[t * 37 + d];
        for (size_t j = 0; j < 4; ++j) {
          sum += static_cast<double>(comb[t * 16 + j * 4 + k]) * before[(t * 4 + j) * 37 + d];
        }
        EXPECT_NEAR(site.streams[(t * 4 + k) * 37 + d], sum, 2e-6);
      }
    }
  }
}

TEST(HyperConnectionTest, HeadCollapsesWithItsOwnWeights) {
  Random random(64);
  const Site site(4, 33, 3, 4, DType::kF32, random);
  std::vector<float> out(3 * 33);
  ThreadPool pool(2);
  HyperConnectionHead(site.streams.data(), 3, site.params, site.weights(), out.data(), pool);
  for (int64_t t = 0; t < 3; ++t) {
    const Doubles m = site.Mixes(t);
    for (int64_t d = 0; d < 33; ++d) {
      double sum = 0.0;
      for (int64_t h = 0; h < 4; ++h) {
        const size_t i = static_cast<size_t>(h);
        sum += (Logistic(m[i] * site.scale[0] + site.base[i]) + 1e-6) *
               site.streams[static_cast<size_t>((t * 4 + h) * 33 + d)];
      }
      EXPECT_NEAR(out[static_cast<size_t>(t * 33 + d)], sum, 2e-5);
    }
  }
}

TEST(HyperConnectionTest, RowsAloneOrTogetherHaveTheSameBits) {
  Random random(65);
  const Site site(4, 512, 70, 24, DType::kF16, random);
  ThreadPool one(1);
  const PreResult expected(site, one);
  for (int threads = 2; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    const PreResult result(site, pool);
    EXPECT_EQ(Bits(result.collapsed), Bits(expected.collapsed));
    EXPECT_EQ(Bits(result.post), Bits(expected.post));
    EXPECT_EQ(Bits(result.comb), Bits(expected.comb));
  }
  for (int64_t t = 0; t < site.rows; t += 23) {
    std::vector<float> collapsed(512), post(4), comb(16);
    HyperConnectionPre(site.streams.data() + t * 2048, 1, site.params, site.weights(),
                       collapsed.data(), post.data(), comb.data(), one);
    EXPECT_TRUE(
        std::equal(collapsed.begin(), collapsed.end(), expected.collapsed.begin() + t * 512));
    EXPECT_TRUE(std::equal(post.begin(), post.end(), expected.post.begin() + t * 4));
    EXPECT_TRUE(std::equal(comb.begin(), comb.end(), expected.comb.begin() + t * 16));
  }
}

}  // namespace
}  // namespace ds4
