// Goal: for weights of every type, the forward pass gives the same bits for any number of ranks,
// any chunk of rows and any number of threads, and the values are those of the unrounded weights
// within what their type loses. Method: the small random model (8 lanes, so that a Q8_0 block fits
// into one), long enough that every layer kind has many rows and the indexer must choose.

#include "engine/layers/transformer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "engine/base/strings.h"
#include "tests/golden/golden_model.h"
#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};
constexpr int64_t kLength = 52;

std::string ModelOf(DType type) {
  return WriteSmallModel(StrCat("layers_", Info(type).name), {.type = type, .seed = 5});
}

std::vector<int32_t> Ids() {
  std::mt19937 random(17);
  std::vector<int32_t> ids(kLength);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % 97);
  return ids;
}

// Logits of every row of Ids(), run in chunks; then those of the draft block for the same rows.
std::vector<float> RunChunks(TestRank& rank, int64_t chunk) {
  const std::vector<int32_t> ids = Ids();
  auto state = KvState::Create(rank.config, 128, 80).value();
  std::vector<float> logits;
  const auto gather = [&](const float* local, int64_t rows) {
    const std::vector<float> all = GatherLogits(rank, local, rows);
    logits.insert(logits.end(), all.begin(), all.end());
  };
  for (int64_t from = 0; from < kLength; from += chunk) {
    const int64_t rows = std::min(chunk, kLength - from);
    Batch batch;
    for (int64_t i = from; i < from + rows; ++i) batch.push_back({ids[i], i, state.get()});
    const Result<const float*> streams = rank.transformer->Forward(batch);
    EXPECT_TRUE(streams.ok()) << streams.status();
    if (!streams.ok()) return {};
    gather(rank.transformer->Logits(*streams, rows), rows);
    const std::vector<float> trunk(
        *streams, *streams + rows * rank.config.num_streams * rank.config.hidden_dim);
    for (int64_t i = 0; i < rows; ++i) batch[i].token = ids[(from + i + 1) % kLength];
    const float* drafted = rank.transformer->ForwardMtp(batch, trunk.data()).value();
    gather(rank.transformer->MtpLogits(drafted, rows), rows);
    state->Advance(rows);
  }
  return logits;
}

// Chunks interleave trunk and draft rows; sorted apart they are the same for every chunk size.
std::vector<float> TrunkThenDraft(const std::vector<float>& logits, int64_t chunk, int64_t vocab) {
  std::vector<float> trunk, draft;
  auto at = logits.begin();
  for (int64_t from = 0; from < kLength; from += chunk) {
    const int64_t count = std::min(chunk, kLength - from) * vocab;
    trunk.insert(trunk.end(), at, at + count);
    draft.insert(draft.end(), at + count, at + 2 * count);
    at += 2 * count;
  }
  trunk.insert(trunk.end(), draft.begin(), draft.end());
  return trunk;
}

std::vector<float> RunOnOneRank(const std::string& path) {
  std::vector<float> logits;
  RunRanks(path, 1, 1, [&](TestRank& rank) {
    logits = TrunkThenDraft(RunChunks(rank, kLength), kLength, rank.config.vocab_size);
  });
  return logits;
}

TEST(TransformerTest, RanksChunksAndThreadsChangeNoBit) {
  for (DType type : kTypes) {
    const std::string path = ModelOf(type);
    const std::vector<float> expected = RunOnOneRank(path);
    ASSERT_EQ(expected.size(), static_cast<size_t>(2 * kLength * 97));
    for (float logit : expected) ASSERT_TRUE(std::isfinite(logit));
    for (int world_size : {1, 2, 3, 5, 8}) {
      const int threads = world_size <= 3 ? 3 : 1;
      RunRanks(path, world_size, threads, [&](TestRank& rank) {
        for (int64_t chunk : {int64_t{1}, int64_t{7}, kLength}) {
          EXPECT_EQ(TrunkThenDraft(RunChunks(rank, chunk), chunk, rank.config.vocab_size), expected)
              << Info(type).name << ", rank " << rank.comm->rank() << " of " << world_size
              << ", chunk " << chunk;
        }
      });
    }
  }
}

// Rounding to a type is all that it changes. A near-tie between experts or compressed rows may fall
// the other way and change a row wholly, so the median row is what counts.
TEST(TransformerTest, RoundedWeightsGiveNearlyTheLogitsOfExactOnes) {
  const std::vector<float> exact = RunOnOneRank(ModelOf(DType::kF32));
  // Relative rms error of a row's logits: each type's own rounding (2^-12, 2^-9, 1/254 of a block's
  // largest, plus that of the inputs) grows a few times on the way through four layers; a wrong
  // scale or a swapped part gives about 1.
  const std::pair<DType, double> bounds[] = {
      {DType::kF16, 0.005}, {DType::kBF16, 0.1}, {DType::kQ8_0, 0.15}};
  for (const auto& [type, bound] : bounds) {
    const std::vector<float> rounded = RunOnOneRank(ModelOf(type));
    ASSERT_EQ(rounded.size(), exact.size());
    std::vector<double> errors;
    for (size_t row = 0; row < exact.size(); row += 97) {
      double error = 0.0;
      double power = 0.0;
      for (size_t i = row; i < row + 97; ++i) {
        const double d = static_cast<double>(rounded[i]) - exact[i];
        error += d * d;
        power += static_cast<double>(exact[i]) * exact[i];
      }
      errors.push_back(std::sqrt(error / power));
    }
    std::sort(errors.begin(), errors.end());
    const double median = errors[errors.size() / 2];
    EXPECT_LT(median, bound) << Info(type).name;
    EXPECT_GT(median, 0.0) << Info(type).name;
    RecordProperty(StrCat("median_error_", Info(type).name), StrCat(median));
  }
}

// The shared expert's limit is its own.
TEST(TransformerTest, TheSharedExpertHasItsOwnLimit) {
  SmallModelOptions tight{.type = DType::kF32, .seed = 5};
  tight.change = [](GgufBuilder& builder) {
    builder.SetFloats("deepseek4.swiglu_clamp_shexp", std::vector<float>(4, 0.05f));
  };
  SmallModelOptions same = tight;
  same.change = [](GgufBuilder& builder) {
    builder.SetFloats("deepseek4.swiglu_clamp_shexp", std::vector<float>(4, 10.0f));
  };
  const std::vector<float> plain = RunOnOneRank(ModelOf(DType::kF32));
  EXPECT_EQ(RunOnOneRank(WriteSmallModel("layers_same_limit", same)), plain);
  EXPECT_NE(RunOnOneRank(WriteSmallModel("layers_tight_limit", tight)), plain);
}

}  // namespace
}  // namespace ds4
