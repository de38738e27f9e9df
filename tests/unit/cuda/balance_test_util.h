// Sinkhorn's balancing in double, and a job of it on the device for the tests of the kernels that
// do one beside their own work.
#pragma once

#include <cmath>
#include <vector>

#include "engine/cuda/hyper_connection.h"
#include "tests/unit/cuda/experts_test_util.h"

namespace ds4::cuda {

inline double Logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Spec 2.2 step 4 in double.
inline void SinkhornInDouble(int h, int iterations, double eps, double* c) {
  for (int i = 0; i < h; ++i) {
    double top = c[i * h], sum = 0;
    for (int j = 0; j < h; ++j) top = std::max(top, c[i * h + j]);
    for (int j = 0; j < h; ++j) sum += c[i * h + j] = std::exp(c[i * h + j] - top);
    for (int j = 0; j < h; ++j) c[i * h + j] = c[i * h + j] / sum + eps;
  }
  for (int n = 0; n < iterations; ++n) {
    for (int i = 0; i < h && n > 0; ++i) {
      double sum = eps;
      for (int j = 0; j < h; ++j) sum += c[i * h + j];
      for (int j = 0; j < h; ++j) c[i * h + j] /= sum;
    }
    for (int j = 0; j < h; ++j) {
      double sum = eps;
      for (int i = 0; i < h; ++i) sum += c[i * h + j];
      for (int i = 0; i < h; ++i) c[i * h + j] /= sum;
    }
  }
}

// Random mixes of four streams, with room for what comes of them.
struct BalanceCase {
  BalanceCase(TestDevice& device, int num_rows) : rows(num_rows), host(num_rows * kMixSlots) {
    std::mt19937 random(num_rows);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    for (float& z : host) z = normal(random);
    mixes = device.Upload(host);
    post = device.Allocate(int64_t{rows} * 4 * 4);
    comb = device.Allocate(int64_t{rows} * 16 * 4);
  }
  SinkhornJob job() const {
    return BalanceOf(params, rows, mixes.as<float>(), {post.as<float>(), comb.as<float>()});
  }
  void ExpectDone(TestDevice& device) const {
    const std::vector<float> got_post = device.Download(post.as<float>(), int64_t{rows} * 4);
    const std::vector<float> got_comb = device.Download(comb.as<float>(), int64_t{rows} * 16);
    for (int t = 0; t < rows; ++t) {
      const float* z = &host[t * kMixSlots];
      std::vector<double> want(z + 8, z + 24);
      SinkhornInDouble(4, params.sinkhorn_iterations, params.hc_eps, want.data());
      for (int i = 0; i < 4; ++i) ASSERT_NEAR(got_post[t * 4 + i], 2 * Logistic(z[4 + i]), 2e-6);
      for (int i = 0; i < 16; ++i) ASSERT_NEAR(got_comb[t * 16 + i], want[i], 1e-6) << "row " << t;
    }
  }

  HcParams params;
  int rows;
  std::vector<float> host;
  DeviceBuffer mixes, post, comb;
};

}  // namespace ds4::cuda
