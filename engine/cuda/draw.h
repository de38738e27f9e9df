// Draws tokens on the device: temperature, top-k, top-p, min-p as in engine/sampling, always in
// this order, then one random number of (seed, position).
//
// A token's mass is floor(2^40 e^((logit - best) / temperature)). Whole numbers have one sum in any
// order, so the drawn token does not depend on ranks, blocks or the batch. Tokens of no mass (less
// than 1e-12 of the best one's) are never drawn.
#pragma once

#include <cstdint>

#include "engine/cuda/choose.h"
#include "engine/cuda/choose_ranks.h"
#include "engine/cuda/launch.h"

namespace ds4::cuda {

// One row's SamplingParams, in device memory.
struct DrawRow {
  float temperature = 0.0f;  // 0 or less: the row keeps its greedy choice
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;  // 0: all
  uint64_t seed = 0;
};

// Logits of the whole vocabulary, in pieces by rising id without gaps, the first from id 0 on.
struct VocabPieces {
  struct Piece {
    const float* logits = nullptr;  // [rows][stride]
    int64_t stride = 0;
    int32_t first_id = 0;
    int32_t count = 0;
  };
  int count = 0;
  Piece pieces[kMaxChoiceRanks];
};

// Candidates that are sorted; where filters leave more, a slower way finds the same token.
inline constexpr int kMaxDrawCandidates = 4096;

// choice: [rows], the greedy choices of the whole vocabulary; token and logit of rows with a
// temperature are replaced by what is drawn for position pos[t] + 1. A row whose logit is no number
// stays. max_candidates: at most kMaxDrawCandidates (less in tests).
void LaunchDraw(const LaunchContext& launch, int rows, const DrawRow* params, const int32_t* pos,
                const VocabPieces& vocab, GreedyChoice* choice, std::byte* scratch,
                int max_candidates = kMaxDrawCandidates);
int64_t DrawScratchBytes(int rows);

}  // namespace ds4::cuda
