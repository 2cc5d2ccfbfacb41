// Who makes the others wait: how much later than the median each rank submits, step by step, as
// means over the steps of late and as lines for the log. It costs no message.
//
// Words: a *step* is what StepClock says. In each all-reduce a rank is late by its arrival less
// that of the median rank (of an even number, the earlier of the two in the middle). A rank's
// *lateness* in a step is the most of these; how late it was in the first all-reduce of the step is
// its lateness *before backward*. The *last* rank has the most lateness.
//
// The arrivals are moments at which the ranks' programs submitted, on rank 0's clock. Those that
// travelled in one frame have the frame's first and last moment.
//
// The class is pure: it has no clock. StepClock owns it. Rank 0's runner calls arrived(), forget()
// and take_line(); any thread calls report(), which the mutex guards.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "negotiation/arrival.h"

namespace hvdlite {

class Lateness {
 public:
  using TimePoint = Arrival::TimePoint;

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

  // "rank 2 was last in ..."
  struct Line {
    int rank = -1;
    std::string text;
  };

  // `interval`: seconds between two lines of take_line(), at least; 0: there are none.
  Lateness(int size, double interval);

  // All ranks have submitted an all-reduce: when, by rank. `begins`: it begins a step.
  void arrived(std::span<const Arrival> arrivals, bool begins);
  // Forgets the step under way.
  void forget() { begin_.reset(); }
  // Returns the line that has become due, once: which rank was last in most of the steps since the
  // line before, and by how much. There is none where no rank stands out.
  std::optional<Line> take_line();
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
  std::optional<Line> describe(const Window& window) const;

  const double interval_;

  // The runner's.
  std::vector<Rank> step_;          // They belong to this step; `last` is not used.
  std::optional<TimePoint> begin_;  // The median's first arrival began this step.
  std::vector<TimePoint> sorted_;   // kept for its capacity
  Window window_;
  std::optional<Line> line_;

  mutable Mutex mutex_;
  Report report_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
