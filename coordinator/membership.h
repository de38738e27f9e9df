// Which workers may form a group: what each said in its hello against what we need. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/status.h"
#include "engine/shard/shard_plan.h"
#include "proto/worker.pb.h"

namespace ds4 {

// A worker that answered the hello.
struct Member {
  std::string address;  // as we reach it
  v1::HelloReply hello;
};

// What every member must agree with.
struct Requirements {
  std::string model_path;    // ours, for messages
  std::string model_digest;  // engine/gguf/fingerprint.h
  int64_t context = 0;       // tokens asked for; 0: whatever the members allow
  int64_t batch_rows = 0;    // rows of one step
};

// "rank 1 (10.0.0.3:9911)".
std::string RankName(int rank, const std::string& address);

// kFailedPrecondition with both values: another protocol version or other model bytes;
// kInvalidArgument: a context or a chunk over the worker's limit, or a hello with impossible
// values.
Status CheckMember(int rank, const Member& member, const Requirements& requirements);
// kFailedPrecondition with both values: a rank whose arithmetic is not rank 0's, so that their sums
// would not fit together.
Status CheckAlike(const std::vector<Member>& members);
// kResourceExhausted: the rank's slices do not fit in the memory that the worker has free.
Status CheckMemory(int rank, const Member& member, const RankPlan& plan);

// All of `errors` in one status, one line each; the first error's code. OK when there is none.
Status Combine(const std::string& what, const std::vector<Status>& errors);

// The context to form the group with: `asked`, or when 0 the smallest of `preferred` and the
// members' limits.
int64_t AgreeOnContext(int64_t asked, int64_t preferred, const std::vector<Member>& members);

// Where peers reach this member's data plane: what it announces, or, when that is empty or a
// wildcard, the host by which we reach it.
std::string DataHost(const Member& member);

// Differences that are worth a word but no reason to refuse, such as kernels for another
// instruction set; empty when there are none.
std::string MemberNotes(const std::vector<Member>& members);

}  // namespace ds4
