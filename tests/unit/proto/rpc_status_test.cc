// Goal: an error keeps its code and its words on the way through gRPC and through the Error
// message. Method: every code there and back, then what a strange peer might send.
#include "proto/rpc_status.h"

#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include "engine/base/strings.h"
#include "proto/common.pb.h"

namespace ds4 {
namespace {

constexpr int kFirstError = 1;
constexpr int kLastError = static_cast<int>(StatusCode::kDataLoss);

TEST(RpcStatus, EveryCodeSurvivesGrpc) {
  for (int code = kFirstError; code <= kLastError; ++code) {
    const Status status(static_cast<StatusCode>(code), StrCat("message of ", code));
    const grpc::Status rpc = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(rpc.error_code()), code);
    EXPECT_EQ(FromGrpcStatus(rpc), status);
  }
  EXPECT_TRUE(FromGrpcStatus(ToGrpcStatus(OkStatus())).ok());
}

TEST(RpcStatus, EveryCodeSurvivesTheErrorMessage) {
  for (int code = kFirstError; code <= kLastError; ++code) {
    const Status status(static_cast<StatusCode>(code), StrCat("message of ", code));
    v1::Error error;
    EncodeError(status, 3, 12, &error);
    EXPECT_EQ(error.rank(), 3);
    EXPECT_EQ(error.epoch(), 12u);
    EXPECT_EQ(DecodeError(error), status);
  }
}

TEST(RpcStatus, CodesThatWeLackStayErrorsAndSayWhatTheyWere) {
  const Status unauthenticated =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "no token"));
  EXPECT_EQ(unauthenticated.code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(unauthenticated.message(), "UNAUTHENTICATED: no token");

  for (const int code : {-1, 0, 17, 1000, INT32_MAX, INT32_MIN}) {
    v1::Error error;
    error.set_code(code);
    error.set_message("odd");
    const Status status = DecodeError(error);
    EXPECT_EQ(status.code(), StatusCode::kUnknown) << code;
    EXPECT_EQ(status.message(), StrCat("error with code ", code, ": odd"));
  }
}

TEST(RpcStatus, LongMessagesAreCutAndSayByHowMuch) {
  const grpc::Status rpc = ToGrpcStatus(InternalError(std::string(10000, 'x')));
  EXPECT_EQ(rpc.error_message().size(),
            kMaxErrorMessageBytes + std::string("... (5904 more bytes)").size());
  EXPECT_TRUE(rpc.error_message().ends_with("... (5904 more bytes)"));
}

TEST(RpcStatus, TheCutDoesNotSplitACharacter) {
  // 4095 bytes, then a character of two bytes across the border: it goes as a whole.
  const std::string text = std::string(kMaxErrorMessageBytes - 1, 'x') + "\xc3\xa9";
  v1::Error error;
  EncodeError(InternalError(text), 0, 1, &error);
  EXPECT_TRUE(error.message().starts_with(std::string(kMaxErrorMessageBytes - 1, 'x') + "... (2"));
}

TEST(RpcStatus, BytesThatAreNoUtf8StillMakeAMessageThatProtobufSends) {
  v1::Error error;
  EncodeError(InternalError("tensor \xff\xfe name"), 0, 1, &error);
  EXPECT_EQ(error.message(), "tensor ?? name");
  v1::Error parsed;
  EXPECT_TRUE(parsed.ParseFromString(error.SerializeAsString()));
}

}  // namespace
}  // namespace ds4
