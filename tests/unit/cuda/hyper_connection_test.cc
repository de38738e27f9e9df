// Goal: mixing of streams, norms, embedding and rotary tables on the device do what spec 2.1-2.4
// say, add lane roots as the host does, and give a row the same bits alone and in a batch. Method:
// small random cases with odd sizes against sums in double; AddRoots, RopeAngles and the plain
// dequantise of the host where results must be equal.
#include "engine/cuda/hyper_connection.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/comm/lane_tree.h"
#include "engine/cuda/attention.h"
#include "engine/kernels/rope.h"
#include "engine/tensor/quant.h"
#include "tests/unit/cuda/balance_test_util.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

std::vector<float> RandomFloats(int64_t count, float scale, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<std::byte> Encode(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(BytesFor(dtype, values.size()));
  EXPECT_TRUE(Quantize(dtype, values, bytes).ok());
  return bytes;
}
std::vector<float> Decode(DType dtype, const std::vector<std::byte>& bytes, int64_t count) {
  std::vector<float> values(count);
  EXPECT_TRUE(Dequantize(dtype, bytes, values).ok());
  return values;
}

// One site: shapes, random weights, and the streams of `rows` rows.
struct Site {
  Site(int h, int d, int num_rows, DType type, uint32_t seed, int num_mixes = 0)
      : rows(num_rows), dtype(type) {
    params.num_streams = h;
    params.hidden_dim = d;
    mixes = num_mixes == 0 ? 2 * h + h * h : num_mixes;
    fn_bytes = Encode(dtype, RandomFloats(int64_t{mixes} * h * d, 0.05f, seed));
    fn = Decode(dtype, fn_bytes, int64_t{mixes} * h * d);
    base = RandomFloats(mixes, 0.5f, seed + 1);
    scale = {0.7f, 1.3f, 1.1f};
    norm = RandomFloats(d, 1.0f, seed + 2);
    streams = RandomFloats(int64_t{rows} * h * d, 1.0f, seed + 3);
    post = RandomFloats(int64_t{rows} * h, 1.0f, seed + 4);
    comb = RandomFloats(int64_t{rows} * h * h, 0.5f, seed + 5);
  }
  int h() const { return params.num_streams; }
  int d() const { return params.hidden_dim; }
  int64_t partial_size() const { return PartialFloats(params, rows); }
  // Where the dot product with row i of fn is, and the product of streams j and (j + k) % 4.
  int64_t DotAt(int part, int t, int i) const {
    const int64_t at = int64_t{part} * rows + t, rest = RestOffset(NumParts(params), rows);
    return i < h() ? at * kStartSlots + i : rest + at * kRestSlots + i - h();
  }
  int64_t GramAt(int part, int t, int j, int k) const {
    return (int64_t{part} * rows + t) * kStartSlots + kGramSlot + 4 * k + j;
  }

  HcParams params;
  int rows, mixes;
  DType dtype;
  std::vector<std::byte> fn_bytes;
  std::vector<float> fn, base, scale, norm, streams, post, comb;
};

// What the device has after a launch.
struct Parts {
  std::vector<float> streams, partial;
};

Parts RunPost(TestDevice& device, const Site& site, const std::vector<std::vector<float>>& roots,
              RootSet set) {
  const DeviceBuffer fn = device.Upload(site.fn_bytes), post = device.Upload(site.post);
  const DeviceBuffer comb = device.Upload(site.comb), streams = device.Upload(site.streams);
  const DeviceBuffer partial = device.Allocate(site.partial_size() * 4);
  std::vector<DeviceBuffer> buffers;
  for (size_t i = 0; i < roots.size(); ++i) {
    buffers.push_back(device.Upload(roots[i]));
    set.data[i] = buffers.back().as<float>();
  }
  LaunchHcPost(device.launch, site.params, site.rows, set, {post.as<float>(), comb.as<float>()},
               {site.dtype, site.mixes, int64_t{site.h()} * site.d(), fn.data()},
               streams.as<float>(), partial.as<float>());
  device.Finish();
  return {device.Download(streams.as<float>(), site.streams.size()),
          device.Download(partial.as<float>(), site.partial_size())};
}

RootSet OneRoot() {
  RootSet set;
  set.count = 1;
  set.size[0] = 1;
  return set;
}

// Up to 128 float32 products, each within 2^-24 of its size, added in a tree with runs of at most
// 8: 2^-19 of the sum of magnitudes.
void ExpectSum(const Site& site, float got, int part, const float* a, const float* b,
               int num_streams) {
  const int d = site.d();
  double sum = 0, size = 0;
  for (int j = 0; j < num_streams; ++j) {
    for (int k = part * kPartCols; k < std::min(d, (part + 1) * kPartCols); ++k) {
      const double product = double{a[int64_t{j} * d + k]} * b[int64_t{j} * d + k];
      sum += product;
      size += std::abs(product);
    }
  }
  ASSERT_NEAR(got, sum, size * 0x1p-19 + 1e-30);
}

// Each partial against the sum in double over its columns.
void ExpectPartials(const Site& site, const std::vector<float>& streams,
                    const std::vector<float>& partial) {
  const int h = site.h(), d = site.d();
  const std::vector<float> none(d);
  for (int part = 0; part < NumParts(site.params); ++part) {
    for (int t = 0; t < site.rows; ++t) {
      SCOPED_TRACE(testing::Message() << "part " << part << " row " << t);
      const float* row = &streams[int64_t{t} * h * d];
      const auto stream = [&](int j) { return j < h ? row + int64_t{j} * d : none.data(); };
      for (int i = 0; i < site.mixes; ++i) {
        ExpectSum(site, partial[site.DotAt(part, t, i)], part, row, &site.fn[int64_t{i} * h * d],
                  h);
      }
      for (int i = 0; i < 10; ++i) {
        const int j = i % 4, k = i / 4;
        ExpectSum(site, partial[site.GramAt(part, t, j, k)], part, stream(j), stream((j + k) % 4),
                  1);
      }
    }
  }
}

TEST(HyperConnectionTest, PostMixesTheResultInAndLeavesPartials) {
  struct Case {
    int h, d, rows;
    DType dtype;
    int mixes;
  };
  for (const Case& c : {Case{4, 64, 1, DType::kF32, 0}, Case{4, 200, 9, DType::kF16, 0},
                        Case{2, 136, 3, DType::kBF16, 0}, Case{3, 64, 2, DType::kF32, 0},
                        Case{1, 72, 5, DType::kF16, 0}, Case{4, 128, 6, DType::kF16, 4},
                        Case{4, 4096, 1, DType::kF16, 0}, Case{4, 96, 3, DType::kBF16, 0},
                        Case{4, 64, 19, DType::kF16, 0}}) {
    SCOPED_TRACE(testing::Message() << c.h << " streams of " << c.d << ", " << c.rows << " rows");
    TestDevice device;
    const Site site(c.h, c.d, c.rows, c.dtype, 7, c.mixes);
    const std::vector<float> result = RandomFloats(int64_t{c.rows} * c.d, 2.0f, 99);
    const Parts got = RunPost(device, site, {result}, OneRoot());
    for (int t = 0; t < c.rows; ++t) {
      for (int k = 0; k < c.h; ++k) {
        for (int i = 0; i < c.d; ++i) {
          double want = double{site.post[t * c.h + k]} * result[int64_t{t} * c.d + i];
          for (int j = 0; j < c.h; ++j) {
            want += double{site.comb[(t * c.h + j) * c.h + k]} *
                    site.streams[(int64_t{t} * c.h + j) * c.d + i];
          }
          // Five products of numbers of at most about 10.
          ASSERT_NEAR(got.streams[(int64_t{t} * c.h + k) * c.d + i], want, 1e-5);
        }
      }
    }
    ExpectPartials(site, got.streams, got.partial);
  }
}

TEST(HyperConnectionTest, PostAddsRootsInTheOrderOfTheLaneTree) {
  // With post = 1 and comb = 0 the new streams are the total itself.
  for (const auto& [lanes, world] :
       {std::pair{8, 1}, {8, 2}, {8, 3}, {8, 5}, {8, 8}, {8, 7}, {16, 16}, {16, 5}, {1, 1}}) {
    SCOPED_TRACE(testing::Message() << lanes << " lanes over " << world << " ranks");
    TestDevice device;
    Site site(4, 72, 3, DType::kF32, 11);
    std::fill(site.post.begin(), site.post.end(), 1.0f);
    std::fill(site.comb.begin(), site.comb.end(), 0.0f);
    const LaneLayout layout = LaneLayout::Even(lanes, world);
    RootSet set;
    set.num_lanes = lanes;
    std::vector<std::vector<float>> roots;
    for (int rank = 0; rank < world; ++rank) {
      for (const LaneSubtree& root : SubtreesOf(layout.begin[rank], layout.begin[rank + 1])) {
        set.begin[set.count] = root.begin;
        set.size[set.count++] = root.size;
        roots.push_back(RandomFloats(int64_t{site.rows} * site.d(), 1.0f, 500 + set.count));
      }
    }
    std::vector<const float*> pointers;
    for (const auto& root : roots) pointers.push_back(root.data());
    std::vector<float> total(int64_t{site.rows} * site.d());
    AddRoots(layout, pointers, total.size(), total.data());
    const Parts got = RunPost(device, site, roots, set);
    for (int t = 0; t < site.rows; ++t) {
      for (int k = 0; k < 4; ++k) {
        ASSERT_EQ(0, std::memcmp(&got.streams[(int64_t{t} * 4 + k) * site.d()],
                                 &total[int64_t{t} * site.d()], site.d() * sizeof(float)));
      }
    }
  }
}

// Row t of `site` as a site of one row.
Site RowOf(const Site& site, int t) {
  const auto cut = [&](std::vector<float>& values) {
    const int64_t size = values.size() / site.rows;
    values = std::vector<float>(values.begin() + t * size, values.begin() + (t + 1) * size);
  };
  Site row = site;
  cut(row.streams), cut(row.post), cut(row.comb);
  row.rows = 1;
  return row;
}

// Rows of a batch in one block, and a block for each; with parts that are whole, and not.
TEST(HyperConnectionTest, PostGivesARowTheSameBitsAloneAndInABatch) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int d : {128, 136}) {
      SCOPED_TRACE(testing::Message() << Info(dtype).name << " " << d);
      const Site site(4, d, 11, dtype, 21);
      const std::vector<float> result = RandomFloats(int64_t{11} * d, 1.0f, 22);
      TestDevice many(1), few(64);
      const Parts batch = RunPost(many, site, {result}, OneRoot());
      for (const int t : {0, 4, 10}) {
        const std::vector<float> own(result.begin() + t * d, result.begin() + (t + 1) * d);
        const Site row = RowOf(site, t);
        const Parts alone = RunPost(few, row, {own}, OneRoot());
        EXPECT_EQ(0, std::memcmp(alone.streams.data(), &batch.streams[int64_t{t} * 4 * d],
                                 alone.streams.size() * 4));
        for (int part = 0; part < NumParts(site.params); ++part) {
          for (int i = 0; i < site.mixes; ++i) {
            EXPECT_EQ(alone.partial[row.DotAt(part, 0, i)], batch.partial[site.DotAt(part, t, i)]);
          }
          for (int i = 0; i < 10; ++i) {
            EXPECT_EQ(alone.partial[row.GramAt(part, 0, i % 4, i / 4)],
                      batch.partial[site.GramAt(part, t, i % 4, i / 4)]);
          }
        }
      }
    }
  }
}

// ---- The start of a site ----

struct Mixes {
  std::vector<double> pre, post, comb;
};

Mixes MixesInDouble(const Site& site, int t) {
  const int h = site.h();
  const int64_t flat = int64_t{h} * site.d();
  const float* x = &site.streams[t * flat];
  double squares = 0;
  for (int64_t k = 0; k < flat; ++k) squares += double{x[k]} * x[k];
  const double inverse =
      1.0 / std::sqrt(squares / static_cast<double>(flat) + site.params.norm_eps);
  Mixes out;
  for (int i = 0; i < site.mixes; ++i) {
    double dot = 0;
    for (int64_t k = 0; k < flat; ++k) dot += double{site.fn[i * flat + k]} * x[k];
    const int kind = i < h ? 0 : i < 2 * h ? 1 : 2;
    const double z = dot * inverse * site.scale[kind] + site.base[i];
    if (kind == 0) out.pre.push_back(Logistic(z) + site.params.hc_eps);
    if (kind == 1) out.post.push_back(2 * Logistic(z));
    if (kind == 2) out.comb.push_back(z);
  }
  if (!out.comb.empty()) {
    SinkhornInDouble(h, site.params.sinkhorn_iterations, site.params.hc_eps, out.comb.data());
  }
  return out;
}

// norm * R(sum_h weight_h X_h) of row t.
std::vector<double> CollapseInDouble(const Site& site, int t, const std::vector<double>& weight) {
  const int h = site.h(), d = site.d();
  std::vector<double> out(d);
  double squares = 0;
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < h; ++j) out[i] += weight[j] * site.streams[(int64_t{t} * h + j) * d + i];
    squares += out[i] * out[i];
  }
  const double inverse = 1.0 / std::sqrt(squares / d + site.params.norm_eps);
  for (int i = 0; i < d; ++i) out[i] *= inverse * site.norm[i];
  return out;
}

// A view with all forms, in memory that starts as garbage.
struct Forms {
  Forms(TestDevice& device, int rows, int64_t cols) {
    const int64_t padded = (rows + 7) / 8 * 8;
    const std::vector<uint8_t> garbage(padded * cols * 4, 0xcd);
    f32 = device.Upload(garbage), q = device.Upload(garbage), scale = device.Upload(garbage);
    sums = device.Upload(garbage), bf16 = device.Upload(garbage);
    view = {rows,
            cols,
            f32.as<float>(),
            q.as<uint64_t>(),
            scale.as<float>(),
            sums.as<float>(),
            bf16.as<uint16_t>()};
  }
  DeviceBuffer f32, q, scale, sums, bf16;
  ActivationView view;
};

// Checks that the other forms are those of the float32 form, bit for bit, and returns the latter.
std::vector<float> CheckedForms(TestDevice& device, const Forms& forms) {
  const ActivationView& view = forms.view;
  const int64_t padded = int64_t{view.tiles()} * 8;
  const std::vector<float> x = device.Download(view.f32, view.rows * view.cols);
  const std::vector<uint16_t> bf16 = device.Download(view.bf16, view.rows * view.cols);
  const std::vector<uint64_t> q = device.Download(view.q, padded * view.cols / 8);
  const std::vector<float> scale = device.Download(view.scale, padded * view.cols / 32);
  const std::vector<float> sums = device.Download(view.sums, padded * view.cols / 16);
  for (int t = 0; t < view.rows; ++t) {
    for (int64_t c = 0; c < view.cols; ++c) {
      EXPECT_EQ(bf16[t * view.cols + c], F32ToBF16(x[t * view.cols + c]));
    }
    for (int64_t block = 0; block < view.cols / 32; ++block) {
      const float* values = &x[t * view.cols + 32 * block];
      float amax = 0;
      for (int i = 0; i < 32; ++i) amax = std::max(amax, std::abs(values[i]));
      EXPECT_EQ(scale[block * padded + t], amax / 127.0f);
      int sum[2] = {0, 0};
      for (int i = 0; i < 32; ++i) {
        const int want =
            amax == 0 ? 0 : static_cast<int>(std::nearbyint(values[i] * (127.0f / amax)));
        const int64_t word = (block * view.tiles() + t / 8) * 32 + 4 * (t % 8) + i / 8;
        EXPECT_EQ(static_cast<int8_t>(q[word] >> (8 * (i % 8))), want) << "row " << t;
        sum[i / 16] += want;
      }
      for (int half = 0; half < 2; ++half) {
        EXPECT_EQ(sums[(2 * block + half) * padded + t],
                  amax / 127.0f * static_cast<float>(sum[half]));
      }
    }
  }
  return x;
}

void ExpectRow(const std::vector<float>& x, int t, int64_t cols, const std::vector<double>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(x[t * cols + i], want[i], 2e-6 * (1.0 + std::abs(want[i]))) << "column " << i;
  }
  for (int64_t i = want.size(); i < cols; ++i) ASSERT_EQ(x[t * cols + i], 0.0f) << "padding " << i;
}

// Partials of the site's streams, from a post that changes nothing (post 0, comb the identity).
std::vector<float> PartialsOf(TestDevice& device, Site site) {
  const int h = site.h();
  std::fill(site.post.begin(), site.post.end(), 0.0f);
  for (int t = 0; t < site.rows; ++t) {
    for (int i = 0; i < h * h; ++i) site.comb[t * h * h + i] = i % (h + 1) == 0 ? 1.0f : 0.0f;
  }
  const std::vector<float> zeros(int64_t{site.rows} * site.d());
  const Parts parts = RunPost(device, site, {zeros}, OneRoot());
  EXPECT_EQ(parts.streams, site.streams);
  return parts.partial;
}

struct PreResult {
  std::vector<float> x, post, comb;
};

// Does the job, beside keys of idle rows, which nobody stores.
void Balance(TestDevice& device, const SinkhornJob& job) {
  AttentionParams params;
  params.head_dim = 32;
  const DeviceBuffer zeros = device.Upload(std::vector<float>(int64_t{job.rows} * 32));
  const DeviceBuffer idle = device.Upload(std::vector<int32_t>(job.rows, -1));
  StepRows step;
  step.slot = step.pos = idle.as<int32_t>();
  StoreKeys keys;
  keys.kv = keys.kv_norm = zeros.as<float>();
  LaunchStoreKeys(device.launch, params, step, job.rows, {}, keys, {}, job);
  device.Finish();
}

PreResult RunPre(TestDevice& device, const Site& site) {
  const DeviceBuffer partial = device.Upload(PartialsOf(device, site));
  const DeviceBuffer streams = device.Upload(site.streams), base = device.Upload(site.base);
  const DeviceBuffer scale = device.Upload(site.scale), norm = device.Upload(site.norm);
  const DeviceBuffer mixes = device.Allocate(int64_t{site.rows} * kMixSlots * 4);
  const DeviceBuffer post = device.Allocate(site.post.size() * 4);
  const DeviceBuffer comb = device.Allocate(site.comb.size() * 4);
  Forms forms(device, site.rows, PaddedCols(site.d()));
  const PlainMatrix fn{site.dtype, site.mixes, int64_t{site.h()} * site.d(), nullptr};
  LaunchHcPre(device.launch, site.params, site.rows, streams.as<float>(), partial.as<float>(),
              {fn, base.as<float>(), scale.as<float>()}, norm.as<float>(), mixes.as<float>(),
              forms.view);
  device.Finish();
  Balance(device, BalanceOf(site.params, site.rows, mixes.as<float>(),
                            {post.as<float>(), comb.as<float>()}));
  return {CheckedForms(device, forms), device.Download(post.as<float>(), site.post.size()),
          device.Download(comb.as<float>(), site.comb.size())};
}

void ExpectPre(const Site& site, const PreResult& got) {
  const int h = site.h();
  for (int t = 0; t < site.rows; ++t) {
    SCOPED_TRACE(testing::Message() << "row " << t);
    const Mixes want = MixesInDouble(site, t);
    for (int i = 0; i < h; ++i) ASSERT_NEAR(got.post[t * h + i], want.post[i], 2e-6);
    for (int i = 0; i < h * h; ++i) ASSERT_NEAR(got.comb[t * h * h + i], want.comb[i], 1e-6);
    ExpectRow(got.x, t, PaddedCols(site.d()), CollapseInDouble(site, t, want.pre));
  }
}

TEST(HyperConnectionTest, PreCollapsesNormsAndBalances) {
  struct Case {
    int h, d, rows;
  };
  for (const Case& c :
       {Case{4, 64, 3}, Case{4, 520, 2}, Case{2, 136, 9}, Case{3, 64, 1}, Case{1, 72, 2},
        Case{4, 4160, 1}, Case{4, 1104, 7}, Case{4, 4096, 1}, Case{4, 4608, 2}}) {
    SCOPED_TRACE(testing::Message() << c.h << " streams of " << c.d);
    TestDevice device;
    const Site site(c.h, c.d, c.rows, DType::kF32, 31);
    ExpectPre(site, RunPre(device, site));
  }
}

TEST(HyperConnectionTest, SinkhornHoldsForLopsidedMatrices) {
  // Only base decides (scale 0): rows that all want one column, permutations, equal entries, and
  // differences so large that softmax leaves nothing but eps.
  TestDevice device;
  Site site(4, 64, 1, DType::kF32, 41);
  site.scale = {0.0f, 0.0f, 0.0f};
  const std::vector<std::vector<float>> matrices = {
      std::vector<float>(16, 0.0f),
      {30, 0, 0, 0, 30, 0, 0, 0, 30, 0, 0, 0, 30, 0, 0, 0},
      {0, 90, 0, 0, 90, 0, 0, 0, 0, 0, 0, 90, 0, 0, 90, 0},
      {-80, 80, 3, 1, -80, 80, 2, 7, 5, 5, 5, 5, 1, -60, 60, 2},
      {1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 9, 0, -4, 8, -2, 6},
  };
  for (const std::vector<float>& matrix : matrices) {
    std::copy(matrix.begin(), matrix.end(), site.base.begin() + 8);
    ExpectPre(site, RunPre(device, site));
  }
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const std::vector<float> matrix = RandomFloats(16, seed < 20 ? 4.0f : 25.0f, 900 + seed);
    std::copy(matrix.begin(), matrix.end(), site.base.begin() + 8);
    ExpectPre(site, RunPre(device, site));
  }
}

// A block for all slices of a row, and one for each.
TEST(HyperConnectionTest, PreGivesARowTheSameBitsAloneAndInABatch) {
  for (const auto& [d, rows] : {std::pair{1104, 10}, {4096, 7}}) {
    SCOPED_TRACE(testing::Message() << d << " columns");
    const Site site(4, d, rows, DType::kF16, 51);
    TestDevice device, wide(64);
    const PreResult batch = RunPre(device, site);
    for (const int t : {0, rows - 1}) {
      const PreResult alone = RunPre(wide, RowOf(site, t));
      EXPECT_EQ(0, std::memcmp(alone.x.data(), &batch.x[t * PaddedCols(d)], alone.x.size() * 4));
      EXPECT_EQ(0, std::memcmp(alone.post.data(), &batch.post[t * 4], 4 * 4));
      EXPECT_EQ(0, std::memcmp(alone.comb.data(), &batch.comb[t * 16], 16 * 4));
    }
  }
}

// Streams whose weighted sum is thousands of times smaller than they are: too small for the norm to
// follow from the products of the streams, in several slices and in rows of one block.
TEST(HyperConnectionTest, PreHoldsWhereStreamsCancel) {
  for (const auto& [d, rows] : {std::pair{1104, 1}, {1104, 9}, {4096, 1}}) {
    SCOPED_TRACE(testing::Message() << rows << " rows of " << d);
    TestDevice device(d == 4096 ? 64 : 3);  // with a rehearsal, and without
    Site site(4, d, rows, DType::kF32, 55);
    site.scale = {0.0f, 0.0f, 0.0f};
    std::fill(site.base.begin(), site.base.begin() + 4, 0.0f);  // all pre are 0.5 + eps
    for (int t = 0; t < rows; ++t) {
      float* row = &site.streams[int64_t{t} * 4 * d];
      // Powers of two beside small whole numbers of them: no sum rounds.
      for (int i = 0; i < d; ++i) {
        const float small = std::round(4.0f * row[3 * d + i]) * 0x1p-12f;
        row[i] = i % 2 == 0 ? 1.0f : -1.0f;
        row[d + i] = -row[i];
        row[2 * d + i] = 2.0f;
        row[3 * d + i] = small - 2.0f;
      }
    }
    ExpectPre(site, RunPre(device, site));
  }
}

TEST(HyperConnectionTest, PreShowsANaN) {
  TestDevice device;
  Site site(4, 64, 2, DType::kF32, 61);
  site.base[8] = std::nanf("");
  const PreResult got = RunPre(device, site);
  for (const float value : got.comb) EXPECT_TRUE(std::isnan(value));
  for (const float value : got.post) EXPECT_TRUE(std::isfinite(value));
}

TEST(HyperConnectionTest, HeadCollapsesTheChosenRows) {
  TestDevice device;
  const Site site(4, 136, 5, DType::kF16, 71, 4);
  const DeviceBuffer partial = device.Upload(PartialsOf(device, site));
  const DeviceBuffer streams = device.Upload(site.streams), base = device.Upload(site.base);
  const DeviceBuffer scale = device.Upload(site.scale), norm = device.Upload(site.norm);
  const std::vector<int32_t> chosen = {4, 0, 2};
  const DeviceBuffer index = device.Upload(chosen);
  Forms forms(device, 3, 256);
  LaunchHcHead(device.launch, site.params, site.rows, index.as<int32_t>(), streams.as<float>(),
               partial.as<float>(),
               {{DType::kF16, 4, 4 * 136, nullptr}, base.as<float>(), scale.as<float>()},
               norm.as<float>(), forms.view);
  device.Finish();
  const std::vector<float> x = CheckedForms(device, forms);
  for (int i = 0; i < 3; ++i) {
    const Mixes want = MixesInDouble(site, chosen[i]);
    ExpectRow(x, i, 256, CollapseInDouble(site, chosen[i], want.pre));
  }
}

// ---- Rows ----

TEST(HyperConnectionTest, EmbedFillsAllStreams) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0}) {
    SCOPED_TRACE(Info(dtype).name);
    TestDevice device;
    const int d = 96, vocab = 7;
    Site site(4, d, 6, DType::kBF16, 81);
    const std::vector<std::byte> table = Encode(dtype, RandomFloats(vocab * d, 1.0f, 82));
    const std::vector<float> values = Decode(dtype, table, vocab * d);
    const std::vector<int32_t> tokens = {6, 0, 3, 3, 1, 5};
    const DeviceBuffer embedding = device.Upload(table), token = device.Upload(tokens);
    const DeviceBuffer fn = device.Upload(site.fn_bytes);
    const DeviceBuffer streams = device.Allocate(site.streams.size() * 4);
    const DeviceBuffer partial = device.Allocate(site.partial_size() * 4);
    StepRows step;
    step.token = token.as<int32_t>();
    LaunchEmbed(device.launch, site.params, step, 6, dtype, embedding.data(),
                {DType::kBF16, site.mixes, 4 * d, fn.data()}, streams.as<float>(),
                partial.as<float>());
    device.Finish();
    const std::vector<float> got = device.Download(streams.as<float>(), site.streams.size());
    for (int t = 0; t < 6; ++t) {
      for (int j = 0; j < 4; ++j) {
        ASSERT_EQ(0, std::memcmp(&got[(t * 4 + j) * d], &values[tokens[t] * d], d * 4));
      }
    }
    ExpectPartials(site, got, device.Download(partial.as<float>(), site.partial_size()));
  }
}

TEST(HyperConnectionTest, RmsNormOfOddRows) {
  struct Case {
    int rows, cols, stride;
    bool weighted;
  };
  for (const Case& c : {Case{3, 64, 64, true}, Case{2, 131, 133, true}, Case{9, 256, 260, false},
                        Case{1, 1536, 1536, true}, Case{2, 37, 40, false}}) {
    SCOPED_TRACE(testing::Message() << c.cols << " columns, stride " << c.stride);
    TestDevice device;
    const std::vector<float> x = RandomFloats(int64_t{c.rows} * c.stride, 3.0f, 91);
    const std::vector<float> weight = RandomFloats(c.cols, 1.0f, 92);
    const DeviceBuffer dx = device.Upload(x), dw = device.Upload(weight);
    Forms forms(device, c.rows, PaddedCols(c.cols));
    LaunchRmsNorm(device.launch, dx.as<float>(), c.stride, c.rows, c.cols,
                  c.weighted ? dw.as<float>() : nullptr, 1e-6f, forms.view);
    device.Finish();
    const std::vector<float> got = CheckedForms(device, forms);
    for (int t = 0; t < c.rows; ++t) {
      double squares = 0;
      std::vector<double> want(c.cols);
      for (int i = 0; i < c.cols; ++i) squares += std::pow(double{x[t * c.stride + i]}, 2);
      for (int i = 0; i < c.cols; ++i) {
        want[i] = x[t * c.stride + i] / std::sqrt(squares / c.cols + 1e-6) *
                  (c.weighted ? weight[i] : 1.0);
      }
      ExpectRow(got, t, PaddedCols(c.cols), want);
    }
  }
}

TEST(HyperConnectionTest, RopeTablesBesideTheEmbeddingHoldAtAMillion) {
  // One multiprocessor: several rows in a block.
  TestDevice device(1);
  const std::vector<int32_t> pos = {0, 1, 127, 65535, 1048575};
  const std::vector<int64_t> positions(pos.begin(), pos.end());
  const int rows = static_cast<int>(pos.size()), pairs = 11;
  const Site site(4, 64, rows, DType::kF32, 83);
  const DeviceBuffer embedding = device.Upload(std::vector<float>(64, 1.0f));
  const DeviceBuffer fn = device.Upload(site.fn_bytes);
  const DeviceBuffer streams = device.Allocate(site.streams.size() * 4);
  const DeviceBuffer partial = device.Allocate(site.partial_size() * 4);
  const DeviceBuffer token = device.Upload(std::vector<int32_t>(rows)), dp = device.Upload(pos);
  StepRows step;
  step.token = token.as<int32_t>();
  step.pos = dp.as<int32_t>();
  RopeTables rope;
  rope.count = 2;
  rope.pairs = pairs;
  const std::vector<double> frequencies[2] = {RopeFrequencies(10000.0, 2 * pairs),
                                              RopeFrequencies(160000.0, 2 * pairs)};
  std::vector<DeviceBuffer> buffers;
  for (int i = 0; i < 2; ++i) {
    buffers.push_back(device.Upload(frequencies[i]));
    rope.tables[i].frequencies = buffers.back().as<double>();
    buffers.push_back(device.Allocate(rows * pairs * 4));
    rope.tables[i].cos = buffers.back().as<float>();
    buffers.push_back(device.Allocate(rows * pairs * 4));
    rope.tables[i].sin = buffers.back().as<float>();
  }
  LaunchEmbed(device.launch, site.params, step, rows, DType::kF32, embedding.data(),
              {DType::kF32, site.mixes, 4 * 64, fn.data()}, streams.as<float>(),
              partial.as<float>(), rope);
  device.Finish();
  for (int i = 0; i < 2; ++i) {
    const int64_t count = rows * pairs;
    std::vector<float> want_cos(count), want_sin(count);
    RopeAngles(positions, frequencies[i], want_cos.data(), want_sin.data());
    const auto got_cos = device.Download(rope.tables[i].cos, count);
    const auto got_sin = device.Download(rope.tables[i].sin, count);
    for (int64_t k = 0; k < count; ++k) {
      // One rounding to float32 of values that agree to 1e-10 (an angle of 1e6 in double).
      EXPECT_NEAR(got_cos[k], want_cos[k], 1.2e-7);
      EXPECT_NEAR(got_sin[k], want_sin[k], 1.2e-7);
    }
  }
}

}  // namespace
}  // namespace ds4::cuda
