#include "negotiation/step_clock.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace hvdlite {
namespace {

constexpr std::size_t kMostNames = 4096;  // in a step; without repetitions there are no steps

using Arrivals = std::vector<Arrival>;

std::size_t latest(const Arrivals& ranks) {
  const auto earlier = [](const Arrival& a, const Arrival& b) { return a.last < b.last; };
  return static_cast<std::size_t>(std::max_element(ranks.begin(), ranks.end(), earlier) -
                                  ranks.begin());
}

// By how much `rank` is later than the median of the others.
StepClock::Duration lag(const Arrivals& ranks, std::size_t rank, StepClock::TimePoint Arrival::* at,
                        std::vector<StepClock::TimePoint>& others) {
  others.clear();
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (other != rank) others.push_back(ranks[other].*at);
  }
  const auto middle = others.begin() + static_cast<std::ptrdiff_t>((others.size() - 1) / 2);
  std::nth_element(others.begin(), middle, others.end());
  return ranks[rank].*at - *middle;
}

// Ranks that have joined wait since `since`.
void fill(Arrivals& ranks, StepClock::TimePoint since) {
  for (Arrival& rank : ranks) {
    if (!rank.came()) rank = {since, since};
  }
}

StepClock::TimePoint earliest(const Arrivals& ranks) {
  StepClock::TimePoint first = StepClock::TimePoint::max();
  for (const Arrival& rank : ranks) {
    if (rank.came()) first = std::min(first, rank.first);
  }
  return first;
}

}  // namespace

double StepClock::Report::seconds() const {
  return std::chrono::duration<double>(time).count() / static_cast<double>(ranks.size());
}

StepClock::StepClock(int size, double lateness_interval)
    : size_(static_cast<std::size_t>(size)), lateness_(size, lateness_interval) {
  step_.ranks.resize(size_);
  report_.ranks.resize(size_);
}

void StepClock::arrived(const std::string& name, std::span<const Arrival> arrivals, bool counted) {
  const std::size_t hash = std::hash<std::string>()(name);
  const bool begins = names_.contains(hash);
  if (begins) {
    close();
  } else if (names_.size() == kMostNames) {
    forget();
  }
  names_.insert(hash);
  for (std::size_t rank = 0; rank < size_; ++rank) step_.ranks[rank].include(arrivals[rank]);
  if (counted) lateness_.arrived(arrivals, begins);
}

void StepClock::ended(TimePoint time) { step_.end = std::max(step_.end, time); }

void StepClock::close() {
  fill(step_.ranks, before_ ? before_->end : earliest(step_.ranks));
  if (before_) add(*before_, step_);
  step_.end = std::max(step_.end, step_.ranks[latest(step_.ranks)].last);
  before_ = std::exchange(step_, {});
  step_.ranks.resize(size_);
  names_.clear();
}

void StepClock::forget() {
  before_.reset();
  step_ = {};
  step_.ranks.resize(size_);
  names_.clear();
  lateness_.forget();
}

void StepClock::add(const Step& step, const Step& next) {
  const std::size_t last = latest(step.ranks);
  const TimePoint all_there = step.ranks[last].last;
  MutexLock lock(mutex_);
  ++report_.steps;
  for (std::size_t i = 0; i < size_; ++i) {
    const Arrival& own = step.ranks[i];
    Rank& sums = report_.ranks[i];
    sums.backward += own.last - own.first;
    sums.waiting += all_there - own.last;
    sums.communicating += step.end - all_there;
    sums.between += next.ranks[i].first - step.end;
    report_.time += next.ranks[i].first - own.first;
  }
  if (size_ == 1) return;
  const Duration late = std::max(lag(step.ranks, last, &Arrival::last, sorted_), Duration());
  const Duration at_first = lag(step.ranks, last, &Arrival::first, sorted_);
  const Duration in_between = std::clamp(at_first, Duration(), late);
  Rank& sums = report_.ranks[last];
  ++sums.last;
  sums.late_between += in_between;
  sums.late_backward += late - in_between;
}

StepClock::Report StepClock::report() const {
  MutexLock lock(mutex_);
  return report_;
}

}  // namespace hvdlite
