// What waits for ranks just now, for people who look: the runner of rank 0 finds it a few times a
// second at most and any thread reads it, because the coordinator's tables are the runner's alone.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "negotiation/coordinator.h"

namespace hvdlite {

struct Stall {
  std::string name;
  std::chrono::steady_clock::time_point since;
  std::vector<int> submitted;  // the ranks that wait in it
  std::vector<int> missing;    // those that it waits for
};

// LiveFigures owns it.
class Stalls {
 public:
  static constexpr std::size_t kMost = 8;
  static constexpr std::chrono::seconds kShortest{1};  // what waits less long is nothing unusual

  // Keeps those that have waited the longest. Rank 0's runner.
  void find(Coordinator& coordinator, Coordinator::TimePoint now);
  // Nothing waits.
  void clear() { set({}); }
  // The longest first. Any thread.
  std::vector<Stall> get() const;

 private:
  void set(std::vector<Stall> found);

  mutable Mutex mutex_;
  std::vector<Stall> stalls_ HVDLITE_GUARDED_BY(mutex_);
  bool empty_ = true;  // the runner's
};

}  // namespace hvdlite
