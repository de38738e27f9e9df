// Goal: no bytes make the GGUF or safetensors reader crash, hang or take much memory.
// Method: libFuzzer. Not in the default build (clang only):
//   cmake -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DDS4_BUILD_CLUSTER=OFF -DDS4_FUZZ=ON
//         -DDS4_SANITIZE=fuzzer-no-link,address,undefined
//   cmake --build build/fuzz --target gguf_fuzz
//   build/fuzz/bin/gguf_fuzz -max_total_time=60 tests/data/gguf_cases
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/gguf/gguf_reader.h"
#include "engine/gguf/safetensors.h"

namespace {

// Everything a caller may ask of an accepted file.
void UseGguf(const ds4::GgufFile& file) {
  size_t sum = 0;
  for (const ds4::GgufKeyText& key : file.KeyTexts()) {
    sum += key.value.size();
    sum += file.GetInt(key.key).ok() + file.GetFloat(key.key).ok() + file.GetBool(key.key).ok();
    sum += file.GetString(key.key).ok() + file.GetIntArray(key.key).ok();
    sum += file.GetFloatArray(key.key).ok() + file.GetStringArray(key.key).ok();
  }
  for (const ds4::TensorInfo& tensor : file.tensors()) {
    for (const std::byte byte : file.data(tensor)) sum += std::to_integer<size_t>(byte);
  }
  volatile size_t keep = sum;
  (void)keep;
}

void UseSafetensors(const ds4::SafetensorsFile& file) {
  size_t sum = file.metadata().size();
  for (const ds4::SafetensorInfo& tensor : file.tensors()) {
    for (const std::byte byte : file.data(tensor)) sum += std::to_integer<size_t>(byte);
  }
  volatile size_t keep = sum;
  (void)keep;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  for (const auto content : {ds4::GgufContent::kComplete, ds4::GgufContent::kDirectory}) {
    const auto file = ds4::GgufFile::Parse(bytes, "fuzz", content);
    if (file.ok()) UseGguf(**file);
  }
  const auto tensors = ds4::SafetensorsFile::Parse(bytes, "fuzz");
  if (tensors.ok()) UseSafetensors(**tensors);
  return 0;
}
