// Goal: ranks exchange messages between their devices, eagerly and from replayed graphs, and a rank
// that is missing, late or aborted never leaves another one waiting.
//
// Method: ranks are threads of this process with a local host transport; each uses device
// rank % (number of devices), so two ranks may share one (and do on the emulator). A message's
// words are a function of its sender and a number that the test chooses, so a stale, lost or
// mixed-up message shows.
#include "engine/cuda/device_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <barrier>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "engine/base/strings.h"
#include "engine/comm/exchange_communicator.h"
#include "engine/comm/local_transport.h"

namespace ds4::cuda {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using Kind = DeviceGroup::Kind;

// Ranks that share a device: see device_group.h. Before the first use of CUDA.
[[maybe_unused]] const int module_loading = setenv("CUDA_MODULE_LOADING", "EAGER", 0);

constexpr int64_t kMaxBytes = 200 * 1024;

// What one rank's thread works with. Memory is taken up front: taking it later could wait for a
// peer's kernel on the same device.
class Rank {
 public:
  Rank(std::unique_ptr<Transport> transport, std::barrier<>& meeting)
      : meeting_(meeting), rank_(transport->rank()) {
    comm_ = MakeExchangeCommunicator(std::move(transport),
                                     LaneLayout::Even(8, transport->world_size()));
    const int num_devices = static_cast<int>(ListDevices().value().size());
    CHECK(UseDevice(rank_ % num_devices).ok());
    stream_ = Stream::Create().value();
    mine_ = DeviceBuffer::Allocate(kMaxBytes).value();
    kept_ = DeviceBuffer::Allocate(kMaxKept * kMaxBytes).value();
    host_.resize(kMaxBytes / sizeof(uint32_t));
  }

  int rank() const { return rank_; }
  int world_size() const { return comm_->world_size(); }
  Communicator& comm() { return *comm_; }
  Stream& stream() { return stream_; }
  DeviceGroup& group() { return *group_; }
  LaunchContext launch() { return {.stream = &stream_, .num_sms = 4}; }
  // All ranks' threads meet, whatever became of their groups.
  void Meet() { meeting_.arrive_and_wait(); }

  Status Create(const DeviceGroup::Options& options) {
    auto made = DeviceGroup::Create(comm_.get(), stream_, options);
    if (made.ok()) group_ = std::move(made).value();
    return made.status();
  }
  void Leave() { group_.reset(); }

  static uint32_t Word(int rank, uint32_t number, size_t i) {
    return (number * 1000003u + static_cast<uint32_t>(i)) * 2654435761u +
           static_cast<uint32_t>(rank);
  }

  Status SetMessage(uint32_t number) {
    for (size_t i = 0; i < host_.size(); ++i) host_[i] = Word(rank_, number, i);
    RETURN_IF_ERROR(stream_.CopyToDevice(mine_.data(), host_.data(), kMaxBytes));
    return stream_.Synchronize();
  }
  Status Gather(int64_t bytes) { return group_->AllGather(launch(), mine_.data(), bytes); }

  // Puts a copy of what `sender` sent on the stream: place `place`.
  Status Keep(int place, int sender, int64_t bytes) {
    CHECK(place < kMaxKept);
    return stream_.CopyOnDevice(kept_.data() + place * kMaxBytes, group_->Gathered(sender), bytes);
  }
  // "" when that place holds the message, else the first difference.
  std::string Compare(const std::byte* at, int sender, uint32_t number, int64_t bytes) {
    std::vector<uint32_t> words(bytes / sizeof(uint32_t));
    Status status = stream_.CopyToHost(words.data(), at, bytes);
    if (status.ok()) status = stream_.Synchronize();
    if (!status.ok()) return status.ToString();
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == Word(sender, number, i)) continue;
      return StrCat("rank ", rank_, ": word ", i, " of ", words.size(), " from rank ", sender,
                    " is not that of message ", number);
    }
    return "";
  }
  std::string CompareKept(int place, int sender, uint32_t number, int64_t bytes) {
    return Compare(kept_.data() + place * kMaxBytes, sender, number, bytes);
  }
  // One gather, checked on all senders.
  std::string GatherAndCompare(uint32_t number, int64_t bytes) {
    Status status = SetMessage(number);
    if (status.ok()) status = Gather(bytes);
    if (status.ok()) status = stream_.Synchronize();
    if (status.ok()) status = group_->CheckHealth();
    if (!status.ok()) return status.ToString();
    for (int sender = 0; sender < world_size(); ++sender) {
      const std::string difference = Compare(group_->Gathered(sender), sender, number, bytes);
      if (!difference.empty()) return difference;
    }
    return "";
  }

 private:
  static constexpr int kMaxKept = 12;

  std::barrier<>& meeting_;
  const int rank_;
  std::unique_ptr<Communicator> comm_;
  Stream stream_;
  DeviceBuffer mine_;
  DeviceBuffer kept_;
  std::vector<uint32_t> host_;
  std::unique_ptr<DeviceGroup> group_;
};

void RunRanks(int world_size, const std::function<void(Rank&)>& run) {
  auto transports = MakeLocalTransports(world_size);
  std::barrier meeting(world_size);
  std::vector<std::jthread> threads;
  for (auto& transport : transports) {
    threads.emplace_back([&run, &meeting, transport = std::move(transport)]() mutable {
      Rank rank(std::move(transport), meeting);
      rank.Meet();
      run(rank);
      rank.Meet();  // memory goes when nobody works any more
      rank.Leave();
    });
  }
}

// Kernels of ranks that share a GPU wait for each other, so all of them must be on it at once; of
// more than two ranks they may not be, and then each waits out its limit. "" where that cannot be:
// the emulator runs any number.
std::string TooManyRanksToWait(int world_size) {
  constexpr int kMaxRanksOfGpu = 2;
  const std::vector<DeviceInfo> devices = ListDevices().value();
  const int num_devices = static_cast<int>(devices.size());
  if (devices[0].name == "emulator" || world_size <= kMaxRanksOfGpu * num_devices) return "";
  return StrCat(world_size, " ranks on ", num_devices, " GPU(s), at most ", kMaxRanksOfGpu,
                " on each can wait for each other");
}

constexpr int64_t kFlaggedBytes = 32 << 10;

DeviceGroup::Options OptionsFor(Kind kind, milliseconds timeout = milliseconds(20'000),
                                int64_t flagged_bytes = kFlaggedBytes) {
  return {.kind = kind, .max_bytes = kMaxBytes, .flagged_bytes = flagged_bytes, .timeout = timeout};
}

struct Setup {
  Kind kind;
  int world_size;
  int64_t flagged_bytes = 0;

  DeviceGroup::Options Options(milliseconds timeout = milliseconds(20'000)) const {
    return OptionsFor(kind, timeout, flagged_bytes);
  }
};
class DeviceGroupTest : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    if (GetParam().kind != Kind::kPush) return;  // the host waits, no kernel
    const std::string reason = TooManyRanksToWait(GetParam().world_size);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, DeviceGroupTest,
                         testing::Values(Setup{Kind::kPush, 2}, Setup{Kind::kPush, 4},
                                         Setup{Kind::kPush, 2, kFlaggedBytes},
                                         Setup{Kind::kPush, 3, kFlaggedBytes},
                                         Setup{Kind::kHost, 2}, Setup{Kind::kHost, 3}),
                         [](const auto& test) {
                           return StrCat(DeviceGroupKindName(test.param.kind),
                                         test.param.flagged_bytes > 0 ? "_flagged" : "", "_of_",
                                         test.param.world_size);
                         });

// Sizes around the limits of blocks and units: one unit, fewer than a block has threads, not a
// multiple of the blocks, a decode row, many units a thread.
TEST_P(DeviceGroupTest, EveryRankReadsWhatEveryRankSent) {
  RunRanks(GetParam().world_size, [](Rank& rank) {
    ASSERT_EQ(rank.Create(GetParam().Options()), OkStatus());
    uint32_t number = 1;
    for (const int64_t bytes : {16L, 48L, 2064L, 16L << 10, 33'008L, 131'120L, long{kMaxBytes}}) {
      for (int repeat = 0; repeat < 2; ++repeat) {
        ASSERT_EQ(rank.GatherAndCompare(number++, bytes), "") << bytes << " bytes";
      }
    }
  });
}

TEST_P(DeviceGroupTest, AMessageIsReadableUntilTheSecondNextGather) {
  constexpr int64_t kBytes = 4096;
  RunRanks(GetParam().world_size, [](Rank& rank) {
    ASSERT_EQ(rank.Create(GetParam().Options()), OkStatus());
    const int last = rank.world_size() - 1;
    std::vector<const std::byte*> gathered;
    for (uint32_t number = 0; number < 9; ++number) {
      ASSERT_EQ(rank.SetMessage(number), OkStatus());
      ASSERT_EQ(rank.Gather(kBytes), OkStatus());
      gathered.push_back(rank.group().Gathered(last));
      if (number == 0) continue;
      ASSERT_EQ(rank.Compare(gathered[number - 1], last, number - 1, kBytes), "");
      ASSERT_EQ(rank.Compare(gathered[number], last, number, kBytes), "");
    }
  });
}

TEST_P(DeviceGroupTest, AMessageThatCannotBeSentIsRefusedAndHurtsNothing) {
  RunRanks(GetParam().world_size, [](Rank& rank) {
    ASSERT_EQ(rank.Create(GetParam().Options()), OkStatus());
    for (const int64_t bytes : {int64_t{0}, int64_t{8}, int64_t{-16}, kMaxBytes + 16}) {
      const Status status = rank.Gather(bytes);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(status.message(), AllOf(HasSubstr(StrCat(bytes, " bytes")),
                                          HasSubstr(StrCat("max_bytes, ", kMaxBytes))));
    }
    const std::byte* odd = rank.group().Gathered(0) + 4;
    EXPECT_EQ(rank.group().AllGather(rank.launch(), odd, 16).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(rank.GatherAndCompare(7, 64), "");
  });
}

TEST_P(DeviceGroupTest, AnAbortedGroupRefusesEverythingWithTheFirstReason) {
  RunRanks(GetParam().world_size, [](Rank& rank) {
    ASSERT_EQ(rank.Create(GetParam().Options()), OkStatus());
    rank.group().Abort(AbortedError("rank 7 is on fire"));
    rank.group().Abort(CancelledError("a second reason"));
    EXPECT_EQ(rank.group().CheckHealth(), AbortedError("rank 7 is on fire"));
    EXPECT_EQ(rank.Gather(16), AbortedError("rank 7 is on fire"));
    EXPECT_EQ(rank.group().EvenUp(rank.launch()), AbortedError("rank 7 is on fire"));
  });
}

// Rank 0 waits for a rank that does nothing, and another thread calls it off.
TEST_P(DeviceGroupTest, AbortFromAnotherThreadEndsAWait) {
  RunRanks(GetParam().world_size, [](Rank& rank) {
    ASSERT_EQ(rank.Create(GetParam().Options(std::chrono::minutes(2))), OkStatus());
    if (rank.rank() == 0) {
      std::jthread other([&] {
        std::this_thread::sleep_for(milliseconds(50));
        rank.group().Abort(CancelledError("called off"));
      });
      const auto start = std::chrono::steady_clock::now();
      (void)rank.Gather(4096);  // the host transport waits here, push on the device
      EXPECT_EQ(rank.stream().Synchronize(), OkStatus());
      EXPECT_EQ(rank.group().CheckHealth(), CancelledError("called off"));
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
    }
    rank.Meet();
  });
}

// A captured graph of any number of gathers, replayed often, with new messages in between: every
// replay must deliver the messages of its own time.
class DeviceGroupGraphTest : public testing::TestWithParam<std::tuple<int, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(GathersAndFlaggedBytes, DeviceGroupGraphTest,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7),
                                          testing::Values(0, 4096, kFlaggedBytes)));

TEST_P(DeviceGroupGraphTest, ReplaysDeliverTheMessagesOfTheirTime) {
  constexpr int64_t kBytes = 2048;
  const auto [num_gathers, flagged_bytes] = GetParam();
  const auto options = OptionsFor(Kind::kPush, milliseconds(20'000), flagged_bytes);
  RunRanks(2, [&, num_gathers = num_gathers](Rank& rank) {
    ASSERT_EQ(rank.Create(options), OkStatus());
    ASSERT_TRUE(rank.group().graph_safe());
    const int peer = 1 - rank.rank();
    auto graph = Graph::Capture(rank.stream(), [&]() -> Status {
      for (int i = 0; i < num_gathers; ++i) {
        // Messages of several sizes use several numbers of blocks, and both ways.
        RETURN_IF_ERROR(rank.Gather(kBytes * (i % 3 + 1)));
        RETURN_IF_ERROR(rank.Keep(i, peer, kBytes));
      }
      return rank.group().EvenUp(rank.launch());
    });
    ASSERT_EQ(graph.status(), OkStatus());
    rank.Meet();
    for (uint32_t replay = 0; replay < 25; ++replay) {
      ASSERT_EQ(rank.SetMessage(replay), OkStatus());
      ASSERT_EQ(graph->Launch(rank.stream()), OkStatus());
      ASSERT_EQ(rank.stream().Synchronize(), OkStatus());
      ASSERT_EQ(rank.group().CheckHealth(), OkStatus());
      for (int i = 0; i < num_gathers; ++i) {
        ASSERT_EQ(rank.CompareKept(i, peer, replay, kBytes), "") << "replay " << replay;
      }
      if (replay % 5 != 0) continue;
      // Eager gathers between replays, ended by EvenUp, do not disturb.
      ASSERT_EQ(rank.GatherAndCompare(1000 + replay, kBytes), "");
      ASSERT_EQ(rank.group().EvenUp(rank.launch()), OkStatus());
    }
  });
}

// Without EvenUp a graph of one gather would use the same slot twice in a row. That is an error of
// ours, and seen on the device before anything is overwritten.
TEST(DeviceGroupPushTest, AGraphThatDoesNotEndWithEvenUpIsFoundOut) {
  RunRanks(2, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kPush, milliseconds(3000))), OkStatus());
    auto graph = Graph::Capture(rank.stream(), [&] { return rank.Gather(16); });
    ASSERT_EQ(graph.status(), OkStatus());
    rank.Meet();
    ASSERT_EQ(graph->Launch(rank.stream()), OkStatus());
    ASSERT_EQ(graph->Launch(rank.stream()), OkStatus());
    ASSERT_EQ(rank.stream().Synchronize(), OkStatus());
    const Status status = rank.group().CheckHealth();
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("gather"), HasSubstr("EvenUp")));
  });
}

TEST(DeviceGroupPushTest, ARankThatNeverComesIsNamedWithinTheTimeout) {
  constexpr int kWorldSize = 4;
  const std::string reason = TooManyRanksToWait(kWorldSize);
  if (!reason.empty()) GTEST_SKIP() << reason;
  RunRanks(kWorldSize, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kPush, milliseconds(300))), OkStatus());
    rank.Meet();
    if (rank.rank() != 2) {
      ASSERT_EQ(rank.SetMessage(1), OkStatus());
      const auto start = std::chrono::steady_clock::now();
      ASSERT_EQ(rank.Gather(16 << 10), OkStatus());
      ASSERT_EQ(rank.stream().Synchronize(), OkStatus());
      const auto waited = std::chrono::steady_clock::now() - start;
      const Status status = rank.group().CheckHealth();
      EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
      EXPECT_THAT(status.message(), AllOf(HasSubstr(StrCat("rank ", rank.rank(), ", gather")),
                                          HasSubstr("from rank 2"), HasSubstr("300 ms")));
      EXPECT_GE(waited, milliseconds(200));
      EXPECT_LT(waited, std::chrono::seconds(20));
      // Broken stays broken: nobody waits a second time.
      EXPECT_EQ(rank.Gather(16 << 10), status);
    }
    rank.Meet();
  });
}

// A whole graph of gathers waits once, not once for each.
TEST(DeviceGroupPushTest, GathersBehindAFailureDoNotWait) {
  RunRanks(2, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kPush, milliseconds(300))), OkStatus());
    auto graph = Graph::Capture(rank.stream(), [&]() -> Status {
      for (int i = 0; i < 300; ++i) RETURN_IF_ERROR(rank.Gather(64));
      return rank.group().EvenUp(rank.launch());
    });
    ASSERT_EQ(graph.status(), OkStatus());
    rank.Meet();
    if (rank.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      ASSERT_EQ(graph->Launch(rank.stream()), OkStatus());
      ASSERT_EQ(rank.stream().Synchronize(), OkStatus());
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
      EXPECT_EQ(rank.group().CheckHealth().code(), StatusCode::kDeadlineExceeded);
    }
    rank.Meet();
  });
}

// Rank 0 gives up while rank 1 is only late. What rank 0 sent before still arrives unharmed; then
// rank 1 learns that nobody answers.
TEST(DeviceGroupPushTest, ALateRankFindsWhatWasSentAndThenNobody) {
  constexpr int64_t kBytes = 1024;  // one block: it has sent all before it waits
  RunRanks(2, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kPush, milliseconds(300))), OkStatus());
    ASSERT_EQ(rank.SetMessage(5), OkStatus());
    rank.Meet();
    if (rank.rank() == 0) {
      ASSERT_EQ(rank.Gather(kBytes), OkStatus());
      ASSERT_EQ(rank.stream().Synchronize(), OkStatus());
      EXPECT_EQ(rank.group().CheckHealth().code(), StatusCode::kDeadlineExceeded);
      EXPECT_NE(rank.Gather(kBytes), OkStatus());
    }
    rank.Meet();
    if (rank.rank() == 1) {
      EXPECT_EQ(rank.GatherAndCompare(5, kBytes), "");
      EXPECT_THAT(rank.GatherAndCompare(6, kBytes), HasSubstr("from rank 0"));
    }
  });
}

// The memory that a peer still writes to stays, although its owner has gone.
TEST(DeviceGroupPushTest, ARankMayLeaveWhileAnotherStillSends) {
  RunRanks(2, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kPush, milliseconds(300))), OkStatus());
    EXPECT_EQ(rank.GatherAndCompare(1, 4096), "");
    if (rank.rank() == 1) rank.Leave();
    rank.Meet();
    if (rank.rank() == 0) {
      EXPECT_THAT(rank.GatherAndCompare(2, 4096), HasSubstr("from rank 1"));
    }
  });
}

TEST(DeviceGroupHostTest, ARankThatNeverComesIsNamed) {
  RunRanks(2, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kHost)), OkStatus());
    rank.comm().set_timeout(milliseconds(200));
    rank.Meet();
    if (rank.rank() == 0) {
      const Status status = rank.Gather(4096);
      EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
      EXPECT_THAT(status.message(), HasSubstr("rank 1"));
      EXPECT_EQ(rank.group().CheckHealth(), status);
    }
    rank.Meet();
  });
}

TEST(DeviceGroupCreateTest, AutoTakesAGraphSafeKindAndSaysWhatItMeasured) {
  RunRanks(2, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kAuto)), OkStatus());
    EXPECT_TRUE(rank.group().graph_safe());
    EXPECT_THAT(rank.group().Describe(),
                AllOf(HasSubstr("us for 16.0 KiB"), HasSubstr("nccl"), HasSubstr("host")));
    EXPECT_EQ(rank.GatherAndCompare(3, kMaxBytes), "");
  });
}

// Where NCCL cannot be (no header, no library, two ranks on one device) every rank gets the same
// error; where it can, it works.
TEST(DeviceGroupCreateTest, NcclWorksOrSaysWhyNotOnEveryRankAlike) {
  std::vector<Status> statuses(2);
  RunRanks(2, [&](Rank& rank) {
    statuses[rank.rank()] = rank.Create(OptionsFor(Kind::kNccl));
    if (statuses[rank.rank()].ok()) {
      EXPECT_EQ(rank.GatherAndCompare(1, kMaxBytes), "");
    }
  });
  EXPECT_EQ(statuses[0], statuses[1]);
  if (!statuses[0].ok()) {
    EXPECT_THAT(statuses[0].message(), HasSubstr("NCCL"));
  }
}

TEST(DeviceGroupCreateTest, RanksThatAskForDifferentThingsAllLearnBothValues) {
  RunRanks(2, [](Rank& rank) {
    DeviceGroup::Options options = OptionsFor(Kind::kPush);
    options.max_bytes = rank.rank() == 0 ? 64 : 128;
    const Status status = rank.Create(options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("max_bytes 64"), HasSubstr("max_bytes 128")));
  });
}

TEST(DeviceGroupCreateTest, ABadOptionOfOneRankIsToldToAll) {
  RunRanks(2, [](Rank& rank) {
    DeviceGroup::Options options = OptionsFor(Kind::kPush);
    if (rank.rank() == 1) options.max_bytes = -1;
    const Status status = rank.Create(options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1"), HasSubstr("max_bytes -1")));
  });
}

// More than any device has (three slots for four ranks are 192 GiB): the rank that fails is named,
// and no other waits for it.
TEST(DeviceGroupCreateTest, MemoryThatIsNotThereIsAnErrorOnAllRanks) {
  RunRanks(4, [](Rank& rank) {
    DeviceGroup::Options options = OptionsFor(Kind::kPush);
    options.max_bytes = int64_t{1} << 34;
    const Status status = rank.Create(options);
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(status.message(), HasSubstr("rank 0"));
  });
}

TEST(DeviceGroupCreateTest, OneRankReadsItsOwnMessageInPlace) {
  RunRanks(1, [](Rank& rank) {
    ASSERT_EQ(rank.Create(OptionsFor(Kind::kAuto)), OkStatus());
    EXPECT_TRUE(rank.group().graph_safe());
    EXPECT_EQ(rank.GatherAndCompare(1, 4096), "");
    EXPECT_EQ(rank.group().EvenUp(rank.launch()), OkStatus());
  });
}

}  // namespace
}  // namespace ds4::cuda
