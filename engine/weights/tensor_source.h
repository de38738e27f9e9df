// One rank's slices of a GGUF file, and what every loader asks of them before it lays them out in
// its own way.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/status.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/shard/shard_plan.h"

namespace ds4 {

struct TensorSource {
  const TensorSlice* slice = nullptr;
  const std::byte* data = nullptr;  // of the whole tensor; null unless asked for
  int64_t columns = 0;
  int64_t rows = 0;  // of one expert
  int64_t experts = 1;
  int64_t row_bytes = 0;

  const std::string& name() const { return slice->spec.name; }
  // The rank's rows of each expert.
  Range own_rows() const {
    return slice->spec.split == Split::kRows ? slice->range : Range{0, rows};
  }
  // The rank's elements of a vector or table.
  Range own_elements() const {
    return slice->spec.split == Split::kElements ? slice->range : Range{0, columns * rows};
  }
};

class TensorSources {
 public:
  // Both outlive it.
  TensorSources(const GgufFile& file, const RankPlan& plan);

  // with_data: kFailedPrecondition when the file has a directory only. kInvalidArgument: rows that
  // are no whole blocks.
  Result<TensorSource> Find(const std::string& name, bool with_data) const;

 private:
  const GgufFile& file_;
  std::map<std::string, const TensorSlice*> slices_;
};

// The rank's elements of a float vector or small table, in float32. kDataLoss names one that is not
// finite.
Result<std::vector<float>> ReadVector(const TensorSource& source);
// A table of expert ids; kDataLoss names one that cannot be.
Result<std::vector<int32_t>> ReadExpertIds(const TensorSource& source, int64_t num_experts);

// Bytes of the plan's slices done and in all, at least every 64 MiB; false calls the loading off.
using WeightProgress = std::function<bool(int64_t done, int64_t total)>;

// Counts bytes that are in place.
class WeightCount {
 public:
  WeightCount(int64_t total, WeightProgress progress)
      : total_(total), progress_(std::move(progress)) {}
  // kCancelled when the caller wants no more.
  Status Advance(int64_t bytes);
  int64_t done() const { return done_; }

 private:
  int64_t total_;
  int64_t done_ = 0;
  WeightProgress progress_;
};

}  // namespace ds4
