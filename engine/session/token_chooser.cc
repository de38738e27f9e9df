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

// kLaneBytes each way.
void PutLane(const LaneStats& lane, Writer& writer) {
  writer.Put(lane.max_logit);
  writer.Put(lane.sum_exp);
  writer.Put(lane.sum_exp_temp);
}

LaneStats GetLane(Reader& reader) {
  LaneStats lane;
  lane.max_logit = reader.Get<float>();
  lane.sum_exp = reader.Get<double>();
  lane.sum_exp_temp = reader.Get<double>();
  return lane;
}

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
    PutLane(lane, writer);
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
      ranks[r].lanes.push_back(GetLane(lanes));
    }
    Reader tokens(message + max_lanes_ * kLaneBytes);
    const int32_t num_tokens = tokens.Get<int32_t>();
    if (num_tokens < 0 || num_tokens > count) {
      return DataLossError(StrCat("rank ", r, " sent ", num_tokens, " candidates, at most ", count,
                                  " were asked for"));
    }
    for (int32_t i = 0; i < num_tokens; ++i) {
      const auto id = tokens.Get<int32_t>();
      RETURN_IF_ERROR(CheckToken(id, r));
      ranks[r].top.push_back({id, tokens.Get<float>()});
    }
  }
  return MergeCandidates(ranks, count);
}

Status TokenChooser::CheckToken(int32_t token, int sender) const {
  if (token >= 0 && token < context_.config->vocab_size) return OkStatus();
  return DataLossError(StrCat("rank ", sender, " sent token ", token,
                              ", the vocabulary has ids 0 to ", context_.config->vocab_size - 1));
}

int TokenChooser::OwnerOfLane(int64_t lane) const {
  const LaneLayout& layout = context_.comm->lanes();
  int owner = 0;
  while (owner + 1 < layout.world_size() && layout.begin[owner + 1] <= lane) ++owner;
  return owner;
}

Status TokenChooser::Choose(std::span<const float> logits, const SamplingParams& sampling,
                            int32_t num_top, TokenOutput& output) {
  Communicator& comm = *context_.comm;
  const int64_t vocab_size = context_.config->vocab_size;
  comm.set_site(static_cast<int>(context_.config->num_layers) - 1,
                "after the head, choosing a token");
  int64_t count = std::max(num_top, FirstCandidateCount(sampling, vocab_size));
  Candidates merged;
  WireDecision wire;
  while (true) {
    ASSIGN_OR_RETURN(merged,
                     GatherCandidates(logits, static_cast<int32_t>(count), sampling.temperature));
    // Every rank fails alike on bad logits, so nobody waits for a decision that does not come.
    ASSIGN_OR_RETURN(const Decision decision, Decide(sampling, output.pos, merged, vocab_size));
    wire = {static_cast<int32_t>(decision.kind), decision.token, decision.count, decision.lane,
            decision.residual};
    RETURN_IF_ERROR(comm.Broadcast(0, std::as_writable_bytes(std::span(&wire, 1))));
    if (wire.kind != static_cast<int32_t>(Decision::Kind::kNeedMore)) break;
    if (count >= vocab_size) {
      return InternalError(StrCat("all ", vocab_size, " candidates are here and none was chosen"));
    }
    count = std::min<int64_t>(vocab_size, std::max<int64_t>(wire.count, count + 1));
  }
  output.token = wire.token;
  if (wire.kind == static_cast<int32_t>(Decision::Kind::kWalkLane)) {
    RETURN_IF_ERROR(
        Walk(logits, sampling.temperature, merged, wire.lane, wire.residual, output.token));
  }
  RETURN_IF_ERROR(CheckToken(output.token, 0));
  output.top.assign(merged.top.begin(),
                    merged.top.begin() + std::min<size_t>(num_top, merged.top.size()));
  ASSIGN_OR_RETURN(const float logit, LogitOf(output.token, logits, merged));
  output.logprob = static_cast<float>(logit - LogSumExp(merged.lanes));
  return OkStatus();
}

// The lane's owner draws inside it and tells everyone.
Status TokenChooser::Walk(std::span<const float> logits, float temperature,
                          const Candidates& merged, int64_t lane, double residual, int32_t& token) {
  const int64_t num_lanes = context_.config->num_lanes;
  if (lane < 0 || lane >= num_lanes) {
    return DataLossError(StrCat("rank 0 sent lane ", lane, ", the model has ", num_lanes));
  }
  const int owner = OwnerOfLane(lane);
  if (owner == context_.comm->rank()) {
    const int64_t local = lane - context_.plan->lanes.begin;
    const int64_t begin = lane_begin_[local];
    token = WalkLane(logits.subspan(begin, lane_begin_[local + 1] - begin),
                     static_cast<int32_t>(context_.plan->vocab.begin + begin), temperature,
                     merged.lanes[lane].max_logit, residual);
  }
  return context_.comm->Broadcast(owner, std::as_writable_bytes(std::span(&token, 1)));
}

// At hand when the token is a candidate; else (after a walk) its owner has it.
Result<float> TokenChooser::LogitOf(int32_t token, std::span<const float> logits,
                                    const Candidates& merged) {
  for (const TopToken& top : merged.top) {
    if (top.id == token) return top.logit;
  }
  const int64_t vocab_size = context_.config->vocab_size;
  const int num_lanes = context_.config->num_lanes;
  int lane = 0;
  while (vocab_size * (lane + 1) / num_lanes <= token) ++lane;
  const int owner = OwnerOfLane(lane);
  float logit = 0.0f;
  if (owner == context_.comm->rank()) logit = logits[token - context_.plan->vocab.begin];
  RETURN_IF_ERROR(context_.comm->Broadcast(owner, std::as_writable_bytes(std::span(&logit, 1))));
  return logit;
}

Status TokenChooser::Score(const float* logits, std::span<const int32_t> targets,
                           std::span<float> nll) {
  Communicator& comm = *context_.comm;
  comm.set_site(static_cast<int>(context_.config->num_layers) - 1, "after the head, scoring rows");
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
      PutLane(lane, writer);
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
        lanes.push_back(GetLane(reader));
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
