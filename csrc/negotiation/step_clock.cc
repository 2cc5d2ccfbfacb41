#include "negotiation/step_clock.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/text.h"

namespace hvdlite {
namespace {

// A rank stands out where it is the last in so many of the steps, and so late.
constexpr std::uint64_t kFewestSteps = 10;
constexpr double kShareOfSteps = 0.6;
constexpr double kShareOfTime = 0.1;
constexpr double kLeastSeconds = 1e-3;

std::string percent(double share) { return text_of_fixed(100 * share, 0) + " %"; }

std::string milliseconds(double seconds) { return text_of_fixed(1000 * seconds, 1) + " ms"; }

constexpr std::size_t kMostNames = 4096;  // in a step; without repetitions there are no steps

using TimePoint = StepClock::TimePoint;
using Arrivals = std::vector<Arrival>;

std::size_t latest(const Arrivals& ranks) {
  const auto earlier = [](const Arrival& a, const Arrival& b) { return a.last < b.last; };
  return static_cast<std::size_t>(std::max_element(ranks.begin(), ranks.end(), earlier) -
                                  ranks.begin());
}

// Returns by how much `rank` is later than the median of the others.
template <TimePoint Arrival::* at>
StepClock::Duration lag(const Arrivals& ranks, std::size_t rank, std::vector<TimePoint>& others) {
  others.clear();
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (other != rank) others.push_back(ranks[other].*at);
  }
  const auto middle = others.begin() + static_cast<std::ptrdiff_t>((others.size() - 1) / 2);
  std::nth_element(others.begin(), middle, others.end());
  return ranks[rank].*at - *middle;
}

TimePoint earliest(const Arrivals& ranks) {
  TimePoint first = TimePoint::max();
  for (const Arrival& rank : ranks) {
    if (rank.came()) first = std::min(first, rank.first);
  }
  return first;
}

void add_phases(StepClock::Rank& sums, const StepClock::Rank& more) {
  sums.backward += more.backward;
  sums.waiting += more.waiting;
  sums.communicating += more.communicating;
  sums.between += more.between;
  sums.held_up += more.held_up;
}

double seconds_of(StepClock::Duration time) { return std::chrono::duration<double>(time).count(); }

StepClock::Duration late(const StepClock::Rank& rank) {
  return rank.late_between + rank.late_backward;
}

}  // namespace

double StepClock::Report::seconds() const {
  return seconds_of(time) / static_cast<double>(ranks.size());
}

StepClock::StepClock(int size, double line_interval)
    : size_(static_cast<std::size_t>(size)), line_interval_(line_interval) {
  burst_.ranks.resize(size_);
  step_.ranks.resize(size_);
  window_.ranks.resize(size_);
  report_.ranks.resize(size_);
}

void StepClock::arrived(const std::string& name, std::span<const Arrival> arrivals, bool counted) {
  const std::size_t hash = std::hash<std::string>()(name);
  const bool begins_step = names_.contains(hash);
  if (!begins_step && names_.size() == kMostNames) {
    begin_anew();
  } else if (begins_step || (!names_.empty() && arrivals[0].after_wait)) {
    close(begins_step);
  }
  names_.insert(hash);
  for (std::size_t rank = 0; rank < size_; ++rank) burst_.ranks[rank].include(arrivals[rank]);
  burst_.counted = burst_.counted && counted;
}

void StepClock::ended(TimePoint time) { burst_.end = std::max(burst_.end, time); }

void StepClock::close(bool begins_step) {
  const TimePoint since = before_ ? before_->end : earliest(burst_.ranks);
  for (std::size_t i = 0; i < size_; ++i) {
    Arrival& rank = burst_.ranks[i];
    if (!rank.came()) rank = {since, since, /*after_wait=*/false};  // it has joined
    if (!before_) continue;
    // What was submitted in an earlier burst may be answered in this one.
    rank.first = std::max(rank.first, before_->ranks[i].last);
    rank.last = std::max(rank.last, rank.first);
  }
  burst_.end = std::max(burst_.end, burst_.ranks[latest(burst_.ranks)].last);
  if (before_) add(*before_, burst_);
  before_ = std::exchange(burst_, {});
  burst_.ranks.resize(size_);
  burst_.begins_step = begins_step;
  if (begins_step) names_.clear();
}

void StepClock::begin_anew() {
  before_.reset();
  burst_ = {};
  burst_.ranks.resize(size_);
  step_ = {};
  step_.ranks.resize(size_);
  names_.clear();
  step_counts_ = true;
}

void StepClock::add(const Burst& burst, const Burst& next) {
  const TimePoint all_there = burst.ranks[latest(burst.ranks)].last;
  for (std::size_t i = 0; i < size_; ++i) {
    const Arrival& own = burst.ranks[i];
    const Duration gap = next.ranks[i].first - burst.end;
    Rank& sums = step_.ranks[i];
    sums.backward += own.last - own.first;
    sums.waiting += all_there - own.last;
    sums.communicating += burst.end - all_there;
    (next.begins_step ? sums.between : sums.backward) += gap;
    step_.time += next.ranks[i].first - own.first;
  }
  step_counts_ = step_counts_ && burst.counted;
  if (size_ > 1) add_lateness(burst);
  if (next.begins_step) end_step();
}

void StepClock::add_lateness(const Burst& burst) {
  const std::size_t last = latest(burst.ranks);
  const Duration late = std::max(lag<&Arrival::last>(burst.ranks, last, others_), Duration());
  const TimePoint second = *std::max_element(others_.begin(), others_.end());
  step_.ranks[last].held_up += burst.ranks[last].last - second;
  const Duration at_first = lag<&Arrival::first>(burst.ranks, last, others_);
  const Duration in_between =
      burst.begins_step ? std::clamp(at_first, Duration(), late) : Duration();
  step_.ranks[last].late_between += in_between;
  step_.ranks[last].late_backward += late - in_between;
}

void StepClock::end_step() {
  {
    MutexLock lock(mutex_);
    add_step_to(report_);
  }
  if (step_counts_ && line_interval_ > 0) {
    add_step_to(window_);
    if (window_.seconds() >= line_interval_) {
      line_ = describe(window_);
      window_ = {};
      window_.ranks.resize(size_);
    }
  }
  step_counts_ = true;
  step_.time = Duration();
  std::fill(step_.ranks.begin(), step_.ranks.end(), Rank());
}

void StepClock::add_step_to(Report& sums) const {
  ++sums.steps;
  sums.time += step_.time;
  for (std::size_t i = 0; i < size_; ++i) add_phases(sums.ranks[i], step_.ranks[i]);
  if (size_ == 1) return;
  const auto less = [](const Rank& a, const Rank& b) { return late(a) < late(b); };
  const auto last = std::max_element(step_.ranks.begin(), step_.ranks.end(), less);
  Rank& rank = sums.ranks[static_cast<std::size_t>(last - step_.ranks.begin())];
  ++rank.last;
  rank.late_between += last->late_between;
  rank.late_backward += last->late_backward;
}

std::optional<Notice> StepClock::describe(const Report& window) const {
  const auto fewer = [](const Rank& a, const Rank& b) { return a.last < b.last; };
  const auto last = std::max_element(window.ranks.begin(), window.ranks.end(), fewer);
  const auto steps = static_cast<double>(window.steps);
  const double share_of_steps = static_cast<double>(last->last) / steps;
  const double seconds = seconds_of(late(*last)) / steps;
  const double share_of_time = seconds * steps / window.seconds();
  if (window.steps < kFewestSteps || share_of_steps < kShareOfSteps || seconds < kLeastSeconds ||
      share_of_time < kShareOfTime) {
    return std::nullopt;
  }
  const double before = seconds_of(last->late_between) / steps;
  const auto rank = static_cast<int>(last - window.ranks.begin());
  std::string text = "rank " + std::to_string(rank) + " was last in " + percent(share_of_steps) +
                     " of " + std::to_string(window.steps) + " steps, " + milliseconds(seconds) +
                     " (" + percent(share_of_time) + " of a step) after the median, " +
                     milliseconds(before) + " of it before backward: look " +
                     (before >= seconds / 2 ? "at its input, its forward pass and its links"
                                            : "at its batches and at what else runs on its host");
  return Notice{"late", rank, "", std::move(text)};
}

std::optional<Notice> StepClock::take_line() { return std::exchange(line_, std::nullopt); }

StepClock::Report StepClock::report() const {
  MutexLock lock(mutex_);
  return report_;
}

}  // namespace hvdlite
