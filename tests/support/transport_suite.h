// Goal: every transport gives the same collectives and the same failures.
// Method: one thread for each rank, data whose sums are exact in float32, so that results are
// compared with plain integers. Include in one file of a test binary and add
//   INSTANTIATE_TEST_SUITE_P(Tcp, TransportTest, testing::Values(TransportKind{"tcp",
//   MakeTcpGroup}));
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/exchange_communicator.h"
#include "engine/comm/transport.h"
#include "tests/support/faulty_transport.h"

namespace ds4 {

using TransportGroup = std::vector<std::unique_ptr<Transport>>;

struct TransportKind {
  std::string name;
  std::function<TransportGroup(int world_size)> make;
};

inline void PrintTo(const TransportKind& kind, std::ostream* os) { *os << kind.name; }

class TransportTest : public testing::TestWithParam<TransportKind> {
 protected:
  static constexpr std::chrono::milliseconds kPatience{20'000};  // of calls that must succeed
  using Communicators = std::vector<std::unique_ptr<Communicator>>;
  using Body = std::function<Status(Communicator&)>;

  TransportGroup MakeTransports(int world_size) const { return GetParam().make(world_size); }

  static Communicators MakeCommunicators(TransportGroup transports) {
    Communicators comms;
    for (auto& transport : transports) {
      const int world_size = transport->world_size();
      comms.push_back(
          MakeExchangeCommunicator(std::move(transport), LaneLayout::Even(8, world_size)));
      comms.back()->set_timeout(kPatience);
    }
    return comms;
  }
  Communicators Make(int world_size) const { return MakeCommunicators(MakeTransports(world_size)); }

  // Runs `body` once for each rank, all at the same time.
  static std::vector<Status> RunRanks(Communicators& comms, const Body& body) {
    std::vector<Status> statuses(comms.size());
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < comms.size(); ++rank) {
      threads.emplace_back([&, rank] { statuses[rank] = body(*comms[rank]); });
    }
    threads.clear();
    return statuses;
  }

  static void ExpectAllOk(const std::vector<Status>& statuses) {
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  }
};

namespace transport_suite {

// Integers below 2^20, so that any sum of eight is exact.
inline float LaneValue(int lane, int64_t column, int round) {
  return static_cast<float>((lane * 7919 + column * 31 + round * 101) % 1'000'003);
}

inline float ExpectedSum(int64_t column, int round) {
  float sum = 0;
  for (int lane = 0; lane < 8; ++lane) sum += LaneValue(lane, column, round);
  return sum;
}

inline Status CheckAllReduce(Communicator& comm, int64_t count, int round) {
  const int begin = comm.lanes().begin[comm.rank()];
  const int end = comm.lanes().begin[comm.rank() + 1];
  std::vector<float> lanes((end - begin) * count);
  for (int lane = begin; lane < end; ++lane) {
    for (int64_t k = 0; k < count; ++k) {
      lanes[(lane - begin) * count + k] = LaneValue(lane, k, round);
    }
  }
  std::vector<float> roots(SubtreesOf(begin, end).size() * count);
  AddLanes(begin, end, lanes.data(), count, roots.data());
  std::vector<float> out(count);
  RETURN_IF_ERROR(comm.AllReduceLanes(roots, out));
  for (int64_t k = 0; k < count; ++k) {
    if (out[k] != ExpectedSum(k, round)) {
      return DataLossError(StrCat("all_reduce of ", count, ", round ", round, ", column ", k, ": ",
                                  out[k], ", must be ", ExpectedSum(k, round)));
    }
  }
  return OkStatus();
}

// Not checked by sanitizers: it fills megabytes byte by byte, which took most of the suite's time.
__attribute__((no_sanitize("thread", "address"))) inline void FillPattern(int rank, int64_t size,
                                                                          int round, char* out) {
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<char>(rank * 59 + i * 7 + i / 251 + round * 13);
  }
}

inline std::vector<std::byte> PatternOf(int rank, int64_t size, int round) {
  std::vector<std::byte> bytes(size);
  FillPattern(rank, size, round, reinterpret_cast<char*>(bytes.data()));
  return bytes;
}

inline Status CheckAllGather(Communicator& comm, int64_t size, int round) {
  const std::vector<std::byte> mine = PatternOf(comm.rank(), size, round);
  std::vector<std::byte> all(size * comm.world_size());
  RETURN_IF_ERROR(comm.AllGather(mine, all));
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    const std::vector<std::byte> expected = PatternOf(rank, size, round);
    if (size > 0 && std::memcmp(expected.data(), all.data() + rank * size, size) != 0) {
      return DataLossError(StrCat("all_gather of ", size, ": block ", rank, " differs"));
    }
  }
  return OkStatus();
}

inline Status CheckBroadcast(Communicator& comm, int root, int64_t size, int round) {
  std::vector<std::byte> data(size);
  if (comm.rank() == root) data = PatternOf(root, size, round);
  RETURN_IF_ERROR(comm.Broadcast(root, data));
  if (data != PatternOf(root, size, round)) {
    return DataLossError(StrCat("broadcast of ", size, " from ", root, " differs"));
  }
  return OkStatus();
}

// The same calls on every rank, chosen by `seed`.
inline Status RunRandomCalls(Communicator& comm, uint32_t seed, int num_rounds) {
  std::mt19937 rng(seed);
  for (int round = 0; round < num_rounds; ++round) {
    const uint32_t kind = rng() % 8;
    // Mostly small, as in decode; now and then above the border of the reduce-scatter.
    const int64_t size = rng() % 16 == 0 ? rng() % 40'000 : rng() % 300;
    const int root = static_cast<int>(rng() % comm.world_size());
    if (kind < 4) RETURN_IF_ERROR(CheckAllReduce(comm, size, round));
    if (kind == 4 || kind == 5) RETURN_IF_ERROR(CheckAllGather(comm, size, round));
    if (kind == 6) RETURN_IF_ERROR(CheckBroadcast(comm, root, size, round));
    if (kind == 7) RETURN_IF_ERROR(comm.Barrier());
  }
  return OkStatus();
}

}  // namespace transport_suite

TEST_P(TransportTest, AllReduceIsExactForEverySizeAndWorldSize) {
  for (int world_size = 1; world_size <= 5; ++world_size) {
    auto comms = Make(world_size);
    ExpectAllOk(RunRanks(comms, [](Communicator& comm) {
      for (const int64_t bytes : {0, 4, 16 << 10, (16 << 10) + 4, 1 << 20, 4 << 20}) {
        RETURN_IF_ERROR(transport_suite::CheckAllReduce(comm, bytes / 4, 0));
      }
      return OkStatus();
    }));
  }
}

TEST_P(TransportTest, AllGatherAndBroadcastKeepEveryByte) {
  for (int world_size = 1; world_size <= 5; ++world_size) {
    auto comms = Make(world_size);
    ExpectAllOk(RunRanks(comms, [](Communicator& comm) {
      for (const int64_t size : {0, 1, 4, 16 << 10, (16 << 10) + 4, 1 << 20, 4 << 20}) {
        // Megabytes from many ranks would show nothing new and take most of the suite's time.
        if (size >= 1 << 20 && comm.world_size() > 3) continue;
        RETURN_IF_ERROR(transport_suite::CheckAllGather(comm, size, 1));
        for (int root = 0; root < comm.world_size(); ++root) {
          RETURN_IF_ERROR(transport_suite::CheckBroadcast(comm, root, size, 2));
        }
      }
      return OkStatus();
    }));
  }
}

TEST_P(TransportTest, ThousandsOfMixedCallsStayInStep) {
  for (const int world_size : {2, 3, 5}) {
    auto comms = Make(world_size);
    const int num_rounds = 6000 / world_size;
    ExpectAllOk(RunRanks(comms, [&](Communicator& comm) {
      return transport_suite::RunRandomCalls(comm, 77 + world_size, num_rounds);
    }));
  }
}

TEST_P(TransportTest, SlowRanksChangeNothing) {
  TransportGroup transports = MakeTransports(3);
  for (int rank = 0; rank < 3; ++rank) {
    const FaultPlan plan{
        .seed = 5u + rank, .delay_probability = 0.2, .max_delay = std::chrono::microseconds(2000)};
    transports[rank] = std::make_unique<FaultyTransport>(std::move(transports[rank]), plan);
  }
  auto comms = MakeCommunicators(std::move(transports));
  ExpectAllOk(RunRanks(
      comms, [](Communicator& comm) { return transport_suite::RunRandomCalls(comm, 11, 300); }));
}

TEST_P(TransportTest, CountsTheTimeSpentWaiting) {
  auto comms = Make(2);
  ExpectAllOk(RunRanks(comms, [](Communicator& comm) {
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return comm.Barrier();
  }));
  EXPECT_GE(comms[0]->wait_seconds(), 0.03);
}

TEST_P(TransportTest, AnotherSizeIsAnErrorWithBothValues) {
  auto comms = Make(2);
  const auto statuses = RunRanks(comms, [](Communicator& comm) {
    std::vector<std::byte> mine(comm.rank() == 0 ? 12 : 20);
    std::vector<std::byte> all(2 * mine.size());
    return comm.AllGather(mine, all);
  });
  // The first to see it says so and leaves; the other sees the same, or that the first has left.
  int num_internal = 0;
  for (const Status& status : statuses) {
    EXPECT_THAT(status.code(), testing::AnyOf(StatusCode::kInternal, StatusCode::kUnavailable));
    if (status.code() != StatusCode::kInternal) continue;
    ++num_internal;
    EXPECT_THAT(status.message(), testing::HasSubstr("12"));
    EXPECT_THAT(status.message(), testing::HasSubstr("20"));
  }
  EXPECT_GE(num_internal, 1);
}

TEST_P(TransportTest, AnotherSequenceIsAnErrorWithBothValues) {
  TransportGroup transports = MakeTransports(2);
  std::vector<Status> statuses(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const std::vector<std::byte> mine(8);
      std::vector<std::byte> theirs(8);
      const SendOp send{1 - rank, mine};
      const RecvOp recv{1 - rank, theirs};
      statuses[rank] = transports[rank]->Exchange(rank == 0 ? 41 : 57, {&send, 1}, {&recv, 1},
                                                  std::chrono::steady_clock::now() + kPatience);
    });
  }
  threads.clear();
  int num_internal = 0;
  for (const Status& status : statuses) {
    EXPECT_FALSE(status.ok());
    if (status.code() != StatusCode::kInternal) continue;
    ++num_internal;
    EXPECT_THAT(status.message(), testing::HasSubstr("41"));
    EXPECT_THAT(status.message(), testing::HasSubstr("57"));
  }
  EXPECT_GE(num_internal, 1);
}

TEST_P(TransportTest, AKilledPeerIsNamedWithinASecond) {
  auto comms = Make(3);
  ExpectAllOk(RunRanks(comms, [](Communicator& comm) { return comm.Barrier(); }));
  std::chrono::steady_clock::time_point killed;
  const auto statuses = RunRanks(comms, [&](Communicator& comm) {
    if (comm.rank() != 1) return comm.Barrier();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    killed = std::chrono::steady_clock::now();
    comms[1].reset();
    return OkStatus();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(1));
  bool is_named = false;
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), StatusCode::kUnavailable) << statuses[rank];
    is_named |= statuses[rank].message().find("lost rank 1 (") != std::string::npos;
  }
  // The second survivor may see the first one leave before it sees rank 1.
  EXPECT_TRUE(is_named) << statuses[0] << "; " << statuses[2];
}

TEST_P(TransportTest, ASilentPeerIsNamedWithThePlaceInTheStep) {
  auto comms = Make(3);
  for (auto& comm : comms) comm->set_timeout(std::chrono::milliseconds(200));
  const auto statuses = RunRanks(comms, [](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      return OkStatus();
    }
    comm.set_site(17, "after attention");
    const auto start = std::chrono::steady_clock::now();
    const Status status = comm.Barrier();
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_GE(took, std::chrono::milliseconds(190));
    EXPECT_LT(took, std::chrono::milliseconds(1500));
    return status;
  });
  int num_named = 0;
  for (const int rank : {0, 2}) {
    EXPECT_THAT(statuses[rank].message(),
                testing::StartsWith(StrCat("rank ", rank, ", layer 17, after attention: ")));
    if (statuses[rank].code() != StatusCode::kDeadlineExceeded) continue;
    ++num_named;
    EXPECT_THAT(statuses[rank].message(),
                testing::ContainsRegex("no progress for [0-9]+ ms, waiting for rank 1 \\("));
  }
  // Both run into it; one may hear of the other's failure first.
  EXPECT_GE(num_named, 1) << statuses[0] << "; " << statuses[2];
}

TEST_P(TransportTest, AbortFromAnotherThreadWakesTheRank) {
  auto comms = Make(2);
  std::jthread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    comms[0]->Abort(AbortedError("the coordinator gave up"));
  });
  const auto start = std::chrono::steady_clock::now();
  const Status status = comms[0]->Barrier();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_THAT(status.message(), testing::HasSubstr("the coordinator gave up"));
}

TEST_P(TransportTest, AbortEndsAGroupOfOneToo) {
  auto comms = Make(1);
  std::vector<float> roots(4, 1.0f);
  std::vector<float> out(4);
  EXPECT_TRUE(comms[0]->AllReduceLanes(roots, out).ok());
  comms[0]->Abort(AbortedError("the coordinator gave up"));
  EXPECT_EQ(comms[0]->AllReduceLanes(roots, out).code(), StatusCode::kAborted);
  EXPECT_EQ(comms[0]->Barrier().code(), StatusCode::kAborted);
}

TEST_P(TransportTest, OnceBrokenItStaysBrokenAndFailsAtOnce) {
  auto comms = Make(2);
  comms[0]->set_timeout(std::chrono::milliseconds(50));
  comms[0]->set_site(3, "after experts");
  const Status first = comms[0]->Barrier();
  EXPECT_EQ(first.code(), StatusCode::kDeadlineExceeded);
  comms[0]->set_timeout(kPatience);
  comms[0]->set_site(4, "elsewhere");
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::byte> data(10);
  EXPECT_EQ(comms[0]->Broadcast(1, data), first);
  EXPECT_EQ(comms[0]->Barrier(), first);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(100));
  // The peer hears of it and does not wait for its own, long deadline. What rank 0 had sent before
  // it gave up may still end the peer's first call well.
  const Status first_of_peer = comms[1]->Barrier();
  EXPECT_THAT(first_of_peer.code(), testing::AnyOf(StatusCode::kOk, StatusCode::kUnavailable));
  EXPECT_EQ(comms[1]->Barrier().code(), StatusCode::kUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

TEST_P(TransportTest, AnySeededFaultEndsEveryRankWithAnError) {
  for (const FaultKind kind : {FaultKind::kFail, FaultKind::kStall, FaultKind::kWrongSequence}) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      TransportGroup transports = MakeTransports(3);
      const int faulty = static_cast<int>(seed) % 3;
      const FaultPlan plan{.seed = seed, .kind = kind, .fault_within = 40};
      transports[faulty] = std::make_unique<FaultyTransport>(std::move(transports[faulty]), plan);
      auto comms = MakeCommunicators(std::move(transports));
      for (auto& comm : comms) comm->set_timeout(std::chrono::milliseconds(300));
      const auto start = std::chrono::steady_clock::now();
      const auto statuses = RunRanks(comms, [&](Communicator& comm) {
        return transport_suite::RunRandomCalls(comm, seed, 400);
      });
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
      for (const Status& status : statuses) {
        EXPECT_FALSE(status.ok());
        EXPECT_NE(status.code(), StatusCode::kDataLoss) << status;
      }
    }
  }
}

}  // namespace ds4
