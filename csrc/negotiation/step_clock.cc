#include "negotiation/step_clock.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/deadline.h"
#include "base/text.h"

namespace hvdlite {
namespace {

using TimePoint = Lateness::TimePoint;

// A rank stands out where it is the last in so many of the steps, and so late.
constexpr std::uint64_t kFewestSteps = 10;
constexpr double kShareOfSteps = 0.6;
constexpr double kShareOfTime = 0.1;
constexpr double kLeastSeconds = 1e-3;

std::string percent(double share) { return text_of_fixed(100 * share, 0) + " %"; }

std::string milliseconds(double seconds) { return text_of_fixed(1000 * seconds, 1) + " ms"; }

template <TimePoint Arrival::* at>
TimePoint median(std::span<const Arrival> arrivals, std::vector<TimePoint>& sorted) {
  sorted.clear();
  for (const Arrival& arrival : arrivals) sorted.push_back(arrival.*at);
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::size_t last_of(const std::vector<Lateness::Rank>& ranks, double Lateness::Rank::* value) {
  const auto less = [value](const Lateness::Rank& a, const Lateness::Rank& b) {
    return a.*value < b.*value;
  };
  return static_cast<std::size_t>(std::max_element(ranks.begin(), ranks.end(), less) -
                                  ranks.begin());
}

}  // namespace

Lateness::Lateness(int size, double interval)
    : interval_(interval), step_(static_cast<std::size_t>(size)) {
  window_.ranks.resize(step_.size());
}

void Lateness::arrived(std::span<const Arrival> arrivals, bool begins) {
  const TimePoint first_median = median<&Arrival::first>(arrivals, sorted_);
  const TimePoint last_median = median<&Arrival::last>(arrivals, sorted_);
  if (begins && begin_) end_step(first_median);
  const bool first = !begin_;
  if (first) begin_ = first_median;
  for (std::size_t rank = 0; rank < step_.size(); ++rank) {
    const double late = seconds_between(last_median, arrivals[rank].last);
    if (first) step_[rank].before_backward = seconds_between(first_median, arrivals[rank].first);
    step_[rank].late = first ? late : std::max(step_[rank].late, late);
  }
}

void Lateness::end_step(TimePoint next) {
  const std::size_t last = last_of(step_, &Rank::late);
  const double seconds = seconds_between(*begin_, next);
  if (window_.steps == 0) window_.begin = *begin_;
  ++window_.steps;
  window_.seconds += seconds;
  window_.ranks[last].last += 1;
  for (std::size_t rank = 0; rank < step_.size(); ++rank) {
    window_.ranks[rank].late += step_[rank].late;
    window_.ranks[rank].before_backward += step_[rank].before_backward;
  }
  if (interval_ > 0 && seconds_between(window_.begin, next) >= interval_) {
    line_ = describe(window_);
    window_ = {};
    window_.ranks.resize(step_.size());
  }
  begin_.reset();
}

std::optional<Lateness::Line> Lateness::describe(const Window& window) const {
  const auto steps = static_cast<double>(window.steps);
  const std::size_t rank = last_of(window.ranks, &Rank::last);
  const Rank& sums = window.ranks[rank];
  const double late = sums.late / steps;
  const double share = sums.late / window.seconds;
  if (window.steps < kFewestSteps || sums.last < kShareOfSteps * steps || late < kLeastSeconds ||
      share < kShareOfTime) {
    return std::nullopt;
  }
  const double before = std::clamp(sums.before_backward / steps, 0.0, late);
  std::string text = "rank " + std::to_string(rank) + " was last in " + percent(sums.last / steps) +
                     " of " + std::to_string(window.steps) + " steps, " + milliseconds(late) +
                     " (" + percent(share) + " of a step) after the median, " +
                     milliseconds(before) + " of it before backward: look " +
                     (before >= late / 2 ? "at its input, its forward pass and its links"
                                         : "at its batches and at what else runs on its host");
  return Line{static_cast<int>(rank), std::move(text)};
}

std::optional<Lateness::Line> Lateness::take_line() { return std::exchange(line_, std::nullopt); }
namespace {

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
}

StepClock::Duration late(const StepClock::Rank& rank) {
  return rank.late_between + rank.late_backward;
}

}  // namespace

double StepClock::Report::seconds() const {
  return std::chrono::duration<double>(time).count() / static_cast<double>(ranks.size());
}

StepClock::StepClock(int size, double lateness_interval)
    : size_(static_cast<std::size_t>(size)), lateness_(size, lateness_interval) {
  burst_.ranks.resize(size_);
  step_.ranks.resize(size_);
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
  if (counted) lateness_.arrived(arrivals, begins_step);
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
  lateness_.forget();
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
  if (size_ > 1) add_lateness(burst);
  if (next.begins_step) end_step();
}

void StepClock::add_lateness(const Burst& burst) {
  const std::size_t last = latest(burst.ranks);
  const Duration late = std::max(lag<&Arrival::last>(burst.ranks, last, others_), Duration());
  const Duration at_first = lag<&Arrival::first>(burst.ranks, last, others_);
  const Duration in_between =
      burst.begins_step ? std::clamp(at_first, Duration(), late) : Duration();
  step_.ranks[last].late_between += in_between;
  step_.ranks[last].late_backward += late - in_between;
}

void StepClock::end_step() {
  const auto less = [](const Rank& a, const Rank& b) { return late(a) < late(b); };
  const auto last = std::max_element(step_.ranks.begin(), step_.ranks.end(), less);
  MutexLock lock(mutex_);
  ++report_.steps;
  report_.time += step_.time;
  for (std::size_t i = 0; i < size_; ++i) add_phases(report_.ranks[i], step_.ranks[i]);
  if (size_ > 1) {
    Rank& sums = report_.ranks[static_cast<std::size_t>(last - step_.ranks.begin())];
    ++sums.last;
    sums.late_between += last->late_between;
    sums.late_backward += last->late_backward;
  }
  step_.time = Duration();
  std::fill(step_.ranks.begin(), step_.ranks.end(), Rank());
}

StepClock::Report StepClock::report() const {
  MutexLock lock(mutex_);
  return report_;
}

}  // namespace hvdlite
