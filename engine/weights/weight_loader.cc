#include "engine/weights/weight_loader.h"

#include <algorithm>

#include "engine/base/mapped_file.h"
#include "engine/base/strings.h"
#include "engine/weights/tensor_walk.h"

namespace ds4 {
namespace {

// Between two reports, and read ahead at once.
constexpr int64_t kReportBytes = int64_t{32} << 20;

// Fills the fields that engine/weights/tensor_walk.h names.
class Loader {
 public:
  Loader(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
         const WeightProgress& progress)
      : config_(config), plan_(plan), sources_(file, plan), count_(plan.held_bytes, progress) {}

  Result<Weights> Load();

  Status Embedding(const std::string& name, Weights& out) { return Rows(name, out.embedding); }
  Status Vector(const std::string& name, std::vector<float>& out, VectorDraw draw);
  Status HashIds(const std::string& name, std::vector<int32_t>& out);
  Status Mixing(const std::string& name, Matrix& out);
  // All experts' rows one after the other; the rank's rows of each when it is split by rows.
  Status Rows(const std::string& name, Matrix& out);
  Status GroupRows(const std::string& name, Matrix& out) { return Rows(name, out); }
  // [experts * local_lanes * rows, lane columns].
  Status LaneColumns(const std::string& name, Matrix& out);
  Status Replicated(const std::string& name, Matrix& out, const std::vector<std::string>&) {
    return Rows(name, out);
  }

 private:
  Status LoadMtp(MtpTensors& out);
  // Fills `out` with `num_pieces` rows of `piece_bytes` each, piece i at piece(i).
  Status Fill(const TensorSource& source, int64_t piece_bytes, int64_t num_pieces,
              const std::function<const std::byte*(int64_t i)>& piece, Matrix& out);

  const ModelConfig& config_;
  const RankPlan& plan_;
  TensorSources sources_;
  WeightCount count_;
};

// No model without data comes here: there is nothing to draw.
Status Loader::Vector(const std::string& name, std::vector<float>& out, VectorDraw) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, true));
  ASSIGN_OR_RETURN(out, ReadVector(source));
  return count_.Advance(source.slice->held_bytes);
}

// A matrix type that kernels read.
Status CheckMatrixType(const std::string& name, DType dtype) {
  if (IsMatrixType(dtype)) return OkStatus();
  return UnimplementedError(StrCat(name, " is ", Info(dtype).name,
                                   ", matrices can be F32, F16, BF16 or Q8_0 on this device"));
}

Status Loader::Rows(const std::string& name, Matrix& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, true));
  RETURN_IF_ERROR(CheckMatrixType(name, source.slice->dtype));
  const Range rows = source.own_rows();
  const int64_t num_rows = source.experts * rows.size();
  Result<Matrix> matrix = Matrix::Create(source.slice->dtype, num_rows, source.columns);
  if (!matrix.ok()) return matrix.status().WithContext(name);
  out = std::move(matrix).value();
  const auto row = [&](int64_t i) {
    const int64_t expert = i / rows.size();
    const int64_t r = rows.begin + i % rows.size();
    return source.data + (expert * source.rows + r) * source.row_bytes;
  };
  return Fill(source, source.row_bytes, num_rows, row, out);
}

Status Loader::LaneColumns(const std::string& name, Matrix& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, true));
  RETURN_IF_ERROR(CheckMatrixType(name, source.slice->dtype));
  const DType dtype = source.slice->dtype;
  const int64_t lane_columns = source.columns / config_.num_lanes;
  const int64_t lane_bytes = BytesFor(dtype, lane_columns);
  const int64_t local_lanes = plan_.lanes.size();
  const int64_t num_rows = source.experts * local_lanes * source.rows;
  Result<Matrix> matrix = Matrix::Create(dtype, num_rows, lane_columns);
  if (!matrix.ok()) return matrix.status().WithContext(name);
  out = std::move(matrix).value();
  const auto part = [&](int64_t i) {
    const int64_t r = i % source.rows;
    const int64_t lane = plan_.lanes.begin + i / source.rows % local_lanes;
    const int64_t expert = i / source.rows / local_lanes;
    return source.data + (expert * source.rows + r) * source.row_bytes + lane * lane_bytes;
  };
  return Fill(source, lane_bytes, num_rows, part, out);
}

Status Loader::Fill(const TensorSource& source, int64_t piece_bytes, int64_t num_pieces,
                    const std::function<const std::byte*(int64_t i)>& piece, Matrix& out) {
  const int64_t pieces_at_once = std::max<int64_t>(1, kReportBytes / piece_bytes);
  for (int64_t first = 0; first < num_pieces; first += pieces_at_once) {
    const int64_t end = std::min(num_pieces, first + pieces_at_once);
    // Ask for the whole stretch at once; pieces rise in the file but for the turn to another lane.
    const std::byte* from = piece(first);
    const std::byte* to = piece(end - 1) + piece_bytes;
    if (from < to) Prefetch({from, to});
    for (int64_t i = first; i < end; ++i) {
      RETURN_IF_ERROR(out.SetRow(i, source.slice->dtype, piece(i)).WithContext(source.name()));
    }
    RETURN_IF_ERROR(count_.Advance((end - first) * piece_bytes));
  }
  return OkStatus();
}

Status Loader::HashIds(const std::string& name, std::vector<int32_t>& out) {
  ASSIGN_OR_RETURN(const TensorSource source, sources_.Find(name, true));
  ASSIGN_OR_RETURN(out, ReadExpertIds(source, config_.num_experts));
  return count_.Advance(source.slice->held_bytes);
}

Status Loader::Mixing(const std::string& name, Matrix& out) {
  RETURN_IF_ERROR(Rows(name, out));
  if (out.dtype() != DType::kQ8_0) return OkStatus();
  // They steer every stream: their kernel reads unrounded float32 rows only (spec 2.10).
  return UnimplementedError(StrCat(name, " is Q8_0, mixing weights can be F32, F16 or BF16"));
}

Status Loader::LoadMtp(MtpTensors& out) {
  const std::string prefix = MtpPrefix();
  RETURN_IF_ERROR(Vector(prefix + "enorm.weight", out.enorm, kNormDraw));
  RETURN_IF_ERROR(Vector(prefix + "hnorm.weight", out.hnorm, kNormDraw));
  RETURN_IF_ERROR(Rows(prefix + "e_proj.weight", out.e_proj));
  RETURN_IF_ERROR(Rows(prefix + "h_proj.weight", out.h_proj));
  RETURN_IF_ERROR(WalkBlock(*this, prefix, config_.mtp_layer, out.block));
  RETURN_IF_ERROR(WalkHyperConnection(*this, prefix + "hc_head", out.head_hc));
  return Vector(prefix + "norm.weight", out.norm, kNormDraw);
}

Result<Weights> Loader::Load() {
  Weights weights;
  RETURN_IF_ERROR(WalkModel(*this, config_, weights));
  weights.mtp.resize(config_.num_mtp_blocks);
  for (MtpTensors& mtp : weights.mtp) RETURN_IF_ERROR(LoadMtp(mtp));
  weights.size_bytes = count_.done();
  return weights;
}

}  // namespace

Result<Weights> LoadWeights(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
                            const WeightProgress& progress) {
  return Loader(config, file, plan, progress).Load();
}

}  // namespace ds4
