// Goal: a worker that does not fit is refused in words that hold both values, and one that fits is
// not. Method: one good hello, changed in one field at a time.
#include "coordinator/membership.h"

#include <gmock/gmock.h>

#include "proto/protocol.h"

namespace ds4 {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Member GoodMember() {
  Member member;
  member.address = "10.0.0.3:9911";
  v1::HelloReply& hello = member.hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_model_path("v4.gguf");
  hello.set_model_digest("aa11");
  hello.set_max_context(2048);
  hello.set_max_batch_rows(512);
  hello.set_memory_bytes(1 << 20);
  hello.set_kernel_isa("avx2");
  hello.set_data_host("10.0.0.3");
  hello.set_data_port(9912);
  return member;
}

Requirements Ours() { return {"ours.gguf", "aa11", 1024, 256}; }

TEST(MembershipTest, AWorkerThatFitsIsTaken) {
  EXPECT_TRUE(CheckMember(0, GoodMember(), Ours()).ok());
}

TEST(MembershipTest, AnotherProtocolVersionIsRefusedWithBoth) {
  Member member = GoodMember();
  member.hello.set_protocol_version(77);
  const Status status = CheckMember(1, member, Ours());
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1 (10.0.0.3:9911)"), HasSubstr("version 77"),
                                      HasSubstr(std::to_string(kProtocolVersion))));
}

TEST(MembershipTest, OtherModelBytesAreRefusedWithBothDigests) {
  Member member = GoodMember();
  member.hello.set_model_digest("bb22");
  const Status status = CheckMember(0, member, Ours());
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("bb22"), HasSubstr("aa11"), HasSubstr("v4.gguf"),
                                      HasSubstr("ours.gguf")));
}

// Keys of another type or sums in another order give other bits, so the ranks' parts of one sum
// would not belong together.
TEST(MembershipTest, RanksMustComputeAlike) {
  Member first = GoodMember();
  Member second = GoodMember();
  EXPECT_TRUE(CheckAlike({first, second}).ok());
  second.hello.set_arithmetic("kv bf16, sums in lanes in decode");
  const Status status = CheckAlike({first, second});
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  // A hello without the field comes from a build that had the CPU engine only.
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("rank 1 (10.0.0.3:9911): computes with kv bf16"),
                    HasSubstr("with kv f32, sums in lanes always"), HasSubstr("--kv-type")));
  first.hello.set_arithmetic("kv f32, sums in lanes always");
  second.hello.clear_arithmetic();
  EXPECT_TRUE(CheckAlike({first, second}).ok());
}

TEST(MembershipTest, LimitsOfTheWorkerAreRefusedWithBothValues) {
  Requirements ours = Ours();
  ours.context = 2049;
  EXPECT_THAT(CheckMember(0, GoodMember(), ours).message(),
              AllOf(HasSubstr("2048"), HasSubstr("2049"), HasSubstr("--ctx")));
  ours = Ours();
  ours.batch_rows = 513;
  EXPECT_THAT(CheckMember(0, GoodMember(), ours).message(),
              AllOf(HasSubstr("512"), HasSubstr("513"), HasSubstr("--chunk")));
}

TEST(MembershipTest, ValuesThatCannotBeAreRefused) {
  Member member = GoodMember();
  member.hello.set_max_context(-5);
  EXPECT_THAT(CheckMember(0, member, Ours()).message(), HasSubstr("-5"));
  member = GoodMember();
  member.hello.set_data_port(70000);
  EXPECT_THAT(CheckMember(0, member, Ours()).message(), HasSubstr("70000"));
}

TEST(MembershipTest, SlicesThatDoNotFitInMemoryAreRefusedWithTheShortfall) {
  RankPlan plan;
  plan.held_bytes = 3 << 20;
  const Status status = CheckMemory(2, GoodMember(), plan);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("3.0 MiB"), HasSubstr("1.0 MiB"), HasSubstr("2.0 MiB too little")));
  plan.held_bytes = 1 << 20;
  EXPECT_TRUE(CheckMemory(2, GoodMember(), plan).ok());
}

TEST(MembershipTest, AllRefusalsComeInOneStatus) {
  EXPECT_TRUE(Combine("x", {OkStatus(), OkStatus()}).ok());
  const Status both =
      Combine("two do not fit", {OkStatus(), UnavailableError("one"), InternalError("two")});
  EXPECT_EQ(both.code(), StatusCode::kUnavailable);
  EXPECT_EQ(both.message(), "two do not fit:\n  one\n  two");
}

TEST(MembershipTest, TheContextIsWhatWasAskedForOrWhatAllAllow) {
  std::vector<Member> members = {GoodMember(), GoodMember()};
  members[1].hello.set_max_context(300);
  EXPECT_EQ(AgreeOnContext(1000, 4096, members), 1000);
  EXPECT_EQ(AgreeOnContext(0, 4096, members), 300);
  EXPECT_EQ(AgreeOnContext(0, 200, members), 200);
}

TEST(MembershipTest, PeersDialTheHostThatWeReachUnlessItAnnouncesOne) {
  Member member = GoodMember();
  EXPECT_EQ(DataHost(member), "10.0.0.3");
  member.hello.set_data_host("0.0.0.0");
  member.address = "node7.lan:9911";
  EXPECT_EQ(DataHost(member), "node7.lan");
  member.hello.set_data_host("");
  member.address = "[fd00::7]:9911";
  EXPECT_EQ(DataHost(member), "fd00::7");
}

TEST(MembershipTest, DifferentKernelsAreOnlyANote) {
  std::vector<Member> members = {GoodMember(), GoodMember()};
  EXPECT_EQ(MemberNotes(members), "");
  members[1].hello.set_kernel_isa("neon");
  EXPECT_THAT(MemberNotes(members), AllOf(HasSubstr("avx2"), HasSubstr("neon")));
}

}  // namespace
}  // namespace ds4
