// What an engine can say of itself while it runs, for the live view (Engine::live()). EngineParts
// owns it; each part says which threads may call it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "engine/entry.h"
#include "engine/events.h"
#include "negotiation/stalls.h"
#include "negotiation/step_clock.h"
#include "wire/message.h"

namespace hvdlite {

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
