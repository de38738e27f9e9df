#include "engine/comm/exchange_errors.h"

#include "engine/base/strings.h"

namespace ds4 {

std::string PeerName(int rank, const std::string& where) {
  return StrCat("rank ", rank, " (", where, ")");
}

Status NoProgressError(std::chrono::steady_clock::duration idle,
                       const std::vector<std::string>& peers) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(idle).count();
  return DeadlineExceededError(
      StrCat("no progress for ", ms, " ms, waiting for ", StrJoin(peers, ", ")));
}

Status LostPeerError(const std::string& peer, const std::string& why) {
  return UnavailableError(StrCat("lost ", peer, ": ", why));
}

Status CheckFrame(const std::string& peer, uint64_t sequence, uint64_t size,
                  uint64_t wanted_sequence, uint64_t wanted_size) {
  if (sequence != wanted_sequence) {
    return InternalError(StrCat("frame from ", peer, " has sequence ", sequence,
                                ", this rank is at ", wanted_sequence,
                                ": the ranks made different calls"));
  }
  if (size != wanted_size) {
    return InternalError(StrCat("frame ", sequence, " from ", peer, " has ", size,
                                " bytes, this rank wants ", wanted_size,
                                ": the ranks disagree on a shape"));
  }
  return OkStatus();
}

}  // namespace ds4
