// Which rank holds which slice of every tensor, and what that costs. Pure: loads nothing.
//
//   token rows      heads          groups        o_b columns        vocabulary
//   (replicated)    q_b  [lane0]   o_a [lane0]   [l0|l1|...|l7]     head [lane0]
//                        [lane1]       [lane1]    each one lane          [lane1]
//                         ...           ...       of a shared sum         ...
//
// A rank owns whole lanes (LaneLayout); every split dimension is cut at lane borders, so the slices
// of all ranks put together are the whole tensor, and shared sums keep one order (docs/adr/0004).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/comm/lane_tree.h"
#include "engine/model/model_config.h"
#include "engine/model/tensor_names.h"

namespace ds4 {

// A half-open range [begin, end) of one dimension.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Lanes [begin, end) of num_lanes, of a dimension of `dim`.
Range LaneRange(int64_t dim, int num_lanes, int lane_begin, int lane_end);

struct TensorSlice {
  TensorSpec spec;
  DType dtype = DType::kF32;
  Range range;                       // of the split dimension; the whole one when replicated
  int64_t total = 0;                 // size of that dimension
  int64_t held_bytes = 0;            // in the file's type
  int64_t read_bytes_per_token = 0;  // one decoded token, batch 1, no drafting
};

struct RankPlan {
  int rank = 0;
  Range lanes;
  Range heads;
  Range groups;
  Range ffn;  // expert width
  Range vocab;
  std::vector<TensorSlice> slices;
  int64_t held_bytes = 0;
  int64_t read_bytes_per_token = 0;
};

struct ShardPlan {
  LaneLayout lanes;
  std::vector<RankPlan> ranks;

  // Hex digest over every slice of every rank; equal plans have equal digests.
  std::string Digest() const;
  // A table for people: one line per rank, then, if `details`, per tensor kind its slices.
  std::string ToString(bool details) const;
};

// kInvalidArgument: more ranks than lanes, a layout that does not fit the config, a lane that would
// cut a quantisation block (tensor named, both values); kNotFound: a tensor is missing.
Result<ShardPlan> MakeShardPlan(const ModelConfig& config, const GgufFile& file,
                                const LaneLayout& lanes);

}  // namespace ds4
