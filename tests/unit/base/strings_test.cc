// Goal: texts for people are exact at every edge. Method: worked examples.

#include "engine/base/strings.h"

#include <gtest/gtest.h>

#include <limits>

namespace ds4 {
namespace {

using Parts = std::vector<std::string>;

TEST(StringsTest, SplitKeepsEmptyPartsButAnEmptyTextHasNone) {
  EXPECT_EQ(StrSplit("", ','), Parts());
  EXPECT_EQ(StrSplit("a", ','), Parts({"a"}));
  EXPECT_EQ(StrSplit("a,b", ','), Parts({"a", "b"}));
  EXPECT_EQ(StrSplit(",a,,b,", ','), Parts({"", "a", "", "b", ""}));
  EXPECT_EQ(StrSplit(",", ','), Parts({"", ""}));
}

TEST(StringsTest, JoinIsTheReverseOfSplit) {
  EXPECT_EQ(StrJoin({}, ", "), "");
  EXPECT_EQ(StrJoin({"a"}, ", "), "a");
  EXPECT_EQ(StrJoin({"a", "", "b"}, ", "), "a, , b");
  for (const char* text : {"a", "a,b", ",a,,b,", ","}) {
    EXPECT_EQ(StrJoin(StrSplit(text, ','), ","), text);
  }
}

TEST(StringsTest, StrCatJoinsWhatStreamsCanPrint) {
  EXPECT_EQ(StrCat(), "");
  EXPECT_EQ(StrCat("rank ", 3, "/", int64_t{8}, " ", 0.5, std::string(" x")), "rank 3/8 0.5 x");
}

TEST(StringsTest, HumanBytesIsExactBelowOneKibibyte) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.0 KiB");
  EXPECT_EQ(HumanBytes(12345678), "11.8 MiB");
  EXPECT_EQ(HumanBytes(int64_t{1} << 30), "1.0 GiB");
  EXPECT_EQ(HumanBytes(int64_t{1} << 40), "1.0 TiB");
}

// A value just below a unit must not print as 1024.0 of the one below it.
TEST(StringsTest, HumanBytesRoundsUpIntoTheNextUnit) {
  EXPECT_EQ(HumanBytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(HumanBytes((int64_t{1} << 30) - 1), "1.0 GiB");
  EXPECT_EQ(HumanBytes(1023 * 1024), "1023.0 KiB");
}

// The largest unit takes what is beyond it; a shortfall may be negative.
TEST(StringsTest, HumanBytesTakesAnyNumber) {
  EXPECT_EQ(HumanBytes(int64_t{1} << 52), "4096.0 TiB");
  EXPECT_EQ(HumanBytes(std::numeric_limits<int64_t>::max()), "8388608.0 TiB");
  EXPECT_EQ(HumanBytes(-5), "-5 B");
  EXPECT_EQ(HumanBytes(-(int64_t{3} << 30)), "-3.0 GiB");
}

TEST(StringsTest, FixedHasAsManyDigitsAsAskedFor) {
  EXPECT_EQ(Fixed(1.5, 0), "2");
  EXPECT_EQ(Fixed(2.0 / 3, 3), "0.667");
  EXPECT_EQ(Fixed(-0.25, 1), "-0.2");
  // A double has up to 309 digits before the point; none may be lost.
  EXPECT_EQ(Fixed(1e300, 1).size(), 303u);
}

}  // namespace
}  // namespace ds4
