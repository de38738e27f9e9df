#include "engine/cuda/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <random>

#include "engine/base/mapped_file.h"
#include "engine/base/strings.h"
#include "engine/kernels/thread_pool.h"
#include "engine/tensor/quant.h"

namespace ds4::cuda {
namespace {

constexpr int64_t kAlign = 256;
constexpr int64_t kStagingBytes = int64_t{64} << 20;
constexpr int kStagingBuffers = 2;

int64_t Aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

using Progress = std::function<bool(int64_t, int64_t)>;

// `count` rows of `cols` values from `first` on, `stride` bytes apart, one after the other to
// `out`: as they are, or in another type.
Status CopyRows(DType from, DType to, int64_t cols, const std::byte* first, int64_t stride,
                int64_t count, std::byte* out) {
  const auto from_bytes = static_cast<size_t>(BytesFor(from, cols));
  const auto to_bytes = static_cast<size_t>(BytesFor(to, cols));
  if (from == to && stride == static_cast<int64_t>(from_bytes)) {
    std::memcpy(out, first, count * from_bytes);
    return OkStatus();
  }
  std::vector<float> values(from == to ? 0 : cols);
  for (int64_t r = 0; r < count; ++r) {
    const std::byte* row = first + r * stride;
    std::byte* at = out + r * to_bytes;
    if (from == to) {
      std::memcpy(at, row, from_bytes);
      continue;
    }
    RETURN_IF_ERROR(Dequantize(from, {row, from_bytes}, values));
    RETURN_IF_ERROR(Quantize(to, values, {at, to_bytes}));
  }
  return OkStatus();
}

// Where tensors go: without memory it only adds up bytes.
class Loader {
 public:
  Loader(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
         const WeightOptions& options)
      : config_(config), file_(file), plan_(plan), options_(options) {
    for (const TensorSlice& slice : plan.slices) slices_[slice.spec.name] = &slice;
  }

  Status Measure() { return Walk(); }
  WeightBytes Measured() const {
    return {used_ + kStagingBuffers * kStagingBytes, host_used_, saved_, weights_.has_f32_matrices};
  }
  Status Fill(Stream& stream, const Progress& progress);
  DeviceWeights Take() { return std::move(weights_); }

 private:
  struct Source {
    const TensorSlice* slice = nullptr;
    const std::byte* data = nullptr;
    int64_t columns = 0;
    int64_t rows = 0;  // of one expert
    int64_t experts = 1;
    int64_t row_bytes = 0;
  };

  Status Walk();
  Status Block(const std::string& prefix, const LayerConfig& layer, DeviceBlock& out);
  Status Attention(const std::string& prefix, const LayerConfig& layer, DeviceAttention& out);
  Status Moe(const std::string& prefix, const LayerConfig& layer, DeviceMoe& out);
  Status HyperConnection(const std::string& name, HcWeights& out);
  Status Compressor(const std::string& name, bool rounded, DeviceCompressor& out);

  Result<Source> Find(const std::string& name) const;
  std::byte* Reserve(int64_t bytes) {
    std::byte* at = filling_ ? weights_.memory.data() + used_ : nullptr;
    used_ += Aligned(bytes);
    return at;
  }
  // For a stack of matrices, one for each expert or one in all.
  std::byte* ReserveMatrices(const Source& source, int64_t bytes) {
    if (source.slice->dtype == DType::kF32) weights_.has_f32_matrices = true;
    if (!options_.experts_on_host || source.experts == 1) return Reserve(bytes);
    std::byte* at = filling_ ? weights_.expert_memory.data() + host_used_ : nullptr;
    host_used_ += Aligned(bytes);
    return at;
  }
  // A float vector or small table in float32; the rank's elements when it is split. `random`: mean
  // and spread of a synthetic one.
  Status Vector(const std::string& name, const float*& out, float mean, float spread);
  // A row-major matrix as it is in the file.
  Status Plain(const std::string& name, DType& dtype, const std::byte*& out);
  // All experts' rows, the rank's rows of each when split by rows; `parts` cuts the rows into that
  // many matrices.
  Status Rows(const std::string& name, PackedMatrix& out, int64_t parts = 1);
  // The same of a matrix that WeightOptions::replicated is about; `rounded`: its input is rounded
  // to int8 for other matrices anyway.
  Status Replicated(const std::string& name, bool rounded, PackedMatrix& out);
  Status RowsAs(DType dtype, const Source& source, int64_t parts, PackedMatrix& out);
  // A matrix split by columns: experts x local lanes matrices.
  Status LaneColumns(const std::string& name, PackedMatrix& out);
  Status HashIds(const std::string& name, const int32_t*& out);

  Status CheckType(const Source& source) const;
  Result<bool> AllQ8_0(const std::string& prefix, std::initializer_list<const char*> names) const;
  // Packs matrix `index` of `out`; row r's blocks are of type `from`, at first + r * stride.
  Status Pack(const PackedMatrix& out, int64_t index, DType from, const std::byte* first,
              int64_t stride);
  Status Upload(const void* host, int64_t bytes, std::byte* device);
  Status Advance(int64_t bytes);
  // The next pinned and device staging buffers, free again.
  Result<int> NextStaging();

  const ModelConfig& config_;
  const GgufFile& file_;
  const RankPlan& plan_;
  std::map<std::string, const TensorSlice*> slices_;
  const WeightOptions& options_;
  DeviceWeights weights_;
  int64_t used_ = 0;
  int64_t host_used_ = 0;
  int64_t saved_ = 0;
  bool filling_ = false;

  const Progress* progress_ = nullptr;
  Stream* stream_ = nullptr;
  std::unique_ptr<ThreadPool> pool_;
  PinnedBuffer pinned_[kStagingBuffers];
  DeviceBuffer staging_[kStagingBuffers];
  Event staged_[kStagingBuffers];
  bool in_flight_[kStagingBuffers] = {};
  int staging_index_ = 0;
  int64_t done_bytes_ = 0;
  uint64_t seed_ = 1;
};

Result<Loader::Source> Loader::Find(const std::string& name) const {
  const auto it = slices_.find(name);
  if (it == slices_.end()) return InternalError(StrCat("the shard plan has no tensor ", name));
  Source source;
  source.slice = it->second;
  const std::vector<int64_t>& dims = source.slice->spec.dims;
  source.columns = dims[0];
  source.rows = dims.size() > 1 ? dims[1] : 1;
  source.experts = dims.size() > 2 ? dims[2] : 1;
  const DTypeInfo& type = Info(source.slice->dtype);
  if (source.columns % type.block_elems != 0) {
    return InvalidArgumentError(StrCat(name, " has rows of ", source.columns, " values, ",
                                       type.name, " blocks hold ", type.block_elems));
  }
  source.row_bytes = BytesFor(source.slice->dtype, source.columns);
  if (!filling_ || options_.synthetic) return source;
  ASSIGN_OR_RETURN(const TensorInfo* tensor, BindTensor(file_, source.slice->spec));
  if (static_cast<int64_t>(file_.data(*tensor).size()) != tensor->size_bytes) {
    return FailedPreconditionError(StrCat(file_.path(), ": ", name, " has no data here, ",
                                          tensor->size_bytes, " bytes are needed"));
  }
  source.data = file_.data(*tensor).data();
  return source;
}

Status Loader::CheckType(const Source& source) const {
  if (IsDeviceMatrixType(source.slice->dtype)) return OkStatus();
  return UnimplementedError(StrCat(source.slice->spec.name, " is ", Info(source.slice->dtype).name,
                                   ", matrices can be F32, F16, BF16, Q8_0, Q4_K, Q2_K, IQ2_XXS or "
                                   "MXFP4 on this device"));
}

Result<bool> Loader::AllQ8_0(const std::string& prefix,
                             std::initializer_list<const char*> names) const {
  for (const char* name : names) {
    ASSIGN_OR_RETURN(const Source source, Find(prefix + name));
    if (source.slice->dtype != DType::kQ8_0) return false;
  }
  return true;
}

Result<int> Loader::NextStaging() {
  const int i = staging_index_;
  staging_index_ = (i + 1) % kStagingBuffers;
  if (in_flight_[i]) RETURN_IF_ERROR(staged_[i].Wait(std::chrono::minutes(1)));
  in_flight_[i] = true;
  return i;
}

Status Loader::Upload(const void* host, int64_t bytes, std::byte* device) {
  for (int64_t at = 0; at < bytes; at += kStagingBytes) {
    const int64_t count = std::min(kStagingBytes, bytes - at);
    ASSIGN_OR_RETURN(const int i, NextStaging());
    std::memcpy(pinned_[i].data(), static_cast<const std::byte*>(host) + at, count);
    RETURN_IF_ERROR(stream_->CopyToDevice(device + at, pinned_[i].data(), count));
    RETURN_IF_ERROR(staged_[i].Record(*stream_));
  }
  return OkStatus();
}

Status Loader::Advance(int64_t bytes) {
  done_bytes_ += bytes;
  if (*progress_ && !(*progress_)(done_bytes_, plan_.held_bytes)) {
    return CancelledError(StrCat("loading was called off after ", HumanBytes(done_bytes_), " of ",
                                 HumanBytes(plan_.held_bytes)));
  }
  return OkStatus();
}

Status Loader::Vector(const std::string& name, const float*& out, float mean, float spread) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  const bool split = source.slice->spec.split == Split::kElements;
  const int64_t total = source.columns * source.rows;
  const Range range = split ? source.slice->range : Range{0, total};
  std::byte* to = Reserve(range.size() * static_cast<int64_t>(sizeof(float)));
  out = reinterpret_cast<const float*>(to);
  if (!filling_) return OkStatus();
  std::vector<float> all(total);
  if (options_.synthetic) {
    std::minstd_rand random(static_cast<unsigned>(seed_++));
    std::uniform_real_distribution<float> draw(mean - spread, mean + spread);
    for (float& value : all) value = draw(random);
  } else {
    const auto bytes = static_cast<size_t>(source.row_bytes * source.rows);
    RETURN_IF_ERROR(Dequantize(source.slice->dtype, {source.data, bytes}, all).WithContext(name));
    for (int64_t i = 0; i < total; ++i) {
      if (!std::isfinite(all[i])) {
        return DataLossError(StrCat(name, "[", i, "] is ", all[i], ", must be finite"));
      }
    }
  }
  RETURN_IF_ERROR(
      Upload(all.data() + range.begin, range.size() * static_cast<int64_t>(sizeof(float)), to));
  return Advance(source.slice->held_bytes);
}

Status Loader::Plain(const std::string& name, DType& dtype, const std::byte*& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  dtype = source.slice->dtype;
  const int64_t bytes = source.row_bytes * source.rows;
  std::byte* to = Reserve(bytes);
  out = to;
  if (!filling_) return OkStatus();
  if (options_.synthetic) {
    // A stretch of random rows again and again: who reads them only looks at one row at a time.
    const int64_t rows = std::min<int64_t>(source.rows, 64);
    std::vector<float> values(rows * source.columns);
    std::minstd_rand random(static_cast<unsigned>(seed_++));
    std::uniform_real_distribution<float> draw(-0.035f, 0.035f);
    for (float& value : values) value = draw(random);
    std::vector<std::byte> block(rows * source.row_bytes);
    RETURN_IF_ERROR(Quantize(dtype, values, block).WithContext(name));
    RETURN_IF_ERROR(Upload(block.data(), static_cast<int64_t>(block.size()), to));
    for (int64_t r = rows; r < source.rows; r += rows) {
      const int64_t count = std::min(rows, source.rows - r) * source.row_bytes;
      RETURN_IF_ERROR(stream_->CopyOnDevice(to + r * source.row_bytes, to, count));
    }
  } else {
    RETURN_IF_ERROR(Upload(source.data, bytes, to));
  }
  return Advance(source.slice->held_bytes);
}

Status Loader::HashIds(const std::string& name, const int32_t*& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  if (source.slice->dtype != DType::kI32) {
    return InvalidArgumentError(
        StrCat(name, " is ", Info(source.slice->dtype).name, ", must be I32"));
  }
  const int64_t count = source.columns * source.rows;
  std::byte* to = Reserve(count * static_cast<int64_t>(sizeof(int32_t)));
  out = reinterpret_cast<const int32_t*>(to);
  if (!filling_) return OkStatus();
  std::vector<int32_t> ids(count);
  if (options_.synthetic) {
    std::minstd_rand random(static_cast<unsigned>(seed_++));
    const int64_t step = config_.num_experts / source.columns;
    for (int64_t r = 0; r < source.rows; ++r) {
      for (int64_t k = 0; k < source.columns; ++k) {
        ids[r * source.columns + k] = static_cast<int32_t>(k * step + random() % step);
      }
    }
  } else {
    std::memcpy(ids.data(), source.data, count * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || ids[i] >= config_.num_experts) {
        return DataLossError(
            StrCat(name, "[", i, "] is expert ", ids[i], ", the model has ", config_.num_experts));
      }
    }
  }
  RETURN_IF_ERROR(Upload(ids.data(), count * static_cast<int64_t>(sizeof(int32_t)), to));
  return Advance(source.slice->held_bytes);
}

Status Loader::Pack(const PackedMatrix& out, int64_t index, DType from, const std::byte* first,
                    int64_t stride) {
  std::byte* to = const_cast<std::byte*>(out.data) + index * out.matrix_bytes();
  const int64_t from_bytes = BytesFor(from, out.cols);
  const int64_t bytes = BytesFor(out.dtype, out.cols);  // in the staging memory
  const int64_t rows_at_once =
      std::max<int64_t>(kTileRows, kStagingBytes / bytes / kTileRows * kTileRows);
  if (rows_at_once * bytes > kStagingBytes) {
    return UnimplementedError(StrCat("a row of ", bytes, " bytes is too long to load"));
  }
  const LaunchContext launch{stream_, 1, false};
  for (int64_t row = 0; row < out.rows; row += rows_at_once) {
    const int64_t count = std::min(rows_at_once, out.rows - row);
    ASSIGN_OR_RETURN(const int i, NextStaging());
    std::byte* pinned = pinned_[i].data();
    if (stride == from_bytes) {
      Prefetch({first + row * stride, first + (row + count) * stride});
    }
    std::mutex mutex;
    Status failed;
    pool_->ParallelFor(
        count, std::max<int64_t>(1, (1 << 18) / bytes), [&](int64_t begin, int64_t end) {
          Status copied = CopyRows(from, out.dtype, out.cols, first + (row + begin) * stride,
                                   stride, end - begin, pinned + begin * bytes);
          const std::lock_guard lock(mutex);
          if (!copied.ok()) failed = std::move(copied);
        });
    RETURN_IF_ERROR(failed);
    RETURN_IF_ERROR(stream_->CopyToDevice(staging_[i].data(), pinned, count * bytes));
    LaunchPack(launch, out.dtype, out.rows, out.cols, row, count, staging_[i].data(), bytes, to);
    RETURN_IF_ERROR(LaunchStatus());
    RETURN_IF_ERROR(staged_[i].Record(*stream_));
    RETURN_IF_ERROR(Advance(count * from_bytes));
  }
  return OkStatus();
}

Status Loader::Rows(const std::string& name, PackedMatrix& out, int64_t parts) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  return RowsAs(source.slice->dtype, source, parts, out);
}

Status Loader::Replicated(const std::string& name, bool rounded, PackedMatrix& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  const DType dtype = source.slice->dtype;
  const bool halves = dtype == DType::kF16 || dtype == DType::kBF16;
  const bool fits = source.columns % Info(DType::kQ8_0).block_elems == 0;
  const bool asked = options_.replicated == ReplicatedWeights::kQ8_0;
  if (asked && halves && !fits) {
    return UnimplementedError(StrCat(name, " has rows of ", source.columns,
                                     " values, Q8_0 blocks hold 32; keep it as the file has it "
                                     "(replicated weights auto or file)"));
  }
  const bool automatic = options_.replicated == ReplicatedWeights::kAuto && rounded;
  if (!halves || !fits || !(asked || automatic)) return RowsAs(dtype, source, 1, out);
  saved_ += source.rows * (source.row_bytes - BytesFor(DType::kQ8_0, source.columns));
  return RowsAs(DType::kQ8_0, source, 1, out);
}

Status Loader::RowsAs(DType dtype, const Source& source, int64_t parts, PackedMatrix& out) {
  RETURN_IF_ERROR(CheckType(source));
  const TensorSlice& slice = *source.slice;
  const Range range = slice.spec.split == Split::kRows ? slice.range : Range{0, source.rows};
  out = {dtype, source.experts * parts, range.size() / parts, source.columns, nullptr};
  out.data = ReserveMatrices(source, out.count * out.matrix_bytes());
  if (!filling_) return OkStatus();
  if (options_.synthetic) {
    LaunchFillRandom({stream_, 1, false}, out, seed_++);
    RETURN_IF_ERROR(LaunchStatus());
    return Advance(slice.held_bytes);
  }
  for (int64_t i = 0; i < out.count; ++i) {
    const int64_t row = i / parts * source.rows + range.begin + i % parts * out.rows;
    RETURN_IF_ERROR(
        Pack(out, i, slice.dtype, source.data + row * source.row_bytes, source.row_bytes)
            .WithContext(slice.spec.name));
  }
  return OkStatus();
}

Status Loader::LaneColumns(const std::string& name, PackedMatrix& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  RETURN_IF_ERROR(CheckType(source));
  const TensorSlice& slice = *source.slice;
  const int64_t lanes = plan_.lanes.size();
  const int64_t lane_columns = source.columns / config_.num_lanes;
  const int64_t lane_bytes = BytesFor(slice.dtype, lane_columns);
  out = {slice.dtype, source.experts * lanes, source.rows, lane_columns, nullptr};
  out.data = ReserveMatrices(source, out.count * out.matrix_bytes());
  if (!filling_) return OkStatus();
  if (options_.synthetic) {
    LaunchFillRandom({stream_, 1, false}, out, seed_++);
    RETURN_IF_ERROR(LaunchStatus());
    return Advance(slice.held_bytes);
  }
  for (int64_t i = 0; i < out.count; ++i) {
    const std::byte* expert = source.data + i / lanes * source.rows * source.row_bytes;
    const int64_t lane = plan_.lanes.begin + i % lanes;
    RETURN_IF_ERROR(
        Pack(out, i, slice.dtype, expert + lane * lane_bytes, source.row_bytes).WithContext(name));
  }
  return OkStatus();
}

Status Loader::HyperConnection(const std::string& name, HcWeights& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name + "_fn.weight"));
  const DType dtype = source.slice->dtype;
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    // They steer every stream, so they are never rounded further (spec 2.10).
    return UnimplementedError(StrCat(name, "_fn.weight is ", Info(dtype).name,
                                     ", mixing weights can be F32, F16 or BF16"));
  }
  out.fn.rows = source.rows;
  out.fn.cols = source.columns;
  RETURN_IF_ERROR(Plain(name + "_fn.weight", out.fn.dtype, out.fn.data));
  RETURN_IF_ERROR(Vector(name + "_base.weight", out.base, 0.0f, 0.5f));
  return Vector(name + "_scale.weight", out.scale, 0.5f, 0.2f);
}

Status Loader::Compressor(const std::string& name, bool rounded, DeviceCompressor& out) {
  RETURN_IF_ERROR(Replicated(name + "_kv.weight", rounded, out.kv));
  RETURN_IF_ERROR(Replicated(name + "_gate.weight", rounded, out.gate));
  RETURN_IF_ERROR(Vector(name + "_ape.weight", out.ape, 0.0f, 0.1f));
  return Vector(name + "_norm.weight", out.norm, 1.0f, 0.1f);
}

Status Loader::Attention(const std::string& prefix, const LayerConfig& layer,
                         DeviceAttention& out) {
  RETURN_IF_ERROR(Vector(prefix + "attn_norm.weight", out.norm, 1.0f, 0.1f));
  RETURN_IF_ERROR(Rows(prefix + "attn_q_a.weight", out.q_a));
  RETURN_IF_ERROR(Vector(prefix + "attn_q_a_norm.weight", out.q_a_norm, 1.0f, 0.1f));
  RETURN_IF_ERROR(Rows(prefix + "attn_q_b.weight", out.q_b));
  RETURN_IF_ERROR(Rows(prefix + "attn_kv.weight", out.kv));
  RETURN_IF_ERROR(Vector(prefix + "attn_kv_a_norm.weight", out.kv_norm, 1.0f, 0.1f));
  RETURN_IF_ERROR(Vector(prefix + "attn_sinks.weight", out.sinks, 0.0f, 0.5f));
  RETURN_IF_ERROR(Rows(prefix + "attn_output_a.weight", out.o_a, plan_.groups.size()));
  RETURN_IF_ERROR(LaneColumns(prefix + "attn_output_b.weight", out.o_b));
  if (layer.attention == AttentionKind::kSliding) return OkStatus();
  ASSIGN_OR_RETURN(const bool x_rounded, AllQ8_0(prefix, {"attn_q_a.weight", "attn_kv.weight"}));
  RETURN_IF_ERROR(Compressor(prefix + "attn_compressor", x_rounded, out.compressor));
  if (layer.attention != AttentionKind::kCompressed) return OkStatus();
  ASSIGN_OR_RETURN(const bool q_rounded, AllQ8_0(prefix, {"attn_q_b.weight"}));
  RETURN_IF_ERROR(Replicated(prefix + "indexer.attn_q_b.weight", q_rounded, out.index_q_b));
  RETURN_IF_ERROR(Replicated(prefix + "indexer.proj.weight", x_rounded, out.index_proj));
  return Compressor(prefix + "indexer_compressor", x_rounded, out.index_compressor);
}

Status Loader::Moe(const std::string& prefix, const LayerConfig& layer, DeviceMoe& out) {
  RETURN_IF_ERROR(Vector(prefix + "ffn_norm.weight", out.norm, 1.0f, 0.1f));
  RETURN_IF_ERROR(Rows(prefix + "ffn_gate_inp.weight", out.router));
  if (layer.router == RouterKind::kHash) {
    RETURN_IF_ERROR(HashIds(prefix + "ffn_gate_tid2eid.weight", out.hash_ids));
  } else {
    RETURN_IF_ERROR(Vector(prefix + "exp_probs_b.bias", out.bias, 0.0f, 0.1f));
  }
  RETURN_IF_ERROR(Rows(prefix + "ffn_gate_exps.weight", out.gate));
  RETURN_IF_ERROR(Rows(prefix + "ffn_up_exps.weight", out.up));
  RETURN_IF_ERROR(LaneColumns(prefix + "ffn_down_exps.weight", out.down));
  RETURN_IF_ERROR(Rows(prefix + "ffn_gate_shexp.weight", out.shared_gate));
  RETURN_IF_ERROR(Rows(prefix + "ffn_up_shexp.weight", out.shared_up));
  return LaneColumns(prefix + "ffn_down_shexp.weight", out.shared_down);
}

Status Loader::Block(const std::string& prefix, const LayerConfig& layer, DeviceBlock& out) {
  RETURN_IF_ERROR(HyperConnection(prefix + "hc_attn", out.attn_hc));
  RETURN_IF_ERROR(Attention(prefix, layer, out.attention));
  RETURN_IF_ERROR(HyperConnection(prefix + "hc_ffn", out.ffn_hc));
  return Moe(prefix, layer, out.moe);
}

Status Loader::Walk() {
  used_ = 0;
  host_used_ = 0;
  saved_ = 0;
  RETURN_IF_ERROR(Plain("token_embd.weight", weights_.embedding_type, weights_.embedding));
  const DType type = weights_.embedding_type;
  if (type != DType::kF32 && type != DType::kF16 && type != DType::kBF16 && type != DType::kQ8_0) {
    return UnimplementedError(
        StrCat("token_embd.weight is ", Info(type).name,
               ", an embedding can be F32, F16, BF16 or Q8_0 on this device"));
  }
  weights_.blocks.resize(config_.num_layers);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    RETURN_IF_ERROR(Block(BlockPrefix(i), config_.layers[i], weights_.blocks[i]));
  }
  RETURN_IF_ERROR(HyperConnection("output_hc", weights_.head_hc));
  RETURN_IF_ERROR(Vector("output_norm.weight", weights_.norm, 1.0f, 0.1f));
  return Rows("output.weight", weights_.head);
}

Status Loader::Fill(Stream& stream, const Progress& progress) {
  RETURN_IF_ERROR(Measure());
  ASSIGN_OR_RETURN(weights_.memory, DeviceBuffer::Allocate(used_));
  if (host_used_ > 0) {
    ASSIGN_OR_RETURN(weights_.expert_memory, PinnedBuffer::Allocate(host_used_));
  }
  progress_ = &progress;
  stream_ = &stream;
  pool_ = std::make_unique<ThreadPool>(options_.num_threads);
  for (int i = 0; i < kStagingBuffers; ++i) {
    ASSIGN_OR_RETURN(pinned_[i], PinnedBuffer::Allocate(kStagingBytes));
    ASSIGN_OR_RETURN(staging_[i], DeviceBuffer::Allocate(kStagingBytes));
    ASSIGN_OR_RETURN(staged_[i], Event::Create());
  }
  filling_ = true;
  RETURN_IF_ERROR(Walk());
  RETURN_IF_ERROR(stream.Synchronize());
  weights_.source_bytes = done_bytes_;
  return OkStatus();
}

}  // namespace

Result<WeightBytes> DeviceWeightBytes(const ModelConfig& config, const GgufFile& file,
                                      const RankPlan& plan, const WeightOptions& options) {
  Loader loader(config, file, plan, options);
  RETURN_IF_ERROR(loader.Measure());
  return loader.Measured();
}

Result<DeviceWeights> LoadDeviceWeights(const ModelConfig& config, const GgufFile& file,
                                        const RankPlan& plan, const WeightOptions& options,
                                        Stream& stream, const Progress& progress) {
  Loader loader(config, file, plan, options);
  RETURN_IF_ERROR(loader.Fill(stream, progress));
  return loader.Take();
}

}  // namespace ds4::cuda
