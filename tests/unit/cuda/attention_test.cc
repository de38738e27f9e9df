// Goal: attention over window and compressed rows is spec 2.6's, in every form of its output, and
// its bits depend on nothing but the row itself.
// Method: caches full of random rows; the result against double-precision softmax written out here
// over the same list of keys. Then the same rows alone, in batches, and through each kernel:
// float32 for small heads, tensor-core tiles split over blocks, tiles of one row in one block for
// 16, 32 and 64 heads.
#include <algorithm>
#include <numeric>

#include "engine/cuda/layout.h"
#include "tests/unit/cuda/attention_test_util.h"

namespace ds4::cuda::attention_test {
namespace {

constexpr int kSlots = 3;

struct Output {
  std::vector<float> f32;
  std::vector<uint16_t> bf16;
  std::vector<int8_t> q;
  std::vector<float> scale, sums;
};

// What each row may see, and all that the launch takes.
struct Problem {
  AttentionParams params;
  std::vector<Row> rows;
  std::vector<std::vector<int32_t>> picks;  // of each row; empty: all visible rows, no lists
  int heads_per_group = 1;

  int ring = 0, max_rows = 0;
  std::vector<float> q, sinks, window, compressed;

  int64_t cols() const {
    return params.num_heads / heads_per_group *
           PaddedCols(static_cast<int64_t>(heads_per_group) * params.head_dim);
  }
  int64_t max_keys() const {
    int64_t keys = 0;
    for (size_t t = 0; t < rows.size(); ++t) {
      keys = std::max<int64_t>(keys, Keys(static_cast<int>(t)).size());
    }
    return keys + 70;  // a bound, seldom met: the last splits have no keys
  }
  // Offsets into `window` (as they are) and `compressed` (-1 - offset), in list order.
  std::vector<int64_t> Keys(int t) const {
    const int slot = std::max(rows[t].slot, 0), pos = rows[t].pos;
    std::vector<int64_t> keys;
    for (int p = std::max(0, pos - params.sliding_window + 1); p <= pos; ++p) {
      keys.push_back((static_cast<int64_t>(slot) * ring + p % ring) * params.head_dim);
    }
    if (params.ratio == 0) return keys;
    std::vector<int32_t> visible((pos + 1) / params.ratio);
    std::iota(visible.begin(), visible.end(), 0);
    for (int32_t w : picks.empty() ? visible : picks[t]) {
      keys.push_back(-1 - (static_cast<int64_t>(slot) * max_rows + w) * params.head_dim);
    }
    return keys;
  }
};

// ratio 0: window only. top_k 0: every visible row.
Problem MakeProblem(int num_heads, int head_dim, KvType type, int window, int ratio, int top_k,
                    std::vector<Row> rows, int heads_per_group = 1) {
  Problem problem;
  AttentionParams& params = problem.params;
  params.num_heads = num_heads;
  params.head_dim = head_dim;
  params.rope_dim = head_dim / 4;
  params.sliding_window = window;
  params.ratio = ratio;
  params.overlap = top_k > 0;
  params.kv_type = type;
  params.index_top_k = top_k;
  problem.rows = std::move(rows);
  problem.heads_per_group = heads_per_group;

  std::mt19937 random(num_heads + head_dim + window + ratio + top_k);
  int last = 0;
  for (const Row& row : problem.rows) last = std::max(last, row.pos);
  problem.ring = window + 5;
  problem.max_rows = ratio == 0 ? 0 : (last + 1) / ratio + 2;
  const int64_t count = static_cast<int64_t>(problem.rows.size()) * num_heads * head_dim;
  problem.q = Normal(random, count, 3.0f);
  problem.sinks = Normal(random, num_heads);
  problem.window = Normal(random, static_cast<int64_t>(kSlots) * problem.ring * head_dim, 1.5f);
  problem.compressed =
      Normal(random, static_cast<int64_t>(kSlots) * problem.max_rows * head_dim, 1.5f);
  if (top_k == 0) return problem;
  for (const Row& row : problem.rows) {
    std::vector<int32_t> all((row.pos + 1) / ratio), chosen;
    std::iota(all.begin(), all.end(), 0);
    std::sample(all.begin(), all.end(), std::back_inserter(chosen), top_k, random);
    problem.picks.push_back(chosen);
  }
  return problem;
}

// The problem's rows at `chosen` alone, same caches.
Problem RowsOf(const Problem& problem, const std::vector<int>& chosen) {
  Problem part = problem;
  part.rows.clear();
  part.q.clear();
  part.picks.clear();
  const int64_t values = static_cast<int64_t>(problem.params.num_heads) * problem.params.head_dim;
  for (int t : chosen) {
    part.rows.push_back(problem.rows[t]);
    part.q.insert(part.q.end(), problem.q.begin() + t * values,
                  problem.q.begin() + (t + 1) * values);
    if (!problem.picks.empty()) part.picks.push_back(problem.picks[t]);
  }
  return part;
}

enum class Kernel { kFewRows, kManyRows };

Output Attend(Problem& problem, Kernel kernel, int num_sms = 4) {
  Bench bench;
  bench.launch.num_sms = num_sms;
  const AttentionParams& params = problem.params;
  const int rows = static_cast<int>(problem.rows.size());
  LayerCache cache;
  cache.ring = problem.ring;
  cache.window = UploadKv(bench, params.kv_type, problem.window);
  if (params.ratio > 0) {
    cache.compressor.max_rows = problem.max_rows;
    cache.compressor.dim = params.head_dim;
    cache.compressor.rows = UploadKv(bench, params.kv_type, problem.compressed);
  }

  AttentionJob job;
  job.q = bench.Upload(problem.q);
  job.sinks = bench.Upload(problem.sinks);
  if (!problem.picks.empty()) {
    std::vector<int32_t> lists, counts;
    for (std::vector<int32_t> list : problem.picks) {
      counts.push_back(static_cast<int32_t>(list.size()));
      list.resize(params.index_top_k, 1 << 30);  // nobody may follow these
      lists.insert(lists.end(), list.begin(), list.end());
    }
    job.picks = bench.Upload(lists);
    job.pick_count = bench.Upload(counts);
  }
  job.max_keys = problem.max_keys();
  job.heads_per_group = problem.heads_per_group;
  const int64_t scratch_bytes = AttentionScratchBytes(params, rows, job.max_keys);
  const std::vector<uint8_t> scratch(scratch_bytes + 4096, 0x55);
  job.scratch = reinterpret_cast<std::byte*>(bench.Upload(scratch));

  const int64_t cols = problem.cols(), tile_rows = (rows + 7) / 8 * 8;
  const bool quantised = params.head_dim % 32 == 0;
  // Not zeros, so that padding which nobody writes shows.
  const std::vector<uint8_t> noise(4 * tile_rows * cols, 0x55);
  job.out.rows = rows;
  job.out.cols = cols;
  job.out.f32 = reinterpret_cast<float*>(bench.Upload(noise));
  job.out.bf16 = reinterpret_cast<uint16_t*>(bench.Upload(noise));
  if (quantised) {
    job.out.q = reinterpret_cast<uint64_t*>(bench.Upload(noise));
    job.out.scale = reinterpret_cast<float*>(bench.Upload(noise));
    job.out.sums = reinterpret_cast<float*>(bench.Upload(noise));
  }
  const StepRows step = UploadRows(bench, problem.rows);
  const RopeView rope = UploadRope(bench, problem.rows, params.rope_dim);
  if (kernel == Kernel::kFewRows) {
    LaunchAttention(bench.launch, params, step, rows, rope, job, cache);
  } else {
    LaunchPrefillAttention(bench.launch, params, step, rows, rope, job, cache);
  }
  bench.Finish();
  const std::vector<uint8_t> behind = bench.Download<uint8_t>(job.scratch + scratch_bytes, 4096);
  EXPECT_EQ(behind, std::vector<uint8_t>(4096, 0x55)) << "the launch wrote past its scratch";
  Output output;
  output.f32 = bench.Download<float>(job.out.f32, rows * cols);
  output.bf16 = bench.Download<uint16_t>(job.out.bf16, rows * cols);
  if (quantised) {
    output.q = bench.Download<int8_t>(job.out.q, tile_rows * cols);
    output.scale = bench.Download<float>(job.out.scale, cols / 32 * tile_rows);
    output.sums = bench.Download<float>(job.out.sums, cols / 16 * tile_rows);
  }
  return output;
}

// One head of one row, and for the error bound the weighted sum of magnitudes.
struct HeadResult {
  std::vector<double> value, magnitude;
};
HeadResult Reference(const Problem& problem, int t, int head, bool round_query) {
  const AttentionParams& params = problem.params;
  const int dim = params.head_dim;
  const float* from = problem.q.data() + (static_cast<int64_t>(t) * params.num_heads + head) * dim;
  std::vector<double> q(from, from + dim);
  Norm(q, nullptr, params.norm_eps);
  Rotate(q, params.rope_dim, problem.rows[t].pos);
  if (round_query) {
    for (double& x : q) x = BF16ToF32(F32ToBF16(static_cast<float>(x)));
  }
  const double sink = problem.sinks[head];
  double weights = std::exp(sink);
  HeadResult result{std::vector<double>(dim), std::vector<double>(dim)};
  for (int64_t at : problem.Keys(t)) {
    const float* key = at >= 0 ? &problem.window[at] : &problem.compressed[-1 - at];
    double score = 0;
    for (int d = 0; d < dim; ++d) score += q[d] * key[d];
    const double weight = std::exp(score / std::sqrt(dim));
    weights += weight;
    for (int d = 0; d < dim; ++d) {
      result.value[d] += weight * key[d];
      result.magnitude[d] += weight * std::abs(key[d]);
    }
  }
  for (int d = 0; d < dim; ++d) {
    result.value[d] /= weights;
    result.magnitude[d] /= weights;
  }
  // A rotated pair mixes the errors of its two channels.
  for (int d = dim - params.rope_dim; d < dim; d += 2) {
    const double both = result.magnitude[d] + result.magnitude[d + 1];
    result.magnitude[d] = result.magnitude[d + 1] = both;
  }
  Rotate(result.value, params.rope_dim, -problem.rows[t].pos);
  return result;
}

int64_t FirstColumn(const Problem& problem, int head) {
  const int in_group = head % problem.heads_per_group;
  return head / problem.heads_per_group *
             PaddedCols(static_cast<int64_t>(problem.heads_per_group) * problem.params.head_dim) +
         in_group * problem.params.head_dim;
}

// float32: sums of a few hundred terms. Tiles: a key's weight is rounded to bf16, 2^-9 of it at
// most, in numerator and denominator, so 2^-8 of the weighted magnitudes; the query is rounded as
// the reference does it, but for the few values that stand so near a tie that float32 and double
// round apart.
void ExpectReference(const Problem& problem, const Output& output) {
  const AttentionParams& params = problem.params;
  const bool tiles = params.kv_type == KvType::kBF16 && params.head_dim >= 256;
  for (size_t t = 0; t < problem.rows.size(); ++t) {
    if (problem.rows[t].slot < 0) continue;
    for (int head = 0; head < params.num_heads; ++head) {
      const HeadResult want = Reference(problem, static_cast<int>(t), head, tiles);
      const float* have = output.f32.data() + t * problem.cols() + FirstColumn(problem, head);
      for (int d = 0; d < params.head_dim; ++d) {
        const double bound =
            tiles ? want.magnitude[d] / 256 + 1e-3 : 2e-6 * want.magnitude[d] + 1e-6;
        ASSERT_NEAR(have[d], want.value[d], bound)
            << "row " << t << " head " << head << " channel " << d;
      }
    }
  }
}

// bf16 and int8 forms from the float32 form, by the rule of activation.h; padding is zero.
void ExpectForms(const Problem& problem, const Output& output) {
  const int64_t cols = problem.cols(), tiles = (problem.rows.size() + 7) / 8;
  std::vector<bool> is_padding(cols, true);
  for (int head = 0; head < problem.params.num_heads; ++head) {
    const auto first = is_padding.begin() + FirstColumn(problem, head);
    std::fill(first, first + problem.params.head_dim, false);
  }
  for (size_t t = 0; t < problem.rows.size(); ++t) {
    const float* x = output.f32.data() + t * cols;
    for (int64_t c = 0; c < cols; ++c) {
      if (is_padding[c]) {
        ASSERT_EQ(x[c], 0.0f) << "row " << t << " padding column " << c;
      }
      ASSERT_EQ(output.bf16[t * cols + c], F32ToBF16(x[c])) << "row " << t << " column " << c;
    }
    if (output.q.empty()) continue;
    for (int64_t block = 0; block < cols / 32; ++block) {
      float amax = 0;
      for (int i = 0; i < 32; ++i) amax = std::max(amax, std::abs(x[32 * block + i]));
      const float scale = amax / 127.0f;
      ASSERT_EQ(output.scale[block * tiles * 8 + t], scale) << "row " << t << " block " << block;
      int sums[2] = {};
      for (int i = 0; i < 32; ++i) {
        const int64_t place = ((block * tiles + t / 8) * 32 + t % 8 * 4 + i / 8) * 8 + i % 8;
        const int want =
            amax == 0 ? 0 : static_cast<int>(std::nearbyint(x[32 * block + i] * (127.0f / amax)));
        ASSERT_EQ(output.q[place], want) << "row " << t << " column " << 32 * block + i;
        sums[i / 16] += want;
      }
      for (int i = 0; i < 2; ++i) {
        ASSERT_EQ(output.sums[(2 * block + i) * tiles * 8 + t],
                  scale * static_cast<float>(sums[i]));
      }
    }
  }
}

void ExpectSameBits(const Output& a, const Output& b) {
  ASSERT_EQ(a.f32.size(), b.f32.size());
  EXPECT_EQ(0, std::memcmp(a.f32.data(), b.f32.data(), a.f32.size() * sizeof(float)));
}

void RunAndCompare(Problem problem) {
  const Output output = Attend(problem, Kernel::kFewRows);
  ExpectReference(problem, output);
  ExpectForms(problem, output);
}

// Row t of a batch against the same row in a batch of its own.
void ExpectRowsIndependent(Problem problem, Kernel kernel) {
  const Output batch = Attend(problem, kernel);
  for (int t = 0; t < static_cast<int>(problem.rows.size()); ++t) {
    if (problem.rows[t].slot < 0) continue;
    Problem single = RowsOf(problem, {t});
    const Output alone = Attend(single, kernel);
    EXPECT_EQ(0, std::memcmp(alone.f32.data(), batch.f32.data() + t * problem.cols(),
                             problem.cols() * sizeof(float)))
        << "row " << t;
  }
}

// Sessions at their start, before the window is full, and after the ring has wrapped several times.
std::vector<Row> MixedRows() { return {{0, 0}, {1, 17}, {2, 200}, {0, 1}, {-1, 0}, {2, 201}}; }

TEST(AttentionTest, WindowOnly) {
  RunAndCompare(MakeProblem(8, 64, KvType::kF32, 24, 0, 0, MixedRows()));
}
TEST(AttentionTest, AllCompressedRows) {
  RunAndCompare(MakeProblem(8, 64, KvType::kF32, 24, 2, 0, MixedRows()));
}
TEST(AttentionTest, PickedRows) {
  RunAndCompare(MakeProblem(8, 64, KvType::kF32, 24, 2, 50, MixedRows()));
}
TEST(AttentionTest, SmallHeadsInBf16) {
  RunAndCompare(MakeProblem(8, 64, KvType::kBF16, 24, 2, 0, MixedRows()));
}
// 40 channels fill no whole warp and no block of 32; five heads.
TEST(AttentionTest, OddHeads) {
  RunAndCompare(MakeProblem(5, 40, KvType::kF32, 9, 3, 0, MixedRows()));
}
// Two heads of 64 in a group of 256 columns: half of them are padding.
TEST(AttentionTest, GroupsWithPadding) {
  RunAndCompare(MakeProblem(8, 64, KvType::kF32, 24, 0, 0, MixedRows(), 2));
}
// Three batches of the splits that are put together at once.
TEST(AttentionTest, ManySplits) {
  RunAndCompare(MakeProblem(2, 64, KvType::kF32, 128, 1, 0, {{0, 1400}, {1, 5}}));
}

TEST(AttentionTest, TilesOfOneSplit) {
  RunAndCompare(MakeProblem(4, 512, KvType::kBF16, 24, 0, 0, MixedRows()));
}
TEST(AttentionTest, TilesOverCompressedRows) {
  RunAndCompare(MakeProblem(8, 256, KvType::kBF16, 70, 2, 0, MixedRows(), 4));
}
TEST(AttentionTest, TilesOverPickedRows) {
  RunAndCompare(MakeProblem(16, 512, KvType::kBF16, 70, 2, 60, {{1, 17}, {2, 200}}, 8));
}
TEST(AttentionTest, TilesOfManyHeads) {
  RunAndCompare(MakeProblem(64, 512, KvType::kBF16, 100, 4, 20, {{2, 130}}, 8));
}
// 20 heads: the second group of 16 is not full.
TEST(AttentionTest, TilesOfOddHeads) {
  RunAndCompare(MakeProblem(20, 256, KvType::kBF16, 30, 1, 0, {{2, 100}, {0, 3}}));
}

// Blocks of 16 heads where there are processors for them, else of 32.
TEST(AttentionTest, SplitsOfAllHeadCountsGiveTheSameBits) {
  for (const int head_dim : {256, 512}) {
    SCOPED_TRACE(testing::Message() << head_dim << " channels");
    Problem problem = MakeProblem(40, head_dim, KvType::kBF16, 70, 2, 60, {{1, 17}, {2, 200}}, 8);
    const Output small = Attend(problem, Kernel::kFewRows, 1000);
    const Output large = Attend(problem, Kernel::kFewRows, 1);
    ExpectReference(problem, large);
    ExpectForms(problem, large);
    ExpectSameBits(small, large);
  }
}

// Every head count has a kernel of its own for many rows; all give the bits of the split kernel.
TEST(AttentionTest, ManyRowsGiveTheBitsOfFew) {
  for (const int num_heads : {8, 16, 24, 64}) {
    for (const int num_sms : {1, 1000}) {
      SCOPED_TRACE(testing::Message() << num_heads << " heads, " << num_sms << " processors");
      Problem problem = MakeProblem(num_heads, 256, KvType::kBF16, 70, 2, 40, MixedRows(), 8);
      const Output many = Attend(problem, Kernel::kManyRows, num_sms);
      ExpectForms(problem, many);
      ExpectSameBits(Attend(problem, Kernel::kFewRows), many);
    }
  }
}
TEST(AttentionTest, ManyRowsOfFullHeadsGiveTheBitsOfFew) {
  for (const int num_sms : {1, 1000}) {
    Problem problem = MakeProblem(64, 512, KvType::kBF16, 100, 2, 90, {{2, 250}, {1, 3}}, 8);
    const Output many = Attend(problem, Kernel::kManyRows, num_sms);
    ExpectReference(problem, many);
    ExpectForms(problem, many);
    ExpectSameBits(Attend(problem, Kernel::kFewRows), many);
  }
}

// From some number of rows on a launch takes another kernel, or goes through its rows in batches;
// the rows do not notice.
TEST(AttentionTest, LargeBatchesGiveTheBitsOfSmallOnes) {
  std::vector<Row> rows;
  for (int t = 0; t < 100; ++t) rows.push_back({t % kSlots, 3 * t});
  for (const int head_dim : {64, 256}) {
    SCOPED_TRACE(testing::Message() << head_dim << " channels");
    Problem problem = MakeProblem(2, head_dim, KvType::kBF16, 70, 8, 0, rows);
    const Output all = Attend(problem, Kernel::kFewRows);
    for (const int t : {0, 41, 99}) {
      Problem single = RowsOf(problem, {t});
      const Output alone = Attend(single, Kernel::kFewRows);
      EXPECT_EQ(0, std::memcmp(alone.f32.data(), all.f32.data() + t * problem.cols(),
                               problem.cols() * sizeof(float)))
          << "row " << t;
    }
  }
}

TEST(AttentionTest, RowsDoNotDependOnTheirBatch) {
  ExpectRowsIndependent(MakeProblem(4, 64, KvType::kF32, 24, 2, 50, MixedRows()), Kernel::kFewRows);
  ExpectRowsIndependent(MakeProblem(4, 256, KvType::kBF16, 70, 2, 50, MixedRows()),
                        Kernel::kFewRows);
  ExpectRowsIndependent(MakeProblem(20, 256, KvType::kBF16, 70, 2, 50, MixedRows()),
                        Kernel::kManyRows);
}

// A sink far above all scores takes nearly all of the weight: outputs near zero, nothing overflows.
TEST(AttentionTest, SinkAboveAllScores) {
  Problem problem = MakeProblem(2, 64, KvType::kF32, 24, 0, 0, {{0, 20}});
  problem.sinks = {80.0f, -80.0f};
  const Output output = Attend(problem, Kernel::kFewRows);
  ExpectReference(problem, output);
  for (int d = 0; d < 64; ++d) EXPECT_LT(std::abs(output.f32[d]), 1e-30f);
}

}  // namespace
}  // namespace ds4::cuda::attention_test
