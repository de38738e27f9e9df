// Session caches in device memory: rings and rows by absolute position, as engine/kv has them
// (spec 3.4), for `slots` sessions at once. Device pointers, plain values.
#pragma once

#include <cstdint>

namespace ds4::cuda {

enum class KvType : int { kF32, kBF16 };

inline int64_t KvBytes(KvType type) { return type == KvType::kF32 ? 4 : 2; }

// The rows of one step, read on the device so that a graph serves any step. [rows] each.
struct StepRows {
  const int32_t* token = nullptr;
  const int32_t* pos = nullptr;
  const int32_t* slot = nullptr;  // session slot; -1: a row that only fills up the batch. It is
                                  // computed like any other (pos 0) but writes no cache.
};

// Pending inputs and finished rows of one compressor; position p in slot p mod ring.
struct CompressorCache {
  float* values = nullptr;  // [slots][ring][width]
  float* scores = nullptr;  // [slots][ring][width], gate projection plus ape
  void* rows = nullptr;     // [slots][max_rows][dim], KvType
  int ring = 0;
  int max_rows = 0;
  int width = 0;  // 2 dim for CSA, dim for HCA
  int dim = 0;
};

struct LayerCache {
  void* window = nullptr;  // [slots][ring][head_dim], KvType; position p in row p mod ring
  int ring = 0;
  CompressorCache compressor;  // CSA, HCA
  CompressorCache indexer;     // CSA
};

}  // namespace ds4::cuda
