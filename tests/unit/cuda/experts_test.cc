// Goal: hidden rows and lane roots of routed and shared experts are those of plain arithmetic, for
// every weight type, for few and many rows and any routing, and a row's bits are the same whatever
// else is in the batch.
// Method: random packed weights; float64 sums over their dequantised values and the very
// activations that the kernel reads (so the rounding to int8 is not part of the error); bounds from
// the number of float32 additions; one row alone against the same row in a batch, bit by bit.
#include "engine/cuda/experts.h"

#include "engine/comm/lane_tree.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

constexpr float kLimit = 2.0f;
constexpr float kSharedLimit = 3.0f;

struct Shape {
  DType up_type = DType::kF32;  // gate and up
  DType down_type = DType::kF32;
  DType shared_type = DType::kF32;
  int64_t hidden = 256;  // D
  int lanes = 8;
  int lane_begin = 0;
  int64_t lane_cols = 32;
  int num_experts = 5;
  int used = 2;

  int64_t ffn() const { return lanes * lane_cols; }
  int64_t hidden_cols() const { return lanes * PaddedCols(lane_cols); }
};

struct Model {
  Shape shape;
  TestMatrix gate, up, shared_gate, shared_up, down, shared_down;
};

Model MakeModel(TestDevice& device, const Shape& s) {
  Model m;
  m.shape = s;
  m.gate = MakeMatrix(device, s.up_type, s.num_experts, s.ffn(), s.hidden, 1);
  m.up = MakeMatrix(device, s.up_type, s.num_experts, s.ffn(), s.hidden, 2);
  m.shared_gate = MakeMatrix(device, s.shared_type, 1, s.ffn(), s.hidden, 3);
  m.shared_up = MakeMatrix(device, s.shared_type, 1, s.ffn(), s.hidden, 4);
  m.down = MakeMatrix(device, s.down_type, s.num_experts * s.lanes, s.hidden, s.lane_cols, 5);
  m.shared_down = MakeMatrix(device, s.shared_type, s.lanes, s.hidden, s.lane_cols, 6);
  return m;
}

// Who computes what: experts of row t at ids[t * used + k], by LaunchRoute from a table.
struct Batch {
  int rows = 0;
  std::vector<int32_t> ids;
  DeviceBuffer table, tokens, logits, memory;
  Routing routing;
  std::vector<float> weights;
  std::vector<int32_t> pairs, pair_place;
};

Batch RouteBatch(TestDevice& device, const Shape& s, int rows, const std::vector<int32_t>& ids,
                 const std::vector<float>& logits) {
  Batch b;
  b.rows = rows;
  b.ids = ids;
  std::vector<int32_t> tokens(rows);
  for (int t = 0; t < rows; ++t) tokens[t] = t;
  b.table = device.Upload(ids);
  b.tokens = device.Upload(tokens);
  b.logits = device.Upload(logits);
  RouterParams params;
  params.num_experts = s.num_experts;
  params.used = s.used;
  params.scale = 1.5f;
  params.hash_ids = b.table.as<int32_t>();
  b.memory = device.Allocate(RoutingBytes(rows, params));
  b.routing = MakeRouting(b.memory.data(), rows, params);
  LaunchRoute(device.launch, params, b.logits.as<float>(), b.tokens.as<int32_t>(), rows, b.routing);
  device.Finish();
  b.weights = device.Download(b.routing.weights, rows * s.used);
  b.pairs = device.Download(b.routing.pairs, rows * s.used);
  b.pair_place = device.Download(b.routing.pair_place, rows * s.used);
  return b;
}

enum class Spread { kEven, kAllAlike };

Batch RandomBatch(TestDevice& device, const Shape& s, int rows, Spread spread) {
  std::vector<int32_t> ids(rows * s.used);
  for (int t = 0; t < rows; ++t) {
    for (int k = 0; k < s.used; ++k) {
      // Descending, so that the order of addition differs from the order of choice.
      const int first = spread == Spread::kEven ? t : 0;
      ids[t * s.used + k] = (first + 2 * (s.used - 1 - k)) % s.num_experts;
    }
  }
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> logits(rows * s.num_experts);
  for (float& x : logits) x = normal(random);
  return RouteBatch(device, s, rows, ids, logits);
}

// Forms that some down products read, and f32 to compare with where int8 is read.
int FormsFor(DType type) { return ReadsQ8(type) ? kFormQ8 : kFormF32; }

double SwiGlu(double gate, double up, double limit, double weight) {
  gate = std::min(gate, limit);
  up = std::clamp(up, -limit, limit);
  return gate / (1 + std::exp(-gate)) * up * weight;
}

struct Dot {
  double sum = 0;
  double magnitude = 0;  // sum of |terms|: what rounding errors grow with
};

Dot DotOf(const float* w, const HostActivation& x, int row, int64_t x_col, int64_t cols, bool q8) {
  Dot dot;
  for (int64_t c = 0; c < cols; ++c) {
    const double term = w[c] * x.Value(row, x_col + c, q8);
    dot.sum += term;
    dot.magnitude += std::fabs(term);
  }
  return dot;
}

// Float32 sums of up to a few hundred rounded terms: a walk of roundings of half a unit (2^-24)
// each; 2^-19 of the magnitudes is many times what it reaches, and far below an error in one
// weight.
constexpr double kSumBound = 0x1p-19;

// One hidden value: the bound passes both products' errors through SwiGLU, whose slope in the gate
// is below 1.1 |up|, in the up value |silu| <= |gate| + 0.3.
void ExpectHidden(const TestMatrix& gate, const TestMatrix& up, int64_t expert, int64_t r,
                  const HostActivation& x, int row, double limit, double weight, float got) {
  const bool q8 = ReadsQ8(gate.packed.dtype);
  const int64_t cols = gate.packed.cols;
  const Dot g = DotOf(gate.Row(expert, r), x, row, 0, cols, q8);
  const Dot u = DotOf(up.Row(expert, r), x, row, 0, cols, q8);
  const double want = SwiGlu(g.sum, u.sum, limit, weight);
  const double bound = kSumBound * weight *
                       (1.1 * g.magnitude * std::min(std::fabs(u.sum), limit) +
                        u.magnitude * (std::min(std::fabs(g.sum), limit) + 0.3) + 1e-3);
  ASSERT_NEAR(got, want, bound) << "expert " << expert << " hidden row " << r << " of row " << row;
}

// Hidden rows against plain sums, and their int8 forms against the rule of activation.h.
void CheckHidden(const Model& m, const HostActivation& x, const Batch& batch,
                 const HostActivation& out, const HostActivation& shared_out, int forms) {
  const Shape& s = m.shape;
  const int64_t padded = PaddedCols(s.lane_cols);
  for (int64_t r = 0; r < s.ffn(); ++r) {
    const int64_t col = r / s.lane_cols * padded + r % s.lane_cols;
    for (int t = 0; t < batch.rows; ++t) {
      ExpectHidden(m.shared_gate, m.shared_up, 0, r, x, t, kSharedLimit, 1.0,
                   shared_out.f32[t * out.cols + col]);
      for (int k = 0; k < s.used; ++k) {
        const int pair = t * s.used + k;
        ExpectHidden(m.gate, m.up, batch.ids[pair], r, x, t, kLimit, batch.weights[pair],
                     out.f32[batch.pair_place[pair] * out.cols + col]);
      }
    }
  }
  for (const HostActivation* h : {&out, &shared_out}) {
    for (int row = 0; row < h->rows; ++row) {
      for (int64_t c = 0; c < h->cols; ++c) {
        if (c % padded < s.lane_cols) continue;
        ASSERT_EQ(h->f32[row * h->cols + c], 0.0f) << "padding";
      }
    }
    if ((forms & kFormQ8) == 0) continue;
    HostActivation want = *h;
    want.QuantiseFromF32();
    for (int row = 0; row < h->rows; ++row) {
      for (int64_t c = 0; c < h->cols; ++c) {
        ASSERT_EQ(h->q[h->QIndex(row, c)], want.q[h->QIndex(row, c)]) << row << ", " << c;
        const int64_t at = c / 32 * h->tiles() * 8 + row;
        ASSERT_EQ(h->scale[at], want.scale[at]);
      }
    }
  }
}

struct UpResult {
  HostActivation out, shared_out;
};

UpResult RunUp(TestDevice& device, const Model& m, const HostActivation& x, const Batch& batch,
               int forms) {
  const Shape& s = m.shape;
  DeviceActivation input =
      UploadActivation(device, x, FormsFor(s.up_type) | FormsFor(s.shared_type));
  DeviceActivation out = EmptyActivation(device, batch.rows * s.used, s.hidden_cols(), forms);
  DeviceActivation shared_out = EmptyActivation(device, batch.rows, s.hidden_cols(), forms);
  ExpertsUp job;
  job.gate = m.gate.packed;
  job.up = m.up.packed;
  job.shared_gate = m.shared_gate.packed;
  job.shared_up = m.shared_up.packed;
  job.x = input.view;
  job.lane_cols = s.lane_cols;
  job.limit = kLimit;
  job.shared_limit = kSharedLimit;
  job.out = out.view;
  job.shared_out = shared_out.view;
  LaunchExpertsUp(device.launch, job, batch.routing, s.used);
  device.Finish();
  return {DownloadActivation(device, out.view), DownloadActivation(device, shared_out.view)};
}

std::vector<float> RunDown(TestDevice& device, const Model& m, const HostActivation& hidden,
                           const HostActivation& shared_hidden, const Batch& batch) {
  const Shape& s = m.shape;
  DeviceActivation in = UploadActivation(device, hidden, FormsFor(s.down_type));
  DeviceActivation shared = UploadActivation(device, shared_hidden, FormsFor(s.shared_type));
  const size_t num_roots = SubtreesOf(s.lane_begin, s.lane_begin + s.lanes).size();
  const std::vector<float> nothing(num_roots * batch.rows * s.hidden, NAN);
  const DeviceBuffer roots = device.Upload(nothing);
  ExpertsDown job;
  job.down = m.down.packed;
  job.shared_down = m.shared_down.packed;
  job.lanes = s.lanes;
  job.lane_begin = s.lane_begin;
  job.hidden = in.view;
  job.shared_hidden = shared.view;
  job.roots = roots.as<float>();
  LaunchExpertsDown(device.launch, job, batch.routing, s.used, batch.rows);
  device.Finish();
  return device.Download(roots.as<float>(), nothing.size());
}

void CheckRoots(const Model& m, const HostActivation& hidden, const HostActivation& shared_hidden,
                const Batch& batch, const std::vector<float>& roots) {
  const Shape& s = m.shape;
  const int64_t padded = PaddedCols(s.lane_cols);
  const auto subtrees = SubtreesOf(s.lane_begin, s.lane_begin + s.lanes);
  for (size_t i = 0; i < subtrees.size(); ++i) {
    for (int t = 0; t < batch.rows; ++t) {
      for (int64_t d = 0; d < s.hidden; ++d) {
        Dot want;
        const auto add = [&](const Dot& dot) {
          want.sum += dot.sum;
          want.magnitude += dot.magnitude;
        };
        const int begin = subtrees[i].begin - s.lane_begin;
        for (int lane = begin; lane < begin + subtrees[i].size; ++lane) {
          add(DotOf(m.shared_down.Row(lane, d), shared_hidden, t, lane * padded, s.lane_cols,
                    ReadsQ8(s.shared_type)));
          for (int k = 0; k < s.used; ++k) {
            const int pair = t * s.used + k;
            add(DotOf(m.down.Row(batch.ids[pair] * s.lanes + lane, d), hidden,
                      batch.pair_place[pair], lane * padded, s.lane_cols, ReadsQ8(s.down_type)));
          }
        }
        ASSERT_NEAR(roots[(i * batch.rows + t) * s.hidden + d], want.sum,
                    kSumBound * want.magnitude + 1e-9)
            << "subtree " << i << " row " << t << " output " << d;
      }
    }
  }
}

void CheckBoth(const Shape& shape, int rows, Spread spread) {
  SCOPED_TRACE(testing::Message() << Info(shape.up_type).name << " " << Info(shape.down_type).name
                                  << " shared " << Info(shape.shared_type).name << ", " << rows
                                  << " rows, lanes of " << shape.lane_cols);
  TestDevice device;
  const Model m = MakeModel(device, shape);
  const Batch batch = RandomBatch(device, shape, rows, spread);
  const HostActivation x = RandomActivation(rows, 1, shape.hidden, 11);
  const int forms = kFormF32 | (shape.lane_cols % 32 == 0 ? kFormQ8 : 0);
  const UpResult up = RunUp(device, m, x, batch, forms);
  CheckHidden(m, x, batch, up.out, up.shared_out, forms);

  const HostActivation hidden =
      RandomActivation(rows * shape.used, shape.lanes, shape.lane_cols, 12);
  const HostActivation shared = RandomActivation(rows, shape.lanes, shape.lane_cols, 13);
  CheckRoots(m, hidden, shared, batch, RunDown(device, m, hidden, shared, batch));
}

// One row takes kernels of its own.
TEST(ExpertsTest, EveryTypeIsPlainArithmetic) {
  for (int rows : {1, 2}) {
    for (DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0, DType::kMXFP4}) {
      CheckBoth({.up_type = type, .down_type = type, .shared_type = type}, rows, Spread::kEven);
    }
    CheckBoth({.up_type = DType::kQ4_K,
               .down_type = DType::kQ4_K,
               .shared_type = DType::kQ8_0,
               .lanes = 1,
               .lane_cols = 256},
              rows, Spread::kEven);
  }
}

TEST(ExpertsTest, TheTwoBitFile) {
  const Shape shape = {.up_type = DType::kIQ2_XXS,
                       .down_type = DType::kQ2_K,
                       .shared_type = DType::kQ8_0,
                       .hidden = 512,
                       .lanes = 2,
                       .lane_cols = 256};
  for (int rows : {1, 7}) CheckBoth(shape, rows, Spread::kEven);
  CheckBoth(shape, 9, Spread::kAllAlike);
}

// The largest tables beside the largest stages, in rows as long as a model's.
TEST(ExpertsTest, TwoBitExpertsBesideASharedOneOfFloats) {
  CheckBoth({.up_type = DType::kIQ2_XXS,
             .down_type = DType::kQ8_0,
             .shared_type = DType::kF16,
             .hidden = 4096,
             .lanes = 1,
             .lane_cols = 32,
             .num_experts = 2,
             .used = 1},
            2, Spread::kEven);
}

// Tables and sums leave little room for rings: blocks sum fewer rows.
TEST(ExpertsTest, TwoBitDownMatricesForManyRows) {
  CheckBoth({.up_type = DType::kQ8_0,
             .down_type = DType::kIQ2_XXS,
             .shared_type = DType::kQ8_0,
             .hidden = 32,
             .lanes = 8,
             .lane_cols = 256,
             .num_experts = 2,
             .used = 1},
            45, Spread::kEven);
}

TEST(ExpertsTest, AnyNumberOfRows) {
  const Shape shape = {.up_type = DType::kMXFP4,
                       .down_type = DType::kMXFP4,
                       .shared_type = DType::kQ8_0,
                       .lanes = 4,
                       .num_experts = 7,
                       .used = 3};
  for (int rows : {1, 2, 7, 9, 20}) CheckBoth(shape, rows, Spread::kEven);
  CheckBoth(shape, 20, Spread::kAllAlike);
}

// More rows than one block of the down kernel sums.
TEST(ExpertsTest, MoreRowsThanABlockHolds) {
  CheckBoth({.up_type = DType::kF32,
             .down_type = DType::kF32,
             .shared_type = DType::kF32,
             .hidden = 32,
             .lanes = 1,
             .lane_cols = 8},
            70, Spread::kEven);
}

// The same where a warp takes row tiles in twos, and the last of three stands alone.
TEST(ExpertsTest, MoreRowsThanABlockHoldsAndAnOddRowTile) {
  for (DType type : {DType::kQ2_K, DType::kQ8_0}) {
    SCOPED_TRACE(Info(type).name);
    const Shape shape = {.down_type = type,
                         .shared_type = DType::kQ8_0,
                         .hidden = 40,
                         .lanes = 3,
                         .lane_begin = 3,
                         .lane_cols = 256,
                         .num_experts = 40};
    TestDevice device;
    Model m;
    m.shape = shape;
    m.down =
        MakeMatrix(device, type, shape.num_experts * shape.lanes, shape.hidden, shape.lane_cols, 1);
    m.shared_down = MakeMatrix(device, DType::kQ8_0, shape.lanes, shape.hidden, shape.lane_cols, 2);
    for (int rows : {1, 66}) {
      const Batch batch = RandomBatch(device, shape, rows, Spread::kEven);
      const HostActivation hidden =
          RandomActivation(rows * shape.used, shape.lanes, shape.lane_cols, 3);
      const HostActivation shared = RandomActivation(rows, shape.lanes, shape.lane_cols, 4);
      CheckRoots(m, hidden, shared, batch, RunDown(device, m, hidden, shared, batch));
    }
  }
}

// Lanes narrower than a block of int8, columns and rows that fill no chunk or tile.
TEST(ExpertsTest, TinyShapes) {
  for (int rows : {1, 3}) {
    CheckBoth({.hidden = 64, .lane_cols = 8, .num_experts = 3}, rows, Spread::kEven);
    CheckBoth({.hidden = 40, .lanes = 1, .lane_cols = 8, .num_experts = 3}, rows, Spread::kEven);
  }
}

// More slices of 512 columns than the kernel has warps for, and than it can keep twice.
TEST(ExpertsTest, LongRows) {
  for (int64_t hidden : {9 * 512 + 256, 21 * 512}) {
    for (DType type : {DType::kQ8_0, DType::kIQ2_XXS}) {
      for (int rows : {1, 2, 5}) {
        CheckBoth({.up_type = type,
                   .down_type = DType::kQ8_0,
                   .shared_type = DType::kQ8_0,
                   .hidden = hidden,
                   .lanes = 1,
                   .lane_cols = 32,
                   .num_experts = 2,
                   .used = 1},
                  rows, Spread::kEven);
      }
    }
  }
}

// Lanes longer than a slice, with padding behind them.
TEST(ExpertsTest, LongLanes) {
  for (int rows : {1, 3}) {
    CheckBoth({.up_type = DType::kMXFP4,
               .down_type = DType::kMXFP4,
               .shared_type = DType::kMXFP4,
               .hidden = 64,
               .lanes = 2,
               .lane_cols = 544,
               .num_experts = 3},
              rows, Spread::kEven);
  }
}

// Half of the lanes, and parts that are no single subtree.
TEST(ExpertsTest, LanesOfOneRank) {
  for (int begin : {0, 4}) {
    CheckBoth({.down_type = DType::kQ8_0, .lanes = 4, .lane_begin = begin}, 2, Spread::kEven);
  }
  CheckBoth({.down_type = DType::kQ8_0, .lanes = 3, .lane_begin = 3}, 2, Spread::kEven);
}

// A table of ids may name one expert twice for a row.
void CheckNamedTwice(const Shape& shape) {
  TestDevice device;
  const Model m = MakeModel(device, shape);
  const std::vector<std::vector<int32_t>> tables = {
      {1, 1, 1, 3, 1, 1, 2, 1},   // a group of several rows
      {1, 1, 2, 3, 0, 4, 0, 2}};  // groups of two pairs
  for (const std::vector<int32_t>& ids : tables) {
    for (int rows : {1, 2}) {
      const Batch batch =
          RouteBatch(device, shape, rows, {ids.begin(), ids.begin() + rows * shape.used},
                     std::vector<float>(rows * shape.num_experts, 0.5f));
      const HostActivation x = RandomActivation(rows, 1, shape.hidden, 1);
      const UpResult up = RunUp(device, m, x, batch, kFormF32 | kFormQ8);
      CheckHidden(m, x, batch, up.out, up.shared_out, kFormF32 | kFormQ8);
      CheckRoots(m, up.out, up.shared_out, batch, RunDown(device, m, up.out, up.shared_out, batch));
    }
  }
}

TEST(ExpertsTest, AnExpertNamedTwice) {
  Shape shape = {.up_type = DType::kQ8_0,
                 .down_type = DType::kQ8_0,
                 .shared_type = DType::kQ8_0,
                 .hidden = 64,
                 .lanes = 1,
                 .used = 4};
  CheckNamedTwice(shape);
  shape.down_type = DType::kQ2_K;
  shape.lane_cols = 256;
  CheckNamedTwice(shape);
}

// Bits of a row are its own: alone, among others, on devices of other sizes.
void CheckAlone(const Shape& shape, int rows, Spread spread) {
  SCOPED_TRACE(testing::Message() << Info(shape.up_type).name << ", " << rows << " rows");
  TestDevice device;
  const Model m = MakeModel(device, shape);
  const Batch batch = RandomBatch(device, shape, rows, spread);
  const HostActivation x = RandomActivation(rows, 1, shape.hidden, 21);
  const UpResult up = RunUp(device, m, x, batch, kFormF32 | kFormQ8);
  const std::vector<float> roots = RunDown(device, m, up.out, up.shared_out, batch);
  const size_t num_roots = SubtreesOf(shape.lane_begin, shape.lane_begin + shape.lanes).size();
  const auto logits = device.Download(batch.logits.as<float>(), rows * shape.num_experts);

  for (int t = 0; t < rows; t += rows < 4 ? 1 : rows / 3) {
    device.launch.num_sms = 1 + 13 * t;
    const std::vector<int32_t> ids(batch.ids.begin() + t * shape.used,
                                   batch.ids.begin() + (t + 1) * shape.used);
    const std::vector<float> own_logits(logits.begin() + t * shape.num_experts,
                                        logits.begin() + (t + 1) * shape.num_experts);
    const Batch one = RouteBatch(device, shape, 1, ids, own_logits);
    const UpResult up_one = RunUp(device, m, OneRow(x, t), one, kFormF32 | kFormQ8);
    for (int k = 0; k < shape.used; ++k) {
      const int64_t at = batch.pair_place[t * shape.used + k] * up.out.cols;
      const int64_t at_one = one.pair_place[k] * up.out.cols;
      ASSERT_EQ(std::memcmp(&up.out.f32[at], &up_one.out.f32[at_one], up.out.cols * 4), 0)
          << "hidden of row " << t << " expert " << k;
    }
    const std::vector<float> roots_one = RunDown(device, m, up_one.out, up_one.shared_out, one);
    for (size_t i = 0; i < num_roots; ++i) {
      ASSERT_EQ(std::memcmp(&roots[(i * rows + t) * shape.hidden], &roots_one[i * shape.hidden],
                            shape.hidden * 4),
                0)
          << "root " << i << " of row " << t;
    }
  }
}

TEST(ExpertsTest, ARowHasTheSameBitsAloneAndAmongOthers) {
  const Shape two_bit = {.up_type = DType::kIQ2_XXS,
                         .down_type = DType::kQ2_K,
                         .shared_type = DType::kQ8_0,
                         .hidden = 1024,
                         .lanes = 1,
                         .lane_cols = 256};
  CheckAlone(two_bit, 9, Spread::kEven);
  CheckAlone(two_bit, 9, Spread::kAllAlike);
  // Groups of one, two and three rows, in two row tiles of a warp or one.
  Shape whole_rank = two_bit;
  whole_rank.hidden = 768;
  whole_rank.lanes = 8;
  whole_rank.num_experts = 9;
  whole_rank.used = 3;
  CheckAlone(whole_rank, 4, Spread::kEven);
  for (DType type : {DType::kQ4_K, DType::kMXFP4, DType::kQ8_0}) {
    CheckAlone({.up_type = type,
                .down_type = type,
                .shared_type = DType::kQ8_0,
                .hidden = 512,
                .lanes = 2,
                .lane_cols = 256,
                .num_experts = 4},
               5, Spread::kAllAlike);
  }
  Shape floats = {.lanes = 4, .lane_begin = 4};
  CheckAlone(floats, 12, Spread::kEven);
}

}  // namespace
}  // namespace ds4::cuda
