// Goal: the engine computes what the reference implementation computes (tests/golden/README.md).
// Method: the golden weights as F32, whole sequences, one by one, in chunks of every size; streams
// after each layer and logits within 1e-4 of the reference, chosen experts and compressed rows
// equal, MTP rows and a chain of drafts too. Between our own ways of running the same rows, bits
// must be equal.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "engine/gguf/safetensors.h"
#include "tests/golden/golden_model.h"

namespace ds4 {
namespace {

constexpr float kTolerance = 1e-4f;  // asked for; the reference's own two ways differ by 7e-6
constexpr int kNumCases = 4;

class Golden {
 public:
  Golden() {
    auto file = SafetensorsFile::Open(DS4_SOURCE_DIR "/tests/golden/tiny_v4.safetensors");
    EXPECT_TRUE(file.ok()) << file.status();
    file_ = std::move(file).value();
  }
  template <typename T>
  std::vector<T> Get(const std::string& name) const {
    const SafetensorInfo* info = file_->Find(name);
    EXPECT_NE(info, nullptr) << name;
    if (info == nullptr) return {};
    std::vector<T> values(info->num_elems());
    std::memcpy(values.data(), file_->data(*info).data(), values.size() * sizeof(T));
    return values;
  }
  bool Has(const std::string& name) const { return file_->Find(name) != nullptr; }
  std::vector<int32_t> Ids(int n) const { return Get<int32_t>(Case(n) + "input_ids"); }
  static std::string Case(int n) { return "case." + std::to_string(n) + "."; }

 private:
  std::unique_ptr<SafetensorsFile> file_;
};

float LargestDifference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  if (a.size() != b.size()) return INFINITY;
  float worst = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) {
    // A NaN must not pass as "no difference".
    const float d = std::abs(a[i] - b[i]);
    if (!(d <= worst)) worst = d;
  }
  return worst;
}

std::unique_ptr<KvState> NewState(const ModelConfig& config, int64_t context = 1024,
                                  int64_t max_rows = 300) {
  return KvState::Create(config, context, max_rows).value();
}

// Runs ids[from, to) of a session that stands at `from`; returns all logits, [to - from, vocab].
std::vector<float> RunRows(TestRank& rank, KvState& state, const std::vector<int32_t>& ids,
                           int64_t from, int64_t to, ForwardTrace* trace = nullptr) {
  Batch batch;
  for (int64_t i = from; i < to; ++i) batch.push_back({ids[i], i, &state});
  Result<const float*> streams = rank.transformer->Forward(batch, trace);
  EXPECT_TRUE(streams.ok()) << streams.status();
  if (!streams.ok()) return {};
  state.Advance(to - from);
  return GatherLogits(rank, rank.transformer->Logits(*streams, to - from), to - from);
}

std::vector<float> RunChunks(TestRank& rank, KvState& state, const std::vector<int32_t>& ids,
                             int64_t chunk) {
  std::vector<float> logits;
  for (int64_t from = 0; from < static_cast<int64_t>(ids.size()); from += chunk) {
    const int64_t to = std::min<int64_t>(from + chunk, static_cast<int64_t>(ids.size()));
    const std::vector<float> part = RunRows(rank, state, ids, from, to);
    logits.insert(logits.end(), part.begin(), part.end());
  }
  return logits;
}

std::vector<int32_t> RandomIds(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % 320);
  return ids;
}

std::vector<int32_t> Sorted(std::vector<int32_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

TEST(ReferenceTest, StreamsPicksAndLogitsMatch) {
  const Golden golden;
  RunRanks(GoldenGguf(), 1, 1, [&](TestRank& rank) {
    for (int n = 0; n < kNumCases; ++n) {
      SCOPED_TRACE(golden.Case(n));
      const std::vector<int32_t> ids = golden.Ids(n);
      const auto length = static_cast<int64_t>(ids.size());
      auto state = NewState(rank.config);
      ForwardTrace trace;
      const std::vector<float> logits = RunRows(rank, *state, ids, 0, length, &trace);
      EXPECT_LT(LargestDifference(logits, golden.Get<float>(golden.Case(n) + "logits")),
                kTolerance);
      for (int64_t layer = 0; layer < rank.config.num_layers; ++layer) {
        const std::string suffix = "." + std::to_string(layer);
        EXPECT_LT(LargestDifference(trace.streams[layer],
                                    golden.Get<float>(golden.Case(n) + "hidden" + suffix)),
                  kTolerance)
            << "layer " << layer;
        const auto experts = golden.Get<int32_t>(golden.Case(n) + "experts" + suffix);
        for (int64_t t = 0; t < length; ++t) {
          EXPECT_EQ(trace.expert_picks[layer][t], Sorted({experts[2 * t], experts[2 * t + 1]}))
              << "layer " << layer << ", row " << t;
        }
        const std::string index = golden.Case(n) + "index" + suffix;
        if (!golden.Has(index)) continue;
        const auto rows = golden.Get<int32_t>(index);
        const int64_t width = static_cast<int64_t>(rows.size()) / length;
        for (int64_t t = 0; t < length; ++t) {
          std::vector<int32_t> expected;
          for (int64_t i = 0; i < width; ++i) {
            if (rows[t * width + i] >= 0) expected.push_back(rows[t * width + i]);
          }
          EXPECT_EQ(trace.index_picks[layer][t], expected) << "layer " << layer << ", row " << t;
        }
      }
    }
  });
}

// Row i pairs the token at i+1 with the trunk's streams at i; the chain feeds the block its own
// streams.
TEST(ReferenceTest, MtpRowsAndChainMatch) {
  const Golden golden;
  RunRanks(GoldenGguf(), 1, 1, [&](TestRank& rank) {
    const int64_t row_size = rank.config.num_streams * rank.config.hidden_dim;
    for (int n = 0; n < kNumCases; ++n) {
      SCOPED_TRACE(golden.Case(n));
      const std::vector<int32_t> ids = golden.Ids(n);
      const auto length = static_cast<int64_t>(ids.size());
      const auto chain = golden.Get<int32_t>(golden.Case(n) + "mtp_chain_tokens");
      auto state = NewState(rank.config);
      Batch batch;
      for (int64_t i = 0; i < length; ++i) batch.push_back({ids[i], i, state.get()});
      const float* trunk = rank.transformer->Forward(batch).value();
      std::vector<float> streams(trunk, trunk + length * row_size);

      for (int64_t i = 0; i < length; ++i) batch[i].token = i + 1 < length ? ids[i + 1] : chain[0];
      const float* drafted = rank.transformer->ForwardMtp(batch, streams.data()).value();
      std::vector<float> rows =
          GatherLogits(rank, rank.transformer->MtpLogits(drafted, length), length);
      const int64_t vocab = rank.config.vocab_size;
      std::vector<float> last(rows.end() - vocab, rows.end());
      rows.resize((length - 1) * vocab);
      if (length > 1) {
        EXPECT_LT(LargestDifference(rows, golden.Get<float>(golden.Case(n) + "mtp_logits")),
                  kTolerance);
      }
      const auto chain_logits = golden.Get<float>(golden.Case(n) + "mtp_chain_logits");
      std::vector<float> carried(drafted + (length - 1) * row_size, drafted + length * row_size);
      for (int k = 0; k < 3; ++k) {
        const std::vector<float> expected(chain_logits.begin() + k * vocab,
                                          chain_logits.begin() + (k + 1) * vocab);
        EXPECT_LT(LargestDifference(last, expected), kTolerance) << "draft " << k;
        EXPECT_EQ(std::max_element(last.begin(), last.end()) - last.begin(), chain[k + 1]);
        if (k == 2) break;
        const Batch next = {{chain[k + 1], length + k, state.get()}};
        const float* step = rank.transformer->ForwardMtp(next, carried.data()).value();
        last = GatherLogits(rank, rank.transformer->MtpLogits(step, 1), 1);
        carried.assign(step, step + row_size);
      }
    }
  });
}

TEST(ReferenceTest, ChunksOfEverySizeGiveTheSameBits) {
  const Golden golden;
  RunRanks(GoldenGguf(), 1, 2, [&](TestRank& rank) {
    for (int n = 1; n < kNumCases; ++n) {
      const std::vector<int32_t> ids = golden.Ids(n);
      const auto length = static_cast<int64_t>(ids.size());
      auto whole = NewState(rank.config);
      const std::vector<float> expected = RunChunks(rank, *whole, ids, length);
      for (int64_t chunk = 1; chunk < length; ++chunk) {
        auto state = NewState(rank.config);
        EXPECT_EQ(RunChunks(rank, *state, ids, chunk), expected)
            << golden.Case(n) << " chunk " << chunk;
        EXPECT_EQ(state->Hash(), whole->Hash()) << golden.Case(n) << " chunk " << chunk;
      }
    }
  });
}

// Lengths around every boundary there is: windows of 8, 16 and their multiples, powers of two, two
// chunks.
TEST(ReferenceTest, LengthsAroundBoundariesGiveTheSameBits) {
  RunRanks(GoldenGguf(), 1, 2, [&](TestRank& rank) {
    for (int64_t length : {1, 13, 31, 32, 33, 127, 128, 129, 130, 255, 257, 521}) {
      const std::vector<int32_t> ids = RandomIds(length, static_cast<uint32_t>(length));
      auto by_row = NewState(rank.config);
      const std::vector<float> expected = RunChunks(rank, *by_row, ids, 1);
      auto by_chunk = NewState(rank.config);
      EXPECT_EQ(RunChunks(rank, *by_chunk, ids, 256), expected) << length;
      EXPECT_EQ(by_chunk->Hash(), by_row->Hash()) << length;
    }
  });
}

// Going back is setting n: whatever was computed past it leaves no trace.
TEST(ReferenceTest, RandomRollbacksLeaveNoTrace) {
  RunRanks(GoldenGguf(), 1, 1, [&](TestRank& rank) {
    const std::vector<int32_t> ids = RandomIds(300, 7);
    auto plain = NewState(rank.config);
    std::vector<uint64_t> hashes = {plain->Hash()};
    const int64_t vocab = rank.config.vocab_size;
    std::vector<float> expected;
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::vector<float> row = RunRows(rank, *plain, ids, i, i + 1);
      expected.insert(expected.end(), row.begin(), row.end());
      hashes.push_back(plain->Hash());
    }
    std::mt19937 random(11);
    auto state = NewState(rank.config, 1024, /*max_rows=*/16);
    int num_rollbacks = 0;
    while (state->n() < static_cast<int64_t>(ids.size())) {
      const int64_t n = state->n();
      const int64_t draft =
          std::min<int64_t>(1 + random() % 16, static_cast<int64_t>(ids.size()) - n);
      // A draft whose tail is wrong: run it, then keep only `accepted` rows.
      const int64_t accepted = 1 + random() % draft;
      std::vector<int32_t> drafted = ids;
      for (int64_t i = n + accepted; i < n + draft; ++i) drafted[i] = (drafted[i] + 1) % 320;
      const std::vector<float> logits = RunRows(rank, *state, drafted, n, n + draft);
      ASSERT_TRUE(std::equal(logits.begin(), logits.begin() + accepted * vocab,
                             expected.begin() + n * vocab))
          << "rows " << n << " to " << n + accepted;
      ASSERT_TRUE(state->Rewind(n + accepted).ok());
      ASSERT_EQ(state->Hash(), hashes[n + accepted]) << "at " << n + accepted;
      num_rollbacks += accepted < draft;
    }
    EXPECT_GT(num_rollbacks, 15);
  });
}

TEST(ReferenceTest, RewindRefusesWhatTheRingsNoLongerHold) {
  RunRanks(GoldenGguf(), 1, 1, [&](TestRank& rank) {
    const std::vector<int32_t> ids = RandomIds(64, 3);
    auto state = NewState(rank.config, 1024, /*max_rows=*/8);
    RunChunks(rank, *state, ids, 8);
    const int64_t lowest = state->LowestRewind();
    EXPECT_EQ(lowest, 64 - 8 - kDraftSlack);
    EXPECT_EQ(state->Rewind(lowest - 1).code(), StatusCode::kOutOfRange);
    EXPECT_EQ(state->Rewind(65).code(), StatusCode::kOutOfRange);
    EXPECT_TRUE(state->Rewind(lowest).ok());
    EXPECT_TRUE(state->Rewind(0).ok());
    auto fresh = NewState(rank.config, 1024, 8);
    EXPECT_EQ(RunChunks(rank, *state, ids, 8), RunChunks(rank, *fresh, ids, 8));
  });
}

// Several sessions in one batch, at different positions: nobody notices the others.
TEST(ReferenceTest, SessionsInOneBatchDoNotTouchEachOther) {
  RunRanks(GoldenGguf(), 1, 2, [&](TestRank& rank) {
    constexpr int kSessions = 5;
    std::vector<std::vector<int32_t>> ids;
    std::vector<std::vector<float>> alone;
    std::vector<std::unique_ptr<KvState>> states;
    for (int s = 0; s < kSessions; ++s) {
      ids.push_back(RandomIds(70, 100 + s));
      auto state = NewState(rank.config);
      alone.push_back(RunChunks(rank, *state, ids[s], 70));
      states.push_back(NewState(rank.config));
    }
    const int64_t vocab = rank.config.vocab_size;
    std::mt19937 random(5);
    for (int step = 0; step < 40; ++step) {
      Batch batch;
      std::vector<std::pair<int, int64_t>> rows;
      for (int s = 0; s < kSessions; ++s) {
        const int64_t n = states[s]->n();
        const int64_t count = std::min<int64_t>(random() % 6, 70 - n);
        for (int64_t i = 0; i < count; ++i) {
          batch.push_back({ids[s][n + i], n + i, states[s].get()});
          rows.emplace_back(s, n + i);
        }
      }
      if (batch.empty()) continue;
      const float* streams = rank.transformer->Forward(batch).value();
      const auto num_rows = static_cast<int64_t>(batch.size());
      const std::vector<float> logits =
          GatherLogits(rank, rank.transformer->Logits(streams, num_rows), num_rows);
      for (int64_t r = 0; r < num_rows; ++r) {
        const auto [s, pos] = rows[r];
        ASSERT_TRUE(std::equal(logits.begin() + r * vocab, logits.begin() + (r + 1) * vocab,
                               alone[s].begin() + pos * vocab))
            << "session " << s << " position " << pos;
      }
      for (const BatchRow& row : batch) row.state->Advance(1);
    }
  });
}

// Lanes (docs/adr/0004): every world size computes the same bits, with any number of threads.
TEST(ReferenceTest, EveryWorldSizeGivesTheSameBits) {
  const Golden golden;
  const std::vector<int32_t> ids = golden.Ids(3);
  std::vector<float> expected;
  RunRanks(GoldenGguf(), 1, 1, [&](TestRank& rank) {
    auto state = NewState(rank.config);
    expected = RunChunks(rank, *state, ids, 100);
  });
  for (int world_size : {2, 3, 4}) {
    for (int threads : {1, 3}) {
      RunRanks(GoldenGguf(), world_size, threads, [&](TestRank& rank) {
        for (int64_t chunk : {1, 7, 100}) {
          auto state = NewState(rank.config);
          EXPECT_EQ(RunChunks(rank, *state, ids, chunk), expected)
              << "rank " << rank.comm->rank() << " of " << world_size << ", chunk " << chunk;
        }
      });
    }
  }
}

}  // namespace
}  // namespace ds4
