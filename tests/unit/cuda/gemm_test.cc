// Goal: products of many rows are the products of the bf16-rounded operands, for every format, any
// number of rows on either side, several jobs, lanes and routed experts.
// Method: double sums on the host over bf16(x) * bf16(w), w as the file format defines it. The
// device adds K exact products in float32, each addition off by at most 2^-23 of the sum of
// magnitudes (tensor cores cut, they do not round), so K * 2^-23 * sum |x w| bounds that part.
// Formats with a minimum may meet a tie of the rounding to bf16 from the other side: one term's
// last bf16 bit, 2^-8 of it, is allowed on top.
#include "engine/cuda/gemm.h"

#include <numeric>

#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

double RoundedToBf16(float value) { return BF16ToF32(F32ToBF16(value)); }

// Rows of x: random, `segments` of segment_cols columns each padded to 256.
struct XRows {
  int rows = 0;
  int64_t cols = 0;
  std::vector<uint16_t> bits;
  DeviceBuffer memory;
  ActivationView view;

  double At(int row, int64_t col) const { return BF16ToF32(bits[row * cols + col]); }
};

XRows MakeX(TestDevice& device, int rows, int64_t segments, int64_t segment_cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  XRows x;
  x.rows = rows;
  x.cols = segments * PaddedCols(segment_cols);
  x.bits.assign(rows * x.cols, 0);
  for (int64_t i = 0; i < rows * x.cols; ++i) {
    if (i % PaddedCols(segment_cols) < segment_cols) x.bits[i] = F32ToBF16(normal(random));
  }
  x.memory = device.Upload(x.bits);
  x.view.rows = rows;
  x.view.cols = x.cols;
  x.view.bf16 = x.memory.as<uint16_t>();
  return x;
}

struct Expected {
  double value = 0;
  double bound = 0;
  void Add(const XRows& x, int row, int64_t x_col, const float* w, int64_t cols) {
    double sum = 0, magnitude = 0, largest = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const double term = x.At(row, x_col + c) * RoundedToBf16(w[c]);
      sum += term;
      magnitude += std::fabs(term);
      largest = std::max(largest, std::fabs(term));
    }
    value += sum;
    bound += std::ldexp(magnitude * static_cast<double>(PaddedCols(cols)), -23) +
             std::ldexp(largest, -8);
  }
};

void ExpectNear(const std::vector<float>& y, const XRows& x, int64_t x_col, const TestMatrix& w) {
  const int64_t rows = w.packed.rows;
  ASSERT_EQ(y.size(), static_cast<size_t>(x.rows * rows));
  for (int t = 0; t < x.rows; ++t) {
    for (int64_t r = 0; r < rows; ++r) {
      Expected expected;
      expected.Add(x, t, x_col, w.Row(0, r), w.packed.cols);
      ASSERT_NEAR(y[t * rows + r], expected.value, expected.bound) << "row " << t << " of x, " << r;
    }
  }
}

std::vector<float> RunGemm(TestDevice& device, const TestMatrix& w, const XRows& x,
                           int64_t x_col = 0) {
  const int64_t count = x.rows * w.packed.rows;
  const DeviceBuffer y = device.Upload(std::vector<float>(count, NAN));
  const GemmJob job{w.packed, x.view, x_col, y.as<float>(), w.packed.rows, {}, 0, false};
  LaunchGemm(device.launch, std::span(&job, 1));
  device.Finish();
  return device.Download(y.as<float>(), count);
}

class GemmFormat : public testing::TestWithParam<DType> {};

// K of several chunks, the last one cut short where blocks allow it.
TEST_P(GemmFormat, FollowsTheFileFormat) {
  TestDevice device;
  const int64_t cols = Info(GetParam()).block_elems == 256 ? 768 : 800;
  const TestMatrix w = MakeMatrix(device, GetParam(), 1, 40, cols, 1);
  const XRows x = MakeX(device, 5, 1, cols, 2);
  ExpectNear(RunGemm(device, w, x), x, 0, w);
}

// Every warp and every group of x rows has work, and the tile's edges are not filled.
TEST_P(GemmFormat, FillsMoreThanOneTile) {
  TestDevice device;
  const TestMatrix w = MakeMatrix(device, GetParam(), 1, 280, 256, 3);
  const XRows x = MakeX(device, 133, 1, 256, 4);
  ExpectNear(RunGemm(device, w, x), x, 0, w);
}

INSTANTIATE_TEST_SUITE_P(All, GemmFormat,
                         testing::Values(DType::kF16, DType::kBF16, DType::kQ8_0, DType::kMXFP4,
                                         DType::kQ4_K, DType::kQ2_K, DType::kIQ2_XXS),
                         [](const auto& tested) { return std::string(Info(tested.param).name); });

TEST(Gemm, TakesAnyNumberOfRows) {
  TestDevice device;
  const TestMatrix w = MakeMatrix(device, DType::kQ8_0, 1, 96, 288, 5);
  for (int rows : {1, 31, 70, 129}) {
    SCOPED_TRACE(rows);
    const XRows x = MakeX(device, rows, 1, 288, 6);
    ExpectNear(RunGemm(device, w, x), x, 0, w);
  }
}

// The same bits for a row alone, among others, and on any number of SMs.
TEST(Gemm, GivesARowTheSameBitsInAnyBatch) {
  TestDevice device(2), large(50);
  const TestMatrix w = MakeMatrix(device, DType::kQ4_K, 1, 300, 512, 7);
  const XRows x = MakeX(device, 70, 1, 512, 8);
  const std::vector<float> all = RunGemm(device, w, x);
  EXPECT_EQ(RunGemm(large, w, x), all);
  for (int row : {0, 9, 69}) {
    XRows one = MakeX(device, 1, 1, 512, 9);
    one.view.bf16 = x.view.bf16 + row * x.cols;
    EXPECT_EQ(RunGemm(device, w, one),
              std::vector<float>(all.begin() + row * 300, all.begin() + (row + 1) * 300));
  }
}

// Jobs of different types and shapes in one launch: float32 here, bf16 at a column there, both, and
// onto what stands there already.
TEST(Gemm, RunsSeveralJobsAtOnce) {
  TestDevice device;
  const TestMatrix first = MakeMatrix(device, DType::kF16, 1, 32, 256, 10);
  const TestMatrix second = MakeMatrix(device, DType::kIQ2_XXS, 1, 300, 512, 11);
  const TestMatrix third = MakeMatrix(device, DType::kQ8_0, 1, 96, 256, 12);
  const int rows = 37;
  const XRows x = MakeX(device, rows, 1, 768, 13);
  const DeviceBuffer y0 = device.Upload(std::vector<float>(rows * 40, 7.0f));
  const DeviceBuffer y1 = device.Upload(std::vector<float>(rows * 300, 1.0f));
  const int64_t out_cols = 512;
  const DeviceBuffer out = device.Upload(std::vector<uint16_t>(rows * out_cols, 0x1234));
  ActivationView view;
  view.rows = rows;
  view.cols = out_cols;
  view.bf16 = out.as<uint16_t>();
  const GemmJob jobs[] = {
      {first.packed, x.view, 256, y0.as<float>(), 40, view, 64, false},
      {second.packed, x.view, 256, y1.as<float>(), 300, {}, 0, true},
      {third.packed, x.view, 0, nullptr, 0, view, 288, false},
  };
  LaunchGemm(device.launch, jobs);
  device.Finish();

  const std::vector<float> got0 = device.Download(y0.as<float>(), rows * 40);
  const std::vector<float> got1 = device.Download(y1.as<float>(), rows * 300);
  const std::vector<uint16_t> got = device.Download(out.as<uint16_t>(), rows * out_cols);
  for (int t = 0; t < rows; ++t) {
    for (int r = 0; r < 300; ++r) {
      Expected expected;
      expected.Add(x, t, 256, second.Row(0, r), 512);
      ASSERT_NEAR(got1[t * 300 + r], 1.0 + expected.value, expected.bound + 1e-6);
    }
    for (int64_t c = 0; c < out_cols; ++c) {
      const uint16_t bits = got[t * out_cols + c];
      if (c >= 64 && c < 96) {
        EXPECT_EQ(bits, F32ToBF16(got0[t * 40 + c - 64]));
      } else if (c >= 288 && c < 384) {
        Expected expected;
        expected.Add(x, t, 0, third.Row(0, c - 288), 256);
        ASSERT_NEAR(BF16ToF32(bits), expected.value,
                    expected.bound + std::ldexp(std::fabs(expected.value), -8));
      } else {
        EXPECT_EQ(bits, 0x1234) << "column " << c << " belongs to nobody";
      }
    }
    for (int r = 0; r < 40; ++r) {
      if (r >= 32) {
        EXPECT_EQ(got0[t * 40 + r], 7.0f);
        continue;
      }
      Expected expected;
      expected.Add(x, t, 256, first.Row(0, r), 256);
      ASSERT_NEAR(got0[t * 40 + r], expected.value, expected.bound);
    }
  }
}

// More jobs than one launch takes.
TEST(Gemm, SplitsManyJobs) {
  TestDevice device;
  const XRows x = MakeX(device, 3, 1, 256, 14);
  std::vector<TestMatrix> matrices;
  std::vector<DeviceBuffer> results;
  std::vector<GemmJob> jobs;
  for (uint32_t i = 0; i < 19; ++i) {
    matrices.push_back(MakeMatrix(device, DType::kBF16, 1, 16 + i, 256, 15 + i));
    results.push_back(device.Allocate(x.rows * (16 + i) * 4));
    jobs.push_back({matrices[i].packed, x.view, 0, results[i].as<float>(), 16 + i, {}, 0, false});
  }
  LaunchGemm(device.launch, jobs);
  device.Finish();
  for (uint32_t i = 0; i < 19; ++i) {
    ExpectNear(device.Download(results[i].as<float>(), x.rows * (16 + i)), x, 0, matrices[i]);
  }
}

// Lanes stand one after the other in x, each padded; their products are one sum.
TEST(Gemm, SumsOverLanes) {
  TestDevice device;
  const struct {
    DType dtype;
    int64_t lane_cols;
    bool accumulate;
  } cases[] = {{DType::kF16, 8, false},
               {DType::kQ8_0, 32, true},
               {DType::kQ2_K, 256, false},
               {DType::kMXFP4, 288, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(Info(c.dtype).name);
    const TestMatrix w = MakeMatrix(device, c.dtype, 3, 56, c.lane_cols, 40);
    const XRows x = MakeX(device, 11, 3, c.lane_cols, 41);
    const DeviceBuffer y = device.Upload(std::vector<float>(11 * 56, c.accumulate ? 2.0f : NAN));
    LaunchLaneGemm(device.launch, w.packed, x.view, y.as<float>(), c.accumulate);
    device.Finish();
    const std::vector<float> got = device.Download(y.as<float>(), 11 * 56);
    for (int t = 0; t < 11; ++t) {
      for (int r = 0; r < 56; ++r) {
        Expected expected;
        for (int lane = 0; lane < 3; ++lane) {
          expected.Add(x, t, lane * PaddedCols(c.lane_cols), w.Row(lane, r), c.lane_cols);
        }
        // The accumulator also carries the lanes before.
        ASSERT_NEAR(got[t * 56 + r], (c.accumulate ? 2.0 : 0.0) + expected.value,
                    3 * expected.bound + 1e-6);
      }
    }
  }
}

// What one test of the experts runs with.
struct ExpertsCase {
  DType up_type, down_type, shared_type;
  int num_experts, used, rows;
  int64_t dim, lane_cols;
  int lanes;
  std::vector<int32_t> ids;  // [rows][used]
};

// The lists of LaunchRoute, made on the host.
struct HostRouting {
  std::vector<int32_t> pairs, place, first;
  std::vector<float> weights;
};

HostRouting SortPairs(const ExpertsCase& c) {
  HostRouting routing;
  const int num_pairs = c.rows * c.used;
  routing.pairs.resize(num_pairs);
  routing.place.resize(num_pairs);
  routing.first.assign(c.num_experts + 1, 0);
  std::iota(routing.pairs.begin(), routing.pairs.end(), 0);
  std::stable_sort(routing.pairs.begin(), routing.pairs.end(),
                   [&](int a, int b) { return c.ids[a] < c.ids[b]; });
  for (int p = 0; p < num_pairs; ++p) {
    routing.place[routing.pairs[p]] = p;
    ++routing.first[c.ids[p] + 1];
    routing.weights.push_back(0.1f + 0.01f * static_cast<float>(p % 17));
  }
  std::partial_sum(routing.first.begin(), routing.first.end(), routing.first.begin());
  return routing;
}

double ClampedSwiGlu(double gate, double up, double limit) {
  gate = std::min(gate, limit);
  up = std::clamp(up, -limit, limit);
  return gate / (1.0 + std::exp(-gate)) * up;
}

class ExpertsGemm {
 public:
  explicit ExpertsGemm(const ExpertsCase& c) : c_(c), routing_(SortPairs(c)) {
    const int64_t ffn = c.lanes * c.lane_cols;
    gate_ = MakeMatrix(device_, c.up_type, c.num_experts, ffn, c.dim, 50);
    up_ = MakeMatrix(device_, c.up_type, c.num_experts, ffn, c.dim, 51);
    shared_gate_ = MakeMatrix(device_, c.shared_type, 1, ffn, c.dim, 52);
    shared_up_ = MakeMatrix(device_, c.shared_type, 1, ffn, c.dim, 53);
    down_ = MakeMatrix(device_, c.down_type, c.num_experts * c.lanes, c.dim, c.lane_cols, 54);
    x_ = MakeX(device_, c.rows, 1, c.dim, 55);
    ids_ = device_.Upload(c.ids);
    pairs_ = device_.Upload(routing_.pairs);
    place_ = device_.Upload(routing_.place);
    first_ = device_.Upload(routing_.first);
    weights_ = device_.Upload(routing_.weights);
    on_device_.ids = ids_.as<int32_t>();
    on_device_.pairs = pairs_.as<int32_t>();
    on_device_.pair_place = place_.as<int32_t>();
    on_device_.expert_first = first_.as<int32_t>();
    on_device_.weights = weights_.as<float>();
  }

  // Gate, up and SwiGLU of every pair and of the shared expert against double sums.
  void CheckUp() {
    const int64_t cols = c_.lanes * PaddedCols(c_.lane_cols);
    const int num_pairs = c_.rows * c_.used;
    const DeviceBuffer out = device_.Upload(std::vector<uint16_t>(num_pairs * cols, 0x7fc0));
    const DeviceBuffer shared = device_.Upload(std::vector<uint16_t>(c_.rows * cols, 0x7fc0));
    ExpertsUp job;
    job.gate = gate_.packed;
    job.up = up_.packed;
    job.shared_gate = shared_gate_.packed;
    job.shared_up = shared_up_.packed;
    job.x = x_.view;
    job.lane_cols = c_.lane_cols;
    job.limit = kLimit;
    job.shared_limit = kSharedLimit;
    job.out = View(out, num_pairs, cols);
    job.shared_out = View(shared, c_.rows, cols);
    LaunchExpertsUpGemm(device_.launch, job, on_device_, c_.used);
    device_.Finish();
    const auto hidden = device_.Download(out.as<uint16_t>(), num_pairs * cols);
    const auto shared_hidden = device_.Download(shared.as<uint16_t>(), c_.rows * cols);
    for (int p = 0; p < num_pairs; ++p) {
      const int pair = routing_.pairs[p];
      CheckHidden(hidden.data() + p * cols, pair / c_.used, gate_, up_, c_.ids[pair], kLimit,
                  routing_.weights[pair]);
    }
    for (int t = 0; t < c_.rows; ++t) {
      CheckHidden(shared_hidden.data() + t * cols, t, shared_gate_, shared_up_, 0, kSharedLimit, 1);
    }
  }

  // Down products of every pair, added to a row in the order of expert ids, onto what is there.
  void CheckDown() {
    const XRows hidden = MakeX(device_, c_.rows * c_.used, c_.lanes, c_.lane_cols, 56);
    const DeviceBuffer pair_out =
        device_.Upload(std::vector<float>(c_.rows * c_.used * c_.dim, NAN));
    const DeviceBuffer out = device_.Upload(std::vector<float>(c_.rows * c_.dim, 3.0f));
    ExpertsDown job;
    job.down = down_.packed;
    job.lanes = c_.lanes;
    job.hidden = hidden.view;
    LaunchExpertsDownGemm(device_.launch, job, on_device_, c_.used, c_.rows, pair_out.as<float>(),
                          out.as<float>());
    device_.Finish();
    const auto pairs = device_.Download(pair_out.as<float>(), c_.rows * c_.used * c_.dim);
    const auto got = device_.Download(out.as<float>(), c_.rows * c_.dim);
    for (int p = 0; p < c_.rows * c_.used; ++p) CheckPair(pairs.data() + p * c_.dim, hidden, p);
    for (int t = 0; t < c_.rows; ++t) {
      std::vector<int> order(c_.used);
      std::iota(order.begin(), order.end(), t * c_.used);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return c_.ids[a] < c_.ids[b]; });
      for (int64_t d = 0; d < c_.dim; ++d) {
        float sum = 3.0f;
        for (int pair : order) sum += pairs[routing_.place[pair] * c_.dim + d];
        ASSERT_EQ(got[t * c_.dim + d], sum) << "row " << t << " column " << d;
      }
    }
  }

 private:
  static constexpr float kLimit = 1.0f, kSharedLimit = 0.5f;  // most values meet one of them

  static ActivationView View(const DeviceBuffer& bits, int rows, int64_t cols) {
    ActivationView view;
    view.rows = rows;
    view.cols = cols;
    view.bf16 = bits.as<uint16_t>();
    return view;
  }

  void CheckHidden(const uint16_t* hidden, int row, const TestMatrix& gate, const TestMatrix& up,
                   int expert, float limit, float weight) {
    const int64_t stride = PaddedCols(c_.lane_cols);
    for (int64_t i = 0; i < c_.lanes * stride; ++i) {
      if (i % stride >= c_.lane_cols) {
        ASSERT_EQ(hidden[i], 0) << "padding column " << i;
        continue;
      }
      const int64_t f = i / stride * c_.lane_cols + i % stride;
      Expected g, u;
      g.Add(x_, row, 0, gate.Row(expert, f), c_.dim);
      u.Add(x_, row, 0, up.Row(expert, f), c_.dim);
      const double value = ClampedSwiGlu(g.value, u.value, limit) * weight;
      // Slopes of SwiGLU: at most 1.1 |u| in the gate, at most limit in u.
      const double bound = (1.1 * limit * g.bound + limit * u.bound) * weight +
                           std::ldexp(std::fabs(value), -8) + 1e-7;
      ASSERT_NEAR(BF16ToF32(hidden[i]), value, bound)
          << "row " << row << " expert " << expert << " column " << i;
    }
  }

  void CheckPair(const float* got, const XRows& hidden, int place) {
    const int expert = c_.ids[routing_.pairs[place]];
    for (int64_t d = 0; d < c_.dim; ++d) {
      Expected expected;
      for (int lane = 0; lane < c_.lanes; ++lane) {
        expected.Add(hidden, place, lane * PaddedCols(c_.lane_cols),
                     down_.Row(expert * c_.lanes + lane, d), c_.lane_cols);
      }
      ASSERT_NEAR(got[d], expected.value, c_.lanes * expected.bound)
          << "place " << place << " expert " << expert << " column " << d;
    }
  }

  ExpertsCase c_;
  HostRouting routing_;
  TestDevice device_;
  TestMatrix gate_, up_, shared_gate_, shared_up_, down_;
  XRows x_;
  DeviceBuffer ids_, pairs_, place_, first_, weights_;
  Routing on_device_;
};

std::vector<int32_t> SpreadIds(int rows, int used, int num_experts) {
  std::mt19937 random(60);
  std::vector<int32_t> ids, all(num_experts);
  std::iota(all.begin(), all.end(), 0);
  for (int t = 0; t < rows; ++t) {
    std::shuffle(all.begin(), all.end(), random);
    ids.insert(ids.end(), all.begin(), all.begin() + used);
  }
  return ids;
}

TEST(ExpertsGemm, SpreadOverExpertsInTinyLanes) {
  ExpertsGemm test(
      {DType::kF16, DType::kF16, DType::kF16, 9, 3, 13, 64, 8, 4, SpreadIds(13, 3, 9)});
  test.CheckUp();
  test.CheckDown();
}

// Rows of no whole number of 16 bytes, and more experts a row than the combining kernel adds at
// once.
TEST(ExpertsGemm, OddWidthsAndManyExpertsARow) {
  ExpertsGemm odd({DType::kF16, DType::kF16, DType::kF16, 5, 2, 7, 70, 8, 2, SpreadIds(7, 2, 5)});
  odd.CheckDown();
  ExpertsGemm many({DType::kF16, DType::kF16, DType::kF16, 9, 8, 7, 72, 8, 2, SpreadIds(7, 8, 9)});
  many.CheckDown();
}

// More pairs of one expert than a tile holds, few of the others, none of some.
TEST(ExpertsGemm, CrowdAtOneExpert) {
  std::vector<int32_t> ids;
  for (int t = 0; t < 150; ++t) {
    ids.push_back(5);
    ids.push_back(t % 40 == 0 ? 2 : 7);
  }
  ExpertsGemm test({DType::kQ4_K, DType::kQ4_K, DType::kQ8_0, 8, 2, 150, 256, 256, 1, ids});
  test.CheckUp();
  test.CheckDown();
}

TEST(ExpertsGemm, TypesOfQ2) {
  ExpertsGemm test(
      {DType::kIQ2_XXS, DType::kQ2_K, DType::kQ8_0, 5, 2, 9, 512, 256, 2, SpreadIds(9, 2, 5)});
  test.CheckUp();
  test.CheckDown();
}

// More experts than threads of a block; most have no row.
TEST(ExpertsGemm, ManyExperts) {
  ExpertsGemm test(
      {DType::kMXFP4, DType::kMXFP4, DType::kBF16, 300, 6, 4, 64, 32, 1, SpreadIds(4, 6, 300)});
  test.CheckUp();
  test.CheckDown();
}

// Numbers of rows of every class of tiles at once: none, 1, 33, 65, 97, a full tile, and more.
TEST(ExpertsGemm, TilesOfEveryLength) {
  std::vector<int32_t> ids;
  const int counts[] = {0, 33, 1, 128, 97, 65, 0, 161};
  for (int e = 0; e < 8; ++e) ids.insert(ids.end(), counts[e], e);
  const int rows = static_cast<int>(ids.size());
  ExpertsGemm test({DType::kQ2_K, DType::kIQ2_XXS, DType::kF16, 8, 1, rows, 256, 256, 1, ids});
  test.CheckUp();
  test.CheckDown();
}

// A table may name an expert twice in a row.
TEST(ExpertsGemm, SameExpertTwice) {
  ExpertsGemm test(
      {DType::kQ8_0, DType::kQ8_0, DType::kQ8_0, 4, 3, 2, 64, 32, 2, {3, 1, 3, 0, 0, 0}});
  test.CheckUp();
  test.CheckDown();
}

}  // namespace
}  // namespace ds4::cuda
