// Set-up of a group's TCP connections; internal to engine/comm.
#pragma once

#include <vector>

#include "engine/base/status.h"
#include "engine/comm/socket.h"
#include "engine/comm/tcp_transport.h"

namespace ds4 {

// One open socket for each rank but our own. Errors: as ConnectTcpTransport.
Result<std::vector<Socket>> JoinTcpGroup(TcpListener& listener, const TcpGroup& group);

std::string TcpPeerName(const TcpGroup& group, int peer);

}  // namespace ds4
