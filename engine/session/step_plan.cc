#include "engine/session/step_plan.h"

#include <cstring>
#include <type_traits>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ds4 {
namespace {

template <typename T>
void Append(std::string& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void AppendList(std::string& out, const std::vector<int32_t>& values) {
  Append(out, static_cast<uint64_t>(values.size()));
  for (int32_t value : values) Append(out, value);
}

}  // namespace

int64_t StepPlan::num_rows() const {
  int64_t rows = 0;
  for (const StepPart& part : parts) rows += static_cast<int64_t>(part.tokens.size());
  return rows;
}

std::string StepPlan::Canonical() const {
  std::string out;
  Append(out, sequence);
  Append(out, decode_steps);
  Append(out, static_cast<uint64_t>(parts.size()));
  for (const StepPart& part : parts) {
    Append(out, part.session_id);
    Append(out, part.pos);
    AppendList(out, part.tokens);
    Append(out, static_cast<uint8_t>(part.sample));
    Append(out, part.sampling.temperature);
    Append(out, part.sampling.top_k);
    Append(out, part.sampling.top_p);
    Append(out, part.sampling.min_p);
    Append(out, part.sampling.seed);
    AppendList(out, part.stop_ids);
    AppendList(out, part.score_targets);
    Append(out, part.num_top);
  }
  return out;
}

uint64_t StepPlan::Digest() const {
  const std::string bytes = Canonical();
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace ds4
