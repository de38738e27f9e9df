// Goal: every row gets the right experts with the right weights, the lists of work hold every pair
// once, by expert and then by row, and the mixes that are balanced beside come out right.
// Method: the same on the host by plain sorting, for both kinds of router, few and many rows, tiny
// and full numbers of experts, with ties, and with all rows choosing alike.
#include <numeric>
#include <set>

#include "engine/cuda/experts.h"
#include "tests/unit/cuda/balance_test_util.h"
#include "tests/unit/cuda/experts_test_util.h"
#include "tests/unit/cuda/route_test_util.h"

namespace ds4::cuda {
namespace {

struct RouteCase {
  int num_experts = 0;
  int used = 0;
  int rows = 0;
  std::vector<float> logits;
  std::vector<float> bias;        // score-routed
  std::vector<int32_t> hash_ids;  // hash-routed
  std::vector<int32_t> tokens;
};

RouteCase RandomCase(int num_experts, int used, int rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  RouteCase c{num_experts, used, rows, {}, {}, {}, {}};
  c.logits.resize(rows * num_experts);
  c.bias.resize(num_experts);
  for (float& x : c.logits) x = normal(random);
  for (float& x : c.bias) x = 0.1f * normal(random);
  return c;
}

RouteResult Route(const RouteCase& c) {
  TestDevice device;
  const BalanceCase balance(device, c.rows);
  RouterParams params;
  params.num_experts = c.num_experts;
  params.used = c.used;
  params.scale = 1.5f;
  const DeviceBuffer bias = device.Upload(c.bias), hash_ids = device.Upload(c.hash_ids);
  if (!c.bias.empty()) params.bias = bias.as<float>();
  if (!c.hash_ids.empty()) params.hash_ids = hash_ids.as<int32_t>();
  const DeviceBuffer logits = device.Upload(c.logits), tokens = device.Upload(c.tokens);
  const DeviceBuffer memory = device.Allocate(RoutingBytes(c.rows, params));
  const Routing routing = MakeRouting(memory.data(), c.rows, params);
  LaunchRoute(device.launch, params, logits.as<float>(), tokens.as<int32_t>(), c.rows, routing,
              balance.job());
  device.Finish();
  balance.ExpectDone(device);

  const RouteResult r = DownloadRouting(device, routing, int64_t{c.rows} * c.used);
  const auto expert_first = device.Download(routing.expert_first, c.num_experts + 1);
  for (int e = 0; e <= c.num_experts; ++e) {
    const auto before = [e](int32_t id) { return id < e; };
    EXPECT_EQ(expert_first[e], std::count_if(r.ids.begin(), r.ids.end(), before)) << "expert " << e;
  }
  return r;
}

double Score(float logit) { return std::sqrt(std::log1p(std::exp(static_cast<double>(logit)))); }

// The chosen ids, best first. Scores nearer than float32 can tell apart would make this test flaky;
// equal logits and biases are exact ties on both sides.
std::vector<int32_t> ExpectedIds(const RouteCase& c, int row) {
  if (!c.hash_ids.empty()) {
    const auto first = c.hash_ids.begin() + int64_t{c.tokens[row]} * c.used;
    return {first, first + c.used};
  }
  const auto key = [&](int32_t e) { return Score(c.logits[row * c.num_experts + e]) + c.bias[e]; };
  std::vector<int32_t> order(c.num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
  order.resize(c.used);
  return order;
}

void CheckChoice(const RouteCase& c, const RouteResult& r) {
  for (int row = 0; row < c.rows; ++row) {
    const std::vector<int32_t> ids(r.ids.begin() + row * c.used,
                                   r.ids.begin() + (row + 1) * c.used);
    ASSERT_EQ(ids, ExpectedIds(c, row)) << "row " << row;
    double sum = 0;
    for (int32_t id : ids) sum += Score(c.logits[row * c.num_experts + id]);
    for (int k = 0; k < c.used; ++k) {
      const double want = Score(c.logits[row * c.num_experts + ids[k]]) / (sum + 1e-20) * 1.5;
      // Some ten roundings of half a unit each.
      EXPECT_NEAR(r.weights[row * c.used + k], want, want * 1e-6);
    }
  }
}

void Check(const RouteCase& c) {
  SCOPED_TRACE(testing::Message() << c.rows << " rows, " << c.used << " of " << c.num_experts);
  const RouteResult r = Route(c);
  CheckChoice(c, r);
  CheckLists(c.num_experts, r);
}

TEST(ExpertsRouteTest, ByScore) {
  for (int rows : {1, 2, 7, 17, 64}) Check(RandomCase(256, 6, rows, rows));
  for (int rows : {1, 9, 65}) Check(RandomCase(3, 2, rows, rows));
  Check(RandomCase(384, 6, 5, 1));
  Check(RandomCase(16, 16, 5, 1));
}

TEST(ExpertsRouteTest, ManyRows) {
  Check(RandomCase(256, 6, 65, 1));
  Check(RandomCase(40, 6, 300, 2));
}

TEST(ExpertsRouteTest, TheLowerIdWinsTies) {
  for (int rows : {3, 20, 70}) {
    RouteCase c = RandomCase(70, 6, rows, 3);
    std::fill(c.bias.begin(), c.bias.end(), 0.0f);
    for (float& x : c.logits) x = x > 0.0f ? 1.0f : -1.0f;
    Check(c);
    // Beyond 20 the score is the root of the logit itself, and all rows choose the same experts.
    std::fill(c.logits.begin(), c.logits.end(), 30.0f);
    Check(c);
  }
}

TEST(ExpertsRouteTest, ByTable) {
  for (int rows : {4, 80}) {
    RouteCase c = RandomCase(24, 3, rows, 5);
    c.bias.clear();
    std::mt19937 random(6);
    for (int token = 0; token < 10; ++token) {
      std::vector<int32_t> ids(24);
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      c.hash_ids.insert(c.hash_ids.end(), ids.begin(), ids.begin() + 3);
    }
    for (int row = 0; row < rows; ++row) c.tokens.push_back(row * 7 % 10);
    Check(c);
  }
}

// A broken model must not send the device out of bounds: the ids stay distinct and valid.
TEST(ExpertsRouteTest, ScoresThatAreNoNumbers) {
  RouteCase c = RandomCase(32, 6, 2, 7);
  for (size_t i = 0; i < c.logits.size(); i += 2) c.logits[i] = NAN;
  std::fill(c.logits.begin() + 32, c.logits.end(), -INFINITY);
  const RouteResult r = Route(c);
  for (int row = 0; row < 2; ++row) {
    const std::set<int32_t> ids(r.ids.begin() + row * 6, r.ids.begin() + row * 6 + 6);
    EXPECT_EQ(ids.size(), 6u);
    EXPECT_GE(*ids.begin(), 0);
    EXPECT_LT(*ids.rbegin(), 32);
  }
  CheckLists(c.num_experts, r);
}

}  // namespace
}  // namespace ds4::cuda
