// Says which thread runs the engine now: its own (the background), or a thread that blocks on a
// handle and does the work itself (a foreground), which saves a small blocking call two thread
// hand-offs.
//
// At most one of them holds the token; all that belongs to "the runner" is guarded by it. A
// background without work *stands by*: it gives the token away and sleeps in the waiter, which it
// has armed before (transport/waiter.h). So a foreground takes the token without asking, and what
// wakes the background makes it take the token, or wake the holder where there is one.
//
// While the background stands by and the token is free, the waiter is armed, or the background has
// been woken. A foreground that gives the token back sees to that: it arms the waiter and looks
// once more, or it wakes the sleeper. It does so in a burst of calls, where wake-ups of peers would
// be for nothing: the background then waits here, for work that nobody waits for, or until no
// foreground has come back for a while.
//
// The engine owns the token; any thread may call it, and its mutex is never held while another one
// is taken.
#pragma once

#include <atomic>
#include <chrono>
#include <compare>
#include <cstdint>

#include "base/mutex.h"

namespace hvdlite {

// Who has the token, and what is to happen next: a plain value, without threads. `soon`, where a
// function asks for it: a foreground has given the token back within the grace.
struct Turn {
  bool held = false;
  bool woken = true;  // the background is to take it, with which it starts
  bool closed = false;
  bool stands_by = false;       // the background does
  bool sleeper_woken = false;   // since it stands by
  bool burst = false;           // the holder has come back soon
  bool awaits_release = false;  // the background does, however long that takes
  auto operator<=>(const Turn&) const = default;

  bool try_take(bool soon);             // foreground
  bool try_take_background(bool soon);  // background
  bool may_stand_by() const { return stands_by && !sleeper_woken && !burst && !woken && !closed; }
  void stand_by();                           // background, the holder
  bool resume();                             // background, which stands by
  bool release(bool work_left, bool armed);  // the holder; true: wake the sleeper
  bool wake();                               // true: notify the background
  bool notifies() const { return woken || closed || awaits_release; }  // at a release
};

class RunnerToken {
 public:
  using Clock = std::chrono::steady_clock;

  // Foreground: takes the token if it is free. Disarm the waiter then.
  bool try_take(Clock::time_point now);
  // Foreground: the background runs the engine now, so this asks for the token.
  void request() { requested_.store(true); }
  // The background releases the token as soon as it sees this.
  bool requested() const { return requested_.load(); }
  // The holder: whether the background stands by, and may go on with that when the token is free
  // again.
  bool may_stand_by();

  // Background: waits for the token. False: the token is closed, and the background's for good.
  bool take_background();
  // Background, before it sleeps with an armed waiter: gives the token away.
  void stand_by();
  // Background, after that sleep. False: the token is held, or the holder has woken it. The
  // caller then wakes the waiter, because it may have taken the event that was to wake the holder.
  bool resume();

  // `work_left`: entries are under way that the background should look after. `armed`: the holder
  // has armed the waiter for the background that stands by, and looked. True: wake
  // the sleeper.
  bool release(bool work_left, bool armed = false);
  // Wakes the background where the token is free: there is work that no foreground waits for. Wake
  // the waiter afterwards.
  void wake();
  // No foreground gets the token any more; the background gets it next. Wake the waiter
  // afterwards.
  void close();

 private:
  // Long enough for a loop of blocking calls, short enough for peers that need this rank's answer.
  static constexpr auto kGrace = std::chrono::milliseconds(2);

  bool soon(Clock::time_point now) const HVDLITE_REQUIRES(mutex_) {
    return now - released_ < kGrace;
  }
  void taken() HVDLITE_REQUIRES(mutex_);

  std::atomic<bool> requested_{false};

  Mutex mutex_;  // guards what follows
  Condition changed_;
  Turn turn_ HVDLITE_GUARDED_BY(mutex_);
  std::uint64_t stints_ HVDLITE_GUARDED_BY(mutex_) = 0;  // how often it was taken
  Clock::time_point released_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
