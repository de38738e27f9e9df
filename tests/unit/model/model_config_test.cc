// Goal: hyper-parameters are what the file says, or the error names the key, the value found and
// what would do. Method: the published metadata of Flash, then one key at a time left out, of
// another type, or out of range.

#include "engine/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

using testing::HasSubstr;

Result<ModelConfig> Read(const GgufBuilder& builder) {
  const ParsedGguf parsed = ParseDirectory(builder);
  return ReadModelConfig(*parsed.file);
}

Status ErrorOf(const GgufBuilder& builder) { return Read(builder).status(); }

// Flash with one integer changed.
Status ErrorWith(const std::string& key, int64_t value) {
  GgufBuilder builder = FlashMetadata();
  builder.SetInt("deepseek4." + key, value);
  return ErrorOf(builder);
}

// Keys that publishers leave out.
const std::set<std::string> kOptional = {"general.name", "deepseek4.expert_weights_norm",
                                         "deepseek4.expert_gating_func",
                                         "deepseek4.rope.scaling.type"};

TEST(ModelConfigTest, FlashHasItsPublishedShape) {
  const Result<ModelConfig> read = Read(FlashMetadata());
  ASSERT_TRUE(read.ok()) << read.status();
  const ModelConfig& c = *read;
  EXPECT_EQ(c.name, "DeepSeek V4 Flash");
  EXPECT_EQ(c.vocab_size, 129280);
  EXPECT_EQ(c.num_layers, 43);
  EXPECT_EQ(c.context_length, 1048576);
  EXPECT_EQ(c.hidden_dim, 4096);
  EXPECT_EQ(c.num_heads, 64);
  EXPECT_EQ(c.head_dim, 512);
  EXPECT_EQ(c.rope_dim, 64);
  EXPECT_EQ(c.q_lora_rank, 1024);
  EXPECT_EQ(c.num_output_groups, 8);
  EXPECT_EQ(c.heads_per_group(), 8);
  EXPECT_EQ(c.output_lora_rank, 1024);
  EXPECT_EQ(c.sliding_window, 128);
  EXPECT_EQ(c.num_index_heads, 64);
  EXPECT_EQ(c.index_head_dim, 128);
  EXPECT_EQ(c.index_top_k, 512);
  EXPECT_EQ(c.num_experts, 256);
  EXPECT_EQ(c.num_experts_used, 6);
  EXPECT_EQ(c.ffn_dim, 2048);
  EXPECT_EQ(c.expert_weights_scale, 1.5f);
  EXPECT_EQ(c.num_streams, 4);
  EXPECT_EQ(c.sinkhorn_iterations, 20);
  EXPECT_EQ(c.hc_eps, 1e-6f);
  EXPECT_EQ(c.norm_eps, 1e-6f);
  EXPECT_EQ(c.rope_base, 10000.0);
  EXPECT_EQ(c.compress_rope_base, 160000.0);
  EXPECT_EQ(c.yarn_factor, 16.0);
  EXPECT_EQ(c.yarn_original_context, 65536);
  EXPECT_EQ(c.yarn_beta_fast, 32.0);
  EXPECT_EQ(c.yarn_beta_slow, 1.0);
  EXPECT_EQ(c.num_mtp_blocks, 0);
  EXPECT_EQ(c.num_lanes, 8);
}

// Two sliding layers, then 4 and 128 in turn; the first three route by table.
TEST(ModelConfigTest, FlashHasItsPublishedLayers) {
  const ModelConfig c = Read(FlashMetadata()).value();
  ASSERT_EQ(c.layers.size(), 43u);
  for (int i = 0; i < 43; ++i) {
    const LayerConfig& layer = c.layers[i];
    const AttentionKind kind = i < 2        ? AttentionKind::kSliding
                               : i % 2 == 0 ? AttentionKind::kCompressed
                                            : AttentionKind::kHeavy;
    EXPECT_EQ(layer.attention, kind) << i;
    EXPECT_EQ(layer.compress_ratio, i < 2 ? 0 : i % 2 == 0 ? 4 : 128) << i;
    EXPECT_EQ(layer.router, i < 3 ? RouterKind::kHash : RouterKind::kScore) << i;
    EXPECT_EQ(layer.swiglu_limit, 10.0f) << i;
    EXPECT_EQ(layer.shared_swiglu_limit, 10.0f) << i;
  }
  EXPECT_EQ(c.mtp_layer.attention, AttentionKind::kSliding);
  EXPECT_EQ(c.mtp_layer.router, RouterKind::kScore);
}

TEST(ModelConfigTest, TheSharedExpertMayHaveItsOwnLimits) {
  GgufBuilder builder = FlashMetadata();
  builder.SetFloats("deepseek4.swiglu_clamp_shexp", std::vector<float>(43, 7.0f));
  const ModelConfig c = Read(builder).value();
  EXPECT_EQ(c.layers[5].swiglu_limit, 10.0f);
  EXPECT_EQ(c.layers[5].shared_swiglu_limit, 7.0f);
  builder.SetFloats("deepseek4.swiglu_clamp_shexp", {7.0f});
  EXPECT_THAT(ErrorOf(builder).message(), HasSubstr("swiglu_clamp_shexp has 1 entries, 43 layers"));
}

TEST(ModelConfigTest, TheDraftBlockIsFoundByItsTensors) {
  GgufBuilder builder = SmallMetadata();
  builder.AddTensor("mtp.0.e_proj.weight", DType::kF32, {64, 64});
  EXPECT_EQ(Read(builder)->num_mtp_blocks, 1);
}

TEST(ModelConfigTest, EveryMissingKeyIsNamed) {
  for (const std::string& key : FlashMetadata().Keys()) {
    GgufBuilder builder = FlashMetadata();
    builder.Remove(key);
    const Status status = ErrorOf(builder);
    if (kOptional.contains(key)) {
      EXPECT_TRUE(status.ok()) << key << ": " << status;
      continue;
    }
    EXPECT_EQ(status.code(), StatusCode::kNotFound) << key << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr(key));
    EXPECT_THAT(status.message(), HasSubstr("test.gguf"));
  }
}

TEST(ModelConfigTest, EveryKeyOfAnotherTypeIsNamedWithBothTypes) {
  for (const std::string& key : FlashMetadata().Keys()) {
    GgufBuilder builder = FlashMetadata();
    const bool is_text = key.starts_with("general.") || key == "deepseek4.rope.scaling.type";
    if (is_text) {
      builder.SetInt(key, 1);
    } else {
      builder.SetString(key, "many");
    }
    const Status status = ErrorOf(builder);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << key << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr(key));
    EXPECT_THAT(status.message(), HasSubstr("string"));
    if (is_text) {
      EXPECT_THAT(status.message(), HasSubstr("u32"));
    }
  }
}

// Sizes from 1 on: nothing, less than nothing, and far more than any machine holds.
TEST(ModelConfigTest, EverySizeOutOfRangeIsNamedWithValueAndRange) {
  for (const char* key : {"block_count",
                          "context_length",
                          "embedding_length",
                          "vocab_size",
                          "attention.head_count",
                          "attention.head_count_kv",
                          "attention.key_length",
                          "attention.value_length",
                          "rope.dimension_count",
                          "attention.q_lora_rank",
                          "attention.output_lora_rank",
                          "attention.output_group_count",
                          "attention.sliding_window",
                          "attention.indexer.head_count",
                          "attention.indexer.key_length",
                          "attention.indexer.top_k",
                          "expert_count",
                          "expert_used_count",
                          "expert_feed_forward_length",
                          "expert_shared_count",
                          "hyper_connection.count",
                          "hyper_connection.sinkhorn_iterations",
                          "rope.scaling.original_context_length"}) {
    for (int64_t value : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, int64_t{1} << 62}) {
      const Status status = ErrorWith(key, value);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << key << " " << value;
      EXPECT_THAT(status.message(), HasSubstr(std::string("deepseek4.") + key + " is " +
                                              std::to_string(value) + ", must be from "));
    }
  }
}

TEST(ModelConfigTest, EveryFloatOutOfRangeIsNamedWithValueAndRange) {
  const std::pair<const char*, float> cases[] = {{"expert_weights_scale", 0.0f},
                                                 {"hyper_connection.epsilon", -1.0f},
                                                 {"attention.layer_norm_rms_epsilon", 2.0f},
                                                 {"rope.freq_base", 0.5f},
                                                 {"attention.compress_rope_freq_base", 1.0f},
                                                 {"rope.scaling.factor", 0.0f},
                                                 {"rope.scaling.yarn_beta_fast", 0.0f},
                                                 {"rope.scaling.yarn_beta_slow", -1.0f}};
  for (const auto& [key, value] : cases) {
    for (float bad :
         {value, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      GgufBuilder builder = FlashMetadata();
      builder.SetFloat(std::string("deepseek4.") + key, bad);
      const Status status = ErrorOf(builder);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << key << " " << bad;
      EXPECT_THAT(status.message(), HasSubstr(std::string(key) + " is "));
      EXPECT_THAT(status.message(), HasSubstr("must be from "));
    }
  }
}

TEST(ModelConfigTest, AnotherArchitectureIsNamedBesideOurs) {
  GgufBuilder builder = FlashMetadata();
  builder.SetString("general.architecture", "llama");
  const Status status = ErrorOf(builder);
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("general.architecture is \"llama\""));
  EXPECT_THAT(status.message(), HasSubstr("\"deepseek4\""));
}

// Settings under which the same weights would mean another computation.
TEST(ModelConfigTest, ArithmeticThatWeDoNotDoIsRefused) {
  EXPECT_THAT(ErrorWith("expert_gating_func", 1).message(), HasSubstr("expert_gating_func is 1"));
  EXPECT_THAT(ErrorWith("expert_group_count", 8).message(), HasSubstr("expert_group_count is 8"));
  EXPECT_THAT(ErrorWith("expert_shared_count", 2).message(), HasSubstr("expert_shared_count is 2"));
  EXPECT_THAT(ErrorWith("attention.head_count_kv", 8).message(), HasSubstr("head_count_kv is 8"));
  GgufBuilder unnormed = FlashMetadata();
  unnormed.SetBool("deepseek4.expert_weights_norm", false);
  EXPECT_THAT(ErrorOf(unnormed).message(), HasSubstr("expert_weights_norm is false"));
  GgufBuilder linear = FlashMetadata();
  linear.SetString("deepseek4.rope.scaling.type", "linear");
  EXPECT_THAT(ErrorOf(linear).message(),
              HasSubstr("rope.scaling.type is \"linear\", only \"yarn\""));
}

TEST(ModelConfigTest, SizesThatDisagreeAreBothNamed) {
  const auto expect = [](const std::string& key, int64_t value, const char* first,
                         const char* second) {
    const Status status = ErrorWith(key, value);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << key;
    EXPECT_THAT(status.message(), HasSubstr(first));
    EXPECT_THAT(status.message(), HasSubstr(second));
  };
  expect("attention.head_count", 60, "head_count 60", "output_group_count 8");
  expect("attention.value_length", 256, "value_length 256", "key_length 512");
  expect("rope.dimension_count", 63, "dimension_count 63", "key_length 512");
  expect("rope.dimension_count", 1024, "dimension_count 1024", "key_length 512");
  expect("attention.indexer.key_length", 32, "dimension_count 64", "indexer.key_length 32");
  expect("expert_used_count", 257, "expert_used_count 257", "expert_count 256");
  expect("hash_layer_count", 44, "hash_layer_count is 44", "to 43");
  expect("vocab_size", 7, "vocab_size 7", "8");
  expect("block_count", 100, "swiglu_clamp_exp has 43 entries", "100 layers");
}

TEST(ModelConfigTest, BadEntriesOfListsAreNamedWithTheirIndex) {
  GgufBuilder builder = SmallMetadata();
  builder.SetInts("deepseek4.attention.compress_ratios", {0, 4, -16, 4});
  EXPECT_THAT(ErrorOf(builder).message(), HasSubstr("compress_ratios[2] is -16"));
  builder = SmallMetadata();
  builder.SetInts("deepseek4.attention.compress_ratios", {0, 4, 65537, 4});
  EXPECT_THAT(ErrorOf(builder).message(), HasSubstr("compress_ratios[2] is 65537"));
  builder = SmallMetadata();
  builder.SetFloats("deepseek4.swiglu_clamp_exp", {10, 10, 10, 0});
  EXPECT_THAT(ErrorOf(builder).message(), HasSubstr("swiglu_clamp_exp[3] is 0"));
  builder.SetFloats("deepseek4.swiglu_clamp_exp", {10, NAN, 10, 10});
  EXPECT_THAT(ErrorOf(builder).message(), HasSubstr("swiglu_clamp_exp[1] is nan"));
}

TEST(ModelConfigTest, AModelWithoutAnIndexerNeedsNoKeysForOne) {
  GgufBuilder builder = SmallMetadata();
  builder.SetInts("deepseek4.attention.compress_ratios", {0, 16, 16, 0});
  for (const char* key : {"head_count", "key_length", "top_k"}) {
    builder.Remove(std::string("deepseek4.attention.indexer.") + key);
  }
  const Result<ModelConfig> config = Read(builder);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_index_heads, 0);
}

TEST(ModelConfigTest, LanesDivideGroupsAndExpertWidth) {
  const auto lanes = [](int64_t groups, int64_t ffn) {
    GgufBuilder builder = FlashMetadata();
    builder.SetInt("deepseek4.attention.output_group_count", groups);
    builder.SetInt("deepseek4.expert_feed_forward_length", ffn);
    return Read(builder)->num_lanes;
  };
  EXPECT_EQ(lanes(16, 3072), 8);
  EXPECT_EQ(lanes(4, 2048), 4);
  EXPECT_EQ(lanes(8, 2044), 4);
  EXPECT_EQ(lanes(2, 2048), 2);
  EXPECT_EQ(lanes(8, 2049), 1);
}

}  // namespace
}  // namespace ds4
