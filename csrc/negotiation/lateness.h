// Who makes the others wait: how much later than the median the requests of each rank arrive, step
// by step, as rank 0's coordinator reads them. It costs no message.
//
// Words: a *step* begins when the name of an all-reduce comes a second time; all-reduces of
// other process sets than that of all ranks, and names that are used once, do not count. In each
// all-reduce a rank is late by its arrival less that of the median rank (of an even number, the
// earlier of the two in the middle). A rank's *lateness* in a step is the most of these; how late
// it was in the first all-reduce of the step is its lateness *before backward*. The *last* rank has
// the most lateness.
//
// The arrivals are moments at which rank 0 read the frames. While rank 0 moves bytes it reads none,
// so a short lateness can be some milliseconds off.
//
// The class is pure: it has no clock. EngineParts owns it. Rank 0's runner calls answered() and
// take_line(); any thread calls report(), which the mutex guards.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/mutex.h"

namespace hvdlite {

class Lateness {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Means over the steps so far; those of long ago count less.
  struct Rank {
    double late = 0;             // seconds after the median
    double before_backward = 0;  // seconds after the median in the first all-reduce of the step
    double last = 0;             // share of the steps in which this rank was the last
  };
  struct Report {
    std::uint64_t steps = 0;
    double step_seconds = 0;  // from one step to the next
    std::vector<Rank> ranks;
  };

  // `interval`: seconds between two lines of take_line(), at least; 0: there are none.
  Lateness(int size, double interval);

  // All ranks have submitted the all-reduce of this name: when, by rank.
  void answered(const std::string& name, std::span<const TimePoint> arrivals);
  // Returns the line that has become due, once: which rank was last in most of the steps since the
  // line before, and by how much. There is none where no rank stands out.
  std::optional<std::string> take_line();
  Report report() const;

 private:
  // Sums over the steps of one line.
  struct Window {
    TimePoint begin;
    std::uint64_t steps = 0;
    double seconds = 0;
    std::vector<Rank> ranks;
  };
  void end_step(TimePoint next);
  std::optional<std::string> describe(const Window& window) const;

  const double interval_;

  // The runner's.
  std::unordered_set<std::size_t> names_;  // of this step, hashed
  std::vector<Rank> step_;                 // of this step; `last` is not used
  std::optional<TimePoint> begin_;         // of this step: the median's first arrival
  std::vector<TimePoint> sorted_;          // kept for its capacity
  Window window_;
  std::optional<std::string> line_;

  mutable Mutex mutex_;
  Report report_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
