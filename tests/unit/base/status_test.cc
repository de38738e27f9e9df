// Goal: errors keep their code and words on the way up, and a broken rule of ours ends the process.
// Method: each macro inside a small function, called on both paths.

#include "engine/base/status.h"

#include <gtest/gtest.h>

#include <memory>

#include "engine/base/check.h"

namespace ds4 {
namespace {

TEST(StatusTest, OkHasNoMessageAndStaysOkWithContext) {
  EXPECT_TRUE(OkStatus().ok());
  EXPECT_EQ(OkStatus().ToString(), "OK");
  EXPECT_EQ(OkStatus().WithContext("rank 3"), OkStatus());
}

TEST(StatusTest, ContextGoesBeforeTheMessageAndKeepsTheCode) {
  const Status status =
      DataLossError("rows 5, plan says 6").WithContext("blk.7").WithContext("rank 3");
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "rank 3: blk.7: rows 5, plan says 6");
  EXPECT_EQ(status.ToString(), "DATA_LOSS: rank 3: blk.7: rows 5, plan says 6");
}

// The numbers are gRPC's: a code crosses the network as its number.
TEST(StatusTest, CodesHaveTheNumbersAndNamesOfGrpc) {
  const std::pair<StatusCode, std::string_view> codes[] = {
      {StatusCode::kOk, "OK"},
      {StatusCode::kCancelled, "CANCELLED"},
      {StatusCode::kUnknown, "UNKNOWN"},
      {StatusCode::kInvalidArgument, "INVALID_ARGUMENT"},
      {StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED"},
      {StatusCode::kNotFound, "NOT_FOUND"},
      {StatusCode::kAlreadyExists, "ALREADY_EXISTS"},
      {StatusCode::kPermissionDenied, "PERMISSION_DENIED"},
      {StatusCode::kResourceExhausted, "RESOURCE_EXHAUSTED"},
      {StatusCode::kFailedPrecondition, "FAILED_PRECONDITION"},
      {StatusCode::kAborted, "ABORTED"},
      {StatusCode::kOutOfRange, "OUT_OF_RANGE"},
      {StatusCode::kUnimplemented, "UNIMPLEMENTED"},
      {StatusCode::kInternal, "INTERNAL"},
      {StatusCode::kUnavailable, "UNAVAILABLE"},
      {StatusCode::kDataLoss, "DATA_LOSS"}};
  int number = 0;
  for (const auto& [code, name] : codes) {
    EXPECT_EQ(static_cast<int>(code), number++);
    EXPECT_EQ(StatusCodeName(code), name);
  }
  EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(16)), "UNKNOWN");
  EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(-1)), "UNKNOWN");
}

TEST(StatusTest, EachMakerGivesItsCode) {
  EXPECT_EQ(InvalidArgumentError("").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(DeadlineExceededError("").code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(NotFoundError("").code(), StatusCode::kNotFound);
  EXPECT_EQ(ResourceExhaustedError("").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(FailedPreconditionError("").code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(AbortedError("").code(), StatusCode::kAborted);
  EXPECT_EQ(OutOfRangeError("").code(), StatusCode::kOutOfRange);
  EXPECT_EQ(UnimplementedError("").code(), StatusCode::kUnimplemented);
  EXPECT_EQ(InternalError("").code(), StatusCode::kInternal);
  EXPECT_EQ(UnavailableError("").code(), StatusCode::kUnavailable);
  EXPECT_EQ(DataLossError("").code(), StatusCode::kDataLoss);
  EXPECT_EQ(CancelledError("").code(), StatusCode::kCancelled);
}

// A move-only value passes through without a copy.
Result<std::unique_ptr<int>> MakeNumber(int value) {
  if (value < 0) return OutOfRangeError("below zero");
  return std::make_unique<int>(value);
}

Result<int> AddOne(int value) {
  ASSIGN_OR_RETURN(const std::unique_ptr<int> number, MakeNumber(value));
  return *number + 1;
}

TEST(StatusTest, AssignOrReturnUnwrapsOrPassesTheErrorOn) {
  EXPECT_EQ(*AddOne(41), 42);
  EXPECT_EQ(AddOne(-1).status(), OutOfRangeError("below zero"));
}

Status RunTwice(const Status& first, int* runs) {
  ++*runs;
  RETURN_IF_ERROR(first);
  ++*runs;
  return OkStatus();
}

TEST(StatusTest, ReturnIfErrorStopsAtTheFirstError) {
  int runs = 0;
  EXPECT_TRUE(RunTwice(OkStatus(), &runs).ok());
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(RunTwice(AbortedError("peer"), &runs), AbortedError("peer"));
  EXPECT_EQ(runs, 3);
}

TEST(StatusDeathTest, TheValueOfAnErrorEndsTheProcessWithItsWords) {
  const Result<int> failed = NotFoundError("no such tensor");
  EXPECT_DEATH((void)failed.value(), "NOT_FOUND: no such tensor");
}

TEST(StatusDeathTest, AResultNeedsAValueOrAnError) {
  EXPECT_DEATH((void)Result<int>(OkStatus()), "needs an error");
}

TEST(CheckDeathTest, SaysWhereWhatAndMore) {
  const int rows = 3;
  EXPECT_DEATH(CHECK(rows == 4) << "rows " << rows << ", plan says 4",
               "status_test.cc:[0-9]+: CHECK failed: rows == 4 rows 3, plan says 4");
}

TEST(CheckTest, ATrueConditionEvaluatesNothingMore) {
  int evaluated = 0;
  CHECK(true) << ++evaluated;
  EXPECT_EQ(evaluated, 0);
  // A statement: it takes no else that was not meant for it.
  if (evaluated == 0)
    CHECK(true);
  else
    FAIL();
}

}  // namespace
}  // namespace ds4
