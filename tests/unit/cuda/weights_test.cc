// Goal: weights in device memory have the types that the options ask for, and what is converted is
// what a Q8_0 file would hold, as exact as its neighbours. Method: the bytes that loading plans,
// compared with the slices' own; a small model loaded in both forms, its packed bytes compared with
// the host's conversion, and a product of each form.
#include "engine/cuda/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <string>

#include "engine/cuda/product.h"
#include "engine/model/synthetic.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

// Rank 0 of one, with a plan that a test may change as if the file were another.
struct Model {
  explicit Model(std::unique_ptr<GgufFile> from)
      : file(std::move(from)),
        config(ReadModelConfig(*file).value()),
        plan(MakeShardPlan(config, *file, LaneLayout::Even(config.num_lanes, 1)).value().ranks[0]) {
  }
  void SetType(const std::string& name, DType dtype) {
    for (TensorSlice& slice : plan.slices) {
      if (slice.spec.name == name) slice.dtype = dtype;
    }
  }
  WeightBytes Bytes(ReplicatedWeights replicated) const {
    WeightOptions options;
    options.replicated = replicated;
    return DeviceWeightBytes(config, *file, plan, options).value();
  }

  std::unique_ptr<GgufFile> file;
  ModelConfig config;
  RankPlan plan;
};
Model SyntheticModel(const std::string& preset, const std::string& quant) {
  return Model(MakeSyntheticFile(preset, quant, 0).value());
}

// What becomes Q8_0 in layer 2, whose attention is of kind CSA.
const std::set<std::string> kFromX = {
    "blk.2.attn_compressor_kv.weight", "blk.2.attn_compressor_gate.weight",
    "blk.2.indexer.proj.weight", "blk.2.indexer_compressor_kv.weight",
    "blk.2.indexer_compressor_gate.weight"};
const std::string kFromQ = "blk.2.indexer.attn_q_b.weight";

// Bytes less for F16 matrices that become Q8_0: 34 for 64.
int64_t Saved(const Model& model, const std::function<bool(const std::string&)>& converted) {
  int64_t bytes = 0;
  for (const TensorSlice& slice : model.plan.slices) {
    if (converted(slice.spec.name)) bytes += slice.held_bytes / 64 * 30;
  }
  return bytes;
}
bool IsReplicatedProjection(const std::string& name) {
  return name.find("compressor_kv.") != std::string::npos ||
         name.find("compressor_gate.") != std::string::npos ||
         name.find("indexer.attn_q_b.") != std::string::npos ||
         name.find("indexer.proj.") != std::string::npos;
}

// A file may keep only its router in float32: tensor-core products cannot read it, wherever it is.
TEST(CudaWeightsTest, OneFloat32MatrixAnywhereIsSeen) {
  Model model = SyntheticModel("tiny", "q8");
  EXPECT_FALSE(model.Bytes(ReplicatedWeights::kAuto).has_f32_matrices);
  model.SetType("blk.3.ffn_gate_inp.weight", DType::kF32);
  EXPECT_TRUE(model.Bytes(ReplicatedWeights::kAuto).has_f32_matrices);
}

TEST(CudaWeightsTest, PublishedTypesKeepHalfOfTheReplicatedProjections) {
  const Model model = SyntheticModel("flash", "q2");
  const WeightBytes as_file = model.Bytes(ReplicatedWeights::kFile);
  const WeightBytes automatic = model.Bytes(ReplicatedWeights::kAuto);
  EXPECT_EQ(as_file.saved, 0);
  EXPECT_EQ(automatic.saved, Saved(model, IsReplicatedProjection));
  EXPECT_GT(automatic.saved, 400'000'000);
  // Whole tiles and chunks only, so that memory shrinks by exactly that.
  EXPECT_EQ(as_file.device - automatic.device, automatic.saved);
}

// Where the input stays in float32 for other matrices, rounding it for these would be a new error.
TEST(CudaWeightsTest, AutoLooksAtWhatElseReadsTheSameInput) {
  const Model model = SyntheticModel("tiny", "q8");
  const int64_t all = model.Bytes(ReplicatedWeights::kAuto).saved;
  EXPECT_EQ(all, Saved(model, IsReplicatedProjection));
  for (const char* name : {"blk.2.attn_q_a.weight", "blk.2.attn_kv.weight"}) {
    Model other = SyntheticModel("tiny", "q8");
    other.SetType(name, DType::kBF16);
    EXPECT_EQ(other.Bytes(ReplicatedWeights::kAuto).saved,
              all - Saved(model, [](const std::string& n) { return kFromX.contains(n); }))
        << name;
    EXPECT_EQ(other.Bytes(ReplicatedWeights::kQ8_0).saved, all);
  }
  Model other = SyntheticModel("tiny", "q8");
  other.SetType("blk.2.attn_q_b.weight", DType::kF16);
  EXPECT_EQ(other.Bytes(ReplicatedWeights::kAuto).saved,
            all - Saved(model, [](const std::string& n) { return n == kFromQ; }));
}

TEST(CudaWeightsTest, Float32IsNeverConverted) {
  Model model = SyntheticModel("tiny", "q8");
  const int64_t all = model.Bytes(ReplicatedWeights::kQ8_0).saved;
  model.SetType(kFromQ, DType::kF32);
  EXPECT_EQ(model.Bytes(ReplicatedWeights::kQ8_0).saved,
            all - Saved(model, [](const std::string& n) { return n == kFromQ; }));
}

class LoadedWeightsTest : public ::testing::Test {
 protected:
  DeviceWeights Load(ReplicatedWeights replicated, bool synthetic) {
    WeightOptions options;
    options.replicated = replicated;
    options.synthetic = synthetic;
    options.num_threads = 2;
    return LoadDeviceWeights(model_.config, *model_.file, model_.plan, options,
                             *device_.launch.stream, nullptr)
        .value();
  }
  std::vector<float> FileValues(const std::string& name) {
    for (const TensorSlice& slice : model_.plan.slices) {
      if (slice.spec.name != name) continue;
      const TensorInfo* tensor = BindTensor(*model_.file, slice.spec).value();
      std::vector<float> values(slice.spec.dims[0] * slice.spec.dims[1]);
      EXPECT_TRUE(Dequantize(slice.dtype, model_.file->data(*tensor), values).ok());
      return values;
    }
    ADD_FAILURE() << name;
    return {};
  }
  std::vector<float> Multiply(const PackedMatrix& w, const HostActivation& x) {
    const DeviceActivation in = UploadActivation(device_, x, kFormF32 | kFormQ8);
    const DeviceBuffer y = device_.Allocate(x.rows * w.rows * int64_t{sizeof(float)});
    const ProductJob job{w, in.view, 0, y.as<float>(), w.rows, {}, 0};
    LaunchProducts(device_.launch, {&job, 1});
    device_.Finish();
    return device_.Download(y.as<float>(), x.rows * w.rows);
  }

  TestDevice device_;
  Model model_{MakeSyntheticModel("tiny", "q8", 4).value()};
};

TEST_F(LoadedWeightsTest, ConvertedMatricesHoldTheBytesOfAQ8File) {
  const DeviceWeights weights = Load(ReplicatedWeights::kAuto, false);
  const DeviceAttention& csa = weights.blocks[2].attention;
  const DeviceAttention& hca = weights.blocks[3].attention;
  const std::pair<std::string, const PackedMatrix*> cases[] = {
      {"blk.2.attn_compressor_kv.weight", &csa.compressor.kv},
      {"blk.2.attn_compressor_gate.weight", &csa.compressor.gate},
      {"blk.2.indexer.attn_q_b.weight", &csa.index_q_b},
      {"blk.2.indexer.proj.weight", &csa.index_proj},
      {"blk.2.indexer_compressor_kv.weight", &csa.index_compressor.kv},
      {"blk.2.indexer_compressor_gate.weight", &csa.index_compressor.gate},
      {"blk.3.attn_compressor_kv.weight", &hca.compressor.kv},
      {"blk.3.attn_compressor_gate.weight", &hca.compressor.gate}};
  for (const auto& [name, matrix] : cases) {
    ASSERT_EQ(matrix->dtype, DType::kQ8_0) << name;
    std::vector<std::byte> blocks(matrix->rows * BytesFor(DType::kQ8_0, matrix->cols));
    ASSERT_TRUE(Quantize(DType::kQ8_0, FileValues(name), blocks).ok());
    std::vector<std::byte> packed(matrix->matrix_bytes());
    PackOnHost(DType::kQ8_0, matrix->rows, matrix->cols, blocks.data(),
               BytesFor(DType::kQ8_0, matrix->cols), packed.data());
    EXPECT_EQ(device_.Download(matrix->data, matrix->matrix_bytes()), packed) << name;
  }
  // Their choices are sensitive.
  EXPECT_EQ(weights.blocks[2].moe.router.dtype, DType::kF16);
  EXPECT_EQ(weights.blocks[2].attn_hc.fn.dtype, DType::kF16);
}

// One block of 32 columns of a row: weights w (largest a) become w', inputs x (largest b) become
// x'. A code is off by half a step at most, a / 254, and its scale, in float16, by 2^-11 of itself,
// which moves a weight by 2^-11 a more (a is far above what float16 holds only roughly); so
// |w' - w| <= a / 254 + a / 2048, and |x' - x| <= b / 254. With w'x' - wx = (w' - w) x + w' (x' -
// x) the block is off by |w' - w| sum|x| + |x' - x| sum|w'| at most.
TEST_F(LoadedWeightsTest, AConvertedProductIsOffByItsRoundingsAtMost) {
  const std::string name = "blk.2.attn_compressor_kv.weight";
  const DeviceWeights exact = Load(ReplicatedWeights::kFile, false);
  const DeviceWeights converted = Load(ReplicatedWeights::kQ8_0, false);
  const PackedMatrix& w = exact.blocks[2].attention.compressor.kv;
  ASSERT_EQ(w.dtype, DType::kF16);
  const HostActivation x = RandomActivation(3, 1, w.cols, 5);
  const std::vector<float> want = Multiply(w, x);
  const std::vector<float> got = Multiply(converted.blocks[2].attention.compressor.kv, x);
  const std::vector<float> values = FileValues(name);
  double squares = 0, errors = 0;
  for (int t = 0; t < x.rows; ++t) {
    for (int64_t r = 0; r < w.rows; ++r) {
      double bound = 0;
      for (int64_t block = 0; block < w.cols; block += 32) {
        double a = 0, b = 0, sum_w = 0, sum_x = 0;
        for (int64_t c = block; c < block + 32; ++c) {
          const double weight = std::fabs(values[r * w.cols + c]);
          const double input = std::fabs(x.f32[t * x.cols + c]);
          a = std::max(a, weight), b = std::max(b, input);
          sum_w += weight, sum_x += input;
        }
        const double off = a / 254 + a / 2048;
        bound += off * sum_x + b / 254 * (sum_w + 32 * off);
      }
      const size_t at = t * w.rows + r;
      const double error = got[at] - want[at];
      ASSERT_LE(std::fabs(error), bound + 1e-5) << "row " << t << ", output " << r;
      squares += want[at] * want[at];
      errors += error * error;
    }
  }
  // Roundings are uniform in +-1/254 of a block's largest, which is about 2.5 deviations: each
  // factor is off by 2.5 / 254 / sqrt(3) = 0.57 % of its deviation, both together by 0.8 %.
  EXPECT_LT(std::sqrt(errors / squares), 0.012);
  EXPECT_GT(errors, 0.0);
}

TEST_F(LoadedWeightsTest, SyntheticWeightsHaveTheSameTypes) {
  const DeviceWeights weights = Load(ReplicatedWeights::kAuto, true);
  const PackedMatrix& w = weights.blocks[2].attention.index_compressor.gate;
  EXPECT_EQ(w.dtype, DType::kQ8_0);
  EXPECT_EQ(Load(ReplicatedWeights::kFile, true).blocks[2].attention.index_compressor.gate.dtype,
            DType::kF16);
  const HostActivation x = RandomActivation(1, 1, w.cols, 6);
  double squares = 0;
  for (const float y : Multiply(w, x)) squares += y * y;
  // Weights of deviation 0.02, inputs of 1.
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(w.rows * w.cols)), 0.02, 0.005);
}

}  // namespace
}  // namespace ds4::cuda
