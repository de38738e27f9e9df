// Goal: every name of simt.h means the same to nvcc on a GPU as to the emulator.
// Method: one small kernel a name (simt_kernels.cu) against plain loops here. All expected values
// are exact: inputs are chosen so that float sums do not round.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "engine/tensor/quant.h"
#include "tests/unit/cuda/device_fixture.h"
#include "tests/unit/cuda/simt_kernels.h"

namespace ds4::cuda::testing {
namespace {

class SimtTest : public DeviceTest {};

bool SameFloat(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

TEST_F(SimtTest, WidensEveryHalfAndBf16) {
  constexpr int kPatterns = 65536;
  const DeviceBuffer half = Zeros(kPatterns * 4), bf16 = Zeros(kPatterns * 4);
  const DeviceBuffer half_pairs = Zeros(kPatterns * 8), bf16_pairs = Zeros(kPatterns * 8);
  LaunchWiden(launch,
              {half.as<float>(), bf16.as<float>(), half_pairs.as<float>(), bf16_pairs.as<float>()});
  const auto halves = ToHost<float>(half), bf16s = ToHost<float>(bf16);
  const auto half_twice = ToHost<float>(half_pairs), bf16_twice = ToHost<float>(bf16_pairs);
  for (int i = 0; i < kPatterns; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const auto other = static_cast<uint16_t>(kPatterns - 1 - i);
    ASSERT_TRUE(SameFloat(halves[i], F16ToF32(bits))) << "half " << i;
    ASSERT_TRUE(SameFloat(bf16s[i], BF16ToF32(bits))) << "bf16 " << i;
    ASSERT_TRUE(SameFloat(half_twice[2 * i], F16ToF32(bits))) << "low half " << i;
    ASSERT_TRUE(SameFloat(half_twice[2 * i + 1], F16ToF32(other))) << "high half " << i;
    ASSERT_TRUE(SameFloat(bf16_twice[2 * i], BF16ToF32(bits))) << "low bf16 " << i;
    ASSERT_TRUE(SameFloat(bf16_twice[2 * i + 1], BF16ToF32(other))) << "high bf16 " << i;
  }
}

TEST_F(SimtTest, FastReciprocalIsClose) {
  std::vector<float> x;
  for (int exponent = -125; exponent < 126; ++exponent) {
    for (int step = 0; step < 50; ++step) {
      x.push_back(std::ldexp(1.0f + 0.0199f * static_cast<float>(step), exponent));
    }
  }
  const DeviceBuffer in = ToDevice(x), out = Zeros(x.size() * 4);
  LaunchReciprocal(launch, in.as<float>(), static_cast<int>(x.size()), out.as<float>());
  const auto got = ToHost<float>(out);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(got[i] * static_cast<double>(x[i]), 1.0, 0x1p-22) << x[i];
  }
}

// Every half and the points between it and the next: exactly half way (ties go to even), and one
// float to either side.
std::vector<float> FloatsAroundHalves() {
  std::vector<float> values = {0.0f,     -0.0f,    65504.0f,
                               65519.9f, 65520.0f, 1e10f,
                               1e-10f,   3e38f,    std::numeric_limits<float>::infinity(),
                               1e-40f,   -1.0f / 3};
  for (uint32_t bits = 0; bits < 0x7bff; bits += 7) {
    const float low = F16ToF32(static_cast<uint16_t>(bits));
    const float high = F16ToF32(static_cast<uint16_t>(bits + 1));
    const float middle = (low + high) / 2;
    for (const float v :
         {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e6f)}) {
      values.push_back(v);
      values.push_back(-v);
    }
  }
  // The same around bf16: its ties are at the bit pattern 0x8000 of the lower half.
  for (const uint32_t low : {0x7fffu, 0x8000u, 0x8001u}) {
    for (uint32_t high = 0; high < 0x7f80; high += 97) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  return values;
}

TEST_F(SimtTest, NarrowsToTheNearestEven) {
  const std::vector<float> x = FloatsAroundHalves();
  const DeviceBuffer in = ToDevice(x);
  const DeviceBuffer half = Zeros(x.size() * 2), bf16 = Zeros(x.size() * 2);
  const DeviceBuffer pairs = Zeros(x.size() * 4);
  LaunchNarrow(launch, in.as<float>(), static_cast<int>(x.size()), half.as<uint16_t>(),
               bf16.as<uint16_t>(), pairs.as<uint32_t>());
  const auto halves = ToHost<uint16_t>(half), bf16s = ToHost<uint16_t>(bf16);
  const auto both = ToHost<uint32_t>(pairs);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(halves[i], F32ToF16(x[i])) << x[i];
    ASSERT_EQ(bf16s[i], F32ToBF16(x[i])) << x[i];
    const uint32_t expected =
        F32ToBF16(x[i]) | static_cast<uint32_t>(F32ToBF16(x[x.size() - 1 - i])) << 16;
    ASSERT_EQ(both[i], expected) << x[i];
  }
}

TEST_F(SimtTest, LanesExchangeValues) {
  std::vector<float> x(32);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>((i * 37 + 11) % 64 - 31);
  const DeviceBuffer in = ToDevice(x), out = Zeros(32 * kExchanges * 4);
  LaunchExchange(launch, in.as<float>(), out.as<float>());
  const auto got = ToHost<float>(out);
  float sum = 0, highest = x[0];
  uint32_t positive = 0, least_bits = ~0u, most_bits = 0, sum_of_bits = 0;
  for (int i = 0; i < 32; ++i) {
    const auto bits = std::bit_cast<uint32_t>(x[i]);
    least_bits = std::min(least_bits, bits);
    most_bits = std::max(most_bits, bits);
    sum_of_bits += bits;
    sum += x[i];
    highest = std::max(highest, x[i]);
    positive |= (x[i] > 0 ? 1u : 0u) << i;
  }
  for (int i = 0; i < 32; ++i) {
    const float* row = &got[i * kExchanges];
    EXPECT_EQ(row[0], x[3 * i % 32]) << "lane " << i;
    EXPECT_EQ(row[1], x[i ^ 5]) << "lane " << i;
    EXPECT_EQ(row[2], i + 7 < 32 ? x[i + 7] : x[i]) << "lane " << i << " has none below";
    EXPECT_EQ(std::bit_cast<uint32_t>(row[3]), positive) << "lane " << i;
    EXPECT_EQ(row[4], sum) << "lane " << i;
    EXPECT_EQ(row[5], highest) << "lane " << i;
    EXPECT_EQ(row[6], x[i / 4 * 4 + 2]) << "lane " << i;
    EXPECT_EQ(std::bit_cast<uint32_t>(row[7]), least_bits) << "lane " << i;
    EXPECT_EQ(std::bit_cast<uint32_t>(row[8]), most_bits) << "lane " << i;
    EXPECT_EQ(std::bit_cast<uint32_t>(row[9]), sum_of_bits) << "lane " << i;
    EXPECT_EQ(std::bit_cast<uint32_t>(row[10]), sum_of_bits) << "lane " << i;
  }
}

uint32_t BytePerm(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 7;
    const uint32_t byte = (pick < 4 ? x >> (8 * pick) : y >> (8 * (pick - 4))) & 0xff;
    result |= byte << (8 * i);
  }
  return result;
}

int Int8(uint32_t word, int i) { return static_cast<int8_t>(word >> (8 * i)); }
int Int16(uint32_t word, int i) { return static_cast<int16_t>(word >> (16 * i)); }

TEST_F(SimtTest, Integers) {
  std::mt19937 random(1);
  std::vector<uint32_t> a = {0, 1, 0x80000000u, 0xffffffffu, 0x7fffffffu, 0x00010000u};
  std::vector<uint32_t> b = {1, 0, 0x7fffffffu, 0, 0x80000000u, 0xfffffffeu};
  while (a.size() < 101) {
    a.push_back(static_cast<uint32_t>(random()) >> (random() % 32));
    b.push_back(static_cast<uint32_t>(random()));
  }
  const DeviceBuffer da = ToDevice(a), db = ToDevice(b),
                     out = Zeros(a.size() * kIntegerResults * 4);
  LaunchIntegers(launch, da.as<uint32_t>(), db.as<uint32_t>(), static_cast<int>(a.size()),
                 out.as<uint32_t>());
  const auto got = ToHost<uint32_t>(out);
  for (size_t i = 0; i < a.size(); ++i) {
    const auto sa = static_cast<int32_t>(a[i]), sb = static_cast<int32_t>(b[i]);
    const std::vector<uint32_t> expected = {
        static_cast<uint32_t>(std::popcount(a[i])),
        static_cast<uint32_t>(std::countl_zero(a[i])),
        a[i] == 0 ? 0 : static_cast<uint32_t>(std::countr_zero(a[i])) + 1,
        BytePerm(a[i], b[i], 0x6240),
        BytePerm(a[i], b[i], 0x1357),
        std::min(a[i], b[i]),
        std::max(a[i], b[i]),
        static_cast<uint32_t>(std::min(sa, sb)),
        static_cast<uint32_t>(std::max(sa, sb)),
        a[i] & 0xff7fffffu,
        static_cast<uint32_t>(static_cast<int>(i) + Int16(a[i], 0) * Int8(b[i], 0) +
                              Int16(a[i], 1) * Int8(b[i], 1)),
        static_cast<uint32_t>(-static_cast<int>(i) + Int16(a[i], 0) * Int8(b[i], 2) +
                              Int16(a[i], 1) * Int8(b[i], 3)),
        a[i],
        a[i] + b[i],
    };
    const std::vector<uint32_t> row(got.begin() + static_cast<ptrdiff_t>(i) * kIntegerResults,
                                    got.begin() + static_cast<ptrdiff_t>(i + 1) * kIntegerResults);
    EXPECT_EQ(row, expected) << std::hex << a[i] << ", " << b[i];
  }
}

TEST_F(SimtTest, MmaS8IsASumOfProducts) {
  std::mt19937 random(2);
  std::vector<int8_t> a(16 * 32), b(8 * 32);
  for (int8_t& v : a) v = static_cast<int8_t>(random() % 256 - 128);
  for (int8_t& v : b) v = static_cast<int8_t>(random() % 256 - 128);
  std::vector<int> c(16 * 8);
  for (int& v : c) v = static_cast<int>(random() % 2000) - 1000;
  const DeviceBuffer da = ToDevice(a), db = ToDevice(b), dc = ToDevice(c), d = Zeros(16 * 8 * 4);
  LaunchMmaS8(launch, da.as<int8_t>(), db.as<int8_t>(), dc.as<int>(), d.as<int>());
  const auto got = ToHost<int>(d);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      int expected = c[row * 8 + column];
      for (int k = 0; k < 32; ++k) expected += a[row * 32 + k] * b[column * 32 + k];
      EXPECT_EQ(got[row * 8 + column], expected) << "row " << row << " column " << column;
    }
  }
}

using NarrowFn = uint16_t(float);
using LaunchMmaFn = void(const LaunchContext&, const uint16_t*, const uint16_t*, const float*,
                         float*);

class MmaFloatTest : public SimtTest {
 protected:
  // Values are multiples of 1/8 below 4: products and their sums are exact in float32.
  void Check(NarrowFn* narrow, LaunchMmaFn* multiply) {
    std::mt19937 random(3);
    const auto draw = [&] { return static_cast<float>(static_cast<int>(random() % 63) - 31) / 8; };
    std::vector<float> a(16 * 16), b(8 * 16), c(16 * 8);
    for (auto* values : {&a, &b, &c}) {
      for (float& v : *values) v = draw();
    }
    std::vector<uint16_t> narrow_a, narrow_b;
    for (const float v : a) narrow_a.push_back(narrow(v));
    for (const float v : b) narrow_b.push_back(narrow(v));
    const DeviceBuffer da = ToDevice(narrow_a), db = ToDevice(narrow_b), dc = ToDevice(c);
    const DeviceBuffer d = Zeros(16 * 8 * 4);
    multiply(launch, da.as<uint16_t>(), db.as<uint16_t>(), dc.as<float>(), d.as<float>());
    const auto got = ToHost<float>(d);
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        float expected = c[row * 8 + column];
        for (int k = 0; k < 16; ++k) expected += a[row * 16 + k] * b[column * 16 + k];
        EXPECT_EQ(got[row * 8 + column], expected) << "row " << row << " column " << column;
      }
    }
  }
};

TEST_F(MmaFloatTest, Bf16) { Check(F32ToBF16, LaunchMmaBf16); }
TEST_F(MmaFloatTest, F16) { Check(F32ToF16, LaunchMmaF16); }

TEST_F(SimtTest, LoadMatrixSpreadsRowsOverLanes) {
  std::vector<uint16_t> matrices(4 * 8 * 8);
  for (size_t i = 0; i < matrices.size(); ++i) matrices[i] = static_cast<uint16_t>(i * 257 + 3);
  const DeviceBuffer in = ToDevice(matrices), plain = Zeros(32 * 16), transposed = Zeros(32 * 16);
  LaunchLoadMatrix(launch, in.as<uint16_t>(), plain.as<uint32_t>(), transposed.as<uint32_t>());
  const auto got = ToHost<uint32_t>(plain), got_transposed = ToHost<uint32_t>(transposed);
  const auto at = [&](int matrix, int row, int column) -> uint32_t {
    return matrices[matrix * 64 + row * 8 + column];
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      EXPECT_EQ(got[lane * 4 + m], at(m, row, column) | at(m, row, column + 1) << 16)
          << "lane " << lane << " matrix " << m;
      EXPECT_EQ(got_transposed[lane * 4 + m], at(m, column, row) | at(m, column + 1, row) << 16)
          << "lane " << lane << " matrix " << m;
    }
  }
}

TEST_F(SimtTest, ThreadsOfABlockShareMemory) {
  constexpr int kBlocks = 5, kThreads = 256;
  std::vector<float> x(kBlocks * kThreads);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const DeviceBuffer in = ToDevice(x);
  // Over 48 KB a kernel must be allowed to take it: the second size needs more than the first.
  for (const size_t shared_bytes : {size_t{1024}, size_t{100 * 1024}, size_t{200 * 1024}}) {
    const DeviceBuffer out = Zeros(x.size() * 4);
    LaunchReverse(launch, in.as<float>(), kBlocks, shared_bytes, out.as<float>());
    const auto got = ToHost<float>(out);
    for (int i = 0; i < kBlocks * kThreads; ++i) {
      ASSERT_EQ(got[i], x[i / kThreads * kThreads + kThreads - 1 - i % kThreads])
          << i << " with " << shared_bytes << " bytes";
    }
  }
}

TEST_F(SimtTest, TeamsOfABlockWaitForThemselvesAlone) {
  std::vector<uint32_t> x(64 * kTeams);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint32_t>(i) * 2654435761u;
  const DeviceBuffer device = ToDevice(x);
  LaunchTeams(launch, device.as<uint32_t>());
  const auto got = ToHost<uint32_t>(device);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t team = i / 64, steps = team + 3;
    EXPECT_EQ(got[i], x[team * 64 + (i + steps) % 64] << steps) << i;
  }
}

TEST_F(SimtTest, AddressesFromBytes) {
  std::vector<uint32_t> table(256 * 64), words(100);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint32_t>(i) * 2654435761u;
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(i + 1) * 0x9e3779b9u;
  const DeviceBuffer in = ToDevice(words), entries = ToDevice(table),
                     out = Zeros(words.size() * 16);
  LaunchLookUp(launch, in.as<uint32_t>(), static_cast<int>(words.size()), entries.as<uint32_t>(),
               out.as<uint32_t>());
  const auto got = ToHost<uint32_t>(out);
  for (size_t i = 0; i < got.size(); ++i) {
    const uint32_t entry = words[i / 4] >> (8 * (i % 4)) & 255;
    EXPECT_EQ(got[i], table[64 * entry + i / 4 % 64]) << i;
  }
}

TEST_F(SimtTest, AsynchronousCopiesInGroups) {
  constexpr int kStages = 11, kValues = 128;
  std::vector<float> x(kStages * kValues);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 251);
  const DeviceBuffer in = ToDevice(x), out = Zeros(kValues * 4);
  LaunchPipeline(launch, in.as<float>(), kStages, out.as<float>());
  const auto got = ToHost<float>(out);
  for (int i = 0; i < kValues; ++i) {
    float expected = 0;
    for (int s = 0; s < kStages; ++s) expected += x[s * kValues + i] * static_cast<float>(s + 1);
    EXPECT_EQ(got[i], expected) << i;
  }
}

TEST_F(SimtTest, BulkCopiesInPhases) {
  for (const int stages : {1, 2, 9}) {
    std::vector<uint32_t> x(static_cast<size_t>(stages) * 560);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint32_t>(i + 1) * 2654435761u;
    const DeviceBuffer in = ToDevice(x), out = Zeros(x.size() * 4);
    LaunchBulk(launch, in.data(), stages, out.data());
    EXPECT_EQ(ToHost<uint32_t>(out), x) << stages;
  }
}

TEST_F(SimtTest, LoadsOfSixteenBytes) {
  std::vector<uint32_t> x(1001 * 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint32_t>(i) * 2654435761u;
  const DeviceBuffer in = ToDevice(x), out = Zeros(x.size() * 4);
  LaunchStreamCopy(launch, in.data(), static_cast<int>(in.size()), out.data());
  EXPECT_EQ(ToHost<uint32_t>(out), x);
}

TEST_F(SimtTest, ARehearsalComesBeforeTheTurn) {
  for (const bool rehearse : {false, true}) {
    const DeviceBuffer out = Zeros(64 * 4);
    LaunchRehearse(launch, rehearse, out.as<int>());
    EXPECT_THAT(ToHost<int>(out), ::testing::Each(rehearse ? 2 : 1));
  }
}

TEST_F(SimtTest, ThreadsAndBlocksAreNumberedInThreeDimensions) {
  constexpr int kBlocks = 3 * 2 * 2, kThreads = 8 * 4 * 3;
  const DeviceBuffer out = Zeros(kBlocks * kThreads * 4);
  LaunchNumberThreads(launch, out.as<int>());
  const auto got = ToHost<int>(out);
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    ASSERT_EQ(got[i], 1000 * (i / kThreads) + i % kThreads);
  }
}

TEST_F(SimtTest, AtomicsLoseNothing) {
  constexpr int kThreads = 992;
  const DeviceBuffer out = Zeros((6 + kThreads / 32) * 4);
  LaunchAtomics(launch, kThreads, out.as<uint32_t>());
  const auto got = ToHost<uint32_t>(out);
  constexpr int kSum = kThreads * (kThreads - 1) / 2;  // exact as a float too
  EXPECT_EQ(static_cast<int32_t>(got[0]), -kSum);
  EXPECT_EQ(got[1], kSum);
  EXPECT_EQ(std::bit_cast<float>(got[2]), static_cast<float>(kSum));
  EXPECT_EQ(static_cast<int32_t>(got[3]), kThreads - 1);
  EXPECT_EQ(got[4], kThreads) << "compare-and-swap let two threads win at once";
  EXPECT_EQ(got[5], kThreads % 100);
  for (int i = 0; i < kThreads / 32; ++i) EXPECT_EQ(got[6 + i], 0xffffffffu) << "word " << i;
}

TEST_F(SimtTest, TheLastToArriveSeesWhatTheOthersWrote) {
  constexpr uint32_t kThreads = 200 * 64;
  const DeviceBuffer counter = Zeros(4), sum = Zeros(4);
  const DeviceBuffer numbers = Zeros(kThreads * 4), floats = Zeros(kThreads * 4);
  for (uint32_t times = 1; times <= 3; ++times) {
    LaunchArrive(launch, kThreads / 64, counter.as<uint32_t>(), numbers.as<uint32_t>(),
                 floats.as<float>(), sum.as<uint32_t>());
    EXPECT_EQ(ToHost<uint32_t>(sum)[0], times * (kThreads * (kThreads - 1)));
    EXPECT_EQ(ToHost<uint32_t>(counter)[0], 0u);
    ASSERT_TRUE(stream.Fill(numbers.data(), 0, numbers.size()).ok());
    ASSERT_TRUE(stream.Fill(floats.data(), 0, floats.size()).ok());
  }
}

// A kernel and a thread of the host talk through pinned memory while the kernel runs.
TEST_F(SimtTest, FlagsCrossToTheHostAndBack) {
  Result<PinnedBuffer> made = PinnedBuffer::Allocate(12);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  auto* words = made->as<uint32_t>();  // flag of the kernel, flag of the host, data
  const DeviceBuffer result = Zeros(4);
  std::jthread host([words](std::stop_token stop) {
    std::atomic_ref<uint32_t> theirs(words[0]), ours(words[1]);
    while (theirs.load(std::memory_order_acquire) != 1) {
      if (stop.stop_requested()) return;
      std::this_thread::yield();
    }
    words[2] = 41;
    ours.store(2, std::memory_order_release);
  });
  LaunchHandshake(launch, words, words + 2, 10000, result.as<uint32_t>());
  EXPECT_EQ(ToHost<uint32_t>(result), std::vector<uint32_t>{42});
}

TEST_F(SimtTest, AKernelThatWaitsInVainEnds) {
  Result<PinnedBuffer> made = PinnedBuffer::Allocate(12);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  auto* words = made->as<uint32_t>();
  const DeviceBuffer result = ToDevice(std::vector<uint32_t>{7});
  LaunchHandshake(launch, words, words + 2, 5, result.as<uint32_t>());
  EXPECT_EQ(ToHost<uint32_t>(result), std::vector<uint32_t>{0});
}

// Each kernel may start before the one ahead has ended; GridDependencyWait must keep the order.
TEST_F(SimtTest, OverlappingKernelsSeeWhatTheOnesBeforeWrote) {
  constexpr int kCount = 5000, kSteps = 50;
  for (const bool overlap : {false, true}) {
    launch.overlap = overlap;
    const DeviceBuffer x = Zeros(kCount * 4);
    for (int i = 0; i < kSteps; ++i) LaunchStep(launch, x.as<uint32_t>(), kCount);
    uint32_t expected = 0;
    for (int i = 0; i < kSteps; ++i) expected = 3 * expected + 1;
    EXPECT_THAT(ToHost<uint32_t>(x), ::testing::Each(expected)) << "overlap " << overlap;
  }
}

}  // namespace
}  // namespace ds4::cuda::testing
