// Goal: a position goes back exactly as far as rings with the slack of one batch and a draft hold
// what it needs, and no further for long batches, of which rings keep an end only. Method: a ring
// by hand: the lowest position whose slots are not overwritten.

#include "engine/kv/session_position.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ds4 {
namespace {

using testing::HasSubstr;

TEST(SessionPositionTest, GoesBackAsFarAsTheSlackReaches) {
  SessionPosition at(/*max_context=*/256, /*max_batch_rows=*/8);
  ASSERT_EQ(RewindSlack(8), 8 + kDraftSlack);
  at.Advance(100);
  EXPECT_EQ(at.LowestRewind(), 76);
  EXPECT_EQ(at.Rewind(75).code(), StatusCode::kOutOfRange);
  EXPECT_THAT(at.Rewind(75).message(), HasSubstr("at position 100 to 75"));
  EXPECT_THAT(at.Rewind(75).message(), HasSubstr("from 76 to 100"));
  EXPECT_TRUE(at.Rewind(80).ok());
  EXPECT_EQ(at.n(), 80);
  // What was written stays written: going back twice reaches no further.
  EXPECT_EQ(at.LowestRewind(), 76);
  EXPECT_EQ(at.Rewind(81).code(), StatusCode::kOutOfRange);
}

TEST(SessionPositionTest, LongBatchesAddNoSlack) {
  EXPECT_EQ(RewindSlack(kMaxSlackRows), kMaxSlackRows + kDraftSlack);
  EXPECT_EQ(RewindSlack(2048), kMaxSlackRows + kDraftSlack);
  SessionPosition at(/*max_context=*/4096, /*max_batch_rows=*/2048);
  at.Advance(2048);
  EXPECT_EQ(at.LowestRewind(), 2048 - RewindSlack(2048));
}

TEST(SessionPositionTest, ZeroIsAlwaysThereAndForgetsWhatWasWritten) {
  SessionPosition at(256, 8);
  at.Advance(100);
  EXPECT_TRUE(at.Rewind(0).ok());
  EXPECT_EQ(at.LowestRewind(), 0);
  at.Advance(20);
  EXPECT_TRUE(at.Rewind(1).ok());
}

TEST(SessionPositionDeathTest, TheContextIsNeverPassed) {
  SessionPosition at(16, 8);
  at.Advance(16);
  EXPECT_DEATH(at.Advance(1), "17 of 16");
}

}  // namespace
}  // namespace ds4
