// One pass in the order of the plan: find the tensor, convert it in pieces of whole rows, append.
#include "engine/gguf/convert.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "engine/base/byte_order.h"
#include "engine/base/strings.h"
#include "engine/gguf/gguf_writer.h"
#include "engine/gguf/hf_config.h"
#include "engine/gguf/hf_names.h"
#include "engine/gguf/hf_tokenizer.h"
#include "engine/gguf/safetensors.h"
#include "engine/tensor/quant.h"

namespace ds4 {
namespace {

constexpr int64_t kPieceElems = int64_t{1} << 20;
constexpr std::string_view kRecordedRuns = "case.";

struct Source {
  const SafetensorsFile* file = nullptr;
  const SafetensorInfo* info = nullptr;
};

// All pieces of the checkpoint as one set of tensors.
class Checkpoint {
 public:
  static Result<Checkpoint> Open(const std::vector<std::string>& paths) {
    if (paths.empty()) return InvalidArgumentError("no input file");
    Checkpoint checkpoint;
    for (const std::string& path : paths) {
      ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(path));
      for (const SafetensorInfo& info : file->tensors()) {
        const auto [it, is_new] = checkpoint.tensors_.emplace(info.name, Source{file.get(), &info});
        if (!is_new) {
          return InvalidArgumentError(
              StrCat("tensor ", info.name, " is in ", path, " and in ", it->second.file->path()));
        }
      }
      checkpoint.files_.push_back(std::move(file));
    }
    return checkpoint;
  }

  bool Has(const std::string& name) const { return tensors_.contains(name); }

  Result<Source> Find(const std::string& name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) {
      return NotFoundError(StrCat("tensor ", name, " is missing in ", files_[0]->path(),
                                  files_.size() > 1 ? " and the other inputs" : ""));
    }
    return it->second;
  }

  // The configuration; where several pieces carry one, they must agree.
  Result<std::string> ConfigJson() const {
    std::string config;
    for (const auto& file : files_) {
      const auto it = file->metadata().find("config_json");
      if (it == file->metadata().end()) continue;
      if (!config.empty() && config != it->second) {
        return InvalidArgumentError(
            StrCat("config_json of ", file->path(), " differs from that of the files before it"));
      }
      config = it->second;
    }
    if (config.empty()) {
      return NotFoundError(StrCat(files_[0]->path(), " has no \"config_json\" in its metadata"));
    }
    return config;
  }

  // kInvalidArgument names a tensor that the plan does not use.
  Status CheckAllUsed(const std::vector<PlannedTensor>& plan) const {
    std::set<std::string_view> planned;
    for (const PlannedTensor& tensor : plan) planned.insert(tensor.hf_name);
    for (const auto& [name, source] : tensors_) {
      if (name.starts_with(kRecordedRuns) || planned.contains(name)) continue;
      return InvalidArgumentError(StrCat(source.file->path(), ": tensor ", name,
                                         " is none that the configuration calls for"));
    }
    return OkStatus();
  }

 private:
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Source, std::less<>> tensors_;
};

bool IsHalf(WeightRole role) {
  return role == WeightRole::kGateHalf || role == WeightRole::kUpHalf;
}

DType TargetType(WeightRole role, DType asked, int64_t row_elems) {
  if (role == WeightRole::kIdTable) return DType::kI32;
  if (role == WeightRole::kVector || asked == DType::kF32) return DType::kF32;
  if (role == WeightRole::kSmallMatrix) return DType::kF16;
  return row_elems % Info(asked).block_elems == 0 ? asked : DType::kF32;
}

// The shape in GGUF order; halves of a fused tensor have half its rows.
Result<std::vector<int64_t>> TargetDims(const PlannedTensor& planned,
                                        const SafetensorInfo& source) {
  std::vector<int64_t> dims(source.shape.rbegin(), source.shape.rend());
  if (!IsHalf(planned.role)) return dims;
  if (dims.size() != 3 || dims[1] % 2 != 0) {
    return InvalidArgumentError(
        StrCat("tensor ", source.name, " must be [experts, 2 * ffn, hidden], it has ", dims.size(),
               " dims", dims.size() == 3 ? StrCat(" and ", dims[1], " rows") : ""));
  }
  dims[1] /= 2;
  return dims;
}

// Reads float values of one source tensor, whatever their stored type.
class FloatReader {
 public:
  static Result<FloatReader> Make(const Source& source) {
    const std::string& name = source.info->dtype;
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      if (name == Info(dtype).name) return FloatReader(source, dtype);
    }
    return UnimplementedError(StrCat("tensor ", source.info->name, " is stored as ", name,
                                     "; F32, F16 and BF16 can be converted"));
  }

  // Values [first, first + out.size()), all finite.
  Status Read(int64_t first, std::span<float> out) const {
    const auto item = static_cast<size_t>(Info(dtype_).block_bytes);
    const auto bytes = source_.file->data(*source_.info)
                           .subspan(static_cast<size_t>(first) * item, out.size() * item);
    RETURN_IF_ERROR(Dequantize(dtype_, bytes, out));
    for (size_t i = 0; i < out.size(); ++i) {
      if (std::isfinite(out[i])) continue;
      return InvalidArgumentError(StrCat("tensor ", source_.info->name, " holds ", out[i],
                                         " at index ", first + static_cast<int64_t>(i)));
    }
    return OkStatus();
  }

 private:
  FloatReader(const Source& source, DType dtype) : source_(source), dtype_(dtype) {}

  Source source_;
  DType dtype_;
};

// F16 ends at 65504: a weight beyond would silently become infinite.
Status CheckFits(const std::string& name, std::span<const float> values, DType dtype) {
  if (dtype != DType::kF16 && dtype != DType::kBF16) return OkStatus();
  for (const float value : values) {
    const float stored =
        dtype == DType::kF16 ? F16ToF32(F32ToF16(value)) : BF16ToF32(F32ToBF16(value));
    if (std::isfinite(stored)) continue;
    return InvalidArgumentError(StrCat("tensor ", name, " holds ", value, ", too large for ",
                                       Info(dtype).name, "; choose another type"));
  }
  return OkStatus();
}

// Source values [first, first + count) as the next bytes of the target; whole rows.
Status AppendRange(const FloatReader& reader, const TensorInfo& target, int64_t first,
                   int64_t count, GgufWriter* writer) {
  const int64_t row = target.dims[0];
  const int64_t piece = std::max(row, kPieceElems / row * row);
  std::vector<float> values;
  std::vector<std::byte> bytes;
  for (int64_t done = 0; done < count; done += piece) {
    const int64_t size = std::min(piece, count - done);
    values.resize(static_cast<size_t>(size));
    bytes.resize(static_cast<size_t>(BytesFor(target.dtype, size)));
    RETURN_IF_ERROR(reader.Read(first + done, values));
    RETURN_IF_ERROR(CheckFits(target.name, values, target.dtype));
    RETURN_IF_ERROR(Quantize(target.dtype, values, bytes).WithContext(target.name));
    RETURN_IF_ERROR(writer->Append(target.name, bytes));
  }
  return OkStatus();
}

Status AppendFloats(const Source& source, WeightRole role, const TensorInfo& target,
                    GgufWriter* writer) {
  ASSIGN_OR_RETURN(const FloatReader reader, FloatReader::Make(source));
  if (!IsHalf(role)) return AppendRange(reader, target, 0, target.num_elems(), writer);
  const int64_t half = target.dims[0] * target.dims[1];
  const int64_t skip = role == WeightRole::kUpHalf ? half : 0;
  for (int64_t expert = 0; expert < target.dims[2]; ++expert) {
    RETURN_IF_ERROR(AppendRange(reader, target, 2 * half * expert + skip, half, writer));
  }
  return OkStatus();
}

// Expert ids, I32 or I64 in the source.
Status AppendIds(const Source& source, const TensorInfo& target, int64_t num_experts,
                 GgufWriter* writer) {
  const SafetensorInfo& info = *source.info;
  if (info.dtype != "I32" && info.dtype != "I64") {
    return InvalidArgumentError(
        StrCat("tensor ", info.name, " is stored as ", info.dtype, ", expert ids are I32 or I64"));
  }
  const size_t item = info.dtype == "I32" ? 4 : 8;
  const auto from = source.file->data(info);
  std::vector<std::byte> bytes(static_cast<size_t>(target.size_bytes));
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    const std::byte* at = from.data() + item * i;
    const int64_t id = item == 4 ? LoadLittleEndian<int32_t>(at) : LoadLittleEndian<int64_t>(at);
    if (id < 0 || id >= num_experts) {
      return InvalidArgumentError(StrCat("tensor ", info.name, " holds expert ", id, " at index ",
                                         i, ", there are ", num_experts));
    }
    StoreLittleEndian(static_cast<int32_t>(id), bytes.data() + 4 * i);
  }
  return writer->Append(target.name, bytes);
}

class Converter {
 public:
  Converter(const ConvertOptions& options, Checkpoint checkpoint)
      : options_(options), checkpoint_(std::move(checkpoint)) {}

  Status Run() {
    RETURN_IF_ERROR(WriteMetadata());
    plan_ = PlanTensors(config_.layout);
    RETURN_IF_ERROR(checkpoint_.CheckAllUsed(plan_));
    for (const PlannedTensor& planned : plan_) RETURN_IF_ERROR(Declare(planned));
    RETURN_IF_ERROR(writer_.Begin(options_.output));
    for (size_t i = 0; i < plan_.size(); ++i) {
      Report(StrCat("[", i + 1, "/", plan_.size(), "] ", plan_[i].gguf_name));
      RETURN_IF_ERROR(Convert(plan_[i], writer_.tensors()[i]));
    }
    return writer_.Finish();
  }

 private:
  Status WriteMetadata() {
    ASSIGN_OR_RETURN(const std::string json, checkpoint_.ConfigJson());
    writer_.AddString("general.architecture", "deepseek4");
    writer_.AddString("general.type", "model");
    writer_.AddString("general.name", options_.name);
    writer_.AddU32("general.quantization_version", 2);
    writer_.AddU32("general.file_type", FileType());
    writer_.AddU32("general.alignment", 32);
    ASSIGN_OR_RETURN(config_,
                     WriteConfigKeys(json, checkpoint_.Has("mtp.0.e_proj.weight"), &writer_));
    if (options_.tokenizer.empty()) return OkStatus();
    return WriteTokenizerKeys(options_.tokenizer, config_, &writer_);
  }

  // The number other programs show as the file's type.
  uint32_t FileType() const {
    switch (options_.type) {
      case DType::kF16:
        return 1;
      case DType::kQ8_0:
        return 7;
      case DType::kBF16:
        return 32;
      default:
        return 0;
    }
  }

  Status Declare(const PlannedTensor& planned) {
    ASSIGN_OR_RETURN(const Source source, checkpoint_.Find(planned.hf_name));
    ASSIGN_OR_RETURN(std::vector<int64_t> dims, TargetDims(planned, *source.info));
    if (dims.empty())
      return InvalidArgumentError(StrCat("tensor ", planned.hf_name, " has no dims"));
    const DType dtype = TargetType(planned.role, options_.type, dims[0]);
    const bool matrix = planned.role == WeightRole::kMatrix || IsHalf(planned.role);
    if (matrix && dtype != options_.type) {
      Report(StrCat("note: ", planned.gguf_name, " stays ", Info(dtype).name, ", its rows of ",
                    dims[0], " values are no multiple of ", Info(options_.type).block_elems));
    }
    return writer_.AddTensor(planned.gguf_name, dtype, std::move(dims));
  }

  Status Convert(const PlannedTensor& planned, const TensorInfo& target) {
    ASSIGN_OR_RETURN(const Source source, checkpoint_.Find(planned.hf_name));
    if (planned.role == WeightRole::kIdTable) {
      return AppendIds(source, target, config_.num_experts, &writer_);
    }
    return AppendFloats(source, planned.role, target, &writer_);
  }

  void Report(const std::string& line) const {
    if (options_.report) options_.report(line);
  }

  const ConvertOptions& options_;
  Checkpoint checkpoint_;
  HfConfig config_;
  GgufWriter writer_;
  std::vector<PlannedTensor> plan_;
};

}  // namespace

Status ConvertSafetensors(const ConvertOptions& options) {
  const DType type = options.type;
  if (type != DType::kF32 && type != DType::kF16 && type != DType::kBF16 && type != DType::kQ8_0) {
    return UnimplementedError(
        StrCat("type ", Info(type).name, " cannot be written; choose f32, f16, bf16 or q8_0"));
  }
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(options.inputs));
  return Converter(options, std::move(checkpoint)).Run();
}

}  // namespace ds4
