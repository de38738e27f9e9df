// Goal: products with few rows are right for every type, and their bits depend on nothing but the
// weight row and the x row. Method: LaunchProductPlain is compared with double sums of the
// dequantised weights; the fast kernel must give the same bits as the plain one, whatever the
// number of rows, jobs and SMs. Lane products are compared with the lanes' products added by
// AddLanes, and quantised outputs with the rule of activation.h in plain code.
#include "engine/cuda/product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/comm/lane_tree.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

constexpr DType kTypes[] = {DType::kF32,   DType::kF16,  DType::kBF16, DType::kQ8_0,
                            DType::kMXFP4, DType::kQ4_K, DType::kQ2_K, DType::kIQ2_XXS};

std::string NameOf(const ::testing::TestParamInfo<DType>& info) {
  return std::string(Info(info.param).name);
}

int FormOf(DType dtype) { return ReadsQ8(dtype) ? kFormQ8 : kFormF32; }

class ProductTest : public ::testing::TestWithParam<DType> {
 protected:
  using Launcher = void (*)(const LaunchContext&, const ProductJob&);
  static void Fast(const LaunchContext& launch, const ProductJob& job) {
    LaunchProducts(launch, {&job, 1});
  }
  // y [x.rows][w.rows] of one product alone.
  std::vector<float> Run(Launcher launcher, const PackedMatrix& w, const ActivationView& x,
                         int64_t x_col = 0) {
    const DeviceBuffer y = device_.Allocate(x.rows * w.rows * 4);
    ProductJob job;
    job.w = w;
    job.x = x;
    job.x_col = x_col;
    job.y = y.as<float>();
    job.y_stride = w.rows;
    launcher(device_.launch, job);
    device_.Finish();
    return device_.Download(y.as<float>(), x.rows * w.rows);
  }

  TestDevice device_;
};

class ProductOfType : public ProductTest {};

// The bound: each step of 32 columns is one or two float32 operations on an exact sum (float types:
// one operation a column, in four parallel chains), each rounding at most 2^-24 of what has been
// added so far. That is at most the sum of |w x|, but for Q4_K and Q2_K, where code and minimum are
// added apart: either is at most the largest weight of the row, as random codes reach both ends.
TEST_P(ProductOfType, NearDoubleSumsAndFastLikePlain) {
  const DType dtype = GetParam();
  const int64_t rows = 40;
  for (const int64_t cols : {64, 256, 512, 1024, 1280}) {
    if (cols % Info(dtype).block_elems != 0) continue;
    const TestMatrix w = MakeMatrix(device_, dtype, 1, rows, cols, 3);
    for (const int num_rows : {1, 3, 8, 9, 17, 32, 40, 64, 70}) {
      if (cols != 1280 && num_rows != 3 && num_rows != 17) continue;
      const HostActivation host = RandomActivation(num_rows, 1, cols, 4);
      const DeviceActivation x = UploadActivation(device_, host, FormOf(dtype));
      const std::vector<float> plain = Run(LaunchProductPlain, w.packed, x.view);
      EXPECT_EQ(Run(Fast, w.packed, x.view), plain) << num_rows << " rows, " << cols << " columns";
      const double operations = ReadsQ8(dtype) ? cols / 32 * 2 + 8 : cols / 4 + 8;
      for (int t = 0; t < num_rows; ++t) {
        for (int64_t r = 0; r < rows; ++r) {
          double want = 0;
          double magnitude = 0;
          float largest = 0;
          for (int64_t c = 0; c < cols; ++c) largest = std::max(largest, std::fabs(w.Row(0, r)[c]));
          for (int64_t c = 0; c < cols; ++c) {
            const double value = host.Value(t, c, ReadsQ8(dtype));
            want += w.Row(0, r)[c] * value;
            magnitude += largest * std::fabs(value);
          }
          ASSERT_NEAR(plain[t * rows + r], want, operations * 0x1p-24 * magnitude)
              << "row " << r << ", x row " << t << ", " << num_rows << " x " << cols;
        }
      }
    }
  }
}

// A row of a batch of any size has the bits of the row alone; also with so many SMs that a block
// gets one row tile, and so few that it gets several.
TEST_P(ProductOfType, BitsDependOnTheRowAlone) {
  const DType dtype = GetParam();
  const TestMatrix w = MakeMatrix(device_, dtype, 1, 80, 768, 5);
  const HostActivation host = RandomActivation(35, 1, 768, 6);
  const DeviceActivation x = UploadActivation(device_, host, FormOf(dtype));
  device_.launch.num_sms = 132;
  const std::vector<float> batch = Run(Fast, w.packed, x.view);
  device_.launch.num_sms = 1;
  EXPECT_EQ(Run(Fast, w.packed, x.view), batch);
  for (const int t : {0, 7, 34}) {
    const DeviceActivation one = UploadActivation(device_, OneRow(host, t), FormOf(dtype));
    const auto begin = batch.begin() + t * w.packed.rows;
    EXPECT_EQ(Run(Fast, w.packed, one.view), std::vector<float>(begin, begin + w.packed.rows)) << t;
  }
}

// Local lanes 2..6 of 8: subtrees {2, 3}, {4, 5}, {6}.
TEST_P(ProductOfType, LaneProductAddsTheTree) {
  const DType dtype = GetParam();
  device_.launch.num_sms = 2;
  const int lane_begin = 2;
  const int lanes = 5;
  const int64_t rows = 24;
  const int64_t lane_cols = ReadsQ8(dtype) ? 768 : 96;
  const TestMatrix w = MakeMatrix(device_, dtype, lanes, rows, lane_cols, 7);
  for (const int num_rows : {1, 6, 11, 18, 45, 57}) {
    const HostActivation host = RandomActivation(num_rows, lanes, lane_cols, 8);
    const DeviceActivation x = UploadActivation(device_, host, FormOf(dtype));
    std::vector<float> sums;
    for (int lane = 0; lane < lanes; ++lane) {
      const auto y =
          Run(LaunchProductPlain, w.packed.At(lane), x.view, lane * w.packed.padded_cols());
      sums.insert(sums.end(), y.begin(), y.end());
    }
    const int64_t count = num_rows * rows;
    std::vector<float> want(3 * count);
    ASSERT_EQ(SubtreesOf(lane_begin, lane_begin + lanes).size(), 3u);
    AddLanes(lane_begin, lane_begin + lanes, sums.data(), count, want.data());

    const DeviceBuffer roots = device_.Allocate(3 * count * 4);
    LaunchLaneProduct(device_.launch, w.packed, x.view, lane_begin, roots.as<float>());
    device_.Finish();
    EXPECT_EQ(device_.Download(roots.as<float>(), 3 * count), want) << num_rows;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ProductOfType, ::testing::ValuesIn(kTypes), NameOf);

// Jobs of different types, sizes and places in x share a launch: each writes what it writes alone,
// at its stride, and nothing beside it.
class ProductJobsTest : public ProductTest {
 protected:
  void ExpectIndependent(const std::vector<DType>& types, int x_rows) {
    const HostActivation host = RandomActivation(x_rows, 3, 256, 9);
    const DeviceActivation x = UploadActivation(device_, host, kFormF32 | kFormQ8);
    std::vector<TestMatrix> matrices;
    std::vector<DeviceBuffer> outputs;
    std::vector<ProductJob> jobs;
    for (const DType dtype : types) {
      const auto i = static_cast<int64_t>(jobs.size());
      const int64_t rows = 5 + 13 * i;
      matrices.push_back(MakeMatrix(device_, dtype, 1, rows, 256 * (1 + i % 2), 10));
      outputs.push_back(device_.Upload(std::vector<float>(x_rows * (rows + i), -1.0f)));
      ProductJob job;
      job.w = matrices.back().packed;
      job.x = x.view;
      job.x_col = 256 * (i % 2);
      job.y = outputs.back().as<float>();
      job.y_stride = rows + i;
      jobs.push_back(job);
    }
    LaunchProducts(device_.launch, jobs);
    device_.Finish();
    for (size_t i = 0; i < jobs.size(); ++i) {
      const ProductJob& job = jobs[i];
      const std::vector<float> alone = Run(LaunchProductPlain, job.w, job.x, job.x_col);
      const std::vector<float> y = device_.Download(job.y, x_rows * job.y_stride);
      for (int64_t t = 0; t < x_rows; ++t) {
        for (int64_t r = 0; r < job.y_stride; ++r) {
          const float want = r < job.w.rows ? alone[t * job.w.rows + r] : -1.0f;
          ASSERT_EQ(y[t * job.y_stride + r], want)
              << "job " << i << " row " << r << " x row " << t << " of " << x_rows << ", "
              << device_.launch.num_sms << " SMs";
        }
      }
    }
  }
};

TEST_F(ProductJobsTest, OfAllTypes) {
  for (const int x_rows : {3, 10}) {
    ExpectIndependent({std::begin(kTypes), std::end(kTypes)}, x_rows);
  }
}

// The types that have kernels of their own; ranges of blocks that end inside jobs, and between.
TEST_F(ProductJobsTest, OfCommonTypes) {
  const std::vector<DType> types = {DType::kF16,  DType::kQ8_0, DType::kQ8_0, DType::kBF16,
                                    DType::kQ8_0, DType::kF32,  DType::kF16,  DType::kQ8_0};
  const std::vector<DType> quantised(9, DType::kQ8_0);
  for (const int num_sms : {1, 3, 7, 200}) {
    device_.launch.num_sms = num_sms;
    for (const int x_rows : {1, 3, 8, 16, 19}) {
      ExpectIndependent(types, x_rows);
      ExpectIndependent(quantised, x_rows);
    }
  }
}

// More row tiles than a block's sums have room for at once, in rows as wide as a model's: 8 slices
// (one for each warp), 2 (four row tiles at a time) and 3 (no warp keeps its slice).
TEST_F(ProductTest, ManyTilesInOneBlock) {
  for (const DType dtype : {DType::kQ8_0, DType::kF16}) {
    for (const int64_t cols : {4096, 1024, 1536}) {
      const TestMatrix w = MakeMatrix(device_, dtype, 1, 328, cols, 15);
      for (const int num_rows : {1, 3, 12, 20, 64}) {
        const HostActivation host = RandomActivation(num_rows, 1, cols, 16);
        const DeviceActivation x = UploadActivation(device_, host, FormOf(dtype));
        const std::vector<float> plain = Run(LaunchProductPlain, w.packed, x.view);
        for (const int num_sms : {1, 5}) {
          device_.launch.num_sms = num_sms;
          EXPECT_EQ(Run(Fast, w.packed, x.view), plain)
              << Info(dtype).name << ", " << cols << " columns, " << num_rows << " rows, "
              << num_sms << " SMs";
        }
      }
    }
  }
}

// Outputs as the next product reads them, beside float32 values, at columns 64..223 of a wider row.
TEST_F(ProductTest, WritesTheFormsOfActivations) {
  for (const int num_rows : {1, 3, 8, 10, 20, 40, 61}) {
    const TestMatrix w = MakeMatrix(device_, DType::kQ8_0, 1, 160, 2048, 11);
    const HostActivation host = RandomActivation(num_rows, 1, 2048, 12);
    const DeviceActivation x = UploadActivation(device_, host, kFormQ8);
    const DeviceActivation out = EmptyActivation(device_, num_rows, 256, kFormF32 | kFormQ8);
    const DeviceBuffer bf16 = device_.Allocate(num_rows * 256 * 2);
    ProductJob job;
    job.w = w.packed;
    job.x = x.view;
    job.out = out.view;
    job.out.bf16 = bf16.as<uint16_t>();
    job.out_col = 64;
    LaunchProducts(device_.launch, {&job, 1});
    device_.Finish();
    const HostActivation got = DownloadActivation(device_, out.view);
    const std::vector<uint16_t> halves = device_.Download(bf16.as<uint16_t>(), num_rows * 256);
    const std::vector<float> y = Run(LaunchProductPlain, w.packed, x.view);

    HostActivation want;
    want.Resize(num_rows, 256);
    for (int t = 0; t < num_rows; ++t) {
      std::copy_n(y.begin() + t * 160, 160, want.f32.begin() + t * 256 + 64);
    }
    want.QuantiseFromF32();
    for (int t = 0; t < num_rows; ++t) {
      for (int64_t c = 64; c < 224; ++c) {
        const size_t at = static_cast<size_t>(t * 256 + c);
        ASSERT_EQ(got.f32[at], want.f32[at]) << t << " " << c;
        ASSERT_EQ(halves[at], F32ToBF16(want.f32[at])) << t << " " << c;
        ASSERT_EQ(got.q[got.QIndex(t, c)], want.q[want.QIndex(t, c)]) << t << " " << c;
        const size_t scale = static_cast<size_t>(c / 32 * want.tiles() * 8 + t);
        ASSERT_EQ(got.scale[scale], want.scale[scale]) << t << " " << c;
        const size_t sum = static_cast<size_t>(c / 16 * want.tiles() * 8 + t);
        ASSERT_EQ(got.sums[sum], want.sums[sum]) << t << " " << c;
      }
      EXPECT_TRUE(std::isnan(got.f32[t * 256 + 63]) && std::isnan(got.f32[t * 256 + 224]));
    }
  }
}

// A NaN among the outputs must stay visible behind the next product, and zeros must stay zeros.
TEST_F(ProductTest, QuantisedFormsKeepZerosAndShowNaNs) {
  TestMatrix w = MakeMatrix(device_, DType::kF32, 1, 64, 64, 13);
  HostActivation host = RandomActivation(2, 1, 64, 14);
  for (int64_t c = 0; c < host.cols; ++c) host.f32[c] = 0.0f;  // row 0
  host.f32[host.cols + 5] = NAN;                               // row 1
  const DeviceActivation x = UploadActivation(device_, host, kFormF32);
  const DeviceActivation out = EmptyActivation(device_, 2, 256, kFormQ8);
  ProductJob job;
  job.w = w.packed;
  job.x = x.view;
  job.out = out.view;
  LaunchProducts(device_.launch, {&job, 1});
  device_.Finish();
  const HostActivation got = DownloadActivation(device_, out.view);
  for (int64_t c = 0; c < 64; ++c) ASSERT_EQ(got.q[got.QIndex(0, c)], 0) << c;
  EXPECT_EQ(got.scale[0], 0.0f);
  EXPECT_EQ(got.sums[0], 0.0f);
  EXPECT_TRUE(std::isnan(got.scale[1]));
}

}  // namespace
}  // namespace ds4::cuda
