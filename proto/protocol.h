// What both sides of the control plane must agree on before anything else.
#pragma once

#include <cstdint>
#include <string>

namespace ds4 {

// Rises when an old and a new program can no longer talk; compared in the hello.
inline constexpr uint32_t kProtocolVersion = 1;

// Largest control message either side accepts. A step with 4096 token ids is under 20 KB; scored
// rows and top lists of a long prefill stay far below this.
inline constexpr int kMaxMessageBytes = 64 << 20;

// "0.1.0 (g++ 12.2.0)": for logs and the hello; not compared.
std::string BuildVersion();

}  // namespace ds4
