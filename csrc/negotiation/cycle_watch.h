// Sees that a program repeats itself: in the coordinator's answers, the same tensors over and over.
//
// Words: a *cycle* is a run of cached requests with different ids; it ends where one of them comes
// once more. Two cycles are *alike* if they have the same ids, in whatever order. After so many
// cycles alike the schedule can be frozen (frozen_schedule.h), in the order of the last answers.
// A schedule that thaws soon has cost more than it gave: the next one then needs twice as many
// cycles.
//
// Pure. Rank 0's negotiator owns it, and only the runner calls it.
#pragma once

#include <cstdint>
#include <vector>

namespace hvdlite {

class CycleWatch {
 public:
  // `cycles`: so many alike; 0: never.
  explicit CycleWatch(std::int64_t cycles) : cycles_(cycles), needed_(cycles) {}

  bool on() const { return cycles_ > 0; }
  // A cached request of the whole world was answered.
  void note(std::uint32_t id);
  // Something else was answered, or may have been.
  void reset();
  // Whether the answers up to here can be followed by a frozen schedule.
  bool ready() const;
  // The schedule that follows.
  std::vector<std::uint32_t> schedule() const;
  // The frozen schedule has thawed after so many whole cycles.
  void thawed(std::uint64_t cycles);

 private:
  bool under_way(std::uint32_t id) const { return id < seen_.size() && seen_[id]; }

  const std::int64_t cycles_;
  std::int64_t needed_;
  std::int64_t alike_ = 0;                    // cycles with the ids of before_, so far
  std::vector<std::uint32_t> ids_;            // of the cycle under way
  std::vector<bool> seen_;                    // by id: it is in ids_
  std::vector<std::uint32_t> before_;         // those of the one before it
  std::vector<std::uint32_t> before_sorted_;  // likewise, ascending
};

}  // namespace hvdlite
