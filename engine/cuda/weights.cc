#include "engine/cuda/weights.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>

#include "engine/base/mapped_file.h"
#include "engine/base/strings.h"
#include "engine/kernels/thread_pool.h"
#include "engine/tensor/quant.h"
#include "engine/weights/tensor_source.h"
#include "engine/weights/tensor_walk.h"

namespace ds4::cuda {
namespace {

constexpr int64_t kAlign = 256;
constexpr int64_t kStagingBytes = int64_t{64} << 20;
constexpr int kStagingBuffers = 2;

int64_t Aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

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

// Where tensors go (engine/weights/tensor_walk.h): without memory it only adds up bytes.
class Loader {
 public:
  Loader(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
         const WeightOptions& options, const WeightProgress& progress)
      : config_(config),
        plan_(plan),
        options_(options),
        sources_(file, plan),
        count_(plan.held_bytes, progress) {}

  Status Measure() { return Walk(); }
  WeightBytes Measured() const {
    return {used_ + kStagingBuffers * kStagingBytes, host_used_, saved_, weights_.has_f32_matrices};
  }
  Status Fill(Stream& stream);
  DeviceWeights Take() { return std::move(weights_); }

  Status Embedding(const std::string& name, DeviceWeights& out);
  // In float32.
  Status Vector(const std::string& name, const float*& out, VectorDraw draw);
  Status HashIds(const std::string& name, const int32_t*& out);
  Status Mixing(const std::string& name, PlainMatrix& out);
  // All experts' rows, the rank's rows of each when split by rows.
  Status Rows(const std::string& name, PackedMatrix& out);
  // A matrix for each of the rank's groups.
  Status GroupRows(const std::string& name, PackedMatrix& out);
  // A matrix split by columns: experts x local lanes matrices.
  Status LaneColumns(const std::string& name, PackedMatrix& out);
  // By WeightOptions::replicated.
  Status Replicated(const std::string& name, PackedMatrix& out,
                    const std::vector<std::string>& beside);

 private:
  Status Walk();
  bool with_data() const { return filling_ && !options_.synthetic; }
  std::byte* Reserve(int64_t bytes) {
    std::byte* at = filling_ ? weights_.memory.data() + used_ : nullptr;
    used_ += Aligned(bytes);
    return at;
  }
  // For a stack of matrices, one for each expert or one in all.
  std::byte* ReserveMatrices(const TensorSource& source, int64_t bytes) {
    if (source.slice->dtype == DType::kF32) weights_.has_f32_matrices = true;
    if (!options_.experts_on_host || source.experts == 1) return Reserve(bytes);
    std::byte* at = filling_ ? weights_.expert_memory.data() + host_used_ : nullptr;
    host_used_ += Aligned(bytes);
    return at;
  }
  // A row-major matrix as it is in the file.
  Status Plain(const TensorSource& source, const std::byte*& out);
  // The rank's rows, cut into `parts` matrices.
  Status RowsAs(DType dtype, const TensorSource& source, int64_t parts, PackedMatrix& out);

  Status CheckType(const TensorSource& source) const;
  Result<bool> AllQ8_0(const std::vector<std::string>& names) const;
  // Copies `count` rows of `cols` values, `stride` bytes apart from `first` on, to a staging buffer
  // on the device, in type `to` and one after the other; which one. EndStage when all that reads it
  // is on the stream.
  Result<int> Stage(DType from, DType to, int64_t cols, const std::byte* first, int64_t stride,
                    int64_t count);
  Status EndStage(int staging, int64_t file_bytes);
  // Packs matrix `index` of `out`; row r's blocks are of type `from`, at first + r * stride.
  Status Pack(const PackedMatrix& out, int64_t index, DType from, const std::byte* first,
              int64_t stride);
  Status Upload(const void* host, int64_t bytes, std::byte* device);
  // The next pinned and device staging buffers, free again.
  Result<int> NextStaging();

  const ModelConfig& config_;
  const RankPlan& plan_;
  const WeightOptions& options_;
  TensorSources sources_;
  WeightCount count_;
  DeviceWeights weights_;
  int64_t used_ = 0;
  int64_t host_used_ = 0;
  int64_t saved_ = 0;
  bool filling_ = false;

  Stream* stream_ = nullptr;
  std::unique_ptr<ThreadPool> pool_;
  PinnedBuffer pinned_[kStagingBuffers];
  DeviceBuffer staging_[kStagingBuffers];
  Event staged_[kStagingBuffers];
  bool in_flight_[kStagingBuffers] = {};
  int staging_index_ = 0;
  uint64_t seed_ = 1;
};

Status Loader::CheckType(const TensorSource& source) const {
  if (IsDeviceMatrixType(source.slice->dtype)) return OkStatus();
  return UnimplementedError(StrCat(source.name(), " is ", Info(source.slice->dtype).name,
                                   ", matrices can be F32, F16, BF16, Q8_0, Q4_K, Q2_K, IQ2_XXS or "
                                   "MXFP4 on this device"));
}

Result<bool> Loader::AllQ8_0(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, false));
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

// Random values between mean - spread and mean + spread.
std::vector<float> Draw(int64_t count, VectorDraw draw, uint64_t seed) {
  std::vector<float> values(count);
  std::minstd_rand random(static_cast<unsigned>(seed));
  std::uniform_real_distribution<float> between(draw.mean - draw.spread, draw.mean + draw.spread);
  for (float& value : values) value = between(random);
  return values;
}

Status Loader::Vector(const std::string& name, const float*& out, VectorDraw draw) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  const Range own = source.own_elements();
  const int64_t bytes = own.size() * static_cast<int64_t>(sizeof(float));
  std::byte* to = Reserve(bytes);
  out = reinterpret_cast<const float*>(to);
  if (!filling_) return OkStatus();
  if (options_.synthetic) {
    // All ranks draw the whole one, so that their parts belong together.
    const std::vector<float> all = Draw(source.columns * source.rows, draw, seed_++);
    RETURN_IF_ERROR(Upload(all.data() + own.begin, bytes, to));
  } else {
    ASSIGN_OR_RETURN(const std::vector<float> values, ReadVector(source));
    RETURN_IF_ERROR(Upload(values.data(), bytes, to));
  }
  return count_.Advance(source.slice->held_bytes);
}

Status Loader::Plain(const TensorSource& source, const std::byte*& out) {
  const int64_t bytes = source.row_bytes * source.rows;
  std::byte* to = Reserve(bytes);
  out = to;
  if (!filling_) return OkStatus();
  if (options_.synthetic) {
    // A stretch of random rows again and again: who reads them only looks at one row at a time.
    const int64_t rows = std::min<int64_t>(source.rows, 64);
    const std::vector<float> values = Draw(rows * source.columns, {0.0f, 0.035f}, seed_++);
    std::vector<std::byte> block(rows * source.row_bytes);
    RETURN_IF_ERROR(Quantize(source.slice->dtype, values, block).WithContext(source.name()));
    RETURN_IF_ERROR(Upload(block.data(), static_cast<int64_t>(block.size()), to));
    for (int64_t r = rows; r < source.rows; r += rows) {
      const int64_t count = std::min(rows, source.rows - r) * source.row_bytes;
      RETURN_IF_ERROR(stream_->CopyOnDevice(to + r * source.row_bytes, to, count));
    }
  } else {
    RETURN_IF_ERROR(Upload(source.data, bytes, to));
  }
  return count_.Advance(source.slice->held_bytes);
}

Status Loader::HashIds(const std::string& name, const int32_t*& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  const int64_t bytes = source.columns * source.rows * static_cast<int64_t>(sizeof(int32_t));
  std::byte* to = Reserve(bytes);
  out = reinterpret_cast<const int32_t*>(to);
  if (!filling_) return OkStatus();
  std::vector<int32_t> ids;
  if (options_.synthetic) {
    std::minstd_rand random(static_cast<unsigned>(seed_++));
    const int64_t step = config_.num_experts / source.columns;
    for (int64_t i = 0; i < source.columns * source.rows; ++i) {
      ids.push_back(static_cast<int32_t>(i % source.columns * step + random() % step));
    }
  } else {
    ASSIGN_OR_RETURN(ids, ReadExpertIds(source, config_.num_experts));
  }
  RETURN_IF_ERROR(Upload(ids.data(), bytes, to));
  return count_.Advance(source.slice->held_bytes);
}

Result<int> Loader::Stage(DType from, DType to, int64_t cols, const std::byte* first,
                          int64_t stride, int64_t count) {
  const int64_t bytes = BytesFor(to, cols);
  ASSIGN_OR_RETURN(const int i, NextStaging());
  std::byte* pinned = pinned_[i].data();
  if (stride == BytesFor(from, cols)) Prefetch({first, first + count * stride});
  std::mutex mutex;
  Status failed;
  pool_->ParallelFor(count, std::max<int64_t>(1, (1 << 18) / bytes),
                     [&](int64_t begin, int64_t end) {
                       Status copied = CopyRows(from, to, cols, first + begin * stride, stride,
                                                end - begin, pinned + begin * bytes);
                       const std::lock_guard lock(mutex);
                       if (!copied.ok()) failed = std::move(copied);
                     });
  RETURN_IF_ERROR(failed);
  RETURN_IF_ERROR(stream_->CopyToDevice(staging_[i].data(), pinned, count * bytes));
  return i;
}

Status Loader::EndStage(int staging, int64_t file_bytes) {
  RETURN_IF_ERROR(LaunchStatus());
  RETURN_IF_ERROR(staged_[staging].Record(*stream_));
  return count_.Advance(file_bytes);
}

Status Loader::Pack(const PackedMatrix& out, int64_t index, DType from, const std::byte* first,
                    int64_t stride) {
  std::byte* to = const_cast<std::byte*>(out.data) + index * out.matrix_bytes();
  const int64_t bytes = BytesFor(out.dtype, out.cols);  // in the staging memory
  const int64_t rows_at_once =
      std::max<int64_t>(kTileRows, kStagingBytes / bytes / kTileRows * kTileRows);
  if (rows_at_once * bytes > kStagingBytes) {
    return UnimplementedError(StrCat("a row of ", bytes, " bytes is too long to load"));
  }
  const LaunchContext launch{stream_, 1, false};
  for (int64_t row = 0; row < out.rows; row += rows_at_once) {
    const int64_t count = std::min(rows_at_once, out.rows - row);
    ASSIGN_OR_RETURN(const int i,
                     Stage(from, out.dtype, out.cols, first + row * stride, stride, count));
    LaunchPack(launch, out.dtype, out.rows, out.cols, row, count, staging_[i].data(), bytes, to);
    RETURN_IF_ERROR(EndStage(i, count * BytesFor(from, out.cols)));
  }
  return OkStatus();
}

Status Loader::Rows(const std::string& name, PackedMatrix& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  return RowsAs(source.slice->dtype, source, 1, out);
}

Status Loader::GroupRows(const std::string& name, PackedMatrix& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  return RowsAs(source.slice->dtype, source, plan_.groups.size(), out);
}

Status Loader::Replicated(const std::string& name, PackedMatrix& out,
                          const std::vector<std::string>& beside) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  // With an input that is rounded to int8 for its neighbours already.
  ASSIGN_OR_RETURN(const bool rounded, AllQ8_0(beside));
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

Status Loader::RowsAs(DType dtype, const TensorSource& source, int64_t parts, PackedMatrix& out) {
  RETURN_IF_ERROR(CheckType(source));
  const TensorSlice& slice = *source.slice;
  const Range range = source.own_rows();
  out = {dtype, source.experts * parts, range.size() / parts, source.columns, nullptr};
  out.data = ReserveMatrices(source, out.count * out.matrix_bytes());
  if (!filling_) return OkStatus();
  if (options_.synthetic) {
    LaunchFillRandom({stream_, 1, false}, out, seed_++);
    RETURN_IF_ERROR(LaunchStatus());
    return count_.Advance(slice.held_bytes);
  }
  // Matrices whose rows follow each other are packed as one: fewer and longer copies.
  const bool joined = source.experts == 1 || range.size() == source.rows;
  PackedMatrix pieces = out;
  int64_t parts_in_expert = parts;
  if (joined && out.rows % kTileRows == 0) {
    pieces.rows *= pieces.count;
    pieces.count = parts_in_expert = 1;
  }
  for (int64_t i = 0; i < pieces.count; ++i) {
    const int64_t row =
        i / parts_in_expert * source.rows + range.begin + i % parts_in_expert * pieces.rows;
    RETURN_IF_ERROR(
        Pack(pieces, i, slice.dtype, source.data + row * source.row_bytes, source.row_bytes)
            .WithContext(source.name()));
  }
  return OkStatus();
}

Status Loader::LaneColumns(const std::string& name, PackedMatrix& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
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
    return count_.Advance(slice.held_bytes);
  }
  const std::byte* first = source.data + plan_.lanes.begin * lane_bytes;
  const int64_t expert_bytes = source.rows * source.row_bytes;
  const int64_t own_bytes = lanes * lane_bytes;  // of a row
  const int64_t at_once = kStagingBytes / (source.rows * own_bytes);
  if (at_once == 0) {
    for (int64_t i = 0; i < out.count; ++i) {
      RETURN_IF_ERROR(Pack(out, i, slice.dtype,
                           first + i / lanes * expert_bytes + i % lanes * lane_bytes,
                           source.row_bytes)
                          .WithContext(name));
    }
    return OkStatus();
  }
  // Whole experts at once; each lane is packed from there.
  const LaunchContext launch{stream_, 1, false};
  for (int64_t e = 0; e < source.experts; e += at_once) {
    const int64_t experts = std::min(at_once, source.experts - e);
    ASSIGN_OR_RETURN(const int i,
                     Stage(slice.dtype, slice.dtype, lanes * lane_columns, first + e * expert_bytes,
                           source.row_bytes, experts * source.rows));
    for (int64_t k = 0; k < experts * lanes; ++k) {
      LaunchPack(launch, out.dtype, out.rows, out.cols, 0, out.rows,
                 staging_[i].data() + k / lanes * source.rows * own_bytes + k % lanes * lane_bytes,
                 own_bytes,
                 const_cast<std::byte*>(out.data) + (e * lanes + k) * out.matrix_bytes());
    }
    RETURN_IF_ERROR(EndStage(i, experts * source.rows * own_bytes).WithContext(name));
  }
  return OkStatus();
}

Status Loader::Mixing(const std::string& name, PlainMatrix& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  out.dtype = source.slice->dtype;
  out.rows = source.rows;
  out.cols = source.columns;
  if (out.dtype != DType::kF32 && out.dtype != DType::kF16 && out.dtype != DType::kBF16) {
    // They steer every stream, so they are never rounded further (spec 2.10).
    return UnimplementedError(
        StrCat(name, " is ", Info(out.dtype).name, ", mixing weights can be F32, F16 or BF16"));
  }
  return Plain(source, out.data);
}

Status Loader::Embedding(const std::string& name, DeviceWeights& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, with_data()));
  const DType type = source.slice->dtype;
  if (type != DType::kF32 && type != DType::kF16 && type != DType::kBF16 && type != DType::kQ8_0) {
    return UnimplementedError(
        StrCat(name, " is ", Info(type).name,
               ", an embedding can be F32, F16, BF16 or Q8_0 on this device"));
  }
  out.embedding_type = type;
  return Plain(source, out.embedding);
}

Status Loader::Walk() {
  used_ = 0;
  host_used_ = 0;
  saved_ = 0;
  return WalkModel(*this, config_, weights_);
}

Status Loader::Fill(Stream& stream) {
  RETURN_IF_ERROR(Measure());
  ASSIGN_OR_RETURN(weights_.memory, DeviceBuffer::Allocate(used_));
  if (host_used_ > 0) {
    ASSIGN_OR_RETURN(weights_.expert_memory, PinnedBuffer::Allocate(host_used_));
  }
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
  weights_.source_bytes = count_.done();
  return OkStatus();
}

}  // namespace

Result<WeightBytes> DeviceWeightBytes(const ModelConfig& config, const GgufFile& file,
                                      const RankPlan& plan, const WeightOptions& options) {
  Loader loader(config, file, plan, options, nullptr);
  RETURN_IF_ERROR(loader.Measure());
  return loader.Measured();
}

Result<DeviceWeights> LoadDeviceWeights(const ModelConfig& config, const GgufFile& file,
                                        const RankPlan& plan, const WeightOptions& options,
                                        Stream& stream, const WeightProgress& progress) {
  Loader loader(config, file, plan, options, progress);
  RETURN_IF_ERROR(loader.Fill(stream));
  return loader.Take();
}

}  // namespace ds4::cuda
