// Goal: what the ranks hold together is the file, value for value; damage and types without kernels
// are named. Method: the small model with random weights; every rank's slices read back as float32
// and compared with the file's own values at their place.

#include "engine/weights/weight_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "engine/base/strings.h"
#include "engine/tensor/quant.h"
#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

using testing::HasSubstr;

struct Loaded {
  std::unique_ptr<GgufFile> file;
  ModelConfig config;
  ShardPlan plan;
};

Loaded Open(const std::string& path, const LaneLayout& layout) {
  Loaded loaded;
  loaded.file = GgufFile::Open(path).value();
  loaded.config = ReadModelConfig(*loaded.file).value();
  loaded.plan = MakeShardPlan(loaded.config, *loaded.file, layout).value();
  return loaded;
}

Status LoadError(const SmallModelOptions& options) {
  const Loaded model = Open(WriteSmallModel("bad", options), LaneLayout::Even(8, 1));
  return LoadWeights(model.config, *model.file, model.plan.ranks[0], nullptr).status();
}

// The file's tensor as float32, [experts, rows, columns].
std::vector<float> FileValues(const GgufFile& file, const std::string& name) {
  const TensorInfo& tensor = *file.FindTensor(name);
  std::vector<float> values(tensor.num_elems());
  const Status status = Dequantize(tensor.dtype, file.data(tensor), values);
  EXPECT_TRUE(status.ok()) << name << ": " << status;
  return values;
}

std::vector<float> RowOf(const Matrix& matrix, int64_t row) {
  std::vector<float> values(matrix.cols());
  matrix.DequantizeRow(row, values.data());
  return values;
}

// Compares one rank's parts with the file and counts the values that were compared.
class Checker {
 public:
  Checker(const Loaded& model, const RankPlan& plan) : model_(model), plan_(plan) {}

  void Vector(const std::string& name, const std::vector<float>& got) {
    EXPECT_EQ(got, FileValues(*model_.file, name)) << name;
    num_values_ += static_cast<int64_t>(got.size());
  }
  void Sinks(const std::string& name, const std::vector<float>& got) {
    const std::vector<float> all = FileValues(*model_.file, name);
    EXPECT_EQ(got,
              std::vector<float>(all.begin() + plan_.heads.begin, all.begin() + plan_.heads.end))
        << name;
    num_values_ += static_cast<int64_t>(got.size());
  }
  // Rows `range` of each expert, one expert after the other.
  void Rows(const std::string& name, const Matrix& got, const Range* range = nullptr) {
    const std::vector<int64_t>& dims = model_.file->FindTensor(name)->dims;
    const int64_t experts = dims.size() > 2 ? dims[2] : 1;
    const Range own = range != nullptr ? *range : Range{0, dims[1]};
    const std::vector<float> all = FileValues(*model_.file, name);
    ASSERT_EQ(got.rows(), experts * own.size()) << name;
    ASSERT_EQ(got.cols(), dims[0]) << name;
    for (int64_t i = 0; i < got.rows(); ++i) {
      const int64_t row = i / own.size() * dims[1] + own.begin + i % own.size();
      ExpectRow(name, RowOf(got, i), all.data() + row * dims[0]);
    }
  }
  // Lane after lane the columns of one lane, all rows of each; experts outermost.
  void Lanes(const std::string& name, const Matrix& got) {
    const std::vector<int64_t>& dims = model_.file->FindTensor(name)->dims;
    const int64_t experts = dims.size() > 2 ? dims[2] : 1;
    const int64_t width = dims[0] / 8;
    const int64_t lanes = plan_.lanes.size();
    const std::vector<float> all = FileValues(*model_.file, name);
    ASSERT_EQ(got.rows(), experts * lanes * dims[1]) << name;
    ASSERT_EQ(got.cols(), width) << name;
    for (int64_t i = 0; i < got.rows(); ++i) {
      const int64_t row = i / (lanes * dims[1]) * dims[1] + i % dims[1];
      const int64_t lane = plan_.lanes.begin + i / dims[1] % lanes;
      ExpectRow(name, RowOf(got, i), all.data() + row * dims[0] + lane * width);
    }
  }
  int64_t num_values() const { return num_values_; }

 private:
  void ExpectRow(const std::string& name, const std::vector<float>& got, const float* expected) {
    EXPECT_EQ(got, std::vector<float>(expected, expected + got.size())) << name;
    num_values_ += static_cast<int64_t>(got.size());
  }

  const Loaded& model_;
  const RankPlan& plan_;
  int64_t num_values_ = 0;
};

void CheckHyperConnection(Checker& check, const std::string& name,
                          const HyperConnectionTensors& hc) {
  check.Rows(name + "_fn.weight", hc.fn);
  check.Vector(name + "_base.weight", hc.base);
  check.Vector(name + "_scale.weight", hc.scale);
}

void CheckCompressor(Checker& check, const std::string& name, const CompressorTensors& compressor) {
  check.Rows(name + "_kv.weight", compressor.kv);
  check.Rows(name + "_gate.weight", compressor.gate);
  check.Vector(name + "_ape.weight", compressor.ape);
  check.Vector(name + "_norm.weight", compressor.norm);
}

void CheckAttention(Checker& check, const ModelConfig& config, const RankPlan& plan,
                    const std::string& block, const LayerConfig& layer, const AttentionTensors& a) {
  const Range q_rows = {plan.heads.begin * config.head_dim, plan.heads.end * config.head_dim};
  const Range o_rows = {plan.groups.begin * config.output_lora_rank,
                        plan.groups.end * config.output_lora_rank};
  check.Vector(block + "attn_norm.weight", a.norm);
  check.Rows(block + "attn_q_a.weight", a.q_a);
  check.Vector(block + "attn_q_a_norm.weight", a.q_a_norm);
  check.Rows(block + "attn_q_b.weight", a.q_b, &q_rows);
  check.Rows(block + "attn_kv.weight", a.kv);
  check.Vector(block + "attn_kv_a_norm.weight", a.kv_norm);
  check.Sinks(block + "attn_sinks.weight", a.sinks);
  check.Rows(block + "attn_output_a.weight", a.o_a, &o_rows);
  check.Lanes(block + "attn_output_b.weight", a.o_b);
  if (layer.attention == AttentionKind::kSliding) return;
  CheckCompressor(check, block + "attn_compressor", a.compressor);
  if (layer.attention == AttentionKind::kHeavy) return;
  check.Rows(block + "indexer.attn_q_b.weight", a.index_q_b);
  check.Rows(block + "indexer.proj.weight", a.index_proj);
  CheckCompressor(check, block + "indexer_compressor", a.index_compressor);
}

void CheckMoe(Checker& check, const RankPlan& plan, const std::string& block,
              const LayerConfig& layer, const MoeTensors& moe) {
  check.Vector(block + "ffn_norm.weight", moe.norm);
  check.Rows(block + "ffn_gate_inp.weight", moe.router);
  if (layer.router == RouterKind::kScore) check.Vector(block + "exp_probs_b.bias", moe.bias);
  check.Rows(block + "ffn_gate_exps.weight", moe.gate, &plan.ffn);
  check.Rows(block + "ffn_up_exps.weight", moe.up, &plan.ffn);
  check.Lanes(block + "ffn_down_exps.weight", moe.down);
  check.Rows(block + "ffn_gate_shexp.weight", moe.shared_gate, &plan.ffn);
  check.Rows(block + "ffn_up_shexp.weight", moe.shared_up, &plan.ffn);
  check.Lanes(block + "ffn_down_shexp.weight", moe.shared_down);
}

void CheckBlock(Checker& check, const ModelConfig& config, const RankPlan& plan,
                const std::string& block, const LayerConfig& layer, const BlockTensors& tensors) {
  CheckHyperConnection(check, block + "hc_attn", tensors.attn_hc);
  CheckAttention(check, config, plan, block, layer, tensors.attention);
  CheckHyperConnection(check, block + "hc_ffn", tensors.ffn_hc);
  CheckMoe(check, plan, block, layer, tensors.moe);
}

// Every tensor of one rank; returns how many values were compared.
int64_t CheckRank(const Loaded& model, const RankPlan& plan, const Weights& w) {
  Checker check(model, plan);
  check.Rows("token_embd.weight", w.embedding);
  for (int64_t i = 0; i < model.config.num_layers; ++i) {
    CheckBlock(check, model.config, plan, BlockPrefix(i), model.config.layers[i], w.blocks[i]);
  }
  CheckHyperConnection(check, "output_hc", w.head_hc);
  check.Vector("output_norm.weight", w.norm);
  check.Rows("output.weight", w.head, &plan.vocab);
  EXPECT_EQ(w.mtp.size(), 1u);
  for (const MtpTensors& mtp : w.mtp) {
    check.Vector("mtp.0.enorm.weight", mtp.enorm);
    check.Vector("mtp.0.hnorm.weight", mtp.hnorm);
    check.Rows("mtp.0.e_proj.weight", mtp.e_proj);
    check.Rows("mtp.0.h_proj.weight", mtp.h_proj);
    CheckBlock(check, model.config, plan, "mtp.0.", model.config.mtp_layer, mtp.block);
    CheckHyperConnection(check, "mtp.0.hc_head", mtp.head_hc);
    check.Vector("mtp.0.norm.weight", mtp.norm);
  }
  return check.num_values();
}

// How many float values the plan gives a rank: none may escape the comparison.
int64_t PlannedValues(const RankPlan& plan) {
  int64_t values = 0;
  for (const TensorSlice& slice : plan.slices) {
    if (slice.dtype == DType::kI32) continue;
    values += slice.held_bytes / Info(slice.dtype).block_bytes * Info(slice.dtype).block_elems;
  }
  return values;
}

TEST(WeightLoaderTest, RanksHoldTheFileInEveryType) {
  for (DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0}) {
    const std::string path = WriteSmallModel(StrCat("weights_", Info(type).name), {.type = type});
    for (const LaneLayout& layout : {LaneLayout::Even(8, 1), LaneLayout::Even(8, 3),
                                     LaneLayout::Even(8, 8), LaneLayout{8, {0, 1, 8}}}) {
      const Loaded model = Open(path, layout);
      for (const RankPlan& plan : model.plan.ranks) {
        SCOPED_TRACE(StrCat(Info(type).name, ", rank ", plan.rank, " of ", layout.world_size()));
        const Result<Weights> weights = LoadWeights(model.config, *model.file, plan, nullptr);
        ASSERT_TRUE(weights.ok()) << weights.status();
        EXPECT_EQ(CheckRank(model, plan, *weights), PlannedValues(plan));
        EXPECT_EQ(weights->size_bytes, plan.held_bytes);
      }
    }
  }
}

TEST(WeightLoaderTest, HashTablesAreReplicated) {
  const Loaded model = Open(WriteSmallModel("hash", {}), LaneLayout::Even(8, 2));
  const std::string name = "blk.0.ffn_gate_tid2eid.weight";
  const std::span<const std::byte> bytes = model.file->data(*model.file->FindTensor(name));
  std::vector<int32_t> expected(bytes.size() / sizeof(int32_t));
  std::memcpy(expected.data(), bytes.data(), bytes.size());
  for (const RankPlan& plan : model.plan.ranks) {
    const Weights weights = LoadWeights(model.config, *model.file, plan, nullptr).value();
    EXPECT_EQ(weights.blocks[0].moe.hash_ids, expected);
    EXPECT_TRUE(weights.blocks[0].moe.bias.empty());
    EXPECT_TRUE(weights.blocks[1].moe.hash_ids.empty());
  }
}

TEST(WeightLoaderTest, ProgressRisesToTheTotalExactly) {
  const Loaded model =
      Open(WriteSmallModel("progress", {.type = DType::kQ8_0}), LaneLayout::Even(8, 3));
  for (const RankPlan& plan : model.plan.ranks) {
    int64_t last = 0;
    size_t calls = 0;
    ASSERT_TRUE(LoadWeights(model.config, *model.file, plan, [&](int64_t done, int64_t total) {
                  EXPECT_GT(done, last);
                  EXPECT_EQ(total, plan.held_bytes);
                  last = done;
                  ++calls;
                  return true;
                }).ok());
    EXPECT_EQ(last, plan.held_bytes);
    EXPECT_EQ(calls, plan.slices.size());  // each tensor is shorter than a report's stretch
  }
}

TEST(WeightLoaderTest, LoadingEndsWhereItIsCalledOff) {
  const Loaded model =
      Open(WriteSmallModel("called_off", {.type = DType::kQ8_0}), LaneLayout::Even(8, 2));
  const RankPlan& plan = model.plan.ranks[0];
  int64_t last = 0;
  const Status status = LoadWeights(model.config, *model.file, plan, [&](int64_t done, int64_t) {
                          last = done;
                          return done < plan.held_bytes / 2;
                        }).status();
  EXPECT_EQ(status.code(), StatusCode::kCancelled);
  EXPECT_GE(last, plan.held_bytes / 2);
  EXPECT_LT(last, plan.held_bytes);
}

TEST(WeightLoaderTest, MatricesInTypesWithoutKernelsAreNamed) {
  const auto with_type = [](const std::string& name, DType type) {
    SmallModelOptions options;
    options.change = [=](GgufBuilder& builder) { builder.Find(name)->dtype = type; };
    // Their bytes do not matter: the type is refused first.
    return options;
  };
  for (const char* name : {"blk.1.attn_kv.weight", "blk.2.ffn_down_shexp.weight"}) {
    SmallModelOptions options = with_type(name, DType::kI32);
    const Status status = LoadError(options);
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << status;
    EXPECT_THAT(status.message(), HasSubstr(std::string(name) + " is I32"));
    EXPECT_THAT(status.message(), HasSubstr("F32, F16, BF16 or Q8_0"));
  }
  const Status vector = LoadError(with_type("blk.1.attn_norm.weight", DType::kI32));
  EXPECT_EQ(vector.code(), StatusCode::kUnimplemented) << vector;
  EXPECT_THAT(vector.message(), HasSubstr("blk.1.attn_norm.weight"));
  const Status mixing = LoadError(with_type("blk.1.hc_ffn_fn.weight", DType::kQ8_0));
  EXPECT_EQ(mixing.code(), StatusCode::kUnimplemented) << mixing;
  EXPECT_THAT(mixing.message(), HasSubstr("blk.1.hc_ffn_fn.weight is Q8_0"));
  const Status table = LoadError(with_type("blk.0.ffn_gate_tid2eid.weight", DType::kF32));
  EXPECT_EQ(table.code(), StatusCode::kInvalidArgument) << table;
  EXPECT_THAT(table.message(), HasSubstr("ffn_gate_tid2eid.weight is F32, must be I32"));
}

// Damage names the tensor, the index and the value.
TEST(WeightLoaderTest, DamagedValuesAreNamedWithTheirIndex) {
  const auto damaged = [](const std::string& name, int64_t index, auto value) {
    SmallModelOptions options;
    options.patch = [=](const GgufBuilder::Tensor& tensor, std::byte* bytes) {
      if (tensor.name == name) std::memcpy(bytes + index * 4, &value, 4);
    };
    const Status status = LoadError(options);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status;
    return status.message();
  };
  EXPECT_THAT(damaged("blk.2.attn_norm.weight", 7, std::numeric_limits<float>::quiet_NaN()),
              HasSubstr("blk.2.attn_norm.weight[7] is nan"));
  EXPECT_THAT(
      damaged("blk.1.attn_compressor_ape.weight", 70, std::numeric_limits<float>::infinity()),
      HasSubstr("blk.1.attn_compressor_ape.weight[70] is inf"));
  EXPECT_THAT(damaged("blk.0.ffn_gate_tid2eid.weight", 193, int32_t{6}),
              HasSubstr("blk.0.ffn_gate_tid2eid.weight[193] is expert 6, the model has 6"));
  EXPECT_THAT(damaged("blk.0.ffn_gate_tid2eid.weight", 0, int32_t{-1}),
              HasSubstr("blk.0.ffn_gate_tid2eid.weight[0] is expert -1"));
}

TEST(WeightLoaderTest, AFileWithoutDataIsRefused) {
  const std::string path = WriteSmallModel("directory", {});
  const Loaded model = Open(path, LaneLayout::Even(8, 1));
  const auto directory =
      GgufFile::Parse(model.file->header(), "plan.gguf", GgufContent::kDirectory).value();
  const Status status =
      LoadWeights(model.config, *directory, model.plan.ranks[0], nullptr).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("token_embd.weight has no data here"));
}

}  // namespace
}  // namespace ds4
