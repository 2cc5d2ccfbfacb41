// Who runs the engine now: its own thread (the background), or a thread that blocks on a handle and
// does the work itself (a foreground), which saves a small blocking call two thread hand-offs.
//
// Exactly one of them holds the turn; whatever belongs to "the runner" is guarded by it. The
// background takes a free turn when it is nudged (there is work that nobody waits for), or when no
// foreground has come back for a while. Any thread.
#pragma once

#include <atomic>
#include <chrono>

#include "base/mutex.h"

namespace hvdlite {

class Turn {
 public:
  // Foreground: takes the turn if it is free.
  bool try_take() {
    MutexLock lock(mutex_);
    if (held_ || closed_) return false;
    held_ = true;
    wanted_.store(false);
    return true;
  }
  // Foreground: asks the background, which is asleep, to let go. Ring its waiter afterwards.
  void want() { wanted_.store(true); }
  // The background lets go as soon as it sees this.
  bool wanted() const { return wanted_.load(); }

  // Background: waits for the turn. False: closed, and the turn is the background's for good.
  bool take_background() {
    MutexLock lock(mutex_);
    while (held_ || !(nudged_ || closed_)) {
      const bool woken = changed_.wait_until(mutex_, std::chrono::steady_clock::now() + kGrace);
      if (!woken && !held_ && std::chrono::steady_clock::now() - released_ >= kGrace) break;
    }
    held_ = true;
    nudged_ = false;
    wanted_.store(false);
    return !closed_;
  }
  // `work_left`: entries are under way that the background should look after.
  void release(bool work_left) {
    MutexLock lock(mutex_);
    held_ = false;
    released_ = std::chrono::steady_clock::now();
    nudged_ = nudged_ || work_left;
    if (nudged_ || closed_) changed_.notify_one();
  }
  // There is work that no foreground waits for.
  void nudge() {
    MutexLock lock(mutex_);
    if (held_) return;  // the holder looks at the queue; ring its waiter
    nudged_ = true;
    changed_.notify_one();
  }
  // No foreground gets the turn any more; the background gets it next.
  void close() {
    MutexLock lock(mutex_);
    closed_ = true;
    wanted_.store(false);
    changed_.notify_one();
  }

 private:
  // Long enough for a loop of blocking calls, short enough for peers that need this rank's answer.
  static constexpr auto kGrace = std::chrono::milliseconds(2);

  Mutex mutex_;
  Condition changed_;
  bool held_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool nudged_ HVDLITE_GUARDED_BY(mutex_) = true;  // the background starts with the turn
  bool closed_ HVDLITE_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point released_ HVDLITE_GUARDED_BY(mutex_);
  std::atomic<bool> wanted_{false};
};

}  // namespace hvdlite
