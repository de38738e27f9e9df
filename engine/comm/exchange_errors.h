// The words in which every transport reports the same failures, so that logs read alike and one
// test suite fits all. Pure.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/base/status.h"

namespace ds4 {

// "rank 1 (10.0.0.3:9911)"
std::string PeerName(int rank, const std::string& where);

// kDeadlineExceeded: "no progress for 2000 ms, waiting for rank 1 (...), rank 3 (...)".
Status NoProgressError(std::chrono::steady_clock::duration idle,
                       const std::vector<std::string>& peers);

// kUnavailable: "lost rank 1 (...): why".
Status LostPeerError(const std::string& peer, const std::string& why);

// OK, or kInternal with both values when a peer's frame is not the one this rank is waiting for.
Status CheckFrame(const std::string& peer, uint64_t sequence, uint64_t size,
                  uint64_t wanted_sequence, uint64_t wanted_size);

}  // namespace ds4
