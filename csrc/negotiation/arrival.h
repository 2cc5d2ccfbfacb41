// When a rank submitted an all-reduce, or the several that travelled with it, or those of a step.
#pragma once

#include <algorithm>
#include <chrono>

namespace hvdlite {

// All moments are on rank 0's clock.
struct Arrival {
  using TimePoint = std::chrono::steady_clock::time_point;
  TimePoint first{};
  TimePoint last{};
  // The program has waited for results between its all-reduce before and this one.
  bool after_wait = false;
  bool came() const { return last != TimePoint(); }
  void include(const Arrival& other) {
    if (!other.came()) return;
    first = came() ? std::min(first, other.first) : other.first;
    last = std::max(last, other.last);
  }
};

}  // namespace hvdlite
