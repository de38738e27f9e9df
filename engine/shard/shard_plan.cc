#include "engine/shard/shard_plan.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

// Index into GGUF dims of the dimension that `split` cuts, or -1.
int SplitDim(Split split) {
  switch (split) {
    case Split::kReplicate:
      return -1;
    case Split::kRows:
      return 1;
    case Split::kColumns:
    case Split::kElements:
      return 0;
  }
  return -1;
}

int64_t Product(const std::vector<int64_t>& dims) {
  int64_t product = 1;
  for (int64_t dim : dims) product *= dim;
  return product;
}

int64_t ReadBytes(const ModelConfig& config, const TensorSlice& slice) {
  switch (slice.spec.read) {
    case ReadPattern::kAll:
      return slice.held_bytes;
    case ReadPattern::kOneRow:
      return slice.held_bytes / slice.spec.dims.back();
    case ReadPattern::kExperts:
      return slice.held_bytes / config.num_experts * config.num_experts_used;
    case ReadPattern::kDraft:
      return 0;
  }
  return 0;
}

Result<TensorSlice> MakeSlice(const ModelConfig& config, const GgufFile& file,
                              const TensorSpec& spec, const Range& lanes) {
  ASSIGN_OR_RETURN(const TensorInfo* tensor, BindTensor(file, spec));
  TensorSlice slice;
  slice.spec = spec;
  slice.dtype = tensor->dtype;
  const int dim = SplitDim(spec.split);
  slice.total = dim < 0 ? spec.dims.back() : spec.dims[dim];
  slice.range = {0, slice.total};
  std::vector<int64_t> held = spec.dims;
  if (dim >= 0) {
    slice.range = LaneRange(slice.total, config.num_lanes, static_cast<int>(lanes.begin),
                            static_cast<int>(lanes.end));
    held[dim] = slice.range.size();
  }
  const int64_t block = Info(slice.dtype).block_elems;
  const int64_t lane_columns = spec.split == Split::kColumns ? slice.total / config.num_lanes : held[0];
  if (lane_columns % block != 0) {
    return InvalidArgumentError(StrCat(file.path(), ": ", spec.name, " (", Info(slice.dtype).name,
                                       ") has ", lane_columns, " columns in a lane, its blocks hold ",
                                       block, "; store it in a type with smaller blocks"));
  }
  slice.held_bytes = BytesFor(slice.dtype, Product(held));
  slice.read_bytes_per_token = ReadBytes(config, slice);
  return slice;
}

Status CheckLayout(const ModelConfig& config, const LaneLayout& lanes) {
  if (lanes.world_size() < 1 || lanes.world_size() > config.num_lanes) {
    return InvalidArgumentError(StrCat("world size ", lanes.world_size(), ", the model splits over 1 to ",
                                       config.num_lanes, " ranks"));
  }
  bool rising = lanes.num_lanes == config.num_lanes && lanes.begin.front() == 0 &&
                lanes.begin.back() == config.num_lanes;
  for (int r = 0; r < lanes.world_size(); ++r) rising = rising && lanes.begin[r] < lanes.begin[r + 1];
  if (!rising) {
    return InvalidArgumentError(StrCat("the lane layout must cut ", config.num_lanes,
                                       " lanes into one part per rank, none empty"));
  }
  return OkStatus();
}

const char* KindOf(const TensorSpec& spec) {
  switch (spec.split) {
    case Split::kReplicate:
      return "replicated";
    case Split::kRows:
      return "rows";
    case Split::kColumns:
      return "columns";
    case Split::kElements:
      return "elements";
  }
  return "";
}

// "blk.17.attn_q_b.weight" is "blk.*.attn_q_b.weight": layers of one kind share a line.
std::string WithoutLayer(const std::string& name) {
  if (!name.starts_with("blk.")) return name;
  return "blk.*" + name.substr(name.find('.', 4));
}

}  // namespace

Range LaneRange(int64_t dim, int num_lanes, int lane_begin, int lane_end) {
  return {dim * lane_begin / num_lanes, dim * lane_end / num_lanes};
}

Result<ShardPlan> MakeShardPlan(const ModelConfig& config, const GgufFile& file,
                                const LaneLayout& lanes) {
  RETURN_IF_ERROR(CheckLayout(config, lanes));
  ShardPlan plan;
  plan.lanes = lanes;
  const std::vector<TensorSpec> specs = ModelTensors(config);
  for (int r = 0; r < lanes.world_size(); ++r) {
    RankPlan rank;
    rank.rank = r;
    const int begin = lanes.begin[r];
    const int end = lanes.begin[r + 1];
    rank.lanes = {begin, end};
    rank.heads = LaneRange(config.num_heads, config.num_lanes, begin, end);
    rank.groups = LaneRange(config.num_output_groups, config.num_lanes, begin, end);
    rank.ffn = LaneRange(config.ffn_dim, config.num_lanes, begin, end);
    rank.vocab = LaneRange(config.vocab_size, config.num_lanes, begin, end);
    for (const TensorSpec& spec : specs) {
      ASSIGN_OR_RETURN(TensorSlice slice, MakeSlice(config, file, spec, rank.lanes));
      rank.held_bytes += slice.held_bytes;
      rank.read_bytes_per_token += slice.read_bytes_per_token;
      rank.slices.push_back(std::move(slice));
    }
    plan.ranks.push_back(std::move(rank));
  }
  return plan;
}

std::string ShardPlan::Digest() const {
  std::ostringstream text;
  text << "lanes " << lanes.num_lanes;
  for (int begin : lanes.begin) text << " " << begin;
  for (const RankPlan& rank : ranks) {
    for (const TensorSlice& slice : rank.slices) {
      text << "\n" << rank.rank << " " << slice.spec.name << " " << Info(slice.dtype).name << " "
           << DimsString(slice.spec.dims) << " " << KindOf(slice.spec) << " " << slice.range.begin
           << "-" << slice.range.end;
    }
  }
  const std::string bytes = std::move(text).str();
  std::ostringstream hex;
  hex << std::hex << std::setfill('0') << std::setw(16) << XXH3_64bits(bytes.data(), bytes.size());
  return std::move(hex).str();
}

std::string ShardPlan::ToString(bool details) const {
  std::ostringstream out;
  out << "rank  lanes  heads      groups   expert width   vocabulary      holds       reads/token\n";
  const auto range = [](const Range& r) { return StrCat(r.begin, "-", r.end - 1); };
  for (const RankPlan& rank : ranks) {
    out << std::left << std::setw(6) << rank.rank << std::setw(7) << range(rank.lanes)
        << std::setw(11) << range(rank.heads) << std::setw(9) << range(rank.groups) << std::setw(15)
        << range(rank.ffn) << std::setw(16) << range(rank.vocab) << std::setw(12)
        << HumanBytes(rank.held_bytes) << HumanBytes(rank.read_bytes_per_token) << "\n";
  }
  if (!details) return std::move(out).str();
  for (const RankPlan& rank : ranks) {
    struct Line {
      int count = 0;
      int64_t held = 0;
      int64_t read = 0;
      const TensorSlice* first = nullptr;
    };
    // In order of first appearance, so that the table reads like a forward pass.
    std::vector<std::string> order;
    std::map<std::string, Line> lines;
    for (const TensorSlice& slice : rank.slices) {
      const std::string key = WithoutLayer(slice.spec.name);
      Line& line = lines[key];
      if (line.count++ == 0) {
        order.push_back(key);
        line.first = &slice;
      }
      line.held += slice.held_bytes;
      line.read += slice.read_bytes_per_token;
    }
    out << "\nrank " << rank.rank << "\n";
    out << "  " << std::setw(38) << "tensor" << std::setw(8) << "layers" << std::setw(9) << "type"
        << std::setw(24) << "dims" << std::setw(26) << "slice" << std::setw(12) << "holds"
        << "reads/token\n";
    for (const std::string& key : order) {
      const Line& line = lines[key];
      const TensorSlice& slice = *line.first;
      const std::string cut =
          slice.spec.split == Split::kReplicate
              ? "whole"
              : StrCat(KindOf(slice.spec), " ", slice.range.begin, "-", slice.range.end - 1, " of ",
                       slice.total);
      out << "  " << std::setw(38) << key << std::setw(8) << line.count << std::setw(9)
          << Info(slice.dtype).name << std::setw(24) << DimsString(slice.spec.dims) << std::setw(26)
          << cut << std::setw(12) << HumanBytes(line.held) << HumanBytes(line.read) << "\n";
    }
  }
  return std::move(out).str();
}

}  // namespace ds4
