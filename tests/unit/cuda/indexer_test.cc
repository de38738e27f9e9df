// Goal: the indexer chooses the compressed rows that spec 2.8 asks for: all when few are visible,
// else the best by score, the lower id on ties, in rising order; the same alone and in a batch.
// Method: small caches with random keys against scores in double. A choice is right when no row
// left out beats a row chosen by more than rounding; where scores are equal it must match exactly.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "engine/cuda/attention.h"
#include "engine/tensor/quant.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

AttentionParams Shape(KvType type, int heads, int dim, int rope_dim, int top_k) {
  AttentionParams params;
  params.kv_type = type;
  params.ratio = 4;
  params.overlap = true;
  params.rope_dim = rope_dim;
  params.index_heads = heads;
  params.index_dim = dim;
  params.index_top_k = top_k;
  return params;
}

// Queries of some rows, and the keys of some sessions.
struct Case {
  Case(const AttentionParams& shape, int num_slots, int rows_of_slot, uint32_t seed)
      : params(shape), slots(num_slots), max_rows(rows_of_slot), random(seed) {
    keys.resize(int64_t{slots} * max_rows * params.index_dim);
    for (float& value : keys) value = Rounded(Normal());
  }
  float Normal() { return normal(random); }
  float Rounded(float value) const {
    return params.kv_type == KvType::kBF16 ? BF16ToF32(F32ToBF16(value)) : value;
  }
  void AddRow(int row_slot, int row_pos) {
    slot.push_back(row_slot);
    pos.push_back(row_pos);
    for (int i = 0; i < params.index_heads * params.index_dim; ++i) q.push_back(Normal());
    for (int i = 0; i < params.index_heads; ++i) weights.push_back(Normal());
    for (int i = 0; i < params.rope_dim / 2; ++i) {
      const double angle = row_pos * std::pow(100.0, -i * 2.0 / params.rope_dim);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  int rows() const { return static_cast<int>(pos.size()); }
  int Visible(int t) const { return slot[t] < 0 ? 0 : (pos[t] + 1) / params.ratio; }
  // Row t alone.
  Case Only(int t) const {
    Case one = *this;
    const auto cut = [&](auto& values) {
      const int64_t size = static_cast<int64_t>(values.size()) / rows();
      values = {values.begin() + t * size, values.begin() + (t + 1) * size};
    };
    cut(one.q), cut(one.weights), cut(one.cos), cut(one.sin), cut(one.slot);
    one.pos = {pos[t]};
    return one;
  }

  AttentionParams params;
  int slots, max_rows;
  std::mt19937 random;
  std::normal_distribution<float> normal{0.0f, 1.0f};
  std::vector<float> keys, q, weights, cos, sin;
  std::vector<int32_t> slot, pos;
};

struct Choice {
  std::vector<int32_t> picks, count;
  std::vector<int32_t> Row(int t, int top_k) const {
    return {picks.begin() + t * top_k, picks.begin() + t * top_k + count[t]};
  }
};

Choice ChooseRows(TestDevice& device, const Case& c, int64_t max_visible = 0,
                  int claimed_max_rows = 0) {
  for (int t = 0; t < c.rows(); ++t) max_visible = std::max<int64_t>(max_visible, c.Visible(t));
  DeviceBuffer keys;
  if (c.params.kv_type == KvType::kBF16) {
    std::vector<uint16_t> bits;
    for (const float value : c.keys) bits.push_back(F32ToBF16(value));
    keys = device.Upload(bits);
  } else {
    keys = device.Upload(c.keys);
  }
  const DeviceBuffer q = device.Upload(c.q), weights = device.Upload(c.weights);
  const DeviceBuffer cos = device.Upload(c.cos), sin = device.Upload(c.sin);
  const DeviceBuffer pos = device.Upload(c.pos), slot = device.Upload(c.slot);
  const DeviceBuffer scratch = device.Allocate(IndexScratchBytes(c.params, c.rows(), max_visible));
  const int64_t size = int64_t{c.rows()} * c.params.index_top_k;
  // One place more, which nobody may write.
  const DeviceBuffer picks = device.Upload(std::vector<int32_t>(size + 1, -7));
  const DeviceBuffer count = device.Allocate(c.rows() * 4);
  StepRows step;
  step.pos = pos.as<int32_t>();
  step.slot = slot.as<int32_t>();
  CompressorCache cache;
  cache.rows = keys.data();
  cache.max_rows = claimed_max_rows > 0 ? claimed_max_rows : c.max_rows;
  cache.dim = c.params.index_dim;
  LaunchIndex(device.launch, c.params, step, c.rows(), {cos.as<float>(), sin.as<float>(), nullptr},
              q.as<float>(), weights.as<float>(), cache, max_visible, scratch.data(),
              picks.as<int32_t>(), count.as<int32_t>());
  device.Finish();
  EXPECT_EQ(device.Download(picks.as<int32_t>() + size, 1)[0], -7);
  return {device.Download(picks.as<int32_t>(), size),
          device.Download(count.as<int32_t>(), c.rows())};
}

std::vector<double> ScoresInDouble(const Case& c, int t) {
  const int heads = c.params.index_heads, dim = c.params.index_dim, pairs = c.params.rope_dim / 2;
  // The rotation in float32 with one rounding at its end, as the device has it; then bf16 where
  // keys are bf16.
  std::vector<float> q(c.q.begin() + t * heads * dim, c.q.begin() + (t + 1) * heads * dim);
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < pairs; ++i) {
      float* x = &q[(h + 1) * dim - 2 * pairs + 2 * i];
      const float cos = c.cos[t * pairs + i], sin = c.sin[t * pairs + i];
      const float a = std::fma(x[0], cos, -(x[1] * sin)), b = std::fma(x[0], sin, x[1] * cos);
      x[0] = a, x[1] = b;
    }
  }
  std::vector<double> scores;
  for (int w = 0; w < c.Visible(t); ++w) {
    const float* key = &c.keys[(int64_t{c.slot[t]} * c.max_rows + w) * dim];
    double sum = 0;
    for (int h = 0; h < heads; ++h) {
      double dot = 0;
      for (int i = 0; i < dim; ++i) dot += double{c.Rounded(q[h * dim + i])} * key[i];
      sum += c.weights[t * heads + h] * std::max(0.0, dot);
    }
    scores.push_back(sum / std::sqrt(double(heads) * dim));
  }
  return scores;
}

// Scores here are about 1 and sums of some hundred float32 terms: 1e-5 is far above their rounding.
void ExpectChoice(const Case& c, const Choice& got) {
  const int top_k = c.params.index_top_k;
  for (int t = 0; t < c.rows(); ++t) {
    SCOPED_TRACE(testing::Message() << "row " << t << ", " << c.Visible(t) << " visible");
    ASSERT_EQ(got.count[t], std::min(c.Visible(t), top_k));
    const std::vector<int32_t> picks = got.Row(t, top_k);
    const std::vector<double> scores = ScoresInDouble(c, t);
    std::vector<bool> chosen(scores.size());
    for (size_t i = 0; i < picks.size(); ++i) {
      ASSERT_TRUE(picks[i] >= 0 && picks[i] < c.Visible(t)) << picks[i];
      if (i > 0) {
        ASSERT_GT(picks[i], picks[i - 1]);
      }
      chosen[picks[i]] = true;
    }
    double worst_chosen = 1e30, best_left = -1e30;
    for (size_t w = 0; w < scores.size(); ++w) {
      if (chosen[w]) worst_chosen = std::min(worst_chosen, scores[w]);
      if (!chosen[w]) best_left = std::max(best_left, scores[w]);
    }
    EXPECT_GE(worst_chosen, best_left - 1e-5);
  }
}

const AttentionParams kShapes[] = {
    Shape(KvType::kBF16, 16, 128, 64, 24),  // matrix instructions
    Shape(KvType::kBF16, 8, 128, 20, 7),    // the same; a rotation that starts inside a unit
    Shape(KvType::kBF16, 6, 128, 64, 24),   // heads in no eights: plain
    Shape(KvType::kBF16, 8, 32, 16, 16),    // a tiny model: plain
    Shape(KvType::kF32, 5, 18, 6, 13),
};

TEST(IndexerTest, ChoosesTheBestRows) {
  for (const AttentionParams& params : kShapes) {
    SCOPED_TRACE(testing::Message() << params.index_heads << " x " << params.index_dim);
    TestDevice device;
    Case c(params, 2, 300, 1);
    const int k = params.index_top_k;
    c.AddRow(0, 0);            // nothing visible
    c.AddRow(1, 4 * k - 5);    // k - 1
    c.AddRow(1, 4 * k - 1);    // k
    c.AddRow(0, 4 * k + 3);    // k + 1
    c.AddRow(-1, 0);           // fills up the batch
    c.AddRow(1, 4 * 128 - 1);  // one run of keys
    c.AddRow(0, 4 * 129);
    c.AddRow(0, 4 * 300 - 1);
    ExpectChoice(c, ChooseRows(device, c));
  }
}

TEST(IndexerTest, HoldsInFlashsShape) {
  TestDevice device;
  Case c(Shape(KvType::kBF16, 64, 128, 64, 512), 1, 640, 8);
  c.AddRow(0, 4 * 512 - 1);
  c.AddRow(0, 4 * 640 - 1);
  ExpectChoice(c, ChooseRows(device, c));
}

TEST(IndexerTest, ManyRowsShareKeys) {
  // 70 rows: blocks of four rows, some of them with rows of two sessions.
  for (const int num_sms : {1, 200}) {
    TestDevice device(num_sms);
    Case c(Shape(KvType::kBF16, 8, 128, 64, 20), 3, 280, 2);
    for (int t = 0; t < 30; ++t) c.AddRow(2, 1050 + t);
    for (int t = 0; t < 29; ++t) c.AddRow(0, 60 + t);
    c.AddRow(-1, 0);
    for (int t = 0; t < 10; ++t) c.AddRow(1, 400 + 11 * t);
    ExpectChoice(c, ChooseRows(device, c));
  }
}

TEST(IndexerTest, ARowChoosesTheSameAloneAndInABatch) {
  for (const AttentionParams& params : kShapes) {
    TestDevice many(1), one(132);
    Case c(params, 2, 200, 3);
    for (int t = 0; t < 66; ++t) c.AddRow(t % 2, 500 + 4 * t);
    const Choice batch = ChooseRows(many, c);
    for (const int t : {0, 31, 65}) {
      EXPECT_EQ(ChooseRows(one, c.Only(t)).Row(0, params.index_top_k),
                batch.Row(t, params.index_top_k));
    }
  }
}

TEST(IndexerTest, EqualScoresGoToTheLowerId) {
  for (const AttentionParams& params : kShapes) {
    SCOPED_TRACE(testing::Message() << params.index_heads << " x " << params.index_dim);
    TestDevice device;
    const int k = params.index_top_k;
    Case c(params, 1, 250, 4);
    // Ten keys over and over.
    for (int64_t i = 10 * params.index_dim; i < static_cast<int64_t>(c.keys.size()); ++i) {
      c.keys[i] = c.keys[i - 10 * params.index_dim];
    }
    c.AddRow(0, 999);
    c.AddRow(0, 999);
    // Weights of nothing: all scores are 0, some of them -0.
    for (int h = 0; h < params.index_heads; ++h) {
      c.weights[params.index_heads + h] = h % 2 == 0 ? -0.0f : 0.0f;
    }
    const Choice got = ChooseRows(device, c);
    std::vector<double> scores = ScoresInDouble(c, 0);
    std::vector<int32_t> want(250);
    for (int i = 0; i < 250; ++i) want[i] = i;
    std::stable_sort(want.begin(), want.end(),
                     [&](int a, int b) { return scores[a % 10] > scores[b % 10]; });
    std::sort(want.begin(), want.begin() + k);
    want.resize(k);
    EXPECT_EQ(got.Row(0, k), want);
    for (int i = 0; i < k; ++i) EXPECT_EQ(got.Row(1, k)[i], i);
  }
}

// One score far from all others: they differ by less than a part in many of the whole span.
TEST(IndexerTest, OneScoreDwarfsTheOthers) {
  for (const AttentionParams& params : kShapes) {
    SCOPED_TRACE(testing::Message() << params.index_heads << " x " << params.index_dim);
    TestDevice device;
    Case c(params, 1, 250, 7);
    for (int i = 0; i < params.index_dim; ++i) c.keys[7 * params.index_dim + i] *= 4096.0f;
    c.AddRow(0, 999);
    ExpectChoice(c, ChooseRows(device, c));
  }
}

TEST(IndexerTest, ChoosesAmongMoreKeysThanSharedMemoryKeeps) {
  TestDevice device;
  Case c(Shape(KvType::kF32, 1, 2, 0, 600), 1, 34000, 5);
  c.AddRow(0, 4 * 34000 - 1);
  c.weights[0] = 1.0f;
  ExpectChoice(c, ChooseRows(device, c));
}

TEST(IndexerTest, OneScratchServesSmallerSteps) {
  const AttentionParams params = Shape(KvType::kBF16, 64, 128, 64, 512);
  int64_t last = 0;
  for (const int64_t visible : {10, 512, 513, 16384, 65536, 100000, 262144}) {
    EXPECT_GE(IndexScratchBytes(params, 4096, visible), last);
    EXPECT_LE(IndexScratchBytes(params, 8, visible), IndexScratchBytes(params, 4096, visible));
    last = IndexScratchBytes(params, 4096, visible);
  }
  EXPECT_LE(last, int64_t{256} << 20);
  EXPECT_EQ(IndexScratchBytes(params, 4096, 512), 0);
}

TEST(IndexerTest, RowsThatDoNotFitTheScratchGoInTurns) {
  // A bound of 2^20 visible rows leaves room for the scores of 64 rows; there are 67. (Only the
  // first 300 keys exist, and no row sees more.)
  TestDevice device(1);
  Case c(Shape(KvType::kBF16, 8, 128, 64, 20), 1, 384, 6);
  for (int t = 0; t < 67; ++t) c.AddRow(0, 400 + 11 * t);
  const Choice got = ChooseRows(device, c, 1 << 20, 1 << 20);
  ExpectChoice(c, got);
}

}  // namespace
}  // namespace ds4::cuda
