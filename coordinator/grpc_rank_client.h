// The real RankClient: one bidirectional gRPC stream over a channel of its own.
#pragma once

#include "coordinator/rank_client.h"

namespace ds4 {

std::unique_ptr<RankClient> MakeGrpcRankClient(int rank, const std::string& address,
                                               EventQueue* queue);

}  // namespace ds4
