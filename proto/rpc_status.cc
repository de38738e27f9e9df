#include "proto/rpc_status.h"

#include <grpcpp/support/status.h>

#include "engine/base/strings.h"
#include "proto/common.pb.h"

namespace ds4 {
namespace {

constexpr int kLastCode = static_cast<int>(StatusCode::kDataLoss);

// Protobuf refuses strings that are not UTF-8, and an error must always arrive.
std::string WithoutNonAscii(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) c = '?';
  }
  return text;
}

bool IsUtf8(const std::string& text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80                   ? 1
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                          : lead >= 0xe0 && lead < 0xf0 ? 3
                          : lead >= 0xf0 && lead < 0xf5 ? 4
                                                        : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    }
    i += length;
  }
  return true;
}

std::string Bounded(const std::string& message) {
  std::string text = IsUtf8(message) ? message : WithoutNonAscii(message);
  if (text.size() <= kMaxErrorMessageBytes) return text;
  size_t end = kMaxErrorMessageBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return StrCat(text.substr(0, end), "... (", text.size() - end, " more bytes)");
}

Status FromNumber(int code, const std::string& message) {
  if (code >= 1 && code <= kLastCode) return {static_cast<StatusCode>(code), message};
  if (code == grpc::StatusCode::UNAUTHENTICATED) {
    return {StatusCode::kPermissionDenied, StrCat("UNAUTHENTICATED: ", message)};
  }
  return {StatusCode::kUnknown, StrCat("error with code ", code, ": ", message)};
}

}  // namespace

grpc::Status ToGrpcStatus(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), Bounded(status.message())};
}

Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  return FromNumber(status.error_code(), status.error_message());
}

void EncodeError(const Status& status, int rank, uint64_t epoch, v1::Error* error) {
  CHECK(!status.ok()) << "an OK status is no error";
  error->set_code(static_cast<int>(status.code()));
  error->set_message(Bounded(status.message()));
  error->set_rank(rank);
  error->set_epoch(epoch);
}

Status DecodeError(const v1::Error& error) { return FromNumber(error.code(), error.message()); }

}  // namespace ds4
