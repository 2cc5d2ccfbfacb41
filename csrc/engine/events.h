// What has happened on this rank that people want to know of: the last events, until somebody takes
// them. Any thread adds and takes. EngineParts owns the book through LiveFigures.
//
// The kinds: "stall", "error" (it ended the world), "process set", "tuned", "epoch", "late"; and
// those that Python adds by Engine::note(), such as "diverged".
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace hvdlite {

struct Event {
  std::chrono::steady_clock::time_point time;
  std::string kind;
  int rank = -1;     // whom it concerns; -1: nobody alone
  std::string name;  // It names a tensor or a process set, or is "".
  std::string text;  // a sentence for people
};

class Events {
 public:
  static constexpr std::size_t kMost = 256;

  // It happens now. Where there are too many, the oldest is dropped.
  void add(std::string kind, int rank, std::string name, std::string text);
  // Returns those that were not taken yet, the oldest first.
  std::vector<Event> take();
  // How many were dropped so far.
  std::uint64_t dropped() const;

 private:
  mutable Mutex mutex_;
  std::deque<Event> events_ HVDLITE_GUARDED_BY(mutex_);
  std::uint64_t dropped_ HVDLITE_GUARDED_BY(mutex_) = 0;
};

}  // namespace hvdlite
