#include "proto/protocol.h"

#include "engine/base/strings.h"

namespace ds4 {

std::string BuildVersion() {
#if defined(__clang__)
  return StrCat("0.1.0 (clang ", __clang_major__, ".", __clang_minor__, ".", __clang_patchlevel__,
                ")");
#else
  return StrCat("0.1.0 (g++ ", __GNUC__, ".", __GNUC_MINOR__, ".", __GNUC_PATCHLEVEL__, ")");
#endif
}

}  // namespace ds4
