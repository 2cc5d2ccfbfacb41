// A point in monotonic time after which a wait gives up. Wall clocks are never used. Plain values:
// any thread.
#pragma once

#include <chrono>

namespace hvdlite {

// How long a peer may make no progress before a wait for it gives up.
using Patience = std::chrono::nanoseconds;

inline constexpr Patience kForever = std::chrono::seconds(1'000'000'000);

// Turns any number of seconds, also infinity, into a delay. A negative number gives no delay.
inline Patience delay_of(double seconds) {
  if (seconds <= 0) return Patience::zero();
  if (!(seconds < 1e9)) return kForever;
  return std::chrono::duration_cast<Patience>(std::chrono::duration<double>(seconds));
}
// Turns the value of a knob that is a time into a patience. For all such knobs 0 means never.
inline Patience patience_of(double seconds) { return seconds == 0 ? kForever : delay_of(seconds); }

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A delay of some thirty years or more gives never().
  static Deadline after(std::chrono::nanoseconds delay) {
    return delay >= kForever ? never() : Deadline(Clock::now() + delay);
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  // The deadline has passed already if `seconds` is 0 or less.
  static Deadline after_seconds(double seconds) { return after(delay_of(seconds)); }
  // The deadline that a knob sets, see patience_of().
  static Deadline after_knob(double seconds) { return after(patience_of(seconds)); }
  // For idle sleeps only: work that others depend on always has a real deadline.
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool passed() const { return is_never() ? false : Clock::now() >= when_; }
  bool is_never() const { return when_ == Clock::time_point::max(); }
  // Milliseconds left, rounded up, at least 0; -1 for never (what epoll_wait takes).
  int remaining_ms() const {
    if (is_never()) return -1;
    const auto left = when_ - Clock::now();
    if (left <= Clock::duration::zero()) return 0;
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    return ms > 1'000'000 ? 1'000'000 : static_cast<int>(ms);
  }
  Clock::time_point when() const { return when_; }
  Deadline earlier(Deadline other) const { return other.when_ < when_ ? other : *this; }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

inline double seconds_between(std::chrono::steady_clock::time_point from,
                              std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace hvdlite
