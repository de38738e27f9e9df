#include "engine/sampling/candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/kernels/isa.h"
#include "engine/kernels/math.h"

namespace ds4 {
namespace {

bool Better(const TopToken& a, const TopToken& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Sum of e^((logit - max) / temperature) in rising order. The exponentials are taken many at a time
// and have the bits of Exp, which WalkLane uses.
double SumExp(std::span<const float> logits, float max, float temperature) {
  constexpr size_t kChunk = 1024;
  float values[kChunk];
  double sum = 0.0;
  for (size_t begin = 0; begin < logits.size(); begin += kChunk) {
    const size_t size = std::min(kChunk, logits.size() - begin);
    for (size_t i = 0; i < size; ++i) values[i] = (logits[begin + i] - max) / temperature;
    ActiveKernels().exp_row(values, static_cast<int64_t>(size));
    for (size_t i = 0; i < size; ++i) sum += values[i];
  }
  return sum;
}

LaneStats StatsOf(std::span<const float> logits, float temperature) {
  LaneStats stats;
  stats.max_logit = -std::numeric_limits<float>::infinity();
  for (const float logit : logits) {
    if (!std::isfinite(logit)) {
      stats.max_logit = std::numeric_limits<float>::quiet_NaN();
      return stats;
    }
    stats.max_logit = std::max(stats.max_logit, logit);
  }
  stats.sum_exp = SumExp(logits, stats.max_logit, 1.0f);
  if (temperature == 1.0f) {
    stats.sum_exp_temp = stats.sum_exp;
  } else if (temperature > 0.0f) {
    stats.sum_exp_temp = SumExp(logits, stats.max_logit, temperature);
  }
  return stats;
}

}  // namespace

Candidates LocalCandidates(std::span<const float> logits, int32_t first_id,
                           std::span<const int64_t> lane_begin, int32_t count, float temperature) {
  Candidates out;
  for (size_t lane = 0; lane + 1 < lane_begin.size(); ++lane) {
    out.lanes.push_back(StatsOf(
        logits.subspan(lane_begin[lane], lane_begin[lane + 1] - lane_begin[lane]), temperature));
  }
  for (const LaneStats& lane : out.lanes) {
    if (std::isnan(lane.max_logit)) return out;  // ordering NaNs means nothing
  }
  // A heap of the best so far, the worst of them in front.
  const size_t keep = std::min<size_t>(std::max(count, 0), logits.size());
  out.top.reserve(keep + 1);
  for (size_t i = 0; i < logits.size() && keep > 0; ++i) {
    const TopToken token{first_id + static_cast<int32_t>(i), logits[i]};
    if (out.top.size() == keep && !Better(token, out.top.front())) continue;
    out.top.push_back(token);
    std::push_heap(out.top.begin(), out.top.end(), Better);
    if (out.top.size() > keep) {
      std::pop_heap(out.top.begin(), out.top.end(), Better);
      out.top.pop_back();
    }
  }
  std::sort(out.top.begin(), out.top.end(), Better);
  return out;
}

Candidates MergeCandidates(std::span<const Candidates> ranks, int32_t count) {
  Candidates out;
  for (const Candidates& rank : ranks) {
    out.lanes.insert(out.lanes.end(), rank.lanes.begin(), rank.lanes.end());
    out.top.insert(out.top.end(), rank.top.begin(), rank.top.end());
  }
  std::sort(out.top.begin(), out.top.end(), Better);
  if (static_cast<int64_t>(out.top.size()) > count) out.top.resize(count);
  return out;
}

double LogSumExp(std::span<const LaneStats> lanes) {
  float max = -std::numeric_limits<float>::infinity();
  for (const LaneStats& lane : lanes) {
    if (std::isnan(lane.max_logit)) return std::numeric_limits<double>::quiet_NaN();
    max = std::max(max, lane.max_logit);
  }
  double sum = 0.0;
  for (const LaneStats& lane : lanes) {
    if (lane.sum_exp > 0.0) sum += lane.sum_exp * Exp(lane.max_logit - max);
  }
  return std::log(sum) + max;
}

}  // namespace ds4
