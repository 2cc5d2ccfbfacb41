#include "negotiation/answer_watch.h"

#include <algorithm>

namespace hvdlite {
namespace {

constexpr Patience kShortest = std::chrono::milliseconds(10);
constexpr Patience kLongest = std::chrono::seconds(5);

}  // namespace

AnswerWatch::AnswerWatch(const Config& config) : warning_(patience_of(config.stall_warning)) {
  const Patience timeout = patience_of(config.collective_timeout);
  const Patience shutdown = patience_of(config.stall_shutdown);
  by_timeout_ = timeout <= shutdown;
  limit_ = by_timeout_ ? config.collective_timeout : config.stall_shutdown;
  const Patience first = std::min({warning_, timeout, shutdown});
  if (first < kForever) interval_ = std::clamp(first / 4, kShortest, kLongest);
}

void AnswerWatch::begin(TimePoint now) {
  heard_ = false;
  asked_ = false;
  since_ = now;
  warns_at_ = warning_;
  due_ = interval_ < kForever ? now + interval_ : TimePoint::max();
}

AnswerWatch::Act AnswerWatch::look(TimePoint now) {
  if (now < due_) return Act::kNothing;
  // This rank itself may have been stopped: then nothing is known of rank 0.
  const bool overslept = now - due_ > std::max(interval_, kLongest);
  if (heard_ || overslept) {
    begin(now);
    return Act::kNothing;
  }
  Act act = Act::kNothing;
  if (!asked_) {
    asked_ = true;
    act = Act::kAsk;
  } else if (silent(now) >= patience_of(limit_)) {
    return Act::kFail;
  } else if (silent(now) >= warns_at_) {
    warns_at_ = 2 * silent(now);
    act = Act::kWarn;
  }
  due_ = since_ + std::min(warns_at_, patience_of(limit_));
  return act;
}

}  // namespace hvdlite
