// Manifold-constrained hyper-connections: how the residual streams feed a sub-layer and take its
// result back (spec 2.2, 2.3). All float32.
#pragma once

#include <cstdint>

#include "engine/kernels/matmul.h"

namespace ds4 {

struct HyperConnectionParams {
  int64_t num_streams = 4;  // H
  int64_t hidden_dim = 0;   // D
  int sinkhorn_iterations = 20;
  float hc_eps = 1e-6f;
  float norm_eps = 1e-6f;
};

// One site's weights. fn: [2H + H*H, H*D]; base: [2H + H*H]; scale: [3].
struct HyperConnectionWeights {
  MatrixView fn;
  const float* base = nullptr;
  const float* scale = nullptr;
};

// streams: [num_rows, H, D]. Writes collapsed [num_rows, D] (the sub-layer's input before its
// norm), post [num_rows, H] and comb [num_rows, H, H] (row i: source stream, column j:
// destination).
void HyperConnectionPre(const float* streams, int64_t num_rows, const HyperConnectionParams& params,
                        const HyperConnectionWeights& weights, float* collapsed, float* post,
                        float* comb, ThreadPool& pool);

// streams[t,k,:] = post[t,k] * result[t,:] + sum_j comb[t,j,k] * streams[t,j,:], in place.
void HyperConnectionPost(float* streams, const float* result, const float* post, const float* comb,
                         int64_t num_rows, const HyperConnectionParams& params, ThreadPool& pool);

// The output head's collapse (spec 2.3): fn [H, H*D], base [H], scale [1]; out [num_rows, D].
void HyperConnectionHead(const float* streams, int64_t num_rows,
                         const HyperConnectionParams& params, const HyperConnectionWeights& weights,
                         float* out, ThreadPool& pool);

}  // namespace ds4
