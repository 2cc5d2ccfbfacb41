// Where the time of a step goes, rank by rank: in computing gradients, in waiting for ranks that
// are later, in communication that nothing hides, and in what lies between two steps.
//
// Words: a *step* begins when the name of an all-reduce comes a second time. All-reduces of other
// process sets than that of all ranks, and names that are used once, do not count. Of a step and a
// rank, f and l are the moments at which the rank's program submitted its first and its last
// all-reduce, on rank 0's clock, as the rank says itself (wire/message.h, Stamps): the moments at
// which rank 0 reads are worthless, because it reads nothing while it moves bytes. e is the end of
// the step's last batch as rank 0 sees it; f' is the f of the next step. Then
//
//   backward = l - f, waiting = max l - l, communicating = e - max l, between = f' - e
//
// are a partition of f' - f. The rank with the greatest l is *last* in the step. It is late by its
// l less the median l of the other ranks (of an even number, the earlier of the two in the middle):
// *late in between* as far as its f was late in the same sense, and *late in backward* by the rest.
//
// A program that waits for results in the middle of a step lets all ranks meet there: for the mean
// of the loss, for example. Who was late before is then not late any more. So a step is cut into
// *bursts*, where the thread that submits has waited on rank 0. The above then holds for each
// burst, and is summed; the time from the e of a burst to the f of the next one of the step counts
// as backward. Last is the rank that was late by the most in all bursts together.
//
// A rank that has joined waits from one e to the next max l. A rank whose gradient is late has
// the moment at which its step was closed as its l, since until then the others waited for it.
// What GPU tensors need after they were given to the device is not seen: it lies in between.
//
// The class is pure: it has no clock. LiveFigures owns it. Rank 0's runner calls all but report();
// any thread calls report(), which the mutex guards. A step is reported when the first
// burst of the next one is over, because only then its f' is known.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/mutex.h"
#include "negotiation/pending_table.h"
#include "wire/message.h"

namespace hvdlite {

class StepClock {
 public:
  using TimePoint = Arrival::TimePoint;
  using Duration = TimePoint::duration;

  // Sums over the steps so far.
  struct Rank {
    Duration backward{};
    Duration waiting{};
    Duration communicating{};
    Duration between{};
    std::uint64_t last = 0;   // steps in which this rank was the last; a rank alone never is
    Duration late_between{};  // in these steps
    Duration late_backward{};
    Duration held_up{};  // all others waited for this rank alone: steps without it save this
  };
  struct Report {
    std::uint64_t steps = 0;
    Duration time{};  // All ranks together took it.
    std::vector<Rank> ranks;
    double seconds() const;  // the mean of the ranks
  };

  // `line_interval`: seconds between two lines of take_line(), at least; 0: there are none.
  StepClock(int size, double line_interval);

  // The all-reduce of this name was answered: when the ranks submitted it, by rank. A rank that has
  // joined gives no Arrival. `counted`: all ranks take part with their own tensors.
  void arrived(const std::string& name, std::span<const Arrival> arrivals, bool counted);
  // A batch of such all-reduces has ended.
  void ended(TimePoint time);

  Report report() const;
  // Returns the line that has become due, once: which rank was last in most of the steps since the
  // line before, and by how much. There is none where no rank stands out. Steps in which a rank had
  // joined, or was late with its gradient, do not count.
  std::optional<Notice> take_line();

 private:
  struct Burst {
    std::vector<Arrival> ranks;  // f and l
    TimePoint end{};             // e, as far as it is known
    bool begins_step = true;     // it is the first one of its step
    bool counted = true;         // so were all its all-reduces
  };
  // Completes what is known of the burst under way, and begins the next one.
  void close(bool begins_step);
  void begin_anew();
  // Adds a burst that is over to its step; `next` is the burst behind it.
  void add(const Burst& burst, const Burst& next);
  void add_lateness(const Burst& burst);
  void end_step();
  // Adds the step to sums over several.
  void add_step_to(Report& sums) const;
  std::optional<Notice> describe(const Report& window) const;

  const std::size_t size_;

  // The runner's.
  const double line_interval_;
  std::unordered_set<std::size_t> names_;  // The step under way has these, hashed.
  Burst burst_;                            // under way
  std::optional<Burst> before_;            // the one before it; its f' is in burst_
  Report step_;                            // sums over the bursts before that, of the same step
  bool step_counts_ = true;                // for the line
  Report window_;                          // of the steps since the line before
  std::optional<Notice> line_;
  std::vector<TimePoint> others_;  // kept for its capacity

  mutable Mutex mutex_;
  Report report_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
