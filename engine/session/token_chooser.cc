#include "engine/session/token_chooser.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/base/strings.h"

namespace ds4 {
namespace {

// Plain values written one after the other; both ends are this file, on equal builds (hello).
class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  template <typename T>
  void Put(T value) {
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    std::memcpy(out_.data() + at, &value, sizeof(T));
  }

 private:
  std::vector<std::byte>& out_;
};

class Reader {
 public:
  explicit Reader(const std::byte* data) : data_(data) {}
  template <typename T>
  T Get() {
    T value;
    std::memcpy(&value, data_, sizeof(T));
    data_ += sizeof(T);
    return value;
  }

 private:
  const std::byte* data_;
};

constexpr int64_t kLaneBytes = sizeof(float) + 2 * sizeof(double);
constexpr int64_t kTokenBytes = sizeof(int32_t) + sizeof(float);

struct WireDecision {
  int32_t kind = 0;
  int32_t token = 0;
  int32_t count = 0;
  int32_t lane = 0;
  double residual = 0.0;
};

}  // namespace

TokenChooser::TokenChooser(const RankContext& context) : context_(context) {
  const RankPlan& plan = *context.plan;
  const int num_lanes = context.config->num_lanes;
  for (int64_t lane = plan.lanes.begin; lane <= plan.lanes.end; ++lane) {
    lane_begin_.push_back(context.config->vocab_size * lane / num_lanes - plan.vocab.begin);
  }
  const LaneLayout& layout = context.comm->lanes();
  for (int r = 0; r < layout.world_size(); ++r) {
    max_lanes_ = std::max<int64_t>(max_lanes_, layout.num_lanes_of(r));
  }
}

Result<Candidates> TokenChooser::GatherCandidates(std::span<const float> logits, int32_t count,
                                                  float temperature) {
  const Candidates own = LocalCandidates(logits, static_cast<int32_t>(context_.plan->vocab.begin),
                                         lane_begin_, count, temperature);
  const int64_t message_bytes = max_lanes_ * kLaneBytes + sizeof(int32_t) + count * kTokenBytes;
  mine_.clear();
  Writer writer(mine_);
  for (const LaneStats& lane : own.lanes) {
    writer.Put(lane.max_logit);
    writer.Put(lane.sum_exp);
    writer.Put(lane.sum_exp_temp);
  }
  mine_.resize(max_lanes_ * kLaneBytes);
  writer.Put(static_cast<int32_t>(own.top.size()));
  for (const TopToken& token : own.top) {
    writer.Put(token.id);
    writer.Put(token.logit);
  }
  mine_.resize(message_bytes);
  const LaneLayout& layout = context_.comm->lanes();
  all_.resize(message_bytes * layout.world_size());
  RETURN_IF_ERROR(context_.comm->AllGather(mine_, all_));

  std::vector<Candidates> ranks(layout.world_size());
  for (int r = 0; r < layout.world_size(); ++r) {
    const std::byte* message = all_.data() + r * message_bytes;
    Reader lanes(message);
    for (int i = 0; i < layout.num_lanes_of(r); ++i) {
      LaneStats& lane = ranks[r].lanes.emplace_back();
      lane.max_logit = lanes.Get<float>();
      lane.sum_exp = lanes.Get<double>();
      lane.sum_exp_temp = lanes.Get<double>();
    }
    Reader tokens(message + max_lanes_ * kLaneBytes);
    const int32_t num_tokens = tokens.Get<int32_t>();
    if (num_tokens < 0 || num_tokens > count) {
      return DataLossError(StrCat("rank ", r, " sent ", num_tokens, " candidates, at most ", count,
                                  " were asked for"));
    }
    for (int32_t i = 0; i < num_tokens; ++i) {
      const auto id = tokens.Get<int32_t>();
      ranks[r].top.push_back({id, tokens.Get<float>()});
    }
  }
  return MergeCandidates(ranks, count);
}

Status TokenChooser::Choose(std::span<const float> logits, const SamplingParams& sampling,
                            int32_t num_top, TokenOutput& output) {
  Communicator& comm = *context_.comm;
  const int64_t vocab_size = context_.config->vocab_size;
  comm.set_site(-1, "choosing a token");
  int32_t count = std::max(num_top, FirstCandidateCount(sampling, vocab_size));
  while (true) {
    ASSIGN_OR_RETURN(const Candidates merged, GatherCandidates(logits, count, sampling.temperature));
    // Every rank fails alike on bad logits, so nobody waits for a decision that does not come.
    ASSIGN_OR_RETURN(Decision decision, Decide(sampling, output.pos, merged, vocab_size));
    WireDecision wire{static_cast<int32_t>(decision.kind), decision.token, decision.count,
                      decision.lane, decision.residual};
    RETURN_IF_ERROR(comm.Broadcast(0, std::as_writable_bytes(std::span(&wire, 1))));
    if (wire.kind == static_cast<int32_t>(Decision::Kind::kNeedMore)) {
      count = std::max(wire.count, count + 1);
      continue;
    }
    output.token = wire.token;
    if (wire.kind == static_cast<int32_t>(Decision::Kind::kWalkLane)) {
      const LaneLayout& layout = comm.lanes();
      int owner = 0;
      while (owner + 1 < layout.world_size() && layout.begin[owner + 1] <= wire.lane) ++owner;
      if (owner == comm.rank()) {
        const int64_t lane = wire.lane - context_.plan->lanes.begin;
        output.token = WalkLane(
            logits.subspan(lane_begin_[lane], lane_begin_[lane + 1] - lane_begin_[lane]),
            static_cast<int32_t>(context_.plan->vocab.begin + lane_begin_[lane]),
            sampling.temperature, merged.lanes[wire.lane].max_logit, wire.residual);
      }
      RETURN_IF_ERROR(comm.Broadcast(owner, std::as_writable_bytes(std::span(&output.token, 1))));
    }
    output.top.assign(merged.top.begin(),
                      merged.top.begin() + std::min<size_t>(num_top, merged.top.size()));
    // The drawn token's logit is at hand unless it came from a lane walk: then its owner has it.
    float logit = 0.0f;
    const auto drawn = std::find_if(merged.top.begin(), merged.top.end(),
                                    [&](const TopToken& t) { return t.id == output.token; });
    if (drawn != merged.top.end()) {
      logit = drawn->logit;
    } else {
      const Range vocab = context_.plan->vocab;
      int owner = 0;
      const auto& layout = comm.lanes();
      while (owner + 1 < layout.world_size() &&
             vocab_size * layout.begin[owner + 1] / layout.num_lanes <= output.token) {
        ++owner;
      }
      if (owner == comm.rank()) logit = logits[output.token - vocab.begin];
      RETURN_IF_ERROR(comm.Broadcast(owner, std::as_writable_bytes(std::span(&logit, 1))));
    }
    output.logprob = static_cast<float>(logit - LogSumExp(merged.lanes));
    return OkStatus();
  }
}

Status TokenChooser::Score(const float* logits, std::span<const int32_t> targets,
                           std::span<float> nll) {
  Communicator& comm = *context_.comm;
  comm.set_site(-1, "scoring rows");
  const Range vocab = context_.plan->vocab;
  const int64_t rows = static_cast<int64_t>(targets.size());
  const int64_t row_bytes = max_lanes_ * kLaneBytes + sizeof(float);
  mine_.clear();
  Writer writer(mine_);
  for (int64_t t = 0; t < rows; ++t) {
    const std::span<const float> row(logits + t * vocab.size(), vocab.size());
    const Candidates own =
        LocalCandidates(row, static_cast<int32_t>(vocab.begin), lane_begin_, 0, 0.0f);
    for (const LaneStats& lane : own.lanes) {
      writer.Put(lane.max_logit);
      writer.Put(lane.sum_exp);
      writer.Put(lane.sum_exp_temp);
    }
    mine_.resize(t * row_bytes + max_lanes_ * kLaneBytes);
    const bool have = targets[t] >= vocab.begin && targets[t] < vocab.end;
    writer.Put(have ? row[targets[t] - vocab.begin] : 0.0f);
  }
  const LaneLayout& layout = comm.lanes();
  all_.resize(mine_.size() * layout.world_size());
  RETURN_IF_ERROR(comm.AllGather(mine_, all_));
  for (int64_t t = 0; t < rows; ++t) {
    std::vector<LaneStats> lanes;
    float logit = 0.0f;
    for (int r = 0; r < layout.world_size(); ++r) {
      const std::byte* message = all_.data() + r * mine_.size() + t * row_bytes;
      Reader reader(message);
      for (int i = 0; i < layout.num_lanes_of(r); ++i) {
        LaneStats& lane = lanes.emplace_back();
        lane.max_logit = reader.Get<float>();
        lane.sum_exp = reader.Get<double>();
        lane.sum_exp_temp = reader.Get<double>();
      }
      // The owner sent the logit, all others 0.
      logit += Reader(message + max_lanes_ * kLaneBytes).Get<float>();
    }
    nll[t] = targets[t] < 0 ? 0.0f : static_cast<float>(LogSumExp(lanes) - logit);
    if (std::isnan(nll[t])) {
      return InternalError(StrCat("row ", t, ": a logit is not a finite number"));
    }
  }
  return OkStatus();
}

}  // namespace ds4
