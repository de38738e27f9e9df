// Goal: a packed matrix holds exactly the weights of its file rows, for every type and odd sizes;
// packing on the device gives the bytes of the plain host form; random contents are valid.
// Method: a product with the rows of the identity reads the packed layout back value by value
// (LaunchProductPlain follows layout.h's description, and one product is exact), compared with
// Dequantize of the file's bytes. Packing on the device is compared byte by byte with PackOnHost.
#include "engine/cuda/layout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "engine/cuda/product.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {
namespace {

constexpr DType kTypes[] = {DType::kF32,   DType::kF16,  DType::kBF16, DType::kQ8_0,
                            DType::kMXFP4, DType::kQ4_K, DType::kQ2_K, DType::kIQ2_XXS};

std::string NameOf(const ::testing::TestParamInfo<DType>& info) {
  return std::string(Info(info.param).name);
}

class LayoutTest : public ::testing::TestWithParam<DType> {
 protected:
  // `cols`, or the next whole block.
  int64_t Cols(int64_t cols) const {
    const int64_t block = Info(GetParam()).block_elems;
    return (cols + block - 1) / block * block;
  }
  std::vector<std::byte> RandomFile(int64_t rows, int64_t cols, uint32_t seed) const {
    std::mt19937 random(seed);
    std::vector<std::byte> file(static_cast<size_t>(rows * BytesFor(GetParam(), cols)));
    const auto block_bytes = static_cast<size_t>(Info(GetParam()).block_bytes);
    for (size_t at = 0; at < file.size(); at += block_bytes) {
      RandomBlock(GetParam(), 0.05f, random, file.data() + at);
    }
    return file;
  }
  // All weights of a packed matrix on the device, [rows][padded cols].
  std::vector<float> ReadBack(const PackedMatrix& matrix) {
    const auto cols = static_cast<int>(matrix.padded_cols());
    HostActivation identity;
    identity.Resize(cols, cols);
    for (int i = 0; i < cols; ++i) identity.f32[static_cast<size_t>(i * cols + i)] = 127.0f;
    identity.QuantiseFromF32();  // 127 with scale 1
    for (int8_t& q : identity.q) q = q == 127 ? 1 : q;
    for (int i = 0; i < cols; ++i) identity.f32[static_cast<size_t>(i * cols + i)] = 1.0f;
    const DeviceActivation x = UploadActivation(device_, identity, kFormF32 | kFormQ8);
    const DeviceBuffer y = device_.Allocate(cols * matrix.rows * 4);
    ProductJob job;
    job.w = matrix;
    job.x = x.view;
    job.y = y.as<float>();
    job.y_stride = matrix.rows;
    LaunchProductPlain(device_.launch, job);
    device_.Finish();
    const std::vector<float> by_column = device_.Download(y.as<float>(), cols * matrix.rows);
    std::vector<float> weights(by_column.size());
    for (int64_t r = 0; r < matrix.rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) weights[r * cols + c] = by_column[c * matrix.rows + r];
    }
    return weights;
  }

  TestDevice device_;
};

// A chunk takes the bytes of its blocks in the file.
// Only IQ2_XXS has more: the signs that the file leaves to parity, 64 bytes a chunk.
TEST_P(LayoutTest, PackingCostsNoBytes) {
  const int64_t more = GetParam() == DType::kIQ2_XXS ? 2 * 64 : 0;  // for 16 rows of 512 columns
  const int64_t tile = 16 * BytesFor(GetParam(), 512) + more;
  EXPECT_EQ(PackedBytes(GetParam(), 32, 512), 2 * tile);
  EXPECT_EQ(PackedBytes(GetParam(), 17, 512), 2 * tile);
  EXPECT_EQ(PackedBytes(GetParam(), 16, 257), tile);
}

TEST_P(LayoutTest, HoldsTheWeightsOfTheFile) {
  const int64_t rows = 19;
  for (const int64_t wanted : {70, 512}) {
    const int64_t cols = Cols(wanted);
    const auto file = RandomFile(rows, cols, 1);
    std::vector<float> weights(static_cast<size_t>(rows * cols));
    ASSERT_TRUE(Dequantize(GetParam(), file, weights).ok());
    std::vector<std::byte> packed(static_cast<size_t>(PackedBytes(GetParam(), rows, cols)));
    PackOnHost(GetParam(), rows, cols, file.data(), BytesFor(GetParam(), cols), packed.data());
    const DeviceBuffer memory = device_.Upload(packed);
    const PackedMatrix matrix{GetParam(), 1, rows, cols, memory.data()};
    const std::vector<float> read = ReadBack(matrix);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < matrix.padded_cols(); ++c) {
        const float want = c < cols ? weights[static_cast<size_t>(r * cols + c)] : 0.0f;
        ASSERT_EQ(read[static_cast<size_t>(r * matrix.padded_cols() + c)], want)
            << "row " << r << " column " << c << " of " << cols;
      }
    }
  }
}

// Rows that stand apart in the source, at the least alignment of their type, packed in two calls.
TEST_P(LayoutTest, DevicePacksLikeTheHost) {
  const int64_t align = GetParam() == DType::kMXFP4 ? 1 : 2;
  for (const auto& [rows, wanted] : {std::pair{1, 33}, {16, 256}, {41, 300}, {35, 640}}) {
    const int64_t cols = Cols(wanted);
    const int64_t row_bytes = BytesFor(GetParam(), cols);
    const int64_t stride = row_bytes + align;
    const auto file = RandomFile(rows, cols, 2);
    std::vector<std::byte> source(static_cast<size_t>(align + rows * stride), std::byte{0x5a});
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(file.data() + r * row_bytes, row_bytes, source.data() + align + r * stride);
    }
    const int64_t bytes = PackedBytes(GetParam(), rows, cols);
    std::vector<std::byte> want(static_cast<size_t>(bytes));
    PackOnHost(GetParam(), rows, cols, file.data(), row_bytes, want.data());

    const DeviceBuffer raw = device_.Upload(source);
    const DeviceBuffer out = device_.Upload(std::vector<std::byte>(want.size(), std::byte{0x77}));
    const std::byte* first = raw.data() + align;
    const int64_t cut = std::min<int64_t>(rows / kTileRows, 1) * kTileRows;
    LaunchPack(device_.launch, GetParam(), rows, cols, 0, cut, first, stride, out.data());
    LaunchPack(device_.launch, GetParam(), rows, cols, cut, rows - cut, first + cut * stride,
               stride, out.data());
    device_.Finish();
    EXPECT_EQ(device_.Download(out.data(), bytes), want) << rows << " x " << cols;
  }
}

// Two experts of random weights: mean 0 and deviation 0.02, zeros in the padding, other weights for
// another seed and for the other expert.
TEST_P(LayoutTest, RandomContentsAreValid) {
  const int64_t rows = 40;
  const int64_t cols = Cols(480);
  const int64_t bytes = PackedBytes(GetParam(), rows, cols);
  const auto fill = [&](uint64_t seed) {
    DeviceBuffer memory = device_.Allocate(2 * bytes);
    LaunchFillRandom(device_.launch, {GetParam(), 2, rows, cols, memory.data()}, seed);
    device_.Finish();
    return memory;
  };
  const DeviceBuffer first = fill(7);
  const DeviceBuffer other = fill(8);
  const auto contents = device_.Download(first.data(), 2 * bytes);
  EXPECT_EQ(contents, device_.Download(fill(7).data(), 2 * bytes));
  EXPECT_NE(contents, device_.Download(other.data(), 2 * bytes));
  EXPECT_FALSE(std::equal(contents.begin(), contents.begin() + bytes, contents.begin() + bytes));

  // All rows of the padded tiles.
  const PackedMatrix matrix{GetParam(), 1, PaddedRows(rows), cols, first.data()};
  const std::vector<float> weights = ReadBack(matrix);
  double sum = 0;
  double squares = 0;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.padded_cols(); ++c) {
      const float w = weights[static_cast<size_t>(r * matrix.padded_cols() + c)];
      ASSERT_TRUE(std::isfinite(w));
      const bool padding = r >= rows || c >= cols;
      ASSERT_TRUE(!padding || w == 0.0f) << "row " << r << " column " << c << ": " << w;
      sum += w;
      squares += static_cast<double>(w) * w;
    }
  }
  // About 19,200 values (correlated through scales at most): the mean's own deviation is 0.00015.
  const double count = static_cast<double>(rows * cols);
  EXPECT_NEAR(sum / count, 0.0, 0.001);
  EXPECT_NEAR(std::sqrt(squares / count), 0.02, 0.002);
}

INSTANTIATE_TEST_SUITE_P(Types, LayoutTest, ::testing::ValuesIn(kTypes), NameOf);

}  // namespace
}  // namespace ds4::cuda
