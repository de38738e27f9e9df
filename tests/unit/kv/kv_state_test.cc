// Goal: a session's memory is what was announced, and its state is a function of the position
// alone. Method: the small model's caches written by hand, a value per position; hashes compared.

#include "engine/kv/kv_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/gguf_builder.h"

namespace ds4 {
namespace {

using testing::HasSubstr;

constexpr int64_t kContext = 256;
constexpr int64_t kRows = 8;
constexpr int64_t kSlack = kRows + kDraftSlack;

// Layers: sliding, CSA (ratio 4), heavy (ratio 16), CSA; a draft block.
ModelConfig SmallConfig() {
  ModelConfig config = ReadModelConfig(*ParseDirectory(SmallMetadata()).file).value();
  config.num_mtp_blocks = 1;
  return config;
}

std::unique_ptr<KvState> NewState(const ModelConfig& config) {
  return KvState::Create(config, kContext, kRows).value();
}

void FillRing(Ring& ring, int64_t pos, float value) {
  std::fill_n(ring.at(pos), ring.width(), value);
}

// Writes position `pos` in every layer as a step would; rows when their window closes.
void WritePosition(const ModelConfig& config, KvState& state, int64_t pos, float salt) {
  for (int64_t i = 0; i < config.num_layers; ++i) {
    LayerState& layer = state.layer(i);
    FillRing(layer.window, pos, salt + static_cast<float>(pos));
    const int64_t ratio = config.layers[i].compress_ratio;
    if (ratio == 0) continue;
    for (CompressorState* part : {&layer.compressor, &layer.indexer}) {
      if (part->dim == 0) continue;
      FillRing(part->values, pos, salt + 0.25f + static_cast<float>(pos));
      FillRing(part->scores, pos, salt + 0.5f + static_cast<float>(pos));
      if ((pos + 1) % ratio == 0) {
        std::fill_n(part->row(pos / ratio), part->dim, salt + static_cast<float>(pos));
      }
    }
  }
  state.Advance(1);
}

void WriteUpTo(const ModelConfig& config, KvState& state, int64_t n, float salt = 0.0f) {
  while (state.n() < n) WritePosition(config, state, state.n(), salt);
}

int64_t AllocatedBytes(const ModelConfig& config, KvState& state) {
  int64_t bytes = state.mtp().window.size_bytes();
  const auto compressor = [](const CompressorState& c) {
    return c.values.size_bytes() + c.scores.size_bytes() +
           static_cast<int64_t>(c.rows.size() * sizeof(float));
  };
  for (int64_t i = 0; i < config.num_layers; ++i) {
    LayerState& layer = state.layer(i);
    bytes += layer.window.size_bytes();
    if (layer.compressor.dim > 0) bytes += compressor(layer.compressor);
    if (layer.indexer.dim > 0) bytes += compressor(layer.indexer);
  }
  return bytes;
}

TEST(KvStateTest, TakesTheBytesThatItAnnounces) {
  for (int64_t context : {1, 15, 16, 17, 255, 4096}) {
    for (int64_t rows : {1, 512}) {
      for (int64_t num_mtp : {0, 1}) {
        ModelConfig config = SmallConfig();
        config.num_mtp_blocks = num_mtp;
        auto state = KvState::Create(config, context, rows).value();
        const int64_t mtp_placeholder = num_mtp == 0 ? state->mtp().window.size_bytes() : 0;
        EXPECT_EQ(AllocatedBytes(config, *state) - mtp_placeholder,
                  KvState::SizeBytes(config, context, rows))
            << context << " tokens, " << rows << " rows, " << num_mtp;
      }
    }
  }
}

// Flash at 65,536 tokens: 3440 float32 a token (0.90 GB) and rings of a few megabytes.
TEST(KvStateTest, FlashTakesWhatItsShapesSay) {
  const ModelConfig config = ReadModelConfig(*ParseDirectory(FlashMetadata()).file).value();
  const double growth = static_cast<double>(KvState::SizeBytes(config, 65536, 512) -
                                            KvState::SizeBytes(config, 128, 512));
  EXPECT_NEAR(growth / (65536 - 128), 13760.0, 1.0);
}

TEST(KvStateTest, NoMemoryIsAnErrorWithTheBytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program instead of throwing std::bad_alloc";
#endif
  ModelConfig config = SmallConfig();
  config.head_dim = int64_t{1} << 40;  // 2^40 * 4 bytes * 32 slots: beyond any address space
  const Status status = KvState::Create(config, kContext, kRows).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("a session of 256 tokens: it takes"));
  EXPECT_THAT(status.message(), HasSubstr("TiB"));
}

TEST(KvStateTest, GoesBackAsFarAsTheRingsReach) {
  const ModelConfig config = SmallConfig();
  auto state = NewState(config);
  EXPECT_EQ(state->LowestRewind(), 0);
  WriteUpTo(config, *state, kSlack);
  EXPECT_EQ(state->LowestRewind(), 0) << "nothing has been overwritten yet";
  WriteUpTo(config, *state, 100);
  EXPECT_EQ(state->LowestRewind(), 100 - kSlack);
  for (int64_t n : {int64_t{-1}, int64_t{1}, 100 - kSlack - 1, int64_t{101}}) {
    const Status status = state->Rewind(n);
    EXPECT_EQ(status.code(), StatusCode::kOutOfRange) << n;
    EXPECT_THAT(status.message(), HasSubstr("at position 100 to " + std::to_string(n)));
    EXPECT_THAT(status.message(), HasSubstr("from " + std::to_string(100 - kSlack) + " to 100"));
    EXPECT_EQ(state->n(), 100) << "a refused rewind moves nothing";
  }
  EXPECT_TRUE(state->Rewind(100).ok());
  EXPECT_TRUE(state->Rewind(100 - kSlack).ok());
  // What was overwritten stays overwritten: going back does not widen the limit.
  EXPECT_EQ(state->LowestRewind(), 100 - kSlack);
  EXPECT_FALSE(state->Rewind(100 - kSlack - 1).ok());
  EXPECT_TRUE(state->Rewind(0).ok());
  EXPECT_EQ(state->LowestRewind(), 0) << "from 0 on everything is written anew";
}

// At the lowest rewind everything that position reads is still in the rings.
TEST(KvStateTest, TheLowestRewindHoldsAllThatLaterStepsRead) {
  const ModelConfig config = SmallConfig();
  for (int64_t n = 1; n < 150; ++n) {
    auto state = NewState(config);
    WriteUpTo(config, *state, n);
    const int64_t lowest = state->LowestRewind();
    ASSERT_TRUE(state->Rewind(lowest).ok());
    auto fresh = NewState(config);
    WriteUpTo(config, *fresh, lowest);
    ASSERT_EQ(state->Hash(), fresh->Hash()) << "from " << n << " to " << lowest;
  }
}

TEST(KvStateTest, HashIgnoresWhatLiesPastThePosition) {
  const ModelConfig config = SmallConfig();
  auto plain = NewState(config);
  WriteUpTo(config, *plain, 61);
  auto state = NewState(config);
  WriteUpTo(config, *state, 61);
  WriteUpTo(config, *state, 75, /*salt=*/1000.0f);  // a wrong draft, closing windows
  EXPECT_NE(state->Hash(), plain->Hash());
  ASSERT_TRUE(state->Rewind(61).ok());
  EXPECT_EQ(state->Hash(), plain->Hash());
  WriteUpTo(config, *state, 80);
  WriteUpTo(config, *plain, 80);
  EXPECT_EQ(state->Hash(), plain->Hash());
}

// Any change that a later step could read changes the hash; the position alone does too.
TEST(KvStateTest, HashSeesEveryPartOfTheState) {
  const ModelConfig config = SmallConfig();
  auto state = NewState(config);
  WriteUpTo(config, *state, 61);
  const uint64_t hash = state->Hash();
  const auto expect_seen = [&](float* value, const char* what) {
    const float before = *value;
    *value += 1.0f;
    EXPECT_NE(state->Hash(), hash) << what;
    *value = before;
    EXPECT_EQ(state->Hash(), hash) << what;
  };
  expect_seen(state->layer(0).window.at(60), "newest window row");
  expect_seen(state->layer(0).window.at(54), "oldest window row that position 61 attends");
  LayerState& csa = state->layer(1);
  expect_seen(csa.compressor.row(0), "first compressed row");
  expect_seen(csa.compressor.row(14) + csa.compressor.dim - 1, "last compressed row");
  expect_seen(csa.indexer.row(14), "last index key");
  expect_seen(csa.compressor.values.at(60), "started window");
  expect_seen(csa.compressor.scores.at(56), "window before, its first position");
  expect_seen(csa.indexer.scores.at(60), "indexer's started window");
  LayerState& heavy = state->layer(2);
  expect_seen(heavy.compressor.row(2), "last heavy row");
  expect_seen(heavy.compressor.values.at(48), "heavy window's first position");
}

TEST(KvStateTest, HashDoesNotSeeWhatNobodyReads) {
  const ModelConfig config = SmallConfig();
  auto state = NewState(config);
  WriteUpTo(config, *state, 61);
  const uint64_t hash = state->Hash();
  *state->layer(0).window.at(53) += 1.0f;             // position 61 sees 54 to 61
  *state->layer(1).compressor.row(15) += 1.0f;        // closes with position 63
  *state->layer(1).compressor.values.at(55) += 1.0f;  // two windows back
  *state->layer(2).compressor.values.at(47) += 1.0f;  // pooled already
  EXPECT_EQ(state->Hash(), hash);
}

TEST(KvStateDeathTest, StepsPastTheContextAreABug) {
  const ModelConfig config = SmallConfig();
  auto state = NewState(config);
  EXPECT_DEATH(state->Advance(kContext + 1), "257 of 256");
}

}  // namespace
}  // namespace ds4
