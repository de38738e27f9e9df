// Points in time for waits that have a limit.
#pragma once

#include <algorithm>
#include <chrono>

namespace ds4 {

using TimePoint = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;

inline TimePoint Now() { return std::chrono::steady_clock::now(); }
inline milliseconds TimeLeft(TimePoint deadline) {
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(deadline - Now()));
}
inline double SecondsSince(TimePoint start) {
  return std::chrono::duration<double>(Now() - start).count();
}

}  // namespace ds4
