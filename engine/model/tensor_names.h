// Names in GGUF files to our tensor roles: the one table of what a block is made of, its shapes and
// how it is split over ranks (spec 4.4, 6.1, 8.1).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"

namespace ds4 {

struct ModelConfig;
struct LayerConfig;

// How a tensor is cut by lanes. Rank r holds the part of its lanes: of `dim` in total, lane j has
// [j * dim / num_lanes, (j + 1) * dim / num_lanes).
enum class Split {
  kReplicate,  // whole on every rank
  kRows,       // output rows (GGUF dim 1): heads, groups, expert width, vocabulary
  kColumns,    // input columns (GGUF dim 0): ends in a shared sum
  kElements,   // a vector's elements: sinks
};

// How much of what a rank holds one decoded token reads.
enum class ReadPattern {
  kAll,
  kOneRow,   // embedding, hash table
  kExperts,  // experts_used of experts
  kDraft,    // only when drafting
};

struct TensorSpec {
  std::string name;           // full GGUF name
  std::vector<int64_t> dims;  // GGUF order: in, out, experts
  Split split = Split::kReplicate;
  ReadPattern read = ReadPattern::kAll;
};

std::string BlockPrefix(int64_t layer);  // "blk.7."
std::string MtpPrefix();                 // "mtp.0."

// Every tensor the engine reads, in the order in which it loads them.
std::vector<TensorSpec> ModelTensors(const ModelConfig& config);

// The tensor of this name, or of the name without ".weight" (some publishers leave it out).
// kNotFound names it; kInvalidArgument when its dims differ from `dims` (both printed).
Result<const TensorInfo*> BindTensor(const GgufFile& file, const TensorSpec& spec);

// "[4096, 1024]"
std::string DimsString(const std::vector<int64_t>& dims);

}  // namespace ds4
