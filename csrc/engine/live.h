// What an engine can say of itself while it runs, for the live view (Engine::live()). EngineParts
// owns it; each part says which threads may call it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/entry.h"
#include "negotiation/stall_monitor.h"
#include "negotiation/step_clock.h"
#include "wire/message.h"

namespace hvdlite {

// What has happened on this rank that people want to know of: the last events, until somebody takes
// them. Any thread adds and takes. EngineParts owns the book through LiveFigures.
//
// The kinds: "stall", "error" (it ended the world), "process set", "tuned", "world", "late"; and
// those that Python adds by Engine::note(), such as "diverged".
struct Event {
  std::chrono::steady_clock::time_point time;
  std::string kind;
  int rank = -1;     // whom it concerns; -1: nobody alone
  std::string name;  // It names a tensor or a process set, or is "".
  std::string text;  // a sentence for people
};

class Events {
 public:
  static constexpr std::size_t kMost = 64;

  // It happens now. Where there are too many, the oldest is dropped.
  void add(std::string kind, int rank, std::string name, std::string text) {
    Event event{std::chrono::steady_clock::now(), std::move(kind), rank, std::move(name),
                std::move(text)};
    MutexLock lock(mutex_);
    if (events_.size() == kMost) events_.pop_front();
    events_.push_back(std::move(event));
  }
  // Returns those that were not taken yet, the oldest first.
  std::vector<Event> take() {
    MutexLock lock(mutex_);
    const std::deque<Event> taken = std::exchange(events_, {});
    return {taken.begin(), taken.end()};
  }

 private:
  Mutex mutex_;
  std::deque<Event> events_ HVDLITE_GUARDED_BY(mutex_);
};

// What an engine has done so far. The runner counts up; any thread reads.
struct Counters {
  Counter batches;
  Counter tensors;
  Counter bytes;
  Counter cache_hits;
  Counter full_requests;
  Counter messages_sent;         // on the control plane
  Counter bytes_to_other_hosts;  // The host's data plane counts them (Backend::count_in).
  Counter bytes_unstaged;        // The host's data plane counts them, too.
  Counter exchanges;             // batches besides broadcasts and barriers
  Counter exchange_us;           // from the begin to the end here of batches that count in steps
};

struct LiveFigures {
  using Clock = std::chrono::steady_clock;

  LiveFigures(int size, double lateness_interval, std::int64_t offset)
      : clock_offset(offset), steps(size, lateness_interval) {}

  // When a peer submitted what it stamped so. It cannot have been before this world, nor later than
  // now, although clocks are compared with an error.
  Arrival arrival(const Stamps& stamps, Clock::time_point now) const {
    const auto first = std::clamp(time_of(stamps.first), began, now);
    return {first, std::clamp(time_of(stamps.last), first, now), /*after_wait=*/false};
  }
  // When this rank submitted an entry.
  static Arrival own(const Entry& entry) {
    return {time_of(entry.began_at), time_of(entry.submitted_at), entry.after_wait};
  }
  // A reading of trace_now() on this rank, as a moment of its clock.
  static Clock::time_point time_of(std::int64_t nanoseconds) {
    return Clock::time_point(
        std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(nanoseconds)));
  }

  const std::int64_t clock_offset;  // nanoseconds from this rank's monotonic clock to rank 0's
  const Clock::time_point began = Clock::now();
  StepClock steps;  // rank 0, or a world of one
  Stalls stalls;    // rank 0
  Events events;
};

}  // namespace hvdlite
