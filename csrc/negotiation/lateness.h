// Who makes the others wait: how much later than the median each rank submits, step by step, as
// lines for the log. It costs no message.
//
// Words: a *step* is what StepClock says. In each all-reduce a rank is late by its arrival less
// that of the median rank (of an even number, the earlier of the two in the middle). A rank's
// *lateness* in a step is the most of these; how late it was in the first all-reduce of the step is
// its lateness *before backward*. The *last* rank has the most lateness.
//
// The arrivals are moments at which the ranks' programs submitted, on rank 0's clock. Those that
// travelled in one frame have the frame's first and last moment.
//
// The class is pure: it has no clock. StepClock owns it. Rank 0's runner calls it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "negotiation/arrival.h"

namespace hvdlite {

class Lateness {
 public:
  using TimePoint = Arrival::TimePoint;

  // Of one step, or sums over several.
  struct Rank {
    double late = 0;             // seconds after the median
    double before_backward = 0;  // seconds after the median in the first all-reduce of the step
    double last = 0;             // steps in which this rank was the last
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
  std::vector<Rank> step_;          // They belong to this step; `last` is not used.
  std::optional<TimePoint> begin_;  // The median's first arrival began this step.
  std::vector<TimePoint> sorted_;   // kept for its capacity
  Window window_;
  std::optional<Line> line_;
};

}  // namespace hvdlite
