// Whether rank 0 still answers, as a rank sees it that waits for an answer. An answer may take as
// long as other ranks do; so who has heard nothing for a while asks rank 0's engine for a sign of
// life, which needs nothing of rank 0's program.
//
// A pure state machine without a clock. The negotiator of a rank other than 0 owns it, and only the
// runner calls it.
#pragma once

#include <chrono>

#include "base/config.h"
#include "base/deadline.h"
#include "base/status.h"

namespace hvdlite {

class AnswerWatch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  enum class Act { kNothing, kAsk, kWarn, kFail };

  explicit AnswerWatch(const Config& config);

  // From here on something waits for an answer, and nothing did.
  void begin(TimePoint now);
  // Rank 0 has sent something.
  void heard() { heard_ = true; }
  // When look() has something to do.
  TimePoint due() const { return due_; }
  // What is to be done now: ask rank 0; warn, which comes again whenever it has been silent for
  // twice as long; or give up.
  Act look(TimePoint now);
  // So long it has been silent.
  Patience silent(TimePoint now) const { return now - since_; }
  StatusCode given_up() const { return by_timeout_ ? StatusCode::kTimeout : StatusCode::kStalled; }

 private:
  Patience warning_;  // kForever: none
  // After so many seconds a silent rank is given up: collective_timeout, where this one is shorter,
  // or else stall_shutdown. 0: never.
  double limit_ = 0;
  bool by_timeout_ = false;
  Patience interval_ = kForever;
  bool heard_ = false;
  bool asked_ = false;
  TimePoint since_;
  Patience warns_at_{0};  // The silence may last so long without a warning.
  TimePoint due_ = TimePoint::max();
};

}  // namespace hvdlite
