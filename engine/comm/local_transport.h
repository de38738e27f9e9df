// Ranks as threads of one process, for tests and for a whole group inside one program.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/transport.h"

namespace ds4 {

// One transport for each rank; they share a hub that lives as long as any of them. A message is
// copied once, straight from the sender's buffer into the receiver's. A rank whose transport
// failed, was aborted or was destroyed is lost to the others (kUnavailable naming it and why).
std::vector<std::unique_ptr<Transport>> MakeLocalTransports(int world_size);

}  // namespace ds4
