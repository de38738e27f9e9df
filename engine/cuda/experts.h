// Routing and routed experts for few rows (decode, verification, small batches). Spec 2.9.
#pragma once

#include "engine/cuda/activation.h"
#include "engine/cuda/hyper_connection.h"
#include "engine/cuda/layout.h"

namespace ds4::cuda {

inline constexpr int kMaxExpertsUsed = 16;

struct RouterParams {
  int num_experts = 0;
  int used = 0;
  float scale = 1.0f;                 // expert_weights_scale
  const float* bias = nullptr;        // [num_experts], score-routed
  const int32_t* hash_ids = nullptr;  // [vocab][used], hash-routed
};

// Scratch of a fixed size for up to `max_rows` rows; device pointers.
//   ids, weights: [rows][used], in the order chosen (hash: table order). Work lists: the pairs
//   (row, k) sorted by expert, then by row; groups of at most 8 pairs of one expert.
struct Routing {
  int32_t* ids = nullptr;
  float* weights = nullptr;
  int32_t* group_expert = nullptr;  // [max_groups]
  int32_t* group_first = nullptr;   // [max_groups] first pair of the group in `pairs`
  int32_t* group_size = nullptr;    // [max_groups] 1..8
  int32_t* num_groups = nullptr;    // [1]
  int32_t* pairs = nullptr;         // [rows * used] row * used + k, sorted
  int32_t* pair_place = nullptr;    // [rows * used] place of pair (row, k) in `pairs`
  float* place_weight = nullptr;    // [rows * used] weights by place in `pairs`
  // Only where logits are routed, LaunchRoute:
  int32_t* expert_first = nullptr;  // [num_experts + 1] first place of each expert in `pairs`
  int32_t* counts = nullptr;        // [num_experts] used while rows are placed
};
// Bytes of everything above for max_rows rows, each array 256-byte aligned; and its addresses.
int64_t RoutingBytes(int64_t max_rows, const RouterParams& params);
Routing MakeRouting(std::byte* memory, int64_t max_rows, const RouterParams& params);

// logits: [rows][num_experts] (both kinds of router). s = sqrt(softplus(logit)); score-routed:
// the `used` largest s + bias, the lower id on ties; weights s / (sum + 1e-20) * scale, the sum in
// the order chosen. tokens: [rows], read when hash-routed. Every idle row is routed like any other.
// In the same launch, `balance`.
void LaunchRoute(const LaunchContext& launch, const RouterParams& params, const float* logits,
                 const int32_t* tokens, int rows, const Routing& routing,
                 const SinkhornJob& balance = {});

// The same for few rows, with the logits' product (w: [num_experts, D] of a type that IsRouterType
// takes, x.f32), in one launch. One result for a row, whatever rows are beside it. scratch: zeros
// before the first launch on it, and nobody else's.
inline constexpr int kMaxRouterRows = 64;
bool IsRouterType(DType dtype);
int64_t RouterScratchBytes(int64_t max_rows, int64_t num_experts, int64_t cols);
void LaunchRouter(const LaunchContext& launch, const RouterParams& params, const PackedMatrix& w,
                  const ActivationView& x, const int32_t* tokens, const Routing& routing,
                  std::byte* scratch, const SinkhornJob& balance = {});

// hidden = silu(min(g, limit)) * clamp(u, -limit, limit) * router weight, for every pair, in place
// p = pair_place order, and for the shared expert (weight 1, its own limit). gate, up: [experts]
// matrices [ffn, D]; shared_gate, shared_up: [ffn, D]. ffn is this rank's part: lanes of lane_cols
// each. out, shared_out: rows = pairs (rows * used) / x.rows; lane segments of
// PaddedCols(lane_cols) columns; forms by the type of the down matrices.
struct ExpertsUp {
  PackedMatrix gate, up, shared_gate, shared_up;
  ActivationView x;
  int64_t lane_cols = 0;
  float limit = 0, shared_limit = 0;
  ActivationView out, shared_out;
};
// Lets the next kernel on the stream start only when the routing is complete.
void LaunchExpertsUp(const LaunchContext& launch, const ExpertsUp& job, const Routing& routing,
                     int used);

// Lane sums of one row and output d: shared expert's product, then the experts' by rising expert
// id, each one float32 addition; then the subtree roots of the local lanes as in LaunchLaneProduct.
// down: [experts * lanes] matrices [D, lane_cols], lane l of expert e at e * lanes + l;
// shared_down: [lanes]. roots: [SubtreesOf(...)][rows][D].
// Reads the routing before the kernel ahead of it has ended: on the stream it must stand right
// behind LaunchExpertsUp, or behind one that started after the routing was complete.
struct ExpertsDown {
  PackedMatrix down, shared_down;
  int lanes = 1;
  int lane_begin = 0;
  ActivationView hidden, shared_hidden;  // as ExpertsUp gave them
  float* roots = nullptr;
};
void LaunchExpertsDown(const LaunchContext& launch, const ExpertsDown& job, const Routing& routing,
                       int used, int rows);

}  // namespace ds4::cuda
