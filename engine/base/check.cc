#include "engine/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace ds4 {

CheckFailure::~CheckFailure() {
  std::fprintf(stderr, "%s\n", stream_.str().c_str());
  std::abort();
}

}  // namespace ds4
