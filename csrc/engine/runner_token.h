// Says which thread runs the engine now: its own (the background), or a thread that blocks on a
// handle and does the work itself (a foreground), which saves a small blocking call two thread
// hand-offs.
//
// Exactly one of them holds the token; all that belongs to "the runner" is guarded by it. The
// background takes a free token when it is woken (there is work that nobody waits for), or when no
// foreground has come back for a while. The engine owns the token; any thread may call it, and its
// mutex is never held while another one is taken.
#pragma once

#include <atomic>
#include <chrono>

#include "base/mutex.h"

namespace hvdlite {

class RunnerToken {
 public:
  // Foreground: takes the token if it is free.
  bool try_take() {
    MutexLock lock(mutex_);
    if (held_ || closed_) return false;
    held_ = true;
    requested_.store(false);
    return true;
  }
  // Foreground: the engine's thread probably holds the token while asleep, so this asks for it.
  // Ring that thread's waiter afterwards.
  void request() { requested_.store(true); }
  // The background releases the token as soon as it sees this.
  bool requested() const { return requested_.load(); }

  // Background: waits for the token. False: the token is closed, and the background's for good.
  bool take_background() {
    MutexLock lock(mutex_);
    while (held_ || !(woken_ || closed_)) {
      const bool notified = changed_.wait_until(mutex_, std::chrono::steady_clock::now() + kGrace);
      if (!notified && !held_ && std::chrono::steady_clock::now() - released_ >= kGrace) break;
    }
    held_ = true;
    woken_ = false;
    requested_.store(false);
    return !closed_;
  }
  // `work_left`: entries are under way that the background should look after.
  void release(bool work_left) {
    MutexLock lock(mutex_);
    held_ = false;
    released_ = std::chrono::steady_clock::now();
    woken_ = woken_ || work_left;
    if (woken_ || closed_) changed_.notify_one();
  }
  // Wakes the background where the token is free: there is work that no foreground waits for.
  void wake() {
    MutexLock lock(mutex_);
    if (held_) return;  // the holder looks at the queue; ring its waiter
    woken_ = true;
    changed_.notify_one();
  }
  // No foreground gets the token any more; the background gets it next.
  void close() {
    MutexLock lock(mutex_);
    closed_ = true;
    requested_.store(false);
    changed_.notify_one();
  }

 private:
  // Long enough for a loop of blocking calls, short enough for peers that need this rank's answer.
  static constexpr auto kGrace = std::chrono::milliseconds(2);

  std::atomic<bool> requested_{false};

  Mutex mutex_;  // guards what follows
  Condition changed_;
  bool held_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool woken_ HVDLITE_GUARDED_BY(mutex_) = true;  // the background starts with the token
  bool closed_ HVDLITE_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point released_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
