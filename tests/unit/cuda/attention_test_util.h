// Device side of small caches and rows, and plain double-precision norms and rotations, for the
// tests of cache writes and attention.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/cuda/attention.h"
#include "engine/tensor/quant.h"

namespace ds4::cuda::attention_test {

// Stream, launch context and the buffers of one test.
class Bench {
 public:
  Bench() {
    EXPECT_TRUE(UseDevice(0).ok());
    Result<Stream> stream = Stream::Create();
    EXPECT_TRUE(stream.ok());
    stream_ = std::move(stream).value();
    launch.stream = &stream_;
  }

  // Device memory of `bytes` that the bench owns, filled with zeros.
  std::byte* Allocate(int64_t bytes) {
    Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(bytes < 16 ? 16 : bytes);
    EXPECT_TRUE(buffer.ok());
    buffers_.push_back(std::move(buffer).value());
    return buffers_.back().data();
  }
  template <typename T>
  T* Upload(const std::vector<T>& host) {
    const int64_t bytes = static_cast<int64_t>(host.size() * sizeof(T));
    std::byte* device = Allocate(bytes);
    EXPECT_TRUE(stream_.CopyToDevice(device, host.data(), bytes).ok());
    Finish();
    return reinterpret_cast<T*>(device);
  }
  template <typename T>
  std::vector<T> Download(const void* device, int64_t count) {
    std::vector<T> host(count);
    EXPECT_TRUE(stream_.CopyToHost(host.data(), device, count * sizeof(T)).ok());
    Finish();
    return host;
  }
  void Finish() {
    const Status launched = LaunchStatus();
    ASSERT_TRUE(launched.ok()) << launched.ToString();
    const Status status = stream_.Synchronize();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  LaunchContext launch;

 private:
  Stream stream_;
  std::vector<DeviceBuffer> buffers_;
};

// Cache elements as float, and the other way round.
inline std::vector<float> DownloadKv(Bench& bench, KvType type, const void* data, int64_t count) {
  if (type == KvType::kF32) return bench.Download<float>(data, count);
  std::vector<float> values;
  for (uint16_t bits : bench.Download<uint16_t>(data, count)) values.push_back(BF16ToF32(bits));
  return values;
}
inline void* UploadKv(Bench& bench, KvType type, std::vector<float>& values) {
  if (type == KvType::kF32) return bench.Upload(values);
  std::vector<uint16_t> bits;
  for (float& value : values) {
    bits.push_back(F32ToBF16(value));
    value = BF16ToF32(bits.back());
  }
  return bench.Upload(bits);
}

inline std::vector<float> Normal(std::mt19937& random, int64_t count, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

struct Row {
  int slot = 0;
  int pos = 0;
};
inline StepRows UploadRows(Bench& bench, const std::vector<Row>& rows) {
  std::vector<int32_t> token(rows.size()), pos, slot;
  for (const Row& row : rows) {
    pos.push_back(row.pos);
    slot.push_back(row.slot);
  }
  return {bench.Upload(token), bench.Upload(pos), bench.Upload(slot)};
}

inline std::vector<double> Frequencies(int rope_dim) {
  std::vector<double> frequencies;
  for (int i = 0; i < rope_dim / 2; ++i) frequencies.push_back(std::pow(1e4, -2.0 * i / rope_dim));
  return frequencies;
}
inline RopeView UploadRope(Bench& bench, const std::vector<Row>& rows, int rope_dim) {
  const std::vector<double> frequencies = Frequencies(rope_dim);
  std::vector<float> cos, sin;
  for (const Row& row : rows) {
    for (double frequency : frequencies) {
      cos.push_back(static_cast<float>(std::cos(row.pos * frequency)));
      sin.push_back(static_cast<float>(std::sin(row.pos * frequency)));
    }
  }
  return {bench.Upload(cos), bench.Upload(sin), bench.Upload(frequencies)};
}

inline void Norm(std::vector<double>& x, const float* weight, double eps) {
  double squares = 0;
  for (double value : x) squares += value * value;
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= factor * (weight == nullptr ? 1.0 : weight[i]);
}
inline void Rotate(std::vector<double>& x, int rope_dim, double pos) {
  const std::vector<double> frequencies = Frequencies(rope_dim);
  double* tail = x.data() + x.size() - rope_dim;
  for (int i = 0; i < rope_dim / 2; ++i) {
    const double c = std::cos(pos * frequencies[i]), s = std::sin(pos * frequencies[i]);
    const double a = tail[2 * i], b = tail[2 * i + 1];
    tail[2 * i] = a * c - b * s;
    tail[2 * i + 1] = a * s + b * c;
  }
}

}  // namespace ds4::cuda::attention_test
