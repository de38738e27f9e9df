// Goal: attention with a sink, whose result for a row and head depends on nothing else. Method: the
// formula in double; rows alone, in batches, on any number of threads and every instruction set,
// compared bit by bit.
#include "engine/kernels/attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/kernels/kernel_test_util.h"

namespace ds4 {
namespace {

struct Case {
  Case(int64_t rows_in, int64_t heads_in, int64_t dim_in, int64_t max_keys, Random& random)
      : rows(rows_in),
        heads(heads_in),
        dim(dim_in),
        q(random.Floats(rows * heads * dim, -2.0f, 2.0f)),
        sinks(random.Floats(heads, -2.0f, 2.0f)),
        memory(random.Floats(max_keys * dim, -2.0f, 2.0f)) {
    for (int64_t t = 0; t < rows; ++t) {
      KeyList list;
      const int64_t n = t == 0 ? max_keys : random.Int(0, max_keys);
      for (int64_t j = 0; j < n; ++j)
        list.push_back(memory.data() + random.Int(0, max_keys - 1) * dim);
      keys.push_back(list);
    }
  }
  std::vector<float> Run(ThreadPool& pool) const {
    std::vector<float> out(q.size(), 9.0f);
    Attend(q.data(), sinks.data(), keys, rows, heads, dim, 0.125f, out.data(), pool);
    return out;
  }
  std::vector<float> RunTable(const KernelTable& table) const {
    std::vector<float> out(q.size());
    for (int64_t t = 0; t < rows; ++t) {
      const KeyList& list = keys[static_cast<size_t>(t)];
      std::vector<float> scores(list.size() * static_cast<size_t>(heads));
      table.attend({.q = q.data() + t * heads * dim,
                    .sinks = sinks.data(),
                    .keys = list.data(),
                    .num_keys = static_cast<int64_t>(list.size()),
                    .num_heads = heads,
                    .head_dim = dim,
                    .scale = 0.125f,
                    .scores = scores.data(),
                    .out = out.data() + t * heads * dim});
    }
    return out;
  }

  int64_t rows, heads, dim;
  std::vector<float> q, sinks, memory;
  std::vector<KeyList> keys;
};

TEST(AttendTest, FollowsTheFormula) {
  Random random(51);
  const Case c(4, 3, 40, 37, random);
  ThreadPool pool(2);
  const std::vector<float> out = c.Run(pool);
  for (int64_t t = 0; t < c.rows; ++t) {
    for (int64_t a = 0; a < c.heads; ++a) {
      const float* q = c.q.data() + (t * c.heads + a) * c.dim;
      double denominator = std::exp(static_cast<double>(c.sinks[static_cast<size_t>(a)]));
      std::vector<double> sum(static_cast<size_t>(c.dim));
      for (const float* key : c.keys[static_cast<size_t>(t)]) {
        double s = 0.0;
        for (int64_t d = 0; d < c.dim; ++d) s += static_cast<double>(q[d]) * key[d];
        const double e = std::exp(0.125 * s);
        denominator += e;
        for (int64_t d = 0; d < c.dim; ++d) sum[static_cast<size_t>(d)] += e * key[d];
      }
      for (int64_t d = 0; d < c.dim; ++d) {
        // Scores up to 20 are off by about 20 * 2^-23, and so is each weight; 37 keys of size 2.
        EXPECT_NEAR(out[static_cast<size_t>((t * c.heads + a) * c.dim + d)],
                    sum[static_cast<size_t>(d)] / denominator, 1e-5);
      }
    }
  }
}

TEST(AttendTest, WithoutKeysTheSinkTakesAll) {
  const std::vector<float> q(16, 1.0f), sinks(1, 0.5f);
  const std::vector<KeyList> keys(1);
  std::vector<float> out(16, 3.0f);
  ThreadPool pool(1);
  Attend(q.data(), sinks.data(), keys, 1, 1, 16, 1.0f, out.data(), pool);
  EXPECT_EQ(out, std::vector<float>(16, 0.0f));
}

TEST(AttendTest, EveryInstructionSetBatchAndThreadCountHasTheSameBits) {
  Random random(52);
  for (const auto& [heads, dim, keys] :
       {std::tuple{1, 16, 1}, {3, 20, 13}, {8, 64, 35}, {18, 80, 130}, {5, 512, 67}}) {
    const Case c(5, heads, dim, keys, random);
    const std::vector<float> expected = c.RunTable(*GenericKernels());
    for (const KernelTable* table : AvailableKernels()) {
      EXPECT_EQ(Bits(c.RunTable(*table)), Bits(expected)) << table->name << " dim " << dim;
    }
    for (int threads = 1; threads <= 4; ++threads) {
      ThreadPool pool(threads);
      EXPECT_EQ(Bits(c.Run(pool)), Bits(expected)) << threads << " threads";
      for (int64_t t = 0; t < c.rows; ++t) {  // each row alone
        const int64_t n = c.heads * c.dim;
        std::vector<float> out(static_cast<size_t>(n));
        Attend(c.q.data() + t * n, c.sinks.data(),
               std::span(c.keys).subspan(static_cast<size_t>(t), 1), 1, c.heads, c.dim, 0.125f,
               out.data(), pool);
        const std::vector<float> row(expected.begin() + t * n, expected.begin() + (t + 1) * n);
        EXPECT_EQ(Bits(out), Bits(row)) << "row " << t;
      }
    }
  }
}

}  // namespace
}  // namespace ds4
