#include "negotiation/lateness.h"

#include <algorithm>
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

}  // namespace hvdlite
