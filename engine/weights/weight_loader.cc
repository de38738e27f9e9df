#include "engine/weights/weight_loader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "engine/base/mapped_file.h"
#include "engine/base/strings.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

// Between two reports, and read ahead at once.
constexpr int64_t kReportBytes = int64_t{32} << 20;

class Loader {
 public:
  Loader(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
         const WeightProgress& progress)
      : config_(config), file_(file), plan_(plan), progress_(progress) {
    for (const TensorSlice& slice : plan.slices) slices_[slice.spec.name] = &slice;
  }

  Result<Weights> Load();

 private:
  Status LoadBlock(const std::string& prefix, const LayerConfig& layer, BlockTensors& out);
  Status LoadAttention(const std::string& prefix, const LayerConfig& layer, AttentionTensors& out);
  Status LoadMoe(const std::string& prefix, const LayerConfig& layer, MoeTensors& out);
  Status LoadHyperConnection(const std::string& name, HyperConnectionTensors& out);
  Status LoadCompressor(const std::string& name, CompressorTensors& out);
  Status LoadMtp(MtpTensors& out);

  // A float vector (or small table), in float32; the rank's elements when the tensor is split.
  Status Vector(const std::string& name, std::vector<float>& out);
  // A matrix, all experts' rows one after the other; the rank's rows of each when it is split by
  // rows.
  Status Rows(const std::string& name, Matrix& out);
  // A matrix split by columns: [experts * local_lanes * rows, lane columns].
  Status LaneColumns(const std::string& name, Matrix& out);
  Status HashIds(const std::string& name, std::vector<int32_t>& out);

  struct Source {
    const TensorSlice* slice = nullptr;
    const std::byte* data = nullptr;
    int64_t columns = 0;
    int64_t rows = 0;  // of one expert
    int64_t experts = 1;
    int64_t row_bytes = 0;
  };
  Result<Source> Find(const std::string& name) const;
  // Fills `out` with `num_pieces` rows of `piece_bytes` each, piece i at piece(i).
  Status Fill(const std::string& name, DType dtype, int64_t piece_bytes, int64_t num_pieces,
              const std::function<const std::byte*(int64_t i)>& piece, Matrix& out);
  // Counts bytes of the rank's slices that are in place; kCancelled when the caller wants no more.
  Status Advance(int64_t bytes) {
    done_bytes_ += bytes;
    if (progress_ && !progress_(done_bytes_, plan_.held_bytes)) {
      return CancelledError(StrCat("loading was called off after ", HumanBytes(done_bytes_), " of ",
                                   HumanBytes(plan_.held_bytes)));
    }
    return OkStatus();
  }

  const ModelConfig& config_;
  const GgufFile& file_;
  const RankPlan& plan_;
  const WeightProgress& progress_;
  std::map<std::string, const TensorSlice*> slices_;
  int64_t done_bytes_ = 0;
};

Result<Loader::Source> Loader::Find(const std::string& name) const {
  const auto it = slices_.find(name);
  if (it == slices_.end()) return InternalError(StrCat("the shard plan has no tensor ", name));
  Source source;
  source.slice = it->second;
  ASSIGN_OR_RETURN(const TensorInfo* tensor, BindTensor(file_, source.slice->spec));
  const std::vector<int64_t>& dims = source.slice->spec.dims;
  if (static_cast<int64_t>(file_.data(*tensor).size()) != tensor->size_bytes) {
    return FailedPreconditionError(StrCat(file_.path(), ": ", name, " has no data here, ",
                                          tensor->size_bytes, " bytes are needed"));
  }
  source.data = file_.data(*tensor).data();
  source.columns = dims[0];
  source.rows = dims.size() > 1 ? dims[1] : 1;
  source.experts = dims.size() > 2 ? dims[2] : 1;
  if (source.columns % Info(tensor->dtype).block_elems != 0) {
    return InvalidArgumentError(StrCat(name, " has rows of ", source.columns, " values, ",
                                       Info(tensor->dtype).name, " blocks hold ",
                                       Info(tensor->dtype).block_elems));
  }
  source.row_bytes = BytesFor(tensor->dtype, source.columns);
  return source;
}

Status Loader::Vector(const std::string& name, std::vector<float>& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  const int64_t total = source.columns * source.rows;
  std::vector<float> all(total);
  const int64_t bytes = source.row_bytes * source.rows;
  RETURN_IF_ERROR(Dequantize(source.slice->dtype, {source.data, static_cast<size_t>(bytes)}, all)
                      .WithContext(name));
  for (int64_t i = 0; i < total; ++i) {
    if (!std::isfinite(all[i])) {
      return DataLossError(StrCat(name, "[", i, "] is ", all[i], ", must be finite"));
    }
  }
  if (source.slice->spec.split == Split::kElements) {
    const Range range = source.slice->range;
    out.assign(all.begin() + range.begin, all.begin() + range.end);
  } else {
    out = std::move(all);
  }
  return Advance(source.slice->held_bytes);
}

// A matrix type that kernels read.
Status CheckMatrixType(const std::string& name, DType dtype) {
  if (IsMatrixType(dtype)) return OkStatus();
  return UnimplementedError(StrCat(name, " is ", Info(dtype).name,
                                   ", matrices can be F32, F16, BF16 or Q8_0 on this device"));
}

Status Loader::Rows(const std::string& name, Matrix& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  RETURN_IF_ERROR(CheckMatrixType(name, source.slice->dtype));
  const TensorSlice& slice = *source.slice;
  const Range rows = slice.spec.split == Split::kRows ? slice.range : Range{0, source.rows};
  const int64_t num_rows = source.experts * rows.size();
  Result<Matrix> matrix = Matrix::Create(slice.dtype, num_rows, source.columns);
  if (!matrix.ok()) return matrix.status().WithContext(name);
  out = std::move(matrix).value();
  const auto row = [&](int64_t i) {
    const int64_t expert = i / rows.size();
    const int64_t r = rows.begin + i % rows.size();
    return source.data + (expert * source.rows + r) * source.row_bytes;
  };
  return Fill(name, slice.dtype, source.row_bytes, num_rows, row, out);
}

Status Loader::LaneColumns(const std::string& name, Matrix& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  RETURN_IF_ERROR(CheckMatrixType(name, source.slice->dtype));
  const TensorSlice& slice = *source.slice;
  const int64_t lane_columns = source.columns / config_.num_lanes;
  const int64_t lane_bytes = BytesFor(slice.dtype, lane_columns);
  const int64_t local_lanes = plan_.lanes.size();
  const int64_t num_rows = source.experts * local_lanes * source.rows;
  Result<Matrix> matrix = Matrix::Create(slice.dtype, num_rows, lane_columns);
  if (!matrix.ok()) return matrix.status().WithContext(name);
  out = std::move(matrix).value();
  const auto part = [&](int64_t i) {
    const int64_t r = i % source.rows;
    const int64_t lane = plan_.lanes.begin + i / source.rows % local_lanes;
    const int64_t expert = i / source.rows / local_lanes;
    return source.data + (expert * source.rows + r) * source.row_bytes + lane * lane_bytes;
  };
  return Fill(name, slice.dtype, lane_bytes, num_rows, part, out);
}

Status Loader::Fill(const std::string& name, DType dtype, int64_t piece_bytes, int64_t num_pieces,
                    const std::function<const std::byte*(int64_t i)>& piece, Matrix& out) {
  const int64_t pieces_at_once = std::max<int64_t>(1, kReportBytes / piece_bytes);
  for (int64_t first = 0; first < num_pieces; first += pieces_at_once) {
    const int64_t end = std::min(num_pieces, first + pieces_at_once);
    // Ask for the whole stretch at once; pieces rise in the file but for the turn to another lane.
    const std::byte* from = piece(first);
    const std::byte* to = piece(end - 1) + piece_bytes;
    if (from < to) Prefetch({from, to});
    for (int64_t i = first; i < end; ++i) {
      RETURN_IF_ERROR(out.SetRow(i, dtype, piece(i)).WithContext(name));
    }
    RETURN_IF_ERROR(Advance((end - first) * piece_bytes));
  }
  return OkStatus();
}

Status Loader::HashIds(const std::string& name, std::vector<int32_t>& out) {
  ASSIGN_OR_RETURN(const Source source, Find(name));
  if (source.slice->dtype != DType::kI32) {
    return InvalidArgumentError(
        StrCat(name, " is ", Info(source.slice->dtype).name, ", must be I32"));
  }
  out.resize(source.columns * source.rows);
  std::memcpy(out.data(), source.data, out.size() * sizeof(int32_t));
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] < 0 || out[i] >= config_.num_experts) {
      return DataLossError(
          StrCat(name, "[", i, "] is expert ", out[i], ", the model has ", config_.num_experts));
    }
  }
  return Advance(source.slice->held_bytes);
}

Status Loader::LoadHyperConnection(const std::string& name, HyperConnectionTensors& out) {
  RETURN_IF_ERROR(Rows(name + "_fn.weight", out.fn));
  if (out.fn.dtype() == DType::kQ8_0) {
    // They steer every stream: their kernel reads unrounded float32 rows only (spec 2.10).
    return UnimplementedError(
        StrCat(name, "_fn.weight is Q8_0, mixing weights can be F32, F16 or BF16"));
  }
  RETURN_IF_ERROR(Vector(name + "_base.weight", out.base));
  return Vector(name + "_scale.weight", out.scale);
}

Status Loader::LoadCompressor(const std::string& name, CompressorTensors& out) {
  RETURN_IF_ERROR(Rows(name + "_kv.weight", out.kv));
  RETURN_IF_ERROR(Rows(name + "_gate.weight", out.gate));
  RETURN_IF_ERROR(Vector(name + "_ape.weight", out.ape));
  return Vector(name + "_norm.weight", out.norm);
}

Status Loader::LoadAttention(const std::string& prefix, const LayerConfig& layer,
                             AttentionTensors& out) {
  RETURN_IF_ERROR(Vector(prefix + "attn_norm.weight", out.norm));
  RETURN_IF_ERROR(Rows(prefix + "attn_q_a.weight", out.q_a));
  RETURN_IF_ERROR(Vector(prefix + "attn_q_a_norm.weight", out.q_a_norm));
  RETURN_IF_ERROR(Rows(prefix + "attn_q_b.weight", out.q_b));
  RETURN_IF_ERROR(Rows(prefix + "attn_kv.weight", out.kv));
  RETURN_IF_ERROR(Vector(prefix + "attn_kv_a_norm.weight", out.kv_norm));
  RETURN_IF_ERROR(Vector(prefix + "attn_sinks.weight", out.sinks));
  RETURN_IF_ERROR(Rows(prefix + "attn_output_a.weight", out.o_a));
  RETURN_IF_ERROR(LaneColumns(prefix + "attn_output_b.weight", out.o_b));
  if (layer.attention == AttentionKind::kSliding) return OkStatus();
  RETURN_IF_ERROR(LoadCompressor(prefix + "attn_compressor", out.compressor));
  if (layer.attention != AttentionKind::kCompressed) return OkStatus();
  RETURN_IF_ERROR(Rows(prefix + "indexer.attn_q_b.weight", out.indexer.q_b));
  RETURN_IF_ERROR(Rows(prefix + "indexer.proj.weight", out.indexer.proj));
  return LoadCompressor(prefix + "indexer_compressor", out.indexer.compressor);
}

Status Loader::LoadMoe(const std::string& prefix, const LayerConfig& layer, MoeTensors& out) {
  RETURN_IF_ERROR(Vector(prefix + "ffn_norm.weight", out.norm));
  RETURN_IF_ERROR(Rows(prefix + "ffn_gate_inp.weight", out.router));
  if (layer.router == RouterKind::kHash) {
    RETURN_IF_ERROR(HashIds(prefix + "ffn_gate_tid2eid.weight", out.hash_ids));
  } else {
    RETURN_IF_ERROR(Vector(prefix + "exp_probs_b.bias", out.bias));
  }
  RETURN_IF_ERROR(Rows(prefix + "ffn_gate_exps.weight", out.gate));
  RETURN_IF_ERROR(Rows(prefix + "ffn_up_exps.weight", out.up));
  RETURN_IF_ERROR(LaneColumns(prefix + "ffn_down_exps.weight", out.down));
  RETURN_IF_ERROR(Rows(prefix + "ffn_gate_shexp.weight", out.shared_gate));
  RETURN_IF_ERROR(Rows(prefix + "ffn_up_shexp.weight", out.shared_up));
  return LaneColumns(prefix + "ffn_down_shexp.weight", out.shared_down);
}

Status Loader::LoadBlock(const std::string& prefix, const LayerConfig& layer, BlockTensors& out) {
  RETURN_IF_ERROR(LoadHyperConnection(prefix + "hc_attn", out.attn_hc));
  RETURN_IF_ERROR(LoadAttention(prefix, layer, out.attention));
  RETURN_IF_ERROR(LoadHyperConnection(prefix + "hc_ffn", out.ffn_hc));
  return LoadMoe(prefix, layer, out.moe);
}

Status Loader::LoadMtp(MtpTensors& out) {
  const std::string prefix = MtpPrefix();
  RETURN_IF_ERROR(Vector(prefix + "enorm.weight", out.enorm));
  RETURN_IF_ERROR(Vector(prefix + "hnorm.weight", out.hnorm));
  RETURN_IF_ERROR(Rows(prefix + "e_proj.weight", out.e_proj));
  RETURN_IF_ERROR(Rows(prefix + "h_proj.weight", out.h_proj));
  RETURN_IF_ERROR(LoadBlock(prefix, config_.mtp_layer, out.block));
  RETURN_IF_ERROR(LoadHyperConnection(prefix + "hc_head", out.head_hc));
  return Vector(prefix + "norm.weight", out.norm);
}

Result<Weights> Loader::Load() {
  Weights weights;
  RETURN_IF_ERROR(Rows("token_embd.weight", weights.embedding));
  weights.blocks.resize(config_.num_layers);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    RETURN_IF_ERROR(LoadBlock(BlockPrefix(i), config_.layers[i], weights.blocks[i]));
  }
  RETURN_IF_ERROR(LoadHyperConnection("output_hc", weights.head_hc));
  RETURN_IF_ERROR(Vector("output_norm.weight", weights.norm));
  RETURN_IF_ERROR(Rows("output.weight", weights.head));
  weights.mtp.resize(config_.num_mtp_blocks);
  for (MtpTensors& mtp : weights.mtp) RETURN_IF_ERROR(LoadMtp(mtp));
  weights.size_bytes = done_bytes_;
  return weights;
}

}  // namespace

Result<Weights> LoadWeights(const ModelConfig& config, const GgufFile& file, const RankPlan& plan,
                            const WeightProgress& progress) {
  return Loader(config, file, plan, progress).Load();
}

}  // namespace ds4
