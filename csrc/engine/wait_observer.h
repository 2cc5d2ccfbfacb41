// How a feature learns what this process waits for. One may register an observer, when the module
// is loaded and no engine is made yet; it lives as long as the process.
#pragma once

#include <chrono>

#include "engine/entry.h"

namespace hvdlite {

class Engine;

// A thread of Python that waits for an operation of this engine.
struct ThreadWait {
  Engine& engine;
  const EntryPtr& entry;
  bool returns;  // It may end by a timeout, after which the thread might submit something.
};

class WaitObserver {
 public:
  WaitObserver() = default;
  virtual ~WaitObserver() = default;
  WaitObserver(const WaitObserver&) = delete;
  WaitObserver& operator=(const WaitObserver&) = delete;

  // The thread has waited for another slice of this length. A wait that went on has ended. The
  // thread holds the GIL, and the wait has one address from its first slice to its end.
  virtual void goes_on(const ThreadWait& wait, std::chrono::nanoseconds slice) = 0;
  virtual void ended(const ThreadWait& wait) = 0;
};

// The observer of this process; null where none is registered.
inline WaitObserver*& wait_observer() {
  static WaitObserver* observer = nullptr;
  return observer;
}

// Tells the observer of one wait, as long as this object lives.
class ObservedWait {
 public:
  explicit ObservedWait(const ThreadWait& wait) : wait_(wait) {}
  ~ObservedWait() {
    if (went_on_) wait_observer()->ended(wait_);
  }
  ObservedWait(const ObservedWait&) = delete;
  ObservedWait& operator=(const ObservedWait&) = delete;

  void goes_on(std::chrono::nanoseconds slice) {
    if (wait_observer() == nullptr) return;
    went_on_ = true;
    wait_observer()->goes_on(wait_, slice);
  }

 private:
  const ThreadWait wait_;
  bool went_on_ = false;
};

}  // namespace hvdlite
