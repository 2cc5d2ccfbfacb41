#include "engine/runner_token.h"

namespace hvdlite {

bool Turn::try_take(bool soon) {
  if (held || closed) return false;
  held = true;
  burst = stands_by && soon;
  return true;
}

bool Turn::try_take_background(bool soon) {
  if (held || (!woken && !closed && soon)) return false;
  held = true;
  woken = false;
  return true;
}

void Turn::stand_by() {
  held = false;
  stands_by = true;
  sleeper_woken = false;
}

bool Turn::resume() {
  stands_by = false;
  if (held || (sleeper_woken && !woken && !closed)) return false;
  held = true;
  woken = false;
  return true;
}

bool Turn::release(bool work_left, bool armed) {
  held = false;
  // What made the background leave its sleep meanwhile may have come after the holder's last look.
  woken = woken || work_left || (armed && !stands_by);
  if (!stands_by || (armed && !woken && !closed)) return false;
  sleeper_woken = true;
  return true;
}

bool Turn::wake() {
  if (held) return false;  // the holder looks at the queue
  woken = true;
  return true;
}

void RunnerToken::taken() {
  ++stints_;
  requested_.store(false);
}

bool RunnerToken::try_take(Clock::time_point now) {
  MutexLock lock(mutex_);
  if (!turn_.try_take(soon(now))) return false;
  taken();
  return true;
}

bool RunnerToken::may_stand_by() {
  MutexLock lock(mutex_);
  return turn_.may_stand_by();
}

bool RunnerToken::take_background() {
  MutexLock lock(mutex_);
  std::uint64_t seen = stints_ - 1;
  while (!turn_.try_take_background(soon(Clock::now()))) {
    if (turn_.held && stints_ == seen) {  // for the whole grace: its holder may wait for long
      turn_.awaits_release = true;
      changed_.wait(mutex_);
      turn_.awaits_release = false;
      continue;
    }
    seen = stints_;
    changed_.wait_until(mutex_, Clock::now() + kGrace);
  }
  taken();
  return !turn_.closed;
}

void RunnerToken::stand_by() {
  MutexLock lock(mutex_);
  turn_.stand_by();
}

bool RunnerToken::resume() {
  MutexLock lock(mutex_);
  if (!turn_.resume()) return false;
  taken();
  return true;
}

bool RunnerToken::release(bool work_left, bool armed) {
  MutexLock lock(mutex_);
  released_ = Clock::now();
  const bool wakes_sleeper = turn_.release(work_left, armed);
  if (turn_.notifies()) changed_.notify_one();
  return wakes_sleeper;
}

void RunnerToken::wake() {
  MutexLock lock(mutex_);
  if (turn_.wake()) changed_.notify_one();
}

void RunnerToken::close() {
  MutexLock lock(mutex_);
  turn_.closed = true;
  requested_.store(false);
  changed_.notify_one();
}

}  // namespace hvdlite
