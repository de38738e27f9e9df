// Goal: the slices of all ranks are the whole model, once, and cost what the arithmetic of the
// published shapes says. Method: directories without data, of Flash as published and of a small
// model; every world size and uneven layouts.

#include "engine/shard/shard_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "engine/base/strings.h"
#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

using testing::HasSubstr;
using testing::Not;

struct TestModel {
  ParsedGguf parsed;
  ModelConfig config;
  const GgufFile& file() const { return *parsed.file; }
};

TestModel Flash(DType gate_up, DType down) {
  GgufBuilder builder = FlashMetadata();
  const ModelConfig config = ReadModelConfig(*ParseDirectory(builder).file).value();
  builder.AddModel(config, [&](const TensorSpec& spec) { return FlashType(spec, gate_up, down); });
  return {ParseDirectory(builder), config};
}

TestModel Small(const std::function<void(GgufBuilder&)>& change = nullptr) {
  GgufBuilder builder = SmallMetadata();
  ModelConfig config = ReadModelConfig(*ParseDirectory(builder).file).value();
  config.num_mtp_blocks = 1;
  builder.AddModel(config, [](const TensorSpec& spec) {
    return spec.name.find("tid2eid") != std::string::npos ? DType::kI32
           : spec.dims.size() < 2                         ? DType::kF32
                                                          : DType::kQ8_0;
  });
  if (change) change(builder);
  return {ParseDirectory(builder), config};
}

std::vector<LaneLayout> Layouts() {
  std::vector<LaneLayout> layouts;
  for (int world = 1; world <= 8; ++world) layouts.push_back(LaneLayout::Even(8, world));
  layouts.push_back({8, {0, 1, 8}});
  layouts.push_back({8, {0, 7, 8}});
  layouts.push_back({8, {0, 5, 6, 8}});
  return layouts;
}

std::string Name(const LaneLayout& layout) {
  std::vector<std::string> parts;
  for (int begin : layout.begin) parts.push_back(std::to_string(begin));
  return "layout " + StrJoin(parts, " ");
}

// Slices follow each other without gap or overlap, and cost together what the tensor costs.
void ExpectWholeTensors(const TestModel& model) {
  for (const LaneLayout& layout : Layouts()) {
    SCOPED_TRACE(Name(layout));
    const Result<ShardPlan> plan = MakeShardPlan(model.config, model.file(), layout);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const size_t num_tensors = ModelTensors(model.config).size();
    for (size_t i = 0; i < num_tensors; ++i) {
      const TensorSlice& first = plan->ranks[0].slices[i];
      const TensorInfo& tensor = *model.file().FindTensor(first.spec.name);
      int64_t next = 0;
      int64_t held = 0;
      for (const RankPlan& rank : plan->ranks) {
        ASSERT_EQ(rank.slices.size(), num_tensors);
        const TensorSlice& slice = rank.slices[i];
        ASSERT_EQ(slice.spec.name, first.spec.name);
        EXPECT_EQ(slice.dtype, tensor.dtype) << tensor.name;
        if (slice.spec.split == Split::kReplicate) {
          EXPECT_EQ(slice.range, (Range{0, slice.total})) << tensor.name;
          EXPECT_EQ(slice.held_bytes, tensor.size_bytes) << tensor.name;
          continue;
        }
        EXPECT_EQ(slice.range.begin, next) << tensor.name << " on rank " << rank.rank;
        EXPECT_GT(slice.range.size(), 0) << tensor.name << " on rank " << rank.rank;
        next = slice.range.end;
        held += slice.held_bytes;
      }
      if (first.spec.split == Split::kReplicate) continue;
      EXPECT_EQ(next, first.total) << tensor.name;
      EXPECT_EQ(held, tensor.size_bytes) << tensor.name;
    }
  }
}

TEST(ShardPlanTest, SlicesOfTheSmallModelAreWholeTensors) { ExpectWholeTensors(Small()); }

TEST(ShardPlanTest, SlicesOfFlashAreWholeTensors) {
  ExpectWholeTensors(Flash(DType::kIQ2_XXS, DType::kQ2_K));
}

// What belongs together stays together: the heads of a rank's groups, the inputs of its lanes.
TEST(ShardPlanTest, HeadsGroupsWidthAndVocabularyFollowTheLanes) {
  const TestModel model = Flash(DType::kIQ2_XXS, DType::kQ2_K);
  for (const LaneLayout& layout : Layouts()) {
    const ShardPlan plan = MakeShardPlan(model.config, model.file(), layout).value();
    for (const RankPlan& rank : plan.ranks) {
      const auto [begin, end] = rank.lanes;
      EXPECT_EQ(rank.groups, (Range{begin, end}));
      EXPECT_EQ(rank.heads, (Range{begin * 8, end * 8}));
      EXPECT_EQ(rank.ffn, (Range{begin * 256, end * 256}));
      EXPECT_EQ(rank.vocab, (Range{begin * 16160, end * 16160}));
      for (const TensorSlice& slice : rank.slices) {
        if (slice.spec.name == "blk.9.attn_q_b.weight") {
          EXPECT_EQ(slice.range, (Range{rank.heads.begin * 512, rank.heads.end * 512}));
        }
        if (slice.spec.name == "blk.9.attn_output_b.weight") {
          EXPECT_EQ(slice.range, (Range{rank.groups.begin * 1024, rank.groups.end * 1024}));
        }
      }
    }
  }
}

// Bytes of Flash by the arithmetic of its published shapes, in GB. A rank holds (routed + split) /
// N + replicated + embedding; one token reads 6 of 256 routed experts, the rest whole, and one row
// of the embedding. The whole indexer is replicated, its query projection (0.352 GB) too.
struct Costs {
  DType gate_up;
  DType down;
  double routed;      // all experts of all layers
  double read_total;  // of one token on one rank that holds everything
};
constexpr double kSplit = 6.664 - 0.352;       // q_b, o_a, o_b, shared expert, head
constexpr double kReplicated = 1.070 + 0.352;  // q_a, kv, compressors, indexer, mHC, router
constexpr double kOneRow = 1.068;              // embedding and the table of expert ids

TEST(ShardPlanTest, FlashCostsWhatItsShapesSay) {
  const Costs all_costs[] = {{DType::kIQ2_XXS, DType::kQ2_K, 77.91, 9.5591},
                             {DType::kQ4_K, DType::kQ4_K, 155.83, 11.3852},
                             {DType::kQ8_0, DType::kQ8_0, 294.34, 14.6316},
                             {DType::kMXFP4, DType::kMXFP4, 147.17, 11.1823}};
  for (const Costs& costs : all_costs) {
    const TestModel model = Flash(costs.gate_up, costs.down);
    for (int world : {1, 2, 4, 8}) {
      SCOPED_TRACE(StrCat(Info(costs.down).name, ", ", world, " ranks"));
      const ShardPlan plan =
          MakeShardPlan(model.config, model.file(), LaneLayout::Even(8, world)).value();
      const double held = (costs.routed + kSplit) / world + kReplicated + kOneRow;
      const double read = (costs.read_total - kReplicated) / world + kReplicated;
      for (const RankPlan& rank : plan.ranks) {
        EXPECT_NEAR(static_cast<double>(rank.held_bytes) / 1e9, held, 0.01 * held);
        EXPECT_NEAR(static_cast<double>(rank.read_bytes_per_token) / 1e9, read, 0.002 * read);
      }
    }
  }
}

// The published files are 80.8 GiB (Q2) and 153.3 GiB (Q4_K).
TEST(ShardPlanTest, OneRankHoldsThePublishedFile) {
  const auto gib = [](DType gate_up, DType down) {
    const TestModel model = Flash(gate_up, down);
    const ShardPlan plan =
        MakeShardPlan(model.config, model.file(), LaneLayout::Even(8, 1)).value();
    return static_cast<double>(plan.ranks[0].held_bytes) / (1 << 30);
  };
  EXPECT_NEAR(gib(DType::kIQ2_XXS, DType::kQ2_K), 80.8, 0.1);
  EXPECT_NEAR(gib(DType::kQ4_K, DType::kQ4_K), 153.3, 0.1);
}

TEST(ShardPlanTest, TheDraftBlockIsHeldButNotRead) {
  const TestModel with = Small();
  ModelConfig without = with.config;
  without.num_mtp_blocks = 0;
  const LaneLayout layout = LaneLayout::Even(8, 2);
  const RankPlan a = MakeShardPlan(with.config, with.file(), layout)->ranks[0];
  const RankPlan b = MakeShardPlan(without, with.file(), layout)->ranks[0];
  EXPECT_GT(a.held_bytes, b.held_bytes);
  EXPECT_EQ(a.read_bytes_per_token, b.read_bytes_per_token);
}

TEST(ShardPlanTest, MoreRanksThanLanesAreRefusedWithBothNumbers) {
  const TestModel model = Small();
  LaneLayout nine{8, {0, 1, 2, 3, 4, 5, 6, 7, 8, 8}};
  const Status status = MakeShardPlan(model.config, model.file(), nine).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("world size 9"));
  EXPECT_THAT(status.message(), HasSubstr("1 to 8 ranks"));
}

// A layout may come from a peer: none may end in a read outside it.
TEST(ShardPlanTest, LayoutsThatCutNothingRightAreRefused) {
  const TestModel model = Small();
  for (const LaneLayout& layout :
       {LaneLayout{8, {}}, LaneLayout{8, {0}}, LaneLayout{8, {0, 4, 4, 8}}, LaneLayout{8, {1, 8}},
        LaneLayout{8, {0, 7}}, LaneLayout{8, {0, 5, 3, 8}}, LaneLayout{4, {0, 4}},
        LaneLayout{8, {0, 9}}, LaneLayout{8, {-1, 4, 8}}}) {
    EXPECT_EQ(MakeShardPlan(model.config, model.file(), layout).status().code(),
              StatusCode::kInvalidArgument)
        << Name(layout);
  }
}

// Lanes of 2048 / 8 = 256 columns are one Q2_K block each; of 1024 / 8 = 128, half of one.
TEST(ShardPlanTest, ALaneThatWouldCutABlockIsRefusedByName) {
  GgufBuilder builder = FlashMetadata();
  builder.SetInt("deepseek4.expert_feed_forward_length", 1024);
  const ModelConfig config = ReadModelConfig(*ParseDirectory(builder).file).value();
  builder.AddModel(config, [](const TensorSpec& spec) {
    return FlashType(spec, DType::kIQ2_XXS, DType::kQ2_K);
  });
  const ParsedGguf parsed = ParseDirectory(builder);
  const Status status = MakeShardPlan(config, *parsed.file, LaneLayout::Even(8, 2)).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("blk.0.ffn_down_exps.weight (Q2_K) has 128 columns"));
  EXPECT_THAT(status.message(), HasSubstr("256"));
}

TEST(ShardPlanTest, AMissingTensorIsNamed) {
  const TestModel model =
      Small([](GgufBuilder& builder) { builder.RemoveTensor("blk.2.attn_kv.weight"); });
  const Status status = MakeShardPlan(model.config, model.file(), LaneLayout::Even(8, 2)).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("blk.2.attn_kv.weight"));
}

TEST(ShardPlanTest, EqualPlansHaveEqualDigestsAndNoOthers) {
  const TestModel model = Small();
  std::map<std::string, std::string> seen;
  for (const LaneLayout& layout : Layouts()) {
    const ShardPlan plan = MakeShardPlan(model.config, model.file(), layout).value();
    EXPECT_EQ(plan.Digest(), MakeShardPlan(model.config, model.file(), layout)->Digest());
    EXPECT_EQ(plan.Digest().size(), 16u);
    const auto [it, is_new] = seen.emplace(plan.Digest(), Name(layout));
    EXPECT_TRUE(is_new) << Name(layout) << " has the digest of " << it->second;
  }
}

TEST(ShardPlanTest, EverySliceCountsInTheDigest) {
  const TestModel model = Small();
  const ShardPlan plan = MakeShardPlan(model.config, model.file(), LaneLayout::Even(8, 2)).value();
  const size_t num_slices = plan.ranks[1].slices.size();
  for (size_t i = 0; i < num_slices; ++i) {
    ShardPlan other = plan;
    ++other.ranks[1].slices[i].range.end;
    EXPECT_NE(other.Digest(), plan.Digest()) << plan.ranks[1].slices[i].spec.name;
    other = plan;
    other.ranks[1].slices[i].dtype = DType::kQ4_0;
    EXPECT_NE(other.Digest(), plan.Digest()) << plan.ranks[1].slices[i].spec.name;
    other = plan;
    other.ranks[1].slices[i].spec.dims[0] += 32;
    EXPECT_NE(other.Digest(), plan.Digest()) << plan.ranks[1].slices[i].spec.name;
  }
}

// Columns stand under their heads, and the last line adds up what the group holds.
TEST(ShardPlanTest, TheTableLinesUp) {
  const TestModel model = Flash(DType::kIQ2_XXS, DType::kQ2_K);
  const ShardPlan plan = MakeShardPlan(model.config, model.file(), LaneLayout::Even(8, 3)).value();
  const std::vector<std::string> lines = StrSplit(plan.ToString(false), '\n');
  ASSERT_EQ(lines.size(), 6u);  // head, three ranks, total, and nothing after the last line end
  const size_t holds = lines[0].find("holds");
  const size_t reads = lines[0].find("reads/token");
  for (size_t i = 1; i <= 3; ++i) {
    EXPECT_TRUE(std::isdigit(lines[i][holds])) << lines[i];
    EXPECT_TRUE(std::isdigit(lines[i][reads])) << lines[i];
    EXPECT_EQ(lines[i][reads - 1], ' ') << lines[i];
    EXPECT_EQ(lines[i].back(), 'B') << lines[i];
  }
  EXPECT_THAT(lines[1], HasSubstr("0-2"));
  EXPECT_THAT(lines[3], HasSubstr("6-7"));
  EXPECT_THAT(lines[4], testing::StartsWith("all"));
  int64_t held = 0;
  for (const RankPlan& rank : plan.ranks) held += rank.held_bytes;
  EXPECT_EQ(lines[4].substr(holds, HumanBytes(held).size()), HumanBytes(held));
}

TEST(ShardPlanTest, TheDetailsNameEveryKindOfTensorOfEveryRank) {
  const TestModel model = Small();
  const ShardPlan plan = MakeShardPlan(model.config, model.file(), LaneLayout::Even(8, 2)).value();
  const std::string text = plan.ToString(true);
  EXPECT_THAT(text, HasSubstr("rank 0"));
  EXPECT_THAT(text, HasSubstr("rank 1"));
  EXPECT_THAT(text, HasSubstr("blk.*.ffn_down_exps.weight"));
  EXPECT_THAT(text, HasSubstr("columns 0-127 of 256"));
  EXPECT_THAT(text, HasSubstr("columns 128-255 of 256"));
  EXPECT_THAT(text, Not(HasSubstr("blk.1.")));
  // Layers of one name but other shapes (compressors of CSA and HCA) have lines of their own.
  EXPECT_THAT(text, HasSubstr("[64, 64]"));
  for (const std::string& line : StrSplit(text, '\n')) EXPECT_LE(line.size(), 120u) << line;
}

}  // namespace
}  // namespace ds4
