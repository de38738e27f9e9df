// The one mapping between our Status, grpc::Status and the Error message. Codes are equal by
// number.
#pragma once

#include <cstdint>

#include "engine/base/status.h"

namespace grpc {
class Status;
}

namespace ds4 {
namespace v1 {
class Error;
}

// Longer messages are cut, and say by how much: gRPC carries them in trailers of at most 8 KiB.
inline constexpr size_t kMaxErrorMessageBytes = 4096;

grpc::Status ToGrpcStatus(const Status& status);

// gRPC's UNAUTHENTICATED, which we lack, becomes kPermissionDenied; an unknown number kUnknown.
// Both say so in the message.
Status FromGrpcStatus(const grpc::Status& status);

// `status` must not be OK (CHECK). rank -1: before a group is formed.
void EncodeError(const Status& status, int rank, uint64_t epoch, v1::Error* error);

// The peer's error. Never OK: an Error with code 0 or an unknown one is kUnknown and says so.
Status DecodeError(const v1::Error& error);

}  // namespace ds4
