// Goal: the device draws the token that temperature, top-k, top-p, min-p and one random number of
// (seed, position) say, whatever way it finds it, and the same one for any cut of the vocabulary
// over ranks and beside any other rows.
// Method: random logits against a sort of all tokens on the host; few sorted candidates allowed, so
// that bisection has to find the same; pieces and batches of several sizes; frequencies of many
// draws against probabilities.
#include "engine/cuda/draw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "engine/sampling/random.h"
#include "tests/unit/cuda/device_fixture.h"

namespace ds4::cuda {
namespace {

using Rows = std::vector<std::vector<float>>;

Rows RandomLogits(int rows, int vocab, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  Rows logits(rows);
  for (std::vector<float>& row : logits) {
    for (int i = 0; i < vocab; ++i) row.push_back(normal(random));
    // Ties at the top and below it.
    row[vocab / 3] = row[vocab / 2] = *std::max_element(row.begin(), row.end());
    row[vocab / 5] = row[vocab / 7];
  }
  return logits;
}

GreedyChoice BestOf(const std::vector<float>& logits) {
  GreedyChoice best;
  const auto at = std::max_element(logits.begin(), logits.end());
  best.token = static_cast<int32_t>(at - logits.begin());
  best.logit = best.max_logit = *at;
  return best;
}

// What draw.h says, by sorting.
int32_t Expected(const std::vector<float>& logits, const DrawRow& p, int64_t pos) {
  struct Token {
    float logit;
    int32_t id;
    float weight;
    uint64_t mass;
  };
  const float best = BestOf(logits).logit;
  std::vector<Token> tokens;
  uint64_t total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float weight = std::exp((logits[i] - best) / p.temperature);
    const auto mass = static_cast<uint64_t>(weight * 0x1.0p40f);
    if (mass != 0) tokens.push_back({logits[i], static_cast<int32_t>(i), weight, mass});
    total += mass;
  }
  if (p.top_k > 0 || p.top_p < 1.0f || p.min_p > 0.0f) {
    std::stable_sort(tokens.begin(), tokens.end(),
                     [](const Token& a, const Token& b) { return a.logit > b.logit; });
  }
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < tokens.size()) tokens.resize(p.top_k);
  if (p.top_k > 0) {
    total = 0;
    for (const Token& token : tokens) total += token.mass;
  }
  uint64_t kept = 0;
  size_t count = 0;
  for (; count < tokens.size(); ++count) {
    if (count > 0 && tokens[count].weight < p.min_p) break;
    kept += tokens[count].mass;
    if (p.top_p < 1.0f &&
        static_cast<double>(kept) >= static_cast<double>(p.top_p) * static_cast<double>(total)) {
      break;
    }
  }
  auto target = static_cast<uint64_t>(Uniform(p.seed, pos, 0) * static_cast<double>(kept));
  for (const Token& token : tokens) {
    if (target < token.mass) return token.id;
    target -= token.mass;
  }
  return -1;
}

class DrawTest : public testing::DeviceTest {
 protected:
  // ends: where the pieces of the vocabulary end.
  std::vector<GreedyChoice> Draw(const Rows& logits, const std::vector<DrawRow>& params,
                                 const std::vector<int32_t>& pos, const std::vector<int>& ends,
                                 int max_candidates = kMaxDrawCandidates) {
    const int rows = static_cast<int>(logits.size());
    std::vector<DeviceBuffer> pieces;
    VocabPieces vocab;
    for (const int end : ends) {
      const int first = vocab.count == 0 ? 0 : ends[vocab.count - 1];
      std::vector<float> values;
      for (const std::vector<float>& row : logits) {
        values.insert(values.end(), row.begin() + first, row.begin() + end);
        values.push_back(std::numeric_limits<float>::quiet_NaN());  // nobody's
      }
      pieces.push_back(ToDevice(values));
      vocab.pieces[vocab.count++] = {pieces.back().as<float>(), end - first + 1, first,
                                     end - first};
    }
    std::vector<GreedyChoice> choices;
    for (const std::vector<float>& row : logits) choices.push_back(BestOf(row));
    const DeviceBuffer choice = ToDevice(choices), rows_params = ToDevice(params),
                       positions = ToDevice(pos);
    const DeviceBuffer scratch = Zeros(DrawScratchBytes(rows));
    LaunchDraw(launch, rows, rows_params.as<DrawRow>(), positions.as<int32_t>(), vocab,
               choice.as<GreedyChoice>(), scratch.data(), max_candidates);
    return ToHost<GreedyChoice>(choice);
  }
};

std::vector<DrawRow> AllKindsOfFilters() {
  std::vector<DrawRow> kinds;
  for (const float temperature : {0.05f, 0.7f, 1.0f, 3.0f}) {
    kinds.push_back({temperature, 1.0f, 0.0f, 0, 11});
    kinds.push_back({temperature, 0.9f, 0.0f, 0, 12});
    kinds.push_back({temperature, 1.0f, 0.0f, 40, 13});
    kinds.push_back({temperature, 1.0f, 0.05f, 0, 14});
    kinds.push_back({temperature, 0.5f, 0.0f, 7, 15});
    kinds.push_back({temperature, 0.95f, 0.01f, 100, 16});
    kinds.push_back({temperature, 0.999f, 1e-6f, 100000, 17});
    kinds.push_back({temperature, 1e-6f, 0.0f, 0, 18});
    kinds.push_back({temperature, 1.0f, 1.0f, 0, 19});
    kinds.push_back({temperature, 1.0f, 0.0f, 1, 20});
  }
  return kinds;
}

TEST_F(DrawTest, DrawsWhatASortOfAllTokensSays) {
  const std::vector<DrawRow> params = AllKindsOfFilters();
  const int rows = static_cast<int>(params.size());
  const Rows logits = RandomLogits(rows, 2999, 3.0f, 1);
  std::vector<int32_t> pos;
  for (int t = 0; t < rows; ++t) pos.push_back(100 + t);
  const std::vector<GreedyChoice> got = Draw(logits, params, pos, {2999});
  for (int t = 0; t < rows; ++t) {
    EXPECT_EQ(got[t].token, Expected(logits[t], params[t], pos[t] + 1)) << "row " << t;
    EXPECT_EQ(got[t].logit, logits[t][got[t].token]) << "row " << t;
  }
}

TEST_F(DrawTest, BisectionFindsTheSameWhereTooManyAreKept) {
  const std::vector<DrawRow> params = {
      {0.7f, 0.9f, 0.0f, 0, 21}, {0.7f, 1.0f, 0.05f, 0, 22}, {1.5f, 0.95f, 0.01f, 40, 23}};
  const int rows = static_cast<int>(params.size());
  const Rows logits = RandomLogits(rows, 301, 3.0f, 2);
  const std::vector<int32_t> pos(rows, 7);
  const std::vector<GreedyChoice> got = Draw(logits, params, pos, {301}, 1);
  for (int t = 0; t < rows; ++t) {
    EXPECT_EQ(got[t].token, Expected(logits[t], params[t], 8)) << "row " << t;
  }
}

TEST_F(DrawTest, NeitherRanksNorNeighboursChangeTheToken) {
  const std::vector<DrawRow> kinds = AllKindsOfFilters();
  const Rows all = RandomLogits(static_cast<int>(kinds.size()), 1000, 2.0f, 3);
  const std::vector<int32_t> pos(kinds.size(), 50);
  const std::vector<GreedyChoice> whole = Draw(all, kinds, pos, {1000});
  for (const std::vector<int>& ends :
       {std::vector<int>{500, 1000}, {1, 334, 667, 1000}, {125, 250, 375, 500, 625, 999, 1000}}) {
    const std::vector<GreedyChoice> cut = Draw(all, kinds, pos, ends);
    for (size_t t = 0; t < kinds.size(); ++t) EXPECT_EQ(cut[t].token, whole[t].token);
  }
  for (size_t t = 0; t < kinds.size(); t += 9) {
    EXPECT_EQ(Draw({all[t]}, {kinds[t]}, {50}, {1000})[0].token, whole[t].token);
  }
}

TEST_F(DrawTest, GreedyRowsAndBadRowsKeepTheirChoice) {
  Rows logits = RandomLogits(3, 100, 1.0f, 4);
  logits[1][5] = std::numeric_limits<float>::quiet_NaN();
  std::vector<DrawRow> params(3);
  params[1].temperature = params[2].temperature = 1.0f;
  std::vector<GreedyChoice> choices;
  for (const std::vector<float>& row : logits) choices.push_back(BestOf(row));
  choices[1].logit = std::numeric_limits<float>::quiet_NaN();  // as LaunchGreedy leaves it
  const DeviceBuffer choice = ToDevice(choices), rows_params = ToDevice(params),
                     positions = ToDevice(std::vector<int32_t>(3, 0));
  std::vector<float> values;
  for (const auto& row : logits) values.insert(values.end(), row.begin(), row.end());
  const DeviceBuffer device_logits = ToDevice(values);
  const DeviceBuffer scratch = Zeros(DrawScratchBytes(3));
  VocabPieces vocab;
  vocab.count = 1;
  vocab.pieces[0] = {device_logits.as<float>(), 100, 0, 100};
  LaunchDraw(launch, 3, rows_params.as<DrawRow>(), positions.as<int32_t>(), vocab,
             choice.as<GreedyChoice>(), scratch.data());
  const std::vector<GreedyChoice> got = ToHost<GreedyChoice>(choice);
  EXPECT_EQ(got[0].token, choices[0].token);
  EXPECT_EQ(got[1].token, choices[1].token);
  EXPECT_TRUE(std::isnan(got[1].logit));
  EXPECT_EQ(got[2].token, Expected(logits[2], params[2], 1));
}

// With 1000 draws a frequency strays by more than four of its standard deviations once in 16,000.
TEST_F(DrawTest, DrawsAsOftenAsTheProbabilitiesSay) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f};
  constexpr int kRows = 50, kRuns = 20;
  std::map<int32_t, int> counts;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<DrawRow> params(kRows);
    std::vector<int32_t> pos(kRows);
    for (int t = 0; t < kRows; ++t) {
      params[t].temperature = 1.0f;
      params[t].seed = run;
      pos[t] = t;
    }
    for (const GreedyChoice& c : Draw(Rows(kRows, logits), params, pos, {5})) ++counts[c.token];
  }
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit));
  for (int i = 0; i < 5; ++i) {
    const double p = std::exp(static_cast<double>(logits[i])) / total;
    const double n = kRows * kRuns;
    EXPECT_NEAR(counts[i], n * p, 4 * std::sqrt(n * p * (1 - p))) << "token " << i;
  }
}

}  // namespace
}  // namespace ds4::cuda
