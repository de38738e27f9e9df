#include "coordinator/membership.h"

#include <algorithm>

#include "engine/base/strings.h"
#include "proto/protocol.h"

namespace ds4 {
namespace {

Status CheckValues(const std::string& who, const v1::HelloReply& hello) {
  if (hello.max_context() < 1) {
    return InvalidArgumentError(
        StrCat(who, ": says its context limit is ", hello.max_context(), ", must be at least 1"));
  }
  if (hello.data_port() > 65535) {
    return InvalidArgumentError(
        StrCat(who, ": says its data port is ", hello.data_port(), ", must be at most 65535"));
  }
  return OkStatus();
}

// Builds from before the field had the CPU engine only.
std::string Arithmetic(const v1::HelloReply& hello) {
  return hello.arithmetic().empty() ? "kv f32, sums in lanes always" : hello.arithmetic();
}

std::string HostOf(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);  // IPv6 in brackets
  }
  return host;
}

}  // namespace

std::string RankName(int rank, const std::string& address) {
  return StrCat("rank ", rank, " (", address, ")");
}

Status CheckMember(int rank, const Member& member, const Requirements& requirements) {
  const std::string who = RankName(rank, member.address);
  const v1::HelloReply& hello = member.hello;
  if (hello.protocol_version() != kProtocolVersion) {
    return FailedPreconditionError(
        StrCat(who, ": speaks protocol version ", hello.protocol_version(), " (build ",
               hello.build(), "), this coordinator version ", kProtocolVersion, " (build ",
               BuildVersion(), "); use the same release on all machines"));
  }
  RETURN_IF_ERROR(CheckValues(who, hello));
  if (hello.model_digest() != requirements.model_digest) {
    return FailedPreconditionError(StrCat(who, ": has other model bytes: ", hello.model_path(),
                                          " has digest ", hello.model_digest(), ", our ",
                                          requirements.model_path, " has ",
                                          requirements.model_digest, "; give all the same file"));
  }
  if (requirements.context > hello.max_context()) {
    return InvalidArgumentError(StrCat(who, ": its context limit is ", hello.max_context(),
                                       " tokens, --ctx asks for ", requirements.context,
                                       "; lower --ctx or start the worker with a larger one"));
  }
  if (requirements.batch_rows > hello.max_batch_rows()) {
    return InvalidArgumentError(StrCat(
        who, ": runs at most ", hello.max_batch_rows(), " rows in one step, --chunk asks for ",
        requirements.batch_rows, "; lower --chunk or start the worker with more --max-rows"));
  }
  return OkStatus();
}

Status CheckAlike(const std::vector<Member>& members) {
  const std::string first = Arithmetic(members[0].hello);
  for (size_t i = 1; i < members.size(); ++i) {
    const std::string own = Arithmetic(members[i].hello);
    if (own == first) continue;
    return FailedPreconditionError(StrCat(
        RankName(static_cast<int>(i), members[i].address), ": computes with ", own, ", ",
        RankName(0, members[0].address), " with ", first,
        "; start all workers with the same --kv-type, --deterministic and --replicated-weights (a "
        "CPU worker has f32 keys, keeps the lanes always and takes the weights as the file has "
        "them)"));
  }
  return OkStatus();
}

Status CheckMemory(int rank, const Member& member, const RankPlan& plan) {
  const int64_t free_bytes = member.hello.memory_bytes();
  if (free_bytes <= 0 || plan.held_bytes <= free_bytes) return OkStatus();
  return ResourceExhaustedError(
      StrCat(RankName(rank, member.address), ": its slices take ", HumanBytes(plan.held_bytes),
             ", it has ", HumanBytes(free_bytes), " free, ",
             HumanBytes(plan.held_bytes - free_bytes), " too little; use more ranks"));
}

Status Combine(const std::string& what, const std::vector<Status>& errors) {
  std::string text;
  StatusCode code = StatusCode::kOk;
  int count = 0;
  for (const Status& error : errors) {
    if (error.ok()) continue;
    if (count++ == 0) code = error.code();
    text += "\n  " + error.message();
  }
  if (count == 0) return OkStatus();
  return Status(code, what + ":" + text);
}

int64_t AgreeOnContext(int64_t asked, int64_t preferred, const std::vector<Member>& members) {
  if (asked > 0) return asked;
  int64_t context = preferred;
  for (const Member& member : members) context = std::min(context, member.hello.max_context());
  return context;
}

std::string DataHost(const Member& member) {
  const std::string& announced = member.hello.data_host();
  const bool wildcard = announced.empty() || announced == "0.0.0.0" || announced == "::";
  return wildcard ? HostOf(member.address) : announced;
}

std::string MemberNotes(const std::vector<Member>& members) {
  std::vector<std::string> sets;
  for (const Member& member : members) {
    const std::string& isa = member.hello.kernel_isa();
    if (std::find(sets.begin(), sets.end(), isa) == sets.end()) sets.push_back(isa);
  }
  if (sets.size() < 2) return "";
  return StrCat("note: the workers use different kernels: ", StrJoin(sets, ", "));
}

}  // namespace ds4
