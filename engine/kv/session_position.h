// Where one session stands and how far back it can go: the arithmetic of rings, without their
// memory, so that every engine accepts and refuses the same positions.
//
// Each ring has slack slots more than what a step reads back, or keeps at least as many of a longer
// batch's positions, so a position can be taken back while what it needs has not been overwritten.
#pragma once

#include <cstdint>

#include "engine/base/status.h"

namespace ds4 {

// Slots beyond one batch, so that a draft can be taken back right after a full prefill chunk.
inline constexpr int64_t kDraftSlack = 16;
// Batches with more rows add no more slack: some engines' rings hold no whole one.
inline constexpr int64_t kMaxSlackRows = 64;

// Positions that a session can go back, at least.
constexpr int64_t RewindSlack(int64_t max_batch_rows) {
  return (max_batch_rows < kMaxSlackRows ? max_batch_rows : kMaxSlackRows) + kDraftSlack;
}

// Thread-compatible.
class SessionPosition {
 public:
  // Both at least 1 (CHECK).
  SessionPosition(int64_t max_context, int64_t max_batch_rows);

  int64_t max_context() const { return max_context_; }
  // Positions processed so far.
  int64_t n() const { return n_; }
  // The lowest n, besides 0, that Rewind takes now.
  int64_t LowestRewind() const;

  // Goes back to position n: as far as the rings reach, or to 0. kOutOfRange names both limits.
  Status Rewind(int64_t n);
  // n += rows, after a step (CHECK: within max_context).
  void Advance(int64_t rows);

 private:
  int64_t max_context_;
  int64_t slack_;
  int64_t n_ = 0;
  int64_t high_water_ = 0;  // positions below this have been written since n was last 0
};

}  // namespace ds4
