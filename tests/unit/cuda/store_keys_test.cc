// Goal: whatever the batches were, the caches hold what spec 2.7 says for each session's tokens.
// Method: sessions of random projections go through LaunchStoreKeys in chunks, singly, mixed with
// each other and with idle rows, until every ring has wrapped. After each batch, all that a later
// step may read is compared with a double-precision computation from the session's whole history.
#include "tests/unit/cuda/attention_test_util.h"
#include "tests/unit/cuda/balance_test_util.h"

namespace ds4::cuda::attention_test {
namespace {

constexpr int kSlots = 3;

struct Model {
  AttentionParams params;
  int slack = 0;  // of the rings, over what a step reads
  int rows = 0;   // of longer batches, which the window ring holds too
  int max_pos = 0;
};

Model SmallModel(int ratio, bool overlap, KvType type) {
  Model model;
  model.params.head_dim = 64;
  model.params.rope_dim = 16;
  model.params.sliding_window = 8;
  model.params.ratio = ratio;
  model.params.overlap = overlap;
  model.params.kv_type = type;
  model.params.index_dim = overlap ? 32 : 0;
  model.slack = 12;
  model.max_pos = 64;
  return model;
}

// Channels and windows as Flash has them: many warps a block.
Model FullModel(int ratio, bool overlap) {
  Model model = SmallModel(ratio, overlap, KvType::kBF16);
  model.params.head_dim = 512;
  model.params.rope_dim = 64;
  if (overlap) model.params.index_dim = 128;
  model.max_pos = 300;
  model.slack = 140;
  return model;
}

// Projections and weights of one compressor, and its cache on the device.
struct Compressor {
  int dim = 0, width = 0;
  std::vector<float> kv[kSlots], gate[kSlots];  // [max_pos][width]
  std::vector<float> ape, norm;
  CompressorCache cache;
};

class StoreKeysTest : public testing::Test {
 protected:
  void Make(const Model& model) {
    model_ = model;
    const AttentionParams& params = model.params;
    for (auto& kv : kv_) kv = Normal(random_, model_.max_pos * params.head_dim);
    kv_norm_ = Normal(random_, params.head_dim);
    cache_.ring = params.sliding_window + model.slack + model.rows;
    window_elements_ = static_cast<int64_t>(kSlots) * cache_.ring * params.head_dim;
    cache_.window = bench_.Allocate(window_elements_ * KvBytes(params.kv_type));
    if (params.ratio == 0) return;
    MakeCompressor(params.head_dim, main_);
    cache_.compressor = main_.cache;
    if (params.index_dim == 0) return;
    MakeCompressor(params.index_dim, index_);
    cache_.indexer = index_.cache;
  }

  void MakeCompressor(int dim, Compressor& part) {
    const AttentionParams& params = model_.params;
    const int halves = params.overlap ? 2 : 1;
    part.dim = dim;
    part.width = halves * dim;
    for (int s = 0; s < kSlots; ++s) {
      part.kv[s] = Normal(random_, model_.max_pos * part.width);
      part.gate[s] = Normal(random_, model_.max_pos * part.width, 2.0f);
    }
    part.ape = Normal(random_, params.ratio * part.width);
    part.norm = Normal(random_, dim);
    CompressorCache& cache = part.cache;
    cache.ring = halves * params.ratio + model_.slack;
    cache.max_rows = model_.max_pos / params.ratio;
    cache.width = part.width;
    cache.dim = dim;
    const int64_t pending = static_cast<int64_t>(kSlots) * cache.ring * part.width;
    cache.values = reinterpret_cast<float*>(bench_.Allocate(4 * pending));
    cache.scores = reinterpret_cast<float*>(bench_.Allocate(4 * pending));
    cache.rows = bench_.Allocate(RowElements(part) * KvBytes(params.kv_type));
  }
  int64_t RowElements(const Compressor& part) const {
    return static_cast<int64_t>(kSlots) * part.cache.max_rows * part.dim;
  }

  // The rows' parts of [max_pos][cols] histories, as a step's projections.
  float* Gather(const std::vector<Row>& rows, const std::vector<float> (&history)[kSlots],
                int cols) {
    std::vector<float> values;
    for (const Row& row : rows) {
      const float* from = history[std::max(row.slot, 0)].data() + row.pos * cols;
      values.insert(values.end(), from, from + cols);
    }
    return bench_.Upload(values);
  }

  // With a norm: in the launch that does both.
  void Step(const std::vector<Row>& rows, const RowNorm* norm = nullptr,
            const SinkhornJob& balance = {}) {
    StoreKeys in;
    in.kv = Gather(rows, kv_, model_.params.head_dim);
    in.kv_norm = bench_.Upload(kv_norm_);
    if (model_.params.ratio > 0) {
      in.comp_kv = Gather(rows, main_.kv, main_.width);
      in.comp_gate = Gather(rows, main_.gate, main_.width);
      in.ape = bench_.Upload(main_.ape);
      in.comp_norm = bench_.Upload(main_.norm);
    }
    if (model_.params.index_dim > 0) {
      in.index_kv = Gather(rows, index_.kv, index_.width);
      in.index_gate = Gather(rows, index_.gate, index_.width);
      in.index_ape = bench_.Upload(index_.ape);
      in.index_norm = bench_.Upload(index_.norm);
    }
    const StepRows step = UploadRows(bench_, rows);
    const RopeView rope = UploadRope(bench_, rows, model_.params.rope_dim);
    const int count = static_cast<int>(rows.size());
    if (norm == nullptr) {
      LaunchStoreKeys(bench_.launch, model_.params, step, count, rope, in, cache_, balance);
    } else {
      LaunchNormAndStore(bench_.launch, model_.params, step, count, rope, in, cache_, *norm,
                         balance);
    }
    bench_.Finish();
    for (const Row& row : rows) {
      if (row.slot >= 0) length_[row.slot] = std::max(length_[row.slot], row.pos + 1);
    }
  }

  // Steps, then compares all that the next step may read.
  void StepAndCompare(const std::vector<Row>& rows, const RowNorm* norm = nullptr,
                      const SinkhornJob& balance = {}) {
    Step(rows, norm, balance);
    CompareWindow();
    if (model_.params.ratio > 0) CompareCompressor(main_, "main");
    if (model_.params.index_dim > 0) CompareCompressor(index_, "indexer");
  }

  // bf16 rounds by half of 2^-8; float32 sums over 64 channels and 32 slots stay far below 1e-5.
  void ExpectVector(const std::vector<double>& want, const float* have, const std::string& where) {
    const double relative = model_.params.kv_type == KvType::kF32 ? 1e-5 : 1.0 / 256;
    for (size_t d = 0; d < want.size(); ++d) {
      ASSERT_NEAR(have[d], want[d], relative * std::abs(want[d]) + 1e-5)
          << where << " channel " << d;
    }
  }

  void CompareWindow() {
    const AttentionParams& params = model_.params;
    const std::vector<float> have =
        DownloadKv(bench_, params.kv_type, cache_.window, window_elements_);
    for (int s = 0; s < kSlots; ++s) {
      for (int p = std::max(0, length_[s] - params.sliding_window); p < length_[s]; ++p) {
        const float* from = kv_[s].data() + p * params.head_dim;
        std::vector<double> want(from, from + params.head_dim);
        Norm(want, kv_norm_.data(), params.norm_eps);
        Rotate(want, params.rope_dim, p);
        const int64_t row = static_cast<int64_t>(s) * cache_.ring + p % cache_.ring;
        ExpectVector(want, have.data() + row * params.head_dim,
                     "window of session " + std::to_string(s) + " position " + std::to_string(p));
      }
    }
  }

  std::vector<double> ExpectedRow(const Compressor& part, int s, int w) const {
    const AttentionParams& params = model_.params;
    const int first = w * params.ratio;
    std::vector<double> pooled(part.dim);
    for (int d = 0; d < part.dim; ++d) {
      double sum = 0, weights = 0;
      const auto add = [&](int p, int channel) {
        const double score = static_cast<double>(part.gate[s][p * part.width + channel]) +
                             part.ape[p % params.ratio * part.width + channel];
        sum += std::exp(score) * part.kv[s][p * part.width + channel];
        weights += std::exp(score);
      };
      if (params.overlap) {
        for (int p = std::max(0, first - params.ratio); p < first; ++p) add(p, d);
      }
      for (int p = first; p < first + params.ratio; ++p) {
        add(p, params.overlap ? part.dim + d : d);
      }
      pooled[d] = sum / weights;
    }
    Norm(pooled, part.norm.data(), params.norm_eps);
    Rotate(pooled, params.rope_dim, first);
    return pooled;
  }

  void CompareCompressor(const Compressor& part, const std::string& name) {
    const std::vector<float> have =
        DownloadKv(bench_, model_.params.kv_type, part.cache.rows, RowElements(part));
    for (int s = 0; s < kSlots; ++s) {
      for (int w = 0; w < length_[s] / model_.params.ratio; ++w) {
        const int64_t row = static_cast<int64_t>(s) * part.cache.max_rows + w;
        ExpectVector(ExpectedRow(part, s, w), have.data() + row * part.dim,
                     name + " row " + std::to_string(w) + " of session " + std::to_string(s));
      }
    }
  }

  // All cache bytes, to see that nothing changed.
  std::vector<uint8_t> AllBytes() {
    std::vector<uint8_t> all;
    const auto add = [&](const void* data, int64_t bytes) {
      const std::vector<uint8_t> part = bench_.Download<uint8_t>(data, bytes);
      all.insert(all.end(), part.begin(), part.end());
    };
    const int64_t kv_bytes = KvBytes(model_.params.kv_type);
    add(cache_.window, window_elements_ * kv_bytes);
    for (const Compressor* part : {&main_, &index_}) {
      const int64_t pending = static_cast<int64_t>(kSlots) * part->cache.ring * part->width * 4;
      if (pending == 0) continue;
      add(part->cache.values, pending);
      add(part->cache.scores, pending);
      add(part->cache.rows, RowElements(*part) * kv_bytes);
    }
    return all;
  }

  std::vector<Row> Run(int slot, int first, int count) {
    std::vector<Row> rows;
    for (int p = first; p < first + count; ++p) rows.push_back({slot, p});
    return rows;
  }

  // Chunks, mixed sessions, idle rows and single tokens, over the ends of all rings.
  void RunSessions() {
    StepAndCompare(Run(0, 0, 11));
    StepAndCompare({{1, 0}, {-1, 0}, {0, 11}, {1, 1}, {0, 12}, {1, 2}, {1, 3}, {1, 4}, {0, 13}});
    StepAndCompare({{2, 0}, {0, 14}, {1, 5}});
    StepAndCompare({{2, 1}, {-1, 0}, {0, 15}, {1, 6}});
    for (int p = 16; p < 24; ++p) StepAndCompare({{0, p}, {1, p - 9}});
    StepAndCompare(Run(1, 15, 12));
    for (int p = 24; p < 60; p += 6) StepAndCompare(Run(0, p, 6));
  }

  // Batches of more rows than the pending rings have, then single tokens, which need what the
  // batches left there; sessions alone and row by row between each other.
  void RunLongBatches() {
    const int windows = 2 * model_.params.ratio;
    StepAndCompare(Run(0, 0, 50));
    for (int p = 50; p < 50 + windows; ++p) StepAndCompare({{0, p}});
    std::vector<Row> rows;
    for (int p = 0; p < 45; ++p) {
      rows.insert(rows.end(), {{1, p}, {2, p}});
      if (p % 7 == 3) rows.push_back({-1, 0});
    }
    StepAndCompare(rows);
    for (int p = 45; p < 45 + windows; ++p) StepAndCompare({{1, p}, {2, p}});
    // From within a window, so that the first rows read positions whose places the last ones take.
    const int from = 50 + windows, to = from + 47;
    StepAndCompare(Run(0, from, to - from));
    length_[0] = to - model_.slack;
    for (int p = length_[0]; p < to + windows; ++p) StepAndCompare({{0, p}});
  }

  Bench bench_;
  std::mt19937 random_{7};
  Model model_;
  std::vector<float> kv_[kSlots];
  std::vector<float> kv_norm_;
  Compressor main_, index_;
  LayerCache cache_;
  int64_t window_elements_ = 0;
  int length_[kSlots] = {};
};

TEST_F(StoreKeysTest, WindowOnly) {
  Make(SmallModel(0, false, KvType::kF32));
  RunSessions();
}

TEST_F(StoreKeysTest, OverlappingWindowsWithIndexer) {
  Make(SmallModel(4, true, KvType::kF32));
  RunSessions();
}

TEST_F(StoreKeysTest, OverlappingWindowsInBf16) {
  Make(SmallModel(4, true, KvType::kBF16));
  RunSessions();
}

// 20 slots are two and a half of the batches in which slots are read.
TEST_F(StoreKeysTest, LongWindowsWithoutOverlap) {
  Make(SmallModel(20, false, KvType::kF32));
  RunSessions();
}

TEST_F(StoreKeysTest, OverlappingWindowsThroughShortRings) {
  Model model = SmallModel(4, true, KvType::kF32);
  model.rows = 60;
  model.max_pos = 160;
  Make(model);
  ASSERT_LT(main_.cache.ring, 45);
  RunLongBatches();
}

TEST_F(StoreKeysTest, LongWindowsThroughShortRings) {
  Model model = SmallModel(20, false, KvType::kF32);
  model.rows = 60;
  model.max_pos = 200;
  Make(model);
  ASSERT_LT(main_.cache.ring, 45);
  RunLongBatches();
}

TEST_F(StoreKeysTest, FullWidthWithOverlap) {
  Make(FullModel(4, true));
  StepAndCompare(Run(0, 0, 9));
  StepAndCompare({{0, 9}, {1, 0}, {0, 10}, {0, 11}});
}

TEST_F(StoreKeysTest, FullWidthWithLongWindows) {
  Make(FullModel(128, false));
  StepAndCompare(Run(0, 0, 130));
  Step(Run(1, 0, 120));
  StepAndCompare({{1, 120}, {0, 130}, {1, 121}, {1, 122}, {1, 123}, {0, 131}});
  StepAndCompare({{1, 124}, {0, 132}, {1, 125}, {1, 126}, {1, 127}});
  Step(Run(0, 133, 122));
  StepAndCompare({{0, 255}});
}

// A token that is stored a second time (a rejected draft, another token at its place) leaves no
// trace: the same rows as if only the last one had come.
TEST_F(StoreKeysTest, PositionsCanBeStoredAgain) {
  Make(SmallModel(4, true, KvType::kF32));
  StepAndCompare(Run(0, 0, 10));
  const int width = main_.width;
  for (int p = 10; p < 13; ++p) {
    for (int c = 0; c < width; ++c) main_.kv[0][p * width + c] += 3.0f;
  }
  Step(Run(0, 10, 3));
  length_[0] = 10;
  for (int p = 10; p < 13; ++p) {
    for (int c = 0; c < width; ++c) main_.kv[0][p * width + c] -= 5.0f;
  }
  StepAndCompare(Run(0, 10, 2));
  StepAndCompare(Run(0, 12, 4));
}

TEST_F(StoreKeysTest, IdleRowsWriteNothing) {
  Make(SmallModel(4, true, KvType::kBF16));
  Step(Run(0, 0, 12));
  const std::vector<uint8_t> before = AllBytes();
  Step({{-1, 0}, {-1, 3}, {-1, 0}});
  EXPECT_EQ(before, AllBytes());
}

// A window's pending values come from the projections when its tokens are of this batch and from
// the ring when they came before: the same bits, and the same ones left in the ring, which is
// shorter than the second chunk.
TEST_F(StoreKeysTest, ChunksGiveTheBitsOfSingleTokens) {
  Model model = SmallModel(4, true, KvType::kF32);
  model.rows = 60;
  Make(model);
  kv_[1] = kv_[0];
  for (Compressor* part : {&main_, &index_}) {
    part->kv[1] = part->kv[0];
    part->gate[1] = part->gate[0];
  }
  for (int p = 0; p < 60; ++p) Step({{0, p}});
  Step(Run(1, 0, 12));
  Step(Run(1, 12, 48));
  for (const Compressor* part : {&main_, &index_}) {
    const std::vector<float> rows = bench_.Download<float>(part->cache.rows, RowElements(*part));
    const float* chunk = rows.data() + static_cast<int64_t>(part->cache.max_rows) * part->dim;
    EXPECT_EQ(0, std::memcmp(rows.data(), chunk, sizeof(float) * 60 / 4 * part->dim));
    const int64_t pending = static_cast<int64_t>(part->cache.ring) * part->width;
    for (const float* ring : {part->cache.values, part->cache.scores}) {
      const std::vector<float> both = bench_.Download<float>(ring, 2 * pending);
      EXPECT_EQ(0, std::memcmp(both.data(), both.data() + pending, sizeof(float) * pending));
    }
  }
}

// Norms of fewer and of more columns than the keys have threads, and of more than one launch takes.
TEST_F(StoreKeysTest, ANormBesideTheKeysIsTheNormAlone) {
  Make(SmallModel(4, true, KvType::kBF16));
  const std::vector<Row> rows = {{0, 0}, {1, 0}, {0, 1}};
  const int count = static_cast<int>(rows.size());
  for (const int cols : {40, 1000, 4300}) {
    SCOPED_TRACE(testing::Message() << cols << " columns");
    const int64_t padded = PaddedCols(cols), stride = cols + 4;
    RowNorm norm;
    norm.x = bench_.Upload(Normal(random_, count * stride));
    norm.stride = stride;
    norm.cols = cols;
    norm.weight = bench_.Upload(Normal(random_, cols));
    norm.eps = 1e-6f;
    norm.out.rows = count;
    norm.out.cols = padded;
    norm.out.f32 = reinterpret_cast<float*>(bench_.Allocate(4 * count * padded));
    ActivationView alone = norm.out;
    alone.f32 = reinterpret_cast<float*>(bench_.Allocate(4 * count * padded));
    LaunchRmsNorm(bench_.launch, norm.x, stride, count, cols, norm.weight, norm.eps, alone);
    StepAndCompare(rows, &norm);
    const std::vector<float> want = bench_.Download<float>(alone.f32, count * padded);
    const std::vector<float> have = bench_.Download<float>(norm.out.f32, count * padded);
    EXPECT_EQ(0, std::memcmp(have.data(), want.data(), want.size() * sizeof(float)));
    EXPECT_NE(want[0], 0.0f);
  }
}

// In blocks of one warp and of four, which five rows do not fill; with a norm of its own launch
// too.
TEST_F(StoreKeysTest, MixesBalanceBesideTheKeys) {
  Make(SmallModel(4, true, KvType::kBF16));
  const std::vector<Row> rows = {{0, 0}, {1, 0}, {0, 1}, {-1, 0}, {0, 2}};
  const int count = static_cast<int>(rows.size());
  TestDevice device;
  const BalanceCase alone(device, count), beside(device, count), behind(device, count);
  device.Finish();
  StepAndCompare(rows, nullptr, alone.job());
  alone.ExpectDone(device);
  RowNorm norm;
  for (const auto& [cols, balance] : {std::pair{1000, &beside}, {4300, &behind}}) {
    norm.x = bench_.Upload(Normal(random_, count * cols));
    norm.stride = norm.cols = cols;
    norm.eps = 1e-6f;
    norm.out.rows = count;
    norm.out.cols = PaddedCols(cols);
    norm.out.f32 = reinterpret_cast<float*>(bench_.Allocate(4 * count * norm.out.cols));
    StepAndCompare(rows, &norm, balance->job());
    balance->ExpectDone(device);
  }
}

}  // namespace
}  // namespace ds4::cuda::attention_test
