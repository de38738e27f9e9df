#include "engine/weights/tensor_source.h"

#include <cmath>
#include <cstring>

#include "engine/base/strings.h"
#include "engine/tensor/quant.h"

namespace ds4 {

TensorSources::TensorSources(const GgufFile& file, const RankPlan& plan) : file_(file) {
  for (const TensorSlice& slice : plan.slices) slices_[slice.spec.name] = &slice;
}

Result<TensorSource> TensorSources::Find(const std::string& name, bool with_data) const {
  const auto it = slices_.find(name);
  if (it == slices_.end()) return InternalError(StrCat("the shard plan has no tensor ", name));
  TensorSource source;
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
  if (!with_data) return source;
  ASSIGN_OR_RETURN(const TensorInfo* tensor, BindTensor(file_, source.slice->spec));
  if (static_cast<int64_t>(file_.data(*tensor).size()) != tensor->size_bytes) {
    return FailedPreconditionError(StrCat(file_.path(), ": ", name, " has no data here, ",
                                          tensor->size_bytes, " bytes are needed"));
  }
  source.data = file_.data(*tensor).data();
  return source;
}

Result<std::vector<float>> ReadVector(const TensorSource& source) {
  std::vector<float> all(source.columns * source.rows);
  const auto bytes = static_cast<size_t>(source.row_bytes * source.rows);
  RETURN_IF_ERROR(
      Dequantize(source.slice->dtype, {source.data, bytes}, all).WithContext(source.name()));
  for (size_t i = 0; i < all.size(); ++i) {
    if (!std::isfinite(all[i])) {
      return DataLossError(StrCat(source.name(), "[", i, "] is ", all[i], ", must be finite"));
    }
  }
  const Range own = source.own_elements();
  if (own.size() < std::ssize(all)) {
    all = std::vector<float>(all.begin() + own.begin, all.begin() + own.end);
  }
  return all;
}

Result<std::vector<int32_t>> ReadExpertIds(const TensorSource& source, int64_t num_experts) {
  if (source.slice->dtype != DType::kI32) {
    return InvalidArgumentError(
        StrCat(source.name(), " is ", Info(source.slice->dtype).name, ", must be I32"));
  }
  std::vector<int32_t> ids(source.columns * source.rows);
  std::memcpy(ids.data(), source.data, ids.size() * sizeof(int32_t));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= num_experts) {
      return DataLossError(
          StrCat(source.name(), "[", i, "] is expert ", ids[i], ", the model has ", num_experts));
    }
  }
  return ids;
}

Status WeightCount::Advance(int64_t bytes) {
  done_ += bytes;
  if (progress_ && !progress_(done_, total_)) {
    return CancelledError(
        StrCat("loading was called off after ", HumanBytes(done_), " of ", HumanBytes(total_)));
  }
  return OkStatus();
}

}  // namespace ds4
