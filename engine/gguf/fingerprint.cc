#include "engine/gguf/fingerprint.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "engine/base/mapped_file.h"
#include "engine/base/strings.h"

namespace ds4 {
namespace {

constexpr int64_t kFullLimitBytes = int64_t{1} << 30;
constexpr size_t kWindowBytes = size_t{64} << 10;
constexpr size_t kStrideBytes = size_t{16} << 20;

struct FreeState {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

class Hasher {
 public:
  Hasher() : state_(XXH3_createState()) {
    CHECK(state_ != nullptr) << "no memory for a hash";
    XXH3_128bits_reset(state_.get());
  }
  void Add(std::span<const std::byte> bytes) {
    XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
  }
  // The canonical (big-endian) bytes in hex, the same on every machine.
  std::string Hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
    std::string hex;
    for (const unsigned char byte : canonical.digest)
      hex += {kDigits[byte >> 4], kDigits[byte & 15]};
    return hex;
  }

 private:
  std::unique_ptr<XXH3_state_t, FreeState> state_;
};

void AddWindow(std::span<const std::byte> window, Hasher* hasher) {
  Prefetch(window);
  hasher->Add(window);
}

// Windows at 0, 16 MiB, 32 MiB, ... and the last one, which ends with the tensor.
void AddSamples(std::span<const std::byte> bytes, Hasher* hasher) {
  for (size_t at = 0; at < bytes.size(); at += kStrideBytes) {
    AddWindow(bytes.subspan(at, std::min(kWindowBytes, bytes.size() - at)), hasher);
  }
  if (bytes.size() > kWindowBytes) AddWindow(bytes.last(kWindowBytes), hasher);
}

}  // namespace

Result<std::string> ModelDigest(const GgufFile& file) {
  const bool sampled = file.file_bytes() > kFullLimitBytes;
  Hasher hasher;
  hasher.Add(file.header());
  for (const TensorInfo& tensor : file.tensors()) {
    const auto bytes = file.data(tensor);
    if (static_cast<int64_t>(bytes.size()) != tensor.size_bytes) {
      return DataLossError(
          StrCat(file.path(), ": the data of tensor ", tensor.name, " is not in the file"));
    }
    if (sampled) {
      AddSamples(bytes, &hasher);
    } else {
      hasher.Add(bytes);
    }
  }
  return (sampled ? "sampled-" : "full-") + hasher.Hex();
}

}  // namespace ds4
