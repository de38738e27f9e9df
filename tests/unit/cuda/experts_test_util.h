// Device and host sides of small tensors, for the tests of routing and experts.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/cuda/activation.h"
#include "engine/cuda/layout.h"
#include "engine/cuda/runtime.h"
#include "engine/tensor/quant.h"

namespace ds4::cuda {

// A stream on device 0; `launch` is what launch functions take. num_sms is small, so that blocks
// have several pieces of work each.
class TestDevice {
 public:
  explicit TestDevice(int num_sms = 3) {
    EXPECT_TRUE(UseDevice(0).ok());
    Result<Stream> stream = Stream::Create();
    EXPECT_TRUE(stream.ok()) << stream.status().ToString();
    stream_ = std::move(stream).value();
    launch.stream = &stream_;
    launch.num_sms = num_sms;
  }

  template <typename T>
  DeviceBuffer Upload(const std::vector<T>& host) {
    DeviceBuffer buffer = Allocate(static_cast<int64_t>(host.size() * sizeof(T)));
    EXPECT_TRUE(stream_.CopyToDevice(buffer.data(), host.data(), host.size() * sizeof(T)).ok());
    return buffer;
  }
  DeviceBuffer Allocate(int64_t bytes) {
    Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(std::max<int64_t>(bytes, 16));
    EXPECT_TRUE(buffer.ok()) << buffer.status().ToString();
    return std::move(buffer).value();
  }
  template <typename T>
  std::vector<T> Download(const T* device, int64_t count) {
    std::vector<T> host(count);
    EXPECT_TRUE(stream_.CopyToHost(host.data(), device, count * sizeof(T)).ok());
    EXPECT_TRUE(stream_.Synchronize().ok());
    return host;
  }
  void Finish() {
    ASSERT_TRUE(LaunchStatus().ok());
    const Status status = stream_.Synchronize();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  LaunchContext launch;

 private:
  Stream stream_;
};

// One random block with weights of about `scale`, every code and sign in use.
inline void RandomBlock(DType dtype, float scale, std::mt19937& random, std::byte* block) {
  const DTypeInfo& info = Info(dtype);
  for (int64_t i = 0; i < info.block_bytes; ++i) block[i] = static_cast<std::byte>(random() & 255);
  const auto put_half = [&](int64_t at, float value) {
    const float jitter = 0.5f + static_cast<float>(random() % 1000) / 1000.0f;
    const uint16_t bits = F32ToF16(value * jitter);
    std::memcpy(block + at, &bits, 2);
  };
  const float plain = scale * (static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
  switch (dtype) {
    case DType::kF32:
      std::memcpy(block, &plain, 4);
      break;
    case DType::kF16:
      put_half(0, plain);
      break;
    case DType::kBF16: {
      const uint16_t bits = F32ToBF16(plain);
      std::memcpy(block, &bits, 2);
      break;
    }
    case DType::kQ8_0:
      put_half(0, scale / 100);
      break;
    case DType::kMXFP4:
      block[0] = static_cast<std::byte>(127 - 6 + random() % 3);
      break;
    case DType::kQ4_K:
      put_half(0, scale / 300), put_half(2, scale / 40);
      break;
    case DType::kQ2_K:
      put_half(80, scale / 20), put_half(82, scale / 20);
      break;
    case DType::kIQ2_XXS:
      put_half(0, scale / 50);
      break;
    default:
      FAIL() << "no random blocks of " << info.name;
  }
}

// `count` random matrices on the device, and their values.
struct TestMatrix {
  PackedMatrix packed;
  DeviceBuffer memory;
  std::vector<float> values;  // [count][rows][cols]

  const float* Row(int64_t matrix, int64_t row) const {
    return values.data() + (matrix * packed.rows + row) * packed.cols;
  }
};

inline TestMatrix MakeMatrix(TestDevice& device, DType dtype, int64_t count, int64_t rows,
                             int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  const DTypeInfo& info = Info(dtype);
  const int64_t row_bytes = BytesFor(dtype, cols);
  std::vector<std::byte> file(count * rows * row_bytes);
  for (size_t at = 0; at < file.size(); at += info.block_bytes) {
    RandomBlock(dtype, 0.05f, random, file.data() + at);
  }
  TestMatrix matrix;
  matrix.values.resize(count * rows * cols);
  EXPECT_TRUE(Dequantize(dtype, file, matrix.values).ok());
  const int64_t bytes = PackedBytes(dtype, rows, cols);
  std::vector<std::byte> packed(count * bytes);
  for (int64_t i = 0; i < count; ++i) {
    PackOnHost(dtype, rows, cols, file.data() + i * rows * row_bytes, row_bytes,
               packed.data() + i * bytes);
  }
  matrix.memory = device.Upload(packed);
  matrix.packed = {dtype, count, rows, cols, matrix.memory.data()};
  return matrix;
}

inline bool ReadsQ8(DType dtype) {
  return dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16;
}

// Rows of activations in all decode forms: plain code for what activation.h says.
struct HostActivation {
  int rows = 0;
  int64_t cols = 0;
  std::vector<float> f32;
  std::vector<int8_t> q;  // fragment order
  std::vector<float> scale, sums;

  int tiles() const { return (rows + 7) / 8; }
  int64_t QIndex(int row, int64_t col) const {
    const int64_t lane = 4 * (row % 8) + col % 32 / 8;
    return ((col / 32 * tiles() + row / 8) * 32 + lane) * 8 + col % 8;
  }
  // The value that a product reads.
  double Value(int row, int64_t col, bool quantised) const {
    if (!quantised) return f32[row * cols + col];
    return static_cast<double>(q[QIndex(row, col)]) * scale[col / 32 * tiles() * 8 + row];
  }
  void Resize(int num_rows, int64_t num_cols) {
    rows = num_rows, cols = num_cols;
    f32.assign(rows * cols, 0.0f);
    // What rows past the last one hold must not matter.
    q.assign(tiles() * 8 * cols, 77);
    scale.assign(tiles() * 8 * cols / 32, NAN);
    sums.assign(tiles() * 8 * cols / 16, NAN);
  }
  void QuantiseFromF32() {
    for (int row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < cols / 32; ++block) QuantiseBlock(row, block);
    }
  }

 private:
  void QuantiseBlock(int row, int64_t block) {
    const float* x = f32.data() + row * cols + block * 32;
    float amax = 0.0f;
    for (int i = 0; i < 32; ++i) amax = std::max(amax, std::fabs(x[i]));
    const float inverse = amax == 0.0f ? 0.0f : 127.0f / amax;
    const float step = amax / 127.0f;
    scale[block * tiles() * 8 + row] = step;
    for (int half = 0; half < 2; ++half) {
      int sum = 0;
      for (int i = 16 * half; i < 16 * half + 16; ++i) {
        const int value = static_cast<int>(std::nearbyint(x[i] * inverse));
        q[QIndex(row, block * 32 + i)] = static_cast<int8_t>(value);
        sum += value;
      }
      sums[(block * 2 + half) * tiles() * 8 + row] = step * static_cast<float>(sum);
    }
  }
};

// Random rows; columns past segment_cols of each padded segment are zero.
inline HostActivation RandomActivation(int rows, int64_t segments, int64_t segment_cols,
                                       uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const int64_t padded = PaddedCols(segment_cols);
  HostActivation x;
  x.Resize(rows, segments * padded);
  for (int row = 0; row < rows; ++row) {
    for (int64_t s = 0; s < segments; ++s) {
      for (int64_t i = 0; i < segment_cols; ++i) {
        x.f32[row * x.cols + s * padded + i] = normal(random);
      }
    }
  }
  x.QuantiseFromF32();
  return x;
}

// The row `row` of `x` alone.
inline HostActivation OneRow(const HostActivation& x, int row) {
  HostActivation one;
  one.Resize(1, x.cols);
  std::copy_n(x.f32.begin() + row * x.cols, x.cols, one.f32.begin());
  one.QuantiseFromF32();
  return one;
}

struct DeviceActivation {
  DeviceBuffer f32, q, scale, sums;
  ActivationView view;
};

// Only the forms named in `forms`.
inline DeviceActivation UploadActivation(TestDevice& device, const HostActivation& x, int forms) {
  DeviceActivation out;
  out.view.rows = x.rows;
  out.view.cols = x.cols;
  if ((forms & kFormF32) != 0) {
    out.f32 = device.Upload(x.f32);
    out.view.f32 = out.f32.as<float>();
  }
  if ((forms & kFormQ8) != 0) {
    out.q = device.Upload(x.q);
    out.scale = device.Upload(x.scale);
    out.sums = device.Upload(x.sums);
    out.view.q = out.q.as<uint64_t>();
    out.view.scale = out.scale.as<float>();
    out.view.sums = out.sums.as<float>();
  }
  return out;
}

inline DeviceActivation EmptyActivation(TestDevice& device, int rows, int64_t cols, int forms) {
  HostActivation nothing;
  nothing.Resize(rows, cols);
  std::fill(nothing.f32.begin(), nothing.f32.end(), NAN);
  return UploadActivation(device, nothing, forms);
}

inline HostActivation DownloadActivation(TestDevice& device, const ActivationView& view) {
  HostActivation x;
  x.Resize(view.rows, view.cols);
  if (view.f32 != nullptr) x.f32 = device.Download(view.f32, x.f32.size());
  if (view.q != nullptr) {
    x.q = device.Download(reinterpret_cast<const int8_t*>(view.q), x.q.size());
    x.scale = device.Download(view.scale, x.scale.size());
    x.sums = device.Download(view.sums, x.sums.size());
  }
  return x;
}

}  // namespace ds4::cuda
