// CHECK(condition) << "more": for bugs of ours only; prints where and what, then aborts. Bytes from
// a file or the network never reach a CHECK: they get a Status. DCHECK is for hot loops, off in
// release.
#pragma once

#include <sstream>

namespace ds4 {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition) {
    stream_ << file << ":" << line << ": CHECK failed: " << condition << " ";
  }
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Turns the stream expression into void, so that CHECK is a statement with no value.
struct CheckVoidify {
  void operator&(std::ostream&) {}
};

}  // namespace ds4

#define CHECK(condition) \
  (condition)            \
      ? (void)0          \
      : ::ds4::CheckVoidify() & ::ds4::CheckFailure(__FILE__, __LINE__, #condition).stream()

#ifdef NDEBUG
#define DCHECK(condition) CHECK(true || (condition))
#else
#define DCHECK(condition) CHECK(condition)
#endif
