// Goal: a synthetic model has the sizes of the real one, the same on every machine, and its data is
// what an engine accepts. Method: sizes against the published figures of Flash; the small preset
// made whole, its values looked at.

#include "engine/model/synthetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/gguf/fingerprint.h"
#include "engine/model/model_config.h"
#include "engine/shard/shard_plan.h"
#include "engine/tensor/finite.h"
#include "engine/tensor/quant.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/weights/weight_loader.h"

namespace ds4 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Sizes {
  double held_gb = 0.0;
  double read_gb = 0.0;
};

Sizes PlannedSizes(const std::string& preset, const std::string& quant, int world_size = 1) {
  const auto file = MakeSyntheticFile(preset, quant, 0).value();
  const ModelConfig config = ReadModelConfig(*file).value();
  const ShardPlan plan =
      MakeShardPlan(config, *file, LaneLayout::Even(config.num_lanes, world_size)).value();
  return {static_cast<double>(plan.ranks[0].held_bytes) / 1e9,
          static_cast<double>(plan.ranks[0].read_bytes_per_token) / 1e9};
}

TEST(SyntheticTest, FlashHasThePublishedShapes) {
  const auto file = MakeSyntheticFile("flash", "q2", 0).value();
  const ModelConfig config = ReadModelConfig(*file).value();
  EXPECT_EQ(config.num_layers, 43);
  EXPECT_EQ(config.hidden_dim, 4096);
  EXPECT_EQ(config.num_experts, 256);
  EXPECT_EQ(config.num_lanes, 8);
  EXPECT_EQ(config.layers[0].attention, AttentionKind::kSliding);
  EXPECT_EQ(config.layers[2].attention, AttentionKind::kCompressed);
  EXPECT_EQ(config.layers[3].compress_ratio, 128);
  EXPECT_EQ(config.layers[2].router, RouterKind::kHash);
  EXPECT_EQ(config.layers[3].router, RouterKind::kScore);
  EXPECT_THAT(file->path(), HasSubstr("flash q2, 43 layers"));
  // A directory: nothing to read.
  EXPECT_TRUE(file->data(file->tensors()[0]).empty());
}

// The figures that a file of these shapes has, to the last digit given.
TEST(SyntheticTest, FlashTakesAndReadsWhatTheFileWould) {
  const Sizes q2 = PlannedSizes("flash", "q2");
  EXPECT_NEAR(q2.held_gb, 86.7, 0.05);
  EXPECT_NEAR(q2.read_gb, 9.56, 0.005);
  // 277.0 G routed parameters: Q4_K has 4.5 bits of each, IQ2_XXS and Q2_K 2.0625 and 2.625.
  const Sizes q4 = PlannedSizes("flash", "q4");
  EXPECT_NEAR(q4.held_gb - q2.held_gb, 277.0 * (4.5 - (2 * 2.0625 + 2.625) / 3) / 8, 0.1);
  EXPECT_NEAR(q4.read_gb - q2.read_gb, (q4.held_gb - q2.held_gb) * 6 / 256, 0.01);
}

TEST(SyntheticTest, EveryQuantOfEveryPresetSplitsOverAllRanks) {
  for (const std::string& preset : SyntheticPresets()) {
    for (const std::string& quant : SyntheticQuants()) {
      SCOPED_TRACE(preset + " " + quant);
      const auto file = MakeSyntheticFile(preset, quant, 0).value();
      const ModelConfig config = ReadModelConfig(*file).value();
      const Status status =
          MakeShardPlan(config, *file, LaneLayout::Even(config.num_lanes, config.num_lanes))
              .status();
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(SyntheticTest, LayersRepeatThePatternOfKinds) {
  const auto file = MakeSyntheticFile("tiny", "q8", 4).value();
  const ModelConfig config = ReadModelConfig(*file).value();
  std::vector<int64_t> ratios;
  for (const LayerConfig& layer : config.layers) ratios.push_back(layer.compress_ratio);
  EXPECT_THAT(ratios, ElementsAre(0, 0, 4, 128));
}

// Every id has its own text, every byte an id; the answers are noise, but readable.
TEST(SyntheticTest, ACoordinatorFindsATokenizer) {
  const auto file = MakeSyntheticFile("flash", "q2", 1).value();
  const auto tokenizer = Tokenizer::FromGguf(*file).value();
  EXPECT_EQ(tokenizer->vocab_size(), 129280);
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(bytes, false)), bytes);
  // 7 specials and 256 bytes, then words: the 37th has consonant 17 and vowel 1.
  EXPECT_EQ(tokenizer->TokenBytes(263 + 37), " webaba");
  EXPECT_TRUE(tokenizer->SpecialId("<｜Assistant｜>").has_value());
}

TEST(SyntheticTest, WhatDoesNotExistIsRefusedWithWhatDoes) {
  const auto message = [](const char* preset, const char* quant, int64_t layers) {
    const Status status = MakeSyntheticFile(preset, quant, layers).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(message("pro", "q2", 0), HasSubstr("preset is \"pro\", must be flash, tiny"));
  EXPECT_THAT(message("tiny", "q3", 0), HasSubstr("quant is \"q3\", must be q2, q4, q8, mxfp4"));
  EXPECT_THAT(message("tiny", "q2", -1), HasSubstr("layers is -1, must be from 1 to 256"));
  EXPECT_THAT(message("tiny", "q2", 257), HasSubstr("layers is 257"));
}

TEST(SyntheticTest, DataThatTheHostCannotMakeIsRefused) {
  const Status large = MakeSyntheticModel("flash", "q8", 0).status();
  EXPECT_EQ(large.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(large.message(), HasSubstr("flash q8, 43 layers takes"));
  const Status type = MakeSyntheticModel("tiny", "q2", 1).status();
  EXPECT_EQ(type.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(type.message(), HasSubstr("IQ2_XXS"));
}

// Mean and standard deviation of a tensor's values.
std::pair<double, double> Moments(const GgufFile& file, const std::string& name) {
  const TensorInfo& tensor = *file.FindTensor(name);
  std::vector<float> values(static_cast<size_t>(tensor.num_elems()));
  EXPECT_TRUE(Dequantize(tensor.dtype, file.data(tensor), values).ok());
  double sum = 0.0;
  double squares = 0.0;
  for (const float value : values) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  const double mean = sum / static_cast<double>(values.size());
  return {mean, std::sqrt(squares / static_cast<double>(values.size()) - mean * mean)};
}

TEST(SyntheticTest, DataIsTheSameEveryTimeAndLoads) {
  const auto digest = [] {
    return ModelDigest(*MakeSyntheticModel("tiny", "q8", 1).value()).value();
  };
  EXPECT_EQ(digest(), digest());
  const auto file = MakeSyntheticModel("tiny", "q8", 4).value();
  for (const TensorInfo& tensor : file->tensors()) {
    EXPECT_TRUE(CheckFinite(tensor.dtype, file->data(tensor)).ok()) << tensor.name;
  }
  const ModelConfig config = ReadModelConfig(*file).value();
  const ShardPlan plan =
      MakeShardPlan(config, *file, LaneLayout::Even(config.num_lanes, 1)).value();
  const auto weights = LoadWeights(config, *file, plan.ranks[0], nullptr);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->size_bytes, plan.ranks[0].held_bytes);
  // The bounds: 6 standard errors of 2^18 and more values, plus Q8_0's rounding.
  const auto [mean, deviation] = Moments(*file, "blk.3.ffn_down_exps.weight");
  EXPECT_NEAR(mean, 0.0, 6 * 0.02 / std::sqrt(4e6));
  EXPECT_NEAR(deviation, 0.02, 2e-4);
  const auto [norm_mean, norm_deviation] = Moments(*file, "blk.1.attn_norm.weight");
  EXPECT_NEAR(norm_mean, 1.0, 6 * 0.1 / 16);
  EXPECT_NEAR(norm_deviation, 0.1, 0.03);
}

}  // namespace
}  // namespace ds4
