// Goal: a tensor is bound only in the shape that the metadata asks for. Method: the small model's
// table of tensors, with one of them changed.

#include "engine/model/tensor_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "engine/model/model_config.h"
#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

using testing::HasSubstr;

ModelConfig SmallConfig() { return ReadModelConfig(*ParseDirectory(SmallMetadata()).file).value(); }

Result<std::vector<int64_t>> Bind(const std::string& stored_name, std::vector<int64_t> stored_dims,
                                  const TensorSpec& spec) {
  GgufBuilder builder = SmallMetadata();
  builder.AddTensor(stored_name, DType::kF32, std::move(stored_dims));
  const ParsedGguf parsed = ParseDirectory(builder);
  Result<const TensorInfo*> tensor = BindTensor(*parsed.file, spec);
  if (!tensor.ok()) return tensor.status();
  return (*tensor)->dims;
}

TEST(TensorNamesTest, WrongDimsAreBothPrinted) {
  const TensorSpec spec{"blk.3.attn_q_a.weight", {64, 32}};
  const Status status = Bind(spec.name, {64, 48}, spec).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("blk.3.attn_q_a.weight has dims [64, 48], the metadata asks for [64, 32]"));
  EXPECT_FALSE(Bind(spec.name, {32, 64}, spec).ok()) << "transposed";
  EXPECT_FALSE(Bind(spec.name, {64, 32, 2}, spec).ok()) << "one dimension more";
  EXPECT_FALSE(Bind(spec.name, {2048}, spec).ok()) << "flat";
}

TEST(TensorNamesTest, AMissingTensorIsNamed) {
  const Status status = Bind("other.weight", {4}, {"output_norm.weight", {64}}).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("output_norm.weight"));
}

// Some publishers leave out ".weight" and write dimensions of 1.
TEST(TensorNamesTest, SpellingsOfTheSameTensorAreTaken) {
  EXPECT_TRUE(Bind("output_hc_base", {4}, {"output_hc_base.weight", {4}}).ok());
  EXPECT_TRUE(Bind("output_hc_base.weight", {4, 1}, {"output_hc_base.weight", {4}}).ok());
  EXPECT_FALSE(Bind("output_hc_base.weight", {4, 2}, {"output_hc_base.weight", {4}}).ok());
  EXPECT_FALSE(Bind("output_hc_base.weight", {4, 1}, {"output_hc_base.weight", {4, 1, 1}}).ok());
}

TEST(TensorNamesTest, EveryKindOfBlockHasItsTensorsOnce) {
  ModelConfig config = SmallConfig();
  config.num_mtp_blocks = 1;
  std::set<std::string> names;
  for (const TensorSpec& spec : ModelTensors(config)) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name << " twice";
  }
  const auto has = [&](const char* name) { return names.contains(name); };
  // Layer 0 slides and routes by table, 1 and 3 have the indexer, 2 is heavy; the last three score.
  EXPECT_TRUE(has("blk.0.ffn_gate_tid2eid.weight") && !has("blk.0.exp_probs_b.bias"));
  EXPECT_TRUE(!has("blk.1.ffn_gate_tid2eid.weight") && has("blk.1.exp_probs_b.bias"));
  EXPECT_TRUE(!has("blk.0.attn_compressor_kv.weight"));
  EXPECT_TRUE(has("blk.1.attn_compressor_kv.weight") && has("blk.1.indexer.attn_q_b.weight"));
  EXPECT_TRUE(has("blk.2.attn_compressor_kv.weight") && !has("blk.2.indexer.attn_q_b.weight"));
  EXPECT_TRUE(has("mtp.0.e_proj.weight") && has("mtp.0.exp_probs_b.bias"));
  EXPECT_TRUE(!has("mtp.0.ffn_gate_tid2eid.weight"));
}

TEST(TensorNamesTest, DraftTensorsAreReadOnlyWhenDrafting) {
  ModelConfig config = SmallConfig();
  config.num_mtp_blocks = 1;
  for (const TensorSpec& spec : ModelTensors(config)) {
    EXPECT_EQ(spec.read == ReadPattern::kDraft, spec.name.starts_with("mtp.")) << spec.name;
  }
}

}  // namespace
}  // namespace ds4
