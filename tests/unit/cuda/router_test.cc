// Goal: one launch takes rows of x to the right experts, weights and lists of work; a row's result
// does not depend on the rows beside it; the rows' mixes are balanced meanwhile.
// Method: logits in double from the weights' values, then plain sorting; all types of weights, both
// kinds of router, one group of rows and several, numbers of experts and columns that fill their
// tiles and slices and others that do not; the same rows alone and in batches, bit by bit.
#include <cstring>
#include <set>

#include "engine/cuda/experts.h"
#include "tests/unit/cuda/balance_test_util.h"
#include "tests/unit/cuda/experts_test_util.h"
#include "tests/unit/cuda/route_test_util.h"

namespace ds4::cuda {
namespace {

constexpr int kTokens = 10;

// A router on the device.
struct TestRouter {
  TestRouter(DType dtype, int num_experts, int used, int num_cols, bool by_token, uint32_t seed = 1)
      : w(MakeMatrix(device, dtype, 1, num_experts, num_cols, seed)), cols(num_cols) {
    params.num_experts = num_experts;
    params.used = used;
    params.scale = 1.5f;
    std::mt19937 random(seed + 1);
    if (by_token) {
      for (int token = 0; token < kTokens; ++token) {
        std::vector<int32_t> ids(num_experts);
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        table.insert(table.end(), ids.begin(), ids.begin() + used);
      }
    } else {
      std::normal_distribution<float> normal(0.0f, 0.1f);
      for (int e = 0; e < num_experts; ++e) bias.push_back(normal(random));
    }
    Upload();
  }
  // After a change of bias or table.
  void Upload() {
    device_bias = device.Upload(bias), device_table = device.Upload(table);
    params.bias = bias.empty() ? nullptr : device_bias.as<float>();
    params.hash_ids = table.empty() ? nullptr : device_table.as<int32_t>();
  }
  // Rows [first, first + rows) of x. `times`: launches on the same scratch memory.
  RouteResult Run(const HostActivation& x, int first, int rows, int times = 1) {
    const int64_t padded = PaddedCols(cols);
    const DeviceBuffer x_rows = device.Upload(std::vector<float>(
        x.f32.begin() + first * padded, x.f32.begin() + (first + rows) * padded));
    std::vector<int32_t> host_tokens;
    for (int row = 0; row < rows; ++row) host_tokens.push_back(TokenOf(first + row));
    const DeviceBuffer tokens = device.Upload(host_tokens);
    const DeviceBuffer memory = device.Allocate(RoutingBytes(rows, params));
    const DeviceBuffer scratch =
        device.Allocate(RouterScratchBytes(rows, params.num_experts, cols));
    const Routing routing = MakeRouting(memory.data(), rows, params);
    ActivationView view;
    view.rows = rows;
    view.cols = padded;
    view.f32 = x_rows.as<float>();
    const BalanceCase balance(device, rows);
    for (int i = 0; i < times; ++i) {
      LaunchRouter(device.launch, params, w.packed, view, tokens.as<int32_t>(), routing,
                   scratch.data(), balance.job());
    }
    device.Finish();
    balance.ExpectDone(device);
    return DownloadRouting(device, routing, int64_t{rows} * params.used);
  }
  static int TokenOf(int row) { return row * 7 % kTokens; }

  TestDevice device;
  TestMatrix w;
  int cols;
  RouterParams params;
  std::vector<float> bias;
  std::vector<int32_t> table;
  DeviceBuffer device_bias, device_table;
};

double Score(double logit) { return std::sqrt(std::log1p(std::exp(logit))); }

void CheckChoice(const TestRouter& router, const HostActivation& x, const RouteResult& r) {
  const int used = router.params.used, num_experts = router.params.num_experts;
  for (int row = 0; row < x.rows; ++row) {
    std::vector<double> score(num_experts);
    for (int e = 0; e < num_experts; ++e) {
      double logit = 0;
      for (int c = 0; c < router.cols; ++c) {
        logit += double{router.w.Row(0, e)[c]} * x.f32[row * x.cols + c];
      }
      score[e] = Score(logit);
    }
    std::vector<int32_t> want(num_experts);
    std::iota(want.begin(), want.end(), 0);
    const auto key = [&](int e) { return score[e] + router.bias[e]; };
    if (router.bias.empty()) {
      const auto first = router.table.begin() + TestRouter::TokenOf(row) * used;
      want.assign(first, first + used);
    } else {
      std::stable_sort(want.begin(), want.end(), [&](int a, int b) { return key(a) > key(b); });
      want.resize(used);
    }
    const std::vector<int32_t> ids(r.ids.begin() + row * used, r.ids.begin() + (row + 1) * used);
    ASSERT_EQ(ids, want) << "row " << row;
    double sum = 0;
    for (int32_t id : ids) sum += score[id];
    for (int k = 0; k < used; ++k) {
      // Sums of thousands of rounded products.
      ASSERT_NEAR(r.weights[row * used + k], score[ids[k]] / sum * 1.5, 2e-5) << "row " << row;
    }
  }
}

void Check(DType dtype, int num_experts, int used, int cols, bool by_token,
           std::initializer_list<int> batches) {
  for (int rows : batches) {
    SCOPED_TRACE(testing::Message() << rows << " rows, " << used << " of " << num_experts << ", "
                                    << cols << " columns of " << Info(dtype).name);
    TestRouter router(dtype, num_experts, used, cols, by_token);
    const HostActivation x = RandomActivation(rows, 1, cols, rows);
    const RouteResult r = router.Run(x, 0, rows);
    CheckChoice(router, x, r);
    CheckLists(num_experts, r);
  }
}

TEST(RouterTest, ChoosesByScore) {
  Check(DType::kF16, 256, 6, 1024, false, {1, 2, 8, 9, 23, 64});
  Check(DType::kBF16, 256, 6, 512, false, {1, 5, 12});
  Check(DType::kF32, 256, 6, 512, false, {1, 5, 12});
}

TEST(RouterTest, ChoosesByTable) { Check(DType::kF16, 24, 3, 512, true, {1, 4, 40}); }

TEST(RouterTest, AnyNumberOfExpertsAndColumns) {
  Check(DType::kF16, 3, 2, 192, false, {1, 9});
  Check(DType::kF16, 40, 6, 1280, false, {1, 3, 33});
  Check(DType::kF32, 17, 16, 700, false, {1, 10});
  Check(DType::kBF16, 384, 6, 768, false, {1, 7, 17});
  Check(DType::kF16, 512, 8, 4352 + 512, false, {1, 2});
}

TEST(RouterTest, ARowsResultDoesNotDependOnTheOthers) {
  constexpr int kRows = 64, kUsed = 6;
  for (DType dtype : {DType::kF16, DType::kF32}) {
    TestRouter router(dtype, 48, kUsed, 1280, false);
    const HostActivation x = RandomActivation(kRows, 1, 1280, 5);
    const RouteResult all = router.Run(x, 0, kRows);
    for (const auto& [first, rows] : {std::pair{0, 1}, {7, 1}, {63, 1}, {3, 2}, {8, 8}, {5, 13}}) {
      const RouteResult part = router.Run(x, first, rows);
      const std::vector<int32_t> ids(all.ids.begin() + first * kUsed,
                                     all.ids.begin() + (first + rows) * kUsed);
      EXPECT_EQ(part.ids, ids) << first << ", " << rows;
      EXPECT_EQ(0, std::memcmp(part.weights.data(), all.weights.data() + first * kUsed,
                               part.weights.size() * sizeof(float)))
          << first << ", " << rows;
    }
  }
}

TEST(RouterTest, TheLowerIdWinsTies) {
  for (int rows : {1, 10}) {
    TestRouter router(DType::kF16, 140, 6, 256, false);
    HostActivation x = RandomActivation(rows, 1, 256, 3);
    std::fill(x.f32.begin(), x.f32.end(), 0.0f);  // all logits are 0
    std::fill(router.bias.begin(), router.bias.end(), -1.0f);
    for (int e : {139, 70, 9, 8, 11}) router.bias[e] = 1.0f;
    router.Upload();
    const RouteResult r = router.Run(x, 0, rows);
    for (int row = 0; row < rows; ++row) {
      const std::vector<int32_t> ids(r.ids.begin() + row * 6, r.ids.begin() + row * 6 + 6);
      EXPECT_EQ(ids, (std::vector<int32_t>{8, 9, 11, 70, 139, 0}));
    }
    CheckLists(140, r);
  }
}

// All rows choose alike: more than one group of pairs of an expert.
TEST(RouterTest, ExpertsThatAllRowsUse) {
  for (int rows : {7, 30, 64}) {
    TestRouter router(DType::kF16, 32, 4, 256, false);
    const HostActivation x = RandomActivation(rows, 1, 256, 3);
    for (int e : {31, 5, 0, 16}) router.bias[e] = 100.0f;
    router.Upload();
    CheckLists(32, router.Run(x, 0, rows));
  }
}

TEST(RouterTest, ATableMayNameAnExpertTwice) {
  for (int rows : {9, 64}) {
    TestRouter router(DType::kF16, 8, 3, 256, true);
    for (size_t i = 0; i < router.table.size(); ++i) router.table[i] = i % 3 == 1 ? 2 : i % 4;
    router.Upload();
    CheckLists(8, router.Run(RandomActivation(rows, 1, 256, 3), 0, rows));
  }
}

// A broken model must not send the device out of bounds: the ids stay distinct and valid.
TEST(RouterTest, ScoresThatAreNoNumbers) {
  for (int rows : {1, 12}) {
    TestRouter router(DType::kF32, 32, 6, 256, false);
    HostActivation x = RandomActivation(rows, 1, 256, 3);
    for (size_t i = 0; i < x.f32.size(); i += 256) x.f32[i] = NAN;
    const RouteResult r = router.Run(x, 0, rows);
    for (int row = 0; row < rows; ++row) {
      const std::set<int32_t> ids(r.ids.begin() + row * 6, r.ids.begin() + row * 6 + 6);
      EXPECT_EQ(ids.size(), 6u);
      EXPECT_GE(*ids.begin(), 0);
      EXPECT_LT(*ids.rbegin(), 32);
    }
    CheckLists(32, r);
  }
}

TEST(RouterTest, LeavesItsScratchMemoryAsItWas) {
  for (int rows : {1, 20}) {
    TestRouter router(DType::kF16, 40, 6, 512, false);
    const HostActivation x = RandomActivation(rows, 1, 512, 3);
    const RouteResult r = router.Run(x, 0, rows, 3);
    CheckChoice(router, x, r);
    CheckLists(40, r);
  }
}

// A kernel that starts when the one before has ended rehearses nothing.
TEST(RouterTest, OneRowWithoutOverlap) {
  TestRouter router(DType::kF16, 32, 6, 512, false);
  const HostActivation x = RandomActivation(1, 1, 512, 3);
  const RouteResult overlapping = router.Run(x, 0, 1);
  router.device.launch.overlap = false;
  const RouteResult r = router.Run(x, 0, 1);
  CheckChoice(router, x, r);
  CheckLists(32, r);
  EXPECT_EQ(r.weights, overlapping.weights);
}

}  // namespace
}  // namespace ds4::cuda
