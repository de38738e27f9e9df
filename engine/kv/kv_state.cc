#include "engine/kv/kv_state.h"

#include <algorithm>
#include <new>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/check.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

// Tokens that a window's row reads: CSA also pools the window before.
int64_t PendingTokens(const LayerConfig& layer) {
  return layer.attention == AttentionKind::kCompressed ? 2 * layer.compress_ratio
                                                       : layer.compress_ratio;
}

int64_t CompressorBytes(const LayerConfig& layer, int64_t dim, int64_t context, int64_t slack) {
  const int64_t width = ModelConfig::CompressorWidth(layer.attention, dim);
  const int64_t pending = 2 * (PendingTokens(layer) + slack) * width;
  return (pending + context / layer.compress_ratio * dim) * static_cast<int64_t>(sizeof(float));
}

CompressorState MakeCompressor(const LayerConfig& layer, int64_t dim, int64_t context,
                               int64_t slack) {
  const int64_t width = ModelConfig::CompressorWidth(layer.attention, dim);
  CompressorState state;
  state.values = Ring(PendingTokens(layer) + slack, width);
  state.scores = Ring(PendingTokens(layer) + slack, width);
  state.dim = dim;
  state.rows.resize(context / layer.compress_ratio * dim);
  return state;
}

class Hasher {
 public:
  Hasher() { XXH3_64bits_reset(&state_); }
  void Add(const float* data, int64_t count) {
    XXH3_64bits_update(&state_, data, count * sizeof(float));
  }
  uint64_t Digest() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

void HashCompressor(const LayerConfig& layer, const CompressorState& state, int64_t n,
                    Hasher& hash) {
  hash.Add(state.rows.data(), n / layer.compress_ratio * state.dim);
  // What the next row will pool: the started window and, for CSA, the one before.
  const int64_t started = n / layer.compress_ratio * layer.compress_ratio;
  const int64_t back = PendingTokens(layer) - layer.compress_ratio;
  for (int64_t p = std::max<int64_t>(0, started - back); p < n; ++p) {
    hash.Add(state.values.at(p), state.values.width());
    hash.Add(state.scores.at(p), state.scores.width());
  }
}

}  // namespace

int64_t KvState::SizeBytes(const ModelConfig& config, int64_t max_context, int64_t max_batch_rows) {
  const int64_t slack = max_batch_rows + kDraftSlack;
  const int64_t ring =
      (config.sliding_window + slack) * config.head_dim * static_cast<int64_t>(sizeof(float));
  int64_t bytes = ring * config.num_mtp_blocks;
  for (const LayerConfig& layer : config.layers) {
    bytes += ring;
    if (layer.attention == AttentionKind::kSliding) continue;
    bytes += CompressorBytes(layer, config.head_dim, max_context, slack);
    if (layer.attention == AttentionKind::kCompressed) {
      bytes += CompressorBytes(layer, config.index_head_dim, max_context, slack);
    }
  }
  return bytes;
}

Result<std::unique_ptr<KvState>> KvState::Create(const ModelConfig& config, int64_t max_context,
                                                 int64_t max_batch_rows) {
  CHECK(max_context > 0 && max_batch_rows > 0);
  try {
    return std::unique_ptr<KvState>(new KvState(config, max_context, max_batch_rows));
  } catch (const std::bad_alloc&) {
    return ResourceExhaustedError(StrCat(
        "no memory for a session of ", max_context, " tokens: it takes ",
        HumanBytes(SizeBytes(config, max_context, max_batch_rows)), "; lower the context limit"));
  }
}

KvState::KvState(const ModelConfig& config, int64_t max_context, int64_t max_batch_rows)
    : position_(max_context, max_batch_rows),
      window_(config.sliding_window),
      configs_(config.layers) {
  const int64_t slack = max_batch_rows + kDraftSlack;
  for (const LayerConfig& layer : config.layers) {
    LayerState state;
    state.window = Ring(window_ + slack, config.head_dim);
    if (layer.attention != AttentionKind::kSliding) {
      state.compressor = MakeCompressor(layer, config.head_dim, max_context, slack);
    }
    if (layer.attention == AttentionKind::kCompressed) {
      state.indexer = MakeCompressor(layer, config.index_head_dim, max_context, slack);
    }
    layers_.push_back(std::move(state));
  }
  if (config.num_mtp_blocks > 0) mtp_.window = Ring(window_ + slack, config.head_dim);
}

uint64_t KvState::Hash() const {
  Hasher hash;
  const int64_t n = position_.n();
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (int64_t p = std::max<int64_t>(0, n - window_ + 1); p < n; ++p) {
      hash.Add(layers_[i].window.at(p), layers_[i].window.width());
    }
    if (configs_[i].attention == AttentionKind::kSliding) continue;
    HashCompressor(configs_[i], layers_[i].compressor, n, hash);
    if (configs_[i].attention == AttentionKind::kCompressed) {
      HashCompressor(configs_[i], layers_[i].indexer, n, hash);
    }
  }
  return hash.Digest();
}

}  // namespace ds4
