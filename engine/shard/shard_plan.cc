#include "engine/shard/shard_plan.h"

#include <array>
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
  const int64_t lane_columns =
      spec.split == Split::kColumns ? slice.total / config.num_lanes : held[0];
  if (lane_columns % block != 0) {
    return InvalidArgumentError(StrCat(
        file.path(), ": ", spec.name, " (", Info(slice.dtype).name, ") has ", lane_columns,
        " columns in a lane, its blocks hold ", block, "; store it in a type with smaller blocks"));
  }
  slice.held_bytes = BytesFor(slice.dtype, Product(held));
  slice.read_bytes_per_token = ReadBytes(config, slice);
  return slice;
}

Status CheckLayout(const ModelConfig& config, const LaneLayout& lanes) {
  if (lanes.world_size() < 1 || lanes.world_size() > config.num_lanes) {
    return InvalidArgumentError(StrCat("world size ", lanes.world_size(),
                                       ", the model splits over 1 to ", config.num_lanes,
                                       " ranks"));
  }
  bool rising = lanes.num_lanes == config.num_lanes && lanes.begin.front() == 0 &&
                lanes.begin.back() == config.num_lanes;
  for (int r = 0; r < lanes.world_size(); ++r)
    rising = rising && lanes.begin[r] < lanes.begin[r + 1];
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

// One line for the tensors of one name, shape, type and cut in all layers of one rank.
struct DetailLine {
  const TensorSlice* first = nullptr;
  int num_layers = 0;
  int64_t held_bytes = 0;
  int64_t read_bytes = 0;
};

std::string CutText(const TensorSlice& slice) {
  if (slice.spec.split == Split::kReplicate) return "whole";
  return StrCat(KindOf(slice.spec), " ", slice.range.begin, "-", slice.range.end - 1, " of ",
                slice.total);
}

// In order of first appearance, so that the table reads like a forward pass.
std::vector<DetailLine> DetailLines(const RankPlan& rank) {
  std::vector<DetailLine> lines;
  std::map<std::string, size_t> index;
  for (const TensorSlice& slice : rank.slices) {
    const std::string key = StrCat(WithoutLayer(slice.spec.name), " ", Info(slice.dtype).name, " ",
                                   DimsString(slice.spec.dims));
    const auto [it, is_new] = index.emplace(key, lines.size());
    if (is_new) lines.push_back({&slice, 0, 0, 0});
    DetailLine& line = lines[it->second];
    ++line.num_layers;
    line.held_bytes += slice.held_bytes;
    line.read_bytes += slice.read_bytes_per_token;
  }
  return lines;
}

void AppendDetails(const RankPlan& rank, std::ostream& out) {
  const auto row = [&](const std::array<std::string, 7>& cells) {
    constexpr std::array<int, 6> kWidths = {34, 6, 9, 19, 28, 11};
    out << "  " << std::left;
    for (size_t i = 0; i < kWidths.size(); ++i) out << std::setw(kWidths[i]) << cells[i];
    out << cells.back() << "\n";
  };
  out << "\nrank " << rank.rank << "\n";
  row({"tensor", "count", "type", "dims", "slice", "holds", "reads/token"});
  for (const DetailLine& line : DetailLines(rank)) {
    const TensorSlice& slice = *line.first;
    row({WithoutLayer(slice.spec.name), std::to_string(line.num_layers),
         std::string(Info(slice.dtype).name), DimsString(slice.spec.dims), CutText(slice),
         HumanBytes(line.held_bytes), HumanBytes(line.read_bytes)});
  }
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
      text << "\n"
           << rank.rank << " " << slice.spec.name << " " << Info(slice.dtype).name << " "
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
  const auto row = [&](const std::array<std::string, 8>& cells) {
    constexpr std::array<int, 7> kWidths = {6, 7, 9, 8, 14, 15, 12};
    out << std::left;
    for (size_t i = 0; i < kWidths.size(); ++i) out << std::setw(kWidths[i]) << cells[i];
    out << cells.back() << "\n";
  };
  const auto text = [](const Range& r) { return StrCat(r.begin, "-", r.end - 1); };
  row({"rank", "lanes", "heads", "groups", "expert width", "vocabulary", "holds", "reads/token"});
  int64_t held = 0;
  int64_t read = 0;
  for (const RankPlan& rank : ranks) {
    held += rank.held_bytes;
    read += rank.read_bytes_per_token;
    row({std::to_string(rank.rank), text(rank.lanes), text(rank.heads), text(rank.groups),
         text(rank.ffn), text(rank.vocab), HumanBytes(rank.held_bytes),
         HumanBytes(rank.read_bytes_per_token)});
  }
  row({"all", "", "", "", "", "", HumanBytes(held), HumanBytes(read)});
  if (details) {
    for (const RankPlan& rank : ranks) AppendDetails(rank, out);
  }
  return std::move(out).str();
}

}  // namespace ds4
