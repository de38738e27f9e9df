// One session's caches on one rank: rings and rows addressed by absolute position (spec 3.4), so
// that everything a later step reads is a function of the position n. Going back is setting n.
//
// What each layer keeps, with R = window + slack slots and so on (slack = max_batch_rows +
// kDraftSlack):
//   window ring      [window + slack, head_dim]   kv row of position p in slot p mod R
//   pending rings    [m or 2m + slack, width] x 2 compressor value and score (with ape) of position
//   p compressed rows  [context / m, head_dim]      row w covers positions w*m .. w*m + m-1 index
//   keys       [context / m, index_dim]     CSA only
// Rows at or above n / m are stale and never read. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/base/status.h"
#include "engine/kv/session_position.h"
#include "engine/model/model_config.h"

namespace ds4 {

// Rows of `width` float32 values, row for position p in slot p mod num_slots.
class Ring {
 public:
  Ring() = default;
  Ring(int64_t num_slots, int64_t width) : num_slots_(num_slots), width_(width) {
    data_.resize(num_slots * width);
  }
  float* at(int64_t position) { return data_.data() + (position % num_slots_) * width_; }
  const float* at(int64_t position) const {
    return data_.data() + (position % num_slots_) * width_;
  }
  int64_t width() const { return width_; }
  int64_t size_bytes() const { return static_cast<int64_t>(data_.size() * sizeof(float)); }

 private:
  int64_t num_slots_ = 1;
  int64_t width_ = 0;
  std::vector<float> data_;
};

// Pending inputs and finished rows of one compressor.
struct CompressorState {
  Ring values;  // projections
  Ring scores;  // gate projections plus ape
  int64_t dim = 0;
  std::vector<float> rows;  // [context / ratio, dim]

  float* row(int64_t w) { return rows.data() + w * dim; }
  const float* row(int64_t w) const { return rows.data() + w * dim; }
};

struct LayerState {
  Ring window;
  CompressorState compressor;  // CSA, HCA
  CompressorState indexer;     // CSA
};

class KvState {
 public:
  // Allocates everything at once. kResourceExhausted: no memory (bytes named).
  static Result<std::unique_ptr<KvState>> Create(const ModelConfig& config, int64_t max_context,
                                                 int64_t max_batch_rows);
  // Bytes that Create takes.
  static int64_t SizeBytes(const ModelConfig& config, int64_t max_context, int64_t max_batch_rows);

  const SessionPosition& position() const { return position_; }
  int64_t max_context() const { return position_.max_context(); }
  int64_t n() const { return position_.n(); }
  Status Rewind(int64_t n) { return position_.Rewind(n); }
  void Advance(int64_t rows) { position_.Advance(rows); }
  int64_t LowestRewind() const { return position_.LowestRewind(); }

  LayerState& layer(int64_t i) { return layers_[i]; }
  // The MTP block's own ring; only when the model has the block.
  LayerState& mtp() { return mtp_; }

  // Hash over everything that a later step at this n can read.
  uint64_t Hash() const;

 private:
  KvState(const ModelConfig& config, int64_t max_context, int64_t max_batch_rows);

  SessionPosition position_;
  int64_t window_;
  std::vector<LayerConfig> configs_;
  std::vector<LayerState> layers_;
  LayerState mtp_;
};

}  // namespace ds4
