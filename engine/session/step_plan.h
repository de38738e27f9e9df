// What the coordinator asks of all ranks in one step, and what a step gives back. Values only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds4 {

// How the next token is drawn; one fixed order: temperature, top-k, top-p, min-p (sampling/).
struct SamplingParams {
  float temperature = 0.0f;  // 0 or less: greedy, lowest id on ties
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;  // the draw for position p is a function of (seed, p) alone
  bool operator==(const SamplingParams&) const = default;
};

// One session's share of a step: rows tokens[0..] at positions pos, pos+1, ...
struct StepPart {
  uint64_t session_id = 0;
  int64_t pos = 0;              // the session is set to this position first (going back is free)
  std::vector<int32_t> tokens;  // at least one
  bool sample = false;          // draw the token after the last row
  SamplingParams sampling;
  std::vector<int32_t> stop_ids;       // drawing one of these ends the part's decoding
  std::vector<int32_t> score_targets;  // empty, or [tokens.size()]: give -ln p(target) after each
                                       // row; -1 for rows that are not scored
  int32_t num_top = 0;  // give this many (id, logit) pairs of the last row, best first
};

// Rows of all parts run as one batch. Then, up to `decode_steps` times, each part that sampled a
// token which is no stop id runs one more row with it: several tokens for one round trip. Rank 0
// decides every token; all ranks get its decision.
struct StepPlan {
  uint64_t sequence = 0;  // rises by one from step to step
  std::vector<StepPart> parts;
  int32_t decode_steps = 0;

  int64_t num_rows() const;
  // A 64-bit digest of everything above; ranks compare it before they run.
  uint64_t Digest() const;
  // One byte string for digests; not a wire format.
  std::string Canonical() const;
};

struct TopToken {
  int32_t id = 0;
  float logit = 0.0f;
};

// One drawn token of one part.
struct TokenOutput {
  int32_t part = 0;
  int64_t pos = 0;  // position at which the token stands (that of the last row plus one)
  int32_t token = 0;
  float logprob = 0.0f;  // ln p(token) at temperature 1, no filters
  bool is_stop = false;  // one of stop_ids
  std::vector<TopToken> top;
};

struct StepResult {
  std::vector<TokenOutput> tokens;      // in the order drawn
  std::vector<std::vector<float>> nll;  // per part, [score_targets.size()], 0 where -1
  double seconds = 0.0;                 // wall time on this rank
  double comm_seconds = 0.0;            // of which waiting for peers
};

}  // namespace ds4
