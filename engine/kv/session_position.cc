#include "engine/kv/session_position.h"

#include <algorithm>

#include "engine/base/check.h"
#include "engine/base/strings.h"

namespace ds4 {

SessionPosition::SessionPosition(int64_t max_context, int64_t max_batch_rows)
    : max_context_(max_context), slack_(RewindSlack(max_batch_rows)) {
  CHECK(max_context > 0 && max_batch_rows > 0) << max_context << ", " << max_batch_rows;
}

// Writing position q takes the slot of q - R. With R = window + slack, the oldest window row that n
// needs, n - window + 1, is still there while high_water <= n + slack; the pending rings have the
// same slack over what they need.
int64_t SessionPosition::LowestRewind() const { return std::max<int64_t>(0, high_water_ - slack_); }

Status SessionPosition::Rewind(int64_t n) {
  if (n < 0 || n > n_ || (n != 0 && n < LowestRewind())) {
    return OutOfRangeError(StrCat("cannot set a session at position ", n_, " to ", n,
                                  ": it can go to 0 or from ", LowestRewind(), " to ", n_));
  }
  n_ = n;
  if (n == 0) high_water_ = 0;
  return OkStatus();
}

void SessionPosition::Advance(int64_t rows) {
  n_ += rows;
  CHECK(n_ <= max_context_) << n_ << " of " << max_context_;
  high_water_ = std::max(high_water_, n_);
}

}  // namespace ds4
