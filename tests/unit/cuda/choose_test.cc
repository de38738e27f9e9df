// Goal: the greedy choice is the largest logit with the lower id on ties, shows values that are not
// finite, and leaves sums that do not depend on ranks or batch; a decode step's hand-over keeps
// rows, records and flags in step. Method: random logits in lanes of odd sizes against sums in
// double; special values put in by hand; several steps through a short ring.
#include "engine/cuda/choose.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// Logits of some rows, cut into lanes; three values more a row that nobody may look at.
struct Logits {
  Logits(int num_rows, std::vector<int32_t> lanes, uint32_t seed)
      : rows(num_rows), lane_begin(std::move(lanes)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 4.0f);
    values.assign(int64_t{rows} * stride(), kNan);
    for (int t = 0; t < rows; ++t) {
      for (int i = 0; i < vocab(); ++i) At(t, i) = normal(random);
    }
  }
  int vocab() const { return lane_begin.back(); }
  int64_t stride() const { return vocab() + 3; }
  int num_lanes() const { return static_cast<int>(lane_begin.size()) - 1; }
  float& At(int t, int i) { return values[t * stride() + i]; }
  float At(int t, int i) const { return values[t * stride() + i]; }

  int rows;
  std::vector<int32_t> lane_begin;
  std::vector<float> values;
};

struct Greedy {
  std::vector<GreedyChoice> choice;
  std::vector<float> lane_max;
  std::vector<double> lane_sum;
};

Greedy ChooseGreedily(TestDevice& device, const Logits& logits, int32_t first_id) {
  const int lanes = logits.num_lanes(), rows = logits.rows;
  const DeviceBuffer values = device.Upload(logits.values),
                     begin = device.Upload(logits.lane_begin);
  const DeviceBuffer choice = device.Allocate(rows * sizeof(GreedyChoice));
  const DeviceBuffer max = device.Allocate(rows * lanes * 4),
                     sum = device.Allocate(rows * lanes * 8);
  const DeviceBuffer scratch = device.Allocate(GreedyScratchBytes(rows));
  LaunchGreedy(device.launch, values.as<float>(), logits.stride(), rows, first_id,
               begin.as<int32_t>(), lanes, choice.as<GreedyChoice>(), max.as<float>(),
               sum.as<double>(), scratch.data());
  device.Finish();
  return {device.Download(choice.as<GreedyChoice>(), rows),
          device.Download(max.as<float>(), rows * lanes),
          device.Download(sum.as<double>(), rows * lanes)};
}

TEST(ChooseTest, FindsTheBestAndTheSums) {
  TestDevice device;
  for (const std::vector<int32_t>& lanes :
       {std::vector<int32_t>{0, 1000, 1777, 3000}, {0, 37}, {0, 1, 2, 5, 5, 700}, {0, 9000}}) {
    const Logits logits(3, lanes, 1);
    const Greedy got = ChooseGreedily(device, logits, 5000);
    for (int t = 0; t < 3; ++t) {
      int best = 0;
      for (int i = 1; i < logits.vocab(); ++i) {
        if (logits.At(t, i) > logits.At(t, best)) best = i;
      }
      EXPECT_EQ(got.choice[t].token, 5000 + best);
      EXPECT_EQ(got.choice[t].logit, logits.At(t, best));
      EXPECT_EQ(got.choice[t].max_logit, logits.At(t, best));
      for (int lane = 0; lane < logits.num_lanes(); ++lane) {
        float max = -kInf;
        double sum = 0;
        for (int i = lanes[lane]; i < lanes[lane + 1]; ++i) max = std::max(max, logits.At(t, i));
        for (int i = lanes[lane]; i < lanes[lane + 1]; ++i) {
          sum += std::exp(double{logits.At(t, i)} - double{max});
        }
        EXPECT_EQ(got.lane_max[t * logits.num_lanes() + lane], max);
        // float32 differences of up to about 30, and expf: some 2^-20 of each term.
        EXPECT_NEAR(got.lane_sum[t * logits.num_lanes() + lane], sum, 2e-6 * sum);
      }
    }
  }
}

TEST(ChooseTest, EqualLogitsGoToTheLowerId) {
  TestDevice device;
  Logits logits(5, {0, 500, 1000}, 2);
  const std::vector<std::vector<int>> places = {
      {3, 4}, {17, 499}, {499, 500}, {0, 999}, {256, 512, 768}};
  for (int t = 0; t < 5; ++t) {
    for (const int place : places[t]) logits.At(t, place) = 50.0f;
  }
  const Greedy got = ChooseGreedily(device, logits, 0);
  for (int t = 0; t < 5; ++t) EXPECT_EQ(got.choice[t].token, places[t][0]);
  // -0 and 0 are equal too.
  Logits zeros(1, {0, 100}, 3);
  for (int i = 0; i < 100; ++i) zeros.At(0, i) = i < 60 ? -0.0f : 0.0f;
  EXPECT_EQ(ChooseGreedily(device, zeros, 7).choice[0].token, 7);
}

TEST(ChooseTest, ShowsLogitsThatAreNotFinite) {
  TestDevice device;
  Logits logits(4, {0, 300, 600}, 4);
  logits.At(0, 450) = kNan;
  logits.At(1, 0) = kInf;
  logits.At(2, 599) = -kInf;
  const Greedy got = ChooseGreedily(device, logits, 0);
  const int bad_lane[3] = {1, 0, 1};
  for (int t = 0; t < 3; ++t) {
    EXPECT_TRUE(std::isnan(got.choice[t].logit)) << "row " << t;
    EXPECT_TRUE(std::isnan(got.lane_max[t * 2 + bad_lane[t]])) << "row " << t;
    EXPECT_EQ(got.lane_sum[t * 2 + bad_lane[t]], 0.0);
    EXPECT_TRUE(std::isfinite(got.lane_max[t * 2 + 1 - bad_lane[t]]));
    EXPECT_TRUE(got.choice[t].token >= 0 && got.choice[t].token < 600);
  }
  EXPECT_TRUE(std::isfinite(got.choice[3].logit));
  // Nothing but NaN still gives an id of this rank.
  Logits nothing(1, {0, 40}, 5);
  for (int i = 0; i < 40; ++i) nothing.At(0, i) = kNan;
  EXPECT_EQ(ChooseGreedily(device, nothing, 11).choice[0].token, 11);
}

TEST(ChooseTest, ALaneHasTheSameBitsOnAnyRankAndInAnyBatch) {
  TestDevice device;
  const Logits all(3, {0, 411, 822, 1201}, 6);
  const Greedy together = ChooseGreedily(device, all, 0);
  for (int t = 0; t < 3; ++t) {
    for (int lane = 0; lane < 3; ++lane) {
      const int begin = all.lane_begin[lane], size = all.lane_begin[lane + 1] - begin;
      Logits own(1, {0, size}, 7);
      for (int i = 0; i < size; ++i) own.At(0, i) = all.At(t, begin + i);
      const Greedy alone = ChooseGreedily(device, own, begin);
      EXPECT_EQ(alone.lane_max[0], together.lane_max[t * 3 + lane]);
      EXPECT_EQ(0, std::memcmp(&alone.lane_sum[0], &together.lane_sum[t * 3 + lane], 8));
    }
  }
}

TEST(ChooseTest, AdvanceHandsStepsToTheHost) {
  // Three rows: one moves, one only fills up the batch, one stands at the last position from step 2
  // on. Five steps through a ring of two.
  TestDevice device;
  const int rows = 3, ring = 2, last_pos = 9;
  const std::vector<int32_t> slots = {4, -1, 0};
  const DeviceBuffer token = device.Upload(std::vector<int32_t>{100, 101, 102});
  const DeviceBuffer pos = device.Upload(std::vector<int32_t>{3, 0, 7});
  const DeviceBuffer slot = device.Upload(slots), counter = device.Allocate(4);
  Result<PinnedBuffer> record = PinnedBuffer::Allocate(ring * rows * sizeof(TokenRecord));
  Result<PinnedBuffer> flags = PinnedBuffer::Allocate(ring * sizeof(uint32_t));
  ASSERT_TRUE(record.ok() && flags.ok());
  DecodeQueue queue;
  queue.token = token.as<int32_t>();
  queue.pos = pos.as<int32_t>();
  queue.slot = slot.as<int32_t>();
  queue.record = record.value().as<TokenRecord>();
  queue.record_flags = flags.value().as<uint32_t>();
  queue.step_counter = counter.as<uint32_t>();
  queue.ring_steps = ring;
  queue.last_pos = last_pos;

  for (int step = 0; step < 5; ++step) {
    SCOPED_TRACE(testing::Message() << "step " << step);
    std::vector<GreedyChoice> choices(rows);
    for (int t = 0; t < rows; ++t) choices[t] = {1000 * step + t, 2.5f + t, 2.5f + t, 0};
    // Lanes of sums 3 and 2 at maxima 1 and -1.
    const DeviceBuffer choice = device.Upload(choices);
    const DeviceBuffer max = device.Upload(std::vector<float>{1, -1, 1, -1, 1, kNan});
    const DeviceBuffer sum = device.Upload(std::vector<double>{3, 2, 3, 2, 3, 0});
    const std::vector<int32_t> old_pos = device.Download(pos.as<int32_t>(), rows);
    LaunchAdvance(device.launch, rows, choice.as<GreedyChoice>(), max.as<float>(), sum.as<double>(),
                  2, queue);
    device.Finish();

    EXPECT_EQ(queue.record_flags[step % ring], static_cast<uint32_t>(step + 1));
    EXPECT_EQ(device.Download(counter.as<uint32_t>(), 1)[0], static_cast<uint32_t>(step + 1));
    const TokenRecord* got = queue.record + step % ring * rows;
    for (int t = 0; t < rows; ++t) {
      EXPECT_EQ(got[t].token, choices[t].token);
      EXPECT_EQ(got[t].pos, old_pos[t] + 1);
      EXPECT_EQ(got[t].logit, choices[t].logit);
    }
    EXPECT_NEAR(got[0].log_sum_exp, std::log(3 * std::exp(1.0) + 2 * std::exp(-1.0)), 1e-6);
    EXPECT_TRUE(std::isnan(got[2].log_sum_exp));
    const int32_t moved = std::min(7 + step + 1, last_pos);
    EXPECT_EQ(device.Download(pos.as<int32_t>(), rows),
              (std::vector<int32_t>{3 + step + 1, 0, moved}));
    const int32_t last_taken = std::min(step, 1);  // of the row that stops
    EXPECT_EQ(device.Download(token.as<int32_t>(), rows),
              (std::vector<int32_t>{1000 * step, 101, 1000 * last_taken + 2}));
  }
}

}  // namespace
}  // namespace ds4::cuda
