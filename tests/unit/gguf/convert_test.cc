// Goal: a converted checkpoint holds the same weights under GGUF names, in the types that were
// asked for, and the engine's model code finds all of it; anything that does not fit is refused in
// words. Method: the golden model's checkpoint, value by value against the source; then copies of
// it with one thing changed in the header.
#include "engine/gguf/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>

#include "engine/base/byte_order.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/gguf/safetensors.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_names.h"
#include "engine/tensor/quant.h"
#include "tests/unit/gguf/file_util.h"

namespace ds4 {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::string kCheckpoint = std::string(DS4_SOURCE_DIR) + "/tests/golden/tiny_v4.safetensors";

class ConvertTest : public testing::Test {
 protected:
  Status Convert(DType type, const std::string& input = kCheckpoint,
                 const std::string& tokenizer = "") {
    ConvertOptions options;
    options.inputs = {input};
    options.tokenizer = tokenizer;
    options.output = folder_ / "out.gguf";
    options.type = type;
    options.report = [this](const std::string& line) { report_ += line + "\n"; };
    return ConvertSafetensors(options);
  }

  std::unique_ptr<GgufFile> Output() {
    auto file = GgufFile::Open(folder_ / "out.gguf");
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? std::move(*file) : nullptr;
  }

  // Writes a copy of the checkpoint with every `from` in its header replaced, sizes equal.
  std::string ChangedCopy(const std::string& from, const std::string& to) {
    EXPECT_EQ(from.size(), to.size());
    auto bytes = ReadBytes(kCheckpoint);
    const auto header_bytes = static_cast<size_t>(LoadLittleEndian<uint64_t>(bytes.data()));
    std::string header(reinterpret_cast<const char*>(bytes.data()) + 8, header_bytes);
    size_t at = header.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    for (; at != std::string::npos; at = header.find(from, at + to.size())) {
      header.replace(at, from.size(), to);
    }
    std::memcpy(bytes.data() + 8, header.data(), header_bytes);
    WriteBytes(folder_ / "changed.safetensors", bytes);
    return folder_ / "changed.safetensors";
  }

  // The message of converting such a copy.
  std::string ErrorAfterReplacing(const std::string& from, const std::string& to) {
    const Status status = Convert(DType::kF32, ChangedCopy(from, to));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "out.gguf")) << "left after an error";
    return status.message();
  }

  TestFolder folder_;
  std::string report_;
};

std::vector<float> Values(const GgufFile& file, const std::string& name) {
  const TensorInfo* tensor = file.FindTensor(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  std::vector<float> values(static_cast<size_t>(tensor->num_elems()));
  const Status status = Dequantize(tensor->dtype, file.data(*tensor), values);
  EXPECT_TRUE(status.ok()) << status;
  return values;
}

std::vector<float> Values(const SafetensorsFile& file, const std::string& name) {
  const SafetensorInfo* tensor = file.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  std::vector<float> values(static_cast<size_t>(tensor->num_elems()));
  std::memcpy(values.data(), file.data(*tensor).data(), values.size() * 4);
  return values;
}

TEST_F(ConvertTest, F32KeepsEveryValueUnderItsNewName) {
  ASSERT_TRUE(Convert(DType::kF32).ok());
  const auto gguf = Output();
  const auto source = SafetensorsFile::Open(kCheckpoint);
  ASSERT_TRUE(source.ok());
  const SafetensorsFile& hf = **source;
  EXPECT_EQ(Values(*gguf, "token_embd.weight"), Values(hf, "model.embed_tokens.weight"));
  EXPECT_EQ(Values(*gguf, "output.weight"), Values(hf, "lm_head.weight"));
  EXPECT_EQ(Values(*gguf, "output_hc_fn.weight"), Values(hf, "model.hc_head.hc_fn"));
  EXPECT_EQ(Values(*gguf, "blk.0.hc_attn_fn.weight"), Values(hf, "model.layers.0.attn_hc.fn"));
  EXPECT_EQ(Values(*gguf, "blk.1.attn_norm.weight"),
            Values(hf, "model.layers.1.input_layernorm.weight"));
  EXPECT_EQ(Values(*gguf, "blk.1.attn_output_a.weight"),
            Values(hf, "model.layers.1.self_attn.o_a_proj.weight"));
  EXPECT_EQ(Values(*gguf, "blk.2.indexer.proj.weight"),
            Values(hf, "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight"));
  EXPECT_EQ(Values(*gguf, "blk.5.attn_compressor_ape.weight"),
            Values(hf, "model.layers.5.self_attn.compressor.position_bias"));
  EXPECT_EQ(Values(*gguf, "blk.5.exp_probs_b.bias"),
            Values(hf, "model.layers.5.mlp.gate.e_score_correction_bias"));
  EXPECT_EQ(Values(*gguf, "mtp.0.attn_q_b.weight"),
            Values(hf, "mtp.0.block.self_attn.q_b_proj.weight"));
  EXPECT_EQ(Values(*gguf, "mtp.0.hc_head_base.weight"), Values(hf, "mtp.0.hc_head.hc_base"));
}

TEST_F(ConvertTest, SplitsTheFusedExpertsIntoGateAndUp) {
  ASSERT_TRUE(Convert(DType::kF32).ok());
  const auto gguf = Output();
  const auto source = SafetensorsFile::Open(kCheckpoint);
  ASSERT_TRUE(source.ok());
  const auto fused = Values(**source, "model.layers.3.mlp.experts.gate_up_proj");
  const auto gate = Values(*gguf, "blk.3.ffn_gate_exps.weight");
  const auto up = Values(*gguf, "blk.3.ffn_up_exps.weight");
  EXPECT_THAT(gguf->FindTensor("blk.3.ffn_up_exps.weight")->dims, ElementsAre(64, 64, 8));
  constexpr size_t kHalf = 64 * 64;  // ffn * hidden
  ASSERT_EQ(fused.size(), 8 * 2 * kHalf);
  for (size_t expert = 0; expert < 8; ++expert) {
    for (size_t i = 0; i < kHalf; ++i) {
      ASSERT_EQ(gate[expert * kHalf + i], fused[2 * expert * kHalf + i]) << expert << " " << i;
      ASSERT_EQ(up[expert * kHalf + i], fused[(2 * expert + 1) * kHalf + i]) << expert << " " << i;
    }
  }
}

TEST_F(ConvertTest, KeepsTheHashTableAsIds) {
  ASSERT_TRUE(Convert(DType::kQ8_0).ok());
  const auto gguf = Output();
  const auto source = SafetensorsFile::Open(kCheckpoint);
  ASSERT_TRUE(source.ok());
  const TensorInfo* table = gguf->FindTensor("blk.1.ffn_gate_tid2eid.weight");
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(table->dtype, DType::kI32);
  EXPECT_THAT(table->dims, ElementsAre(2, 320));
  const auto want = (*source)->data(*(*source)->Find("model.layers.1.mlp.gate.tid2eid"));
  const auto got = gguf->data(*table);
  ASSERT_EQ(got.size(), want.size());
  EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size()), 0);
}

TEST_F(ConvertTest, TheModelCodeFindsEverythingInIt) {
  for (const DType type : {DType::kF32, DType::kQ8_0, DType::kF16, DType::kBF16}) {
    ASSERT_TRUE(Convert(type).ok());
    const auto gguf = Output();
    const auto config = ReadModelConfig(*gguf);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto specs = ModelTensors(*config);
    EXPECT_EQ(specs.size(), gguf->tensors().size()) << "a tensor more or less than needed";
    for (const TensorSpec& spec : specs) {
      const auto tensor = BindTensor(*gguf, spec);
      EXPECT_TRUE(tensor.ok()) << tensor.status();
    }
    EXPECT_EQ(config->num_layers, 6);
    EXPECT_EQ(config->num_mtp_blocks, 1);
    EXPECT_EQ(config->layers[3].compress_ratio, 16);
    EXPECT_FLOAT_EQ(config->layers[0].swiglu_limit, 1.5f);
  }
}

TEST_F(ConvertTest, QuantisesMatricesAndKeepsTheRestFiner) {
  ASSERT_TRUE(Convert(DType::kQ8_0).ok());
  const auto gguf = Output();
  const auto type_of = [&](const std::string& name) { return gguf->FindTensor(name)->dtype; };
  for (const char* name : {"token_embd.weight", "output.weight", "blk.0.attn_q_a.weight",
                           "blk.2.attn_compressor_kv.weight", "blk.2.indexer.proj.weight",
                           "blk.0.ffn_down_exps.weight", "mtp.0.e_proj.weight"}) {
    EXPECT_EQ(type_of(name), DType::kQ8_0) << name;
  }
  for (const char* name : {"blk.0.hc_ffn_fn.weight", "blk.2.attn_compressor_ape.weight",
                           "blk.0.ffn_gate_inp.weight", "output_hc_fn.weight"}) {
    EXPECT_EQ(type_of(name), DType::kF16) << name;
  }
  EXPECT_EQ(type_of("blk.0.attn_norm.weight"), DType::kF32);
  // Each value is off by at most half a step of its block of 32: amax / 127 / 2, plus the rounding
  // of the scale to f16, 127 * 2^-11 of a step.
  const auto source = SafetensorsFile::Open(kCheckpoint);
  ASSERT_TRUE(source.ok());
  const auto want = Values(**source, "lm_head.weight");
  const auto got = Values(*gguf, "output.weight");
  for (size_t block = 0; block < want.size(); block += 32) {
    float amax = 0;
    for (size_t i = block; i < block + 32; ++i) amax = std::max(amax, std::fabs(want[i]));
    const float bound = amax / 127 * (0.5f + 127.0f / 2048);
    for (size_t i = block; i < block + 32; ++i) ASSERT_NEAR(got[i], want[i], bound * 1.001f);
  }
}

TEST_F(ConvertTest, JoinsThePiecesOfACheckpoint) {
  const std::string piece =
      ChangedCopy("model.layers.2.self_attn.sinks", "case.0.layers.2.self_attn.sink");
  const std::string header =
      R"({"model.layers.2.self_attn.sinks":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}})";
  std::vector<std::byte> other(8 + header.size() + 16);
  StoreLittleEndian(static_cast<uint64_t>(header.size()), other.data());
  std::memcpy(other.data() + 8, header.data(), header.size());
  for (size_t i = 0; i < 8; ++i) {
    StoreLittleEndian(F32ToBF16(static_cast<float>(i)), other.data() + 8 + header.size() + 2 * i);
  }
  WriteBytes(folder_ / "other.safetensors", other);
  ConvertOptions options;
  options.inputs = {piece, folder_ / "other.safetensors"};
  options.output = folder_ / "out.gguf";
  options.type = DType::kF32;
  const Status status = ConvertSafetensors(options);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(Values(*Output(), "blk.2.attn_sinks.weight"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  options.inputs.push_back(folder_ / "other.safetensors");
  EXPECT_THAT(ConvertSafetensors(options).message(), HasSubstr("sinks is in"));
}

TEST_F(ConvertTest, ReportsProgress) {
  ASSERT_TRUE(Convert(DType::kF32).ok());
  EXPECT_THAT(report_, HasSubstr("[1/210] token_embd.weight"));
}

TEST_F(ConvertTest, RefusesWhatDoesNotFit) {
  EXPECT_THAT(
      ErrorAfterReplacing("model.layers.2.self_attn.sinks", "model.layers.9.self_attn.sinks"),
      HasSubstr("model.layers.9.self_attn.sinks is none that the configuration calls for"));
  EXPECT_THAT(
      ErrorAfterReplacing("\"model.layers.2.self_attn.sinks", "\"case..layers.2.self_attn.sink_"),
      HasSubstr("tensor model.layers.2.self_attn.sinks is missing"));
  EXPECT_THAT(ErrorAfterReplacing("sqrtsoftplus", "softmax....."), HasSubstr("scoring_func"));
  EXPECT_THAT(ErrorAfterReplacing("\\\"q_lora_rank\\\"", "\\\"q_lora_rang\\\""),
              HasSubstr("config key q_lora_rank is missing"));
  EXPECT_THAT(ErrorAfterReplacing("\\\"n_routed_experts\\\": 8", "\\\"n_routed_experts\\\": 7"),
              HasSubstr("holds expert 7"));
  EXPECT_THAT(ErrorAfterReplacing("\"config_json\"", "\"config_jsn_\""), HasSubstr("config_json"));
}

TEST_F(ConvertTest, RefusesATypeItCannotWrite) {
  EXPECT_EQ(Convert(DType::kQ4_K).code(), StatusCode::kUnimplemented);
}

// A tokenizer for the golden model's 320 ids: letters of the byte alphabet do not matter here.
std::string TokenizerJson(int num_words) {
  std::string json = R"({"model":{"type":"BPE","vocab":{)";
  for (int i = 0; i < num_words; ++i) {
    const std::string text = i == 5 ? "a" : i == 6 ? "b" : i == 7 ? "ab" : "w" + std::to_string(i);
    if (i >= 2) json += (i > 2 ? ",\"" : "\"") + text + "\":" + std::to_string(i);
  }
  return json + R"(},"merges":["a b",["a","b"]]},"added_tokens":[
    {"id":0,"content":"<｜begin▁of▁sentence｜>","special":true},
    {"id":1,"content":"<｜end▁of▁sentence｜>","special":true},
    {"id":319,"content":"<｜User｜>","special":false}]})";
}

TEST_F(ConvertTest, WritesTheTokenizer) {
  const std::string json = TokenizerJson(319);
  WriteBytes(folder_ / "tokenizer.json", std::as_bytes(std::span(json)));
  const Status status = Convert(DType::kF32, kCheckpoint, folder_ / "tokenizer.json");
  ASSERT_TRUE(status.ok()) << status;
  const auto gguf = Output();
  EXPECT_EQ(*gguf->GetString("tokenizer.ggml.model"), "gpt2");
  EXPECT_EQ(*gguf->GetString("tokenizer.ggml.pre"), "joyai-llm");
  const auto tokens = gguf->GetStringArray("tokenizer.ggml.tokens");
  ASSERT_TRUE(tokens.ok());
  ASSERT_EQ(tokens->size(), 320u);
  EXPECT_EQ(tokens->at(7), "ab");
  EXPECT_EQ(tokens->at(319), "<｜User｜>");
  const auto types = gguf->GetIntArray("tokenizer.ggml.token_type");
  ASSERT_TRUE(types.ok());
  EXPECT_EQ(types->at(0), 3);
  EXPECT_EQ(types->at(7), 1);
  EXPECT_EQ(types->at(319), 4);
  EXPECT_THAT(*gguf->GetStringArray("tokenizer.ggml.merges"), ElementsAre("a b", "a b"));
  EXPECT_EQ(*gguf->GetInt("tokenizer.ggml.bos_token_id"), 0);
  EXPECT_EQ(*gguf->GetInt("tokenizer.ggml.eos_token_id"), 1);
}

TEST_F(ConvertTest, RefusesATokenizerOfAnotherModel) {
  const auto error = [&](const std::string& json) {
    WriteBytes(folder_ / "tokenizer.json", std::as_bytes(std::span(json)));
    return Convert(DType::kF32, kCheckpoint, folder_ / "tokenizer.json").message();
  };
  EXPECT_THAT(error(TokenizerJson(300)), HasSubstr("no token has id 300"));
  EXPECT_THAT(error(TokenizerJson(321)), HasSubstr("the configuration's vocabulary has 320"));
  EXPECT_THAT(error("{"), HasSubstr("not a JSON object"));
  std::string clash = TokenizerJson(319);
  clash.replace(clash.find("\"id\":319"), 8, "\"id\":318");
  EXPECT_THAT(error(clash), HasSubstr("clashes with"));
  std::string merge = TokenizerJson(319);
  merge.replace(merge.find("\"a b\""), 5, "\"a c\"");
  EXPECT_THAT(error(merge), HasSubstr("not in the vocabulary"));
}

}  // namespace
}  // namespace ds4
