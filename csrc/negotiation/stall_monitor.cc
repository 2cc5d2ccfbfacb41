#include "negotiation/stall_monitor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "base/text.h"
#include "negotiation/deadlock.h"

namespace hvdlite {
namespace {

constexpr std::size_t kNamesShown = 8;

std::string text_of_seconds(double seconds) { return text_of_fixed(seconds, 1) + " s"; }

int common(const std::vector<int>& a, const std::vector<int>& b) {
  const auto found = std::find_first_of(a.begin(), a.end(), b.begin(), b.end());
  return found != a.end() ? *found : -1;
}

// One of `ranks` that waits for one of `awaited`.
std::optional<Wait> find_wait(Coordinator& coordinator, const std::vector<int>& ranks,
                              const std::vector<int>& awaited) {
  for (const auto& [id, book] : coordinator.books()) {
    for (const auto& [key, tally] : book.tallies) {
      const int rank = common(ranks, Coordinator::submitters(book, tally));
      const int other = common(awaited, coordinator.missing_ranks(book, tally));
      if (rank >= 0 && other >= 0) return Wait{rank, other, &tally.request};
    }
  }
  return std::nullopt;
}

}  // namespace

void StallMonitor::fail_circular_changes(Coordinator::TimePoint now) {
  std::vector<std::pair<std::string, Status>> failures;
  const Coordinator::Book& book = coordinator_.books().at(0);
  for (const auto& [key, tally] : book.tallies) {
    if (!tally.request.changes_process_sets()) continue;
    if (seconds_between(tally.since, now) < warning_) continue;
    // A change blocks the rank that makes it, so this can never end.
    const auto wait = find_wait(coordinator_, coordinator_.missing_ranks(book, tally),
                                Coordinator::submitters(book, tally));
    if (!wait) continue;
    failures.emplace_back(tally.request.name,
                          deadlock_error({{wait->awaited, wait->rank, &tally.request}, *wait}));
  }
  for (const auto& [name, error] : failures) coordinator_.fail_change(name, error);
}

std::vector<StallMonitor::Warning> StallMonitor::check(Coordinator::TimePoint now) {
  if (warning_ > 0) fail_circular_changes(now);
  std::vector<Warning> warnings;
  std::size_t hidden = 0;
  std::string fatal;
  int suspect = -1;
  for (auto& [id, book] : coordinator_.books()) {
    for (auto& [key, tally] : book.tallies) {
      const Coordinator::TimePoint since = coordinator_.idle_since(book, tally);
      if (shutdown_ > 0 && seconds_between(since, now) >= shutdown_ && fatal.empty()) {
        fatal = describe_stall(book, tally, now) + "; stall_shutdown is " +
                text_of_seconds(shutdown_) +
                ": set HVDLITE_STALL_SHUTDOWN to wait longer, or to 0 to wait for ever";
        suspect = coordinator_.missing_ranks(book, tally).front();
      }
      const double silence = std::max(warning_, seconds_between(since, tally.warned));
      const auto last = std::max(tally.warned, since);
      if (warning_ <= 0 || seconds_between(last, now) < silence) continue;
      tally.warned = now;
      if (warnings.size() < kNamesShown) {
        const std::vector<int> missing = coordinator_.missing_ranks(book, tally);
        warnings.push_back({tally.request.name, missing.empty() ? -1 : missing.front(),
                            describe_stall(book, tally, now)});
      } else {
        ++hidden;
      }
    }
  }
  if (hidden > 0) {
    warnings.push_back({"", -1, "... and " + std::to_string(hidden) + " more tensors wait"});
  }
  if (!fatal.empty()) {
    coordinator_.fail_stalled(now - patience_of(shutdown_), fatal, suspect);
  }
  return warnings;
}

std::chrono::milliseconds StallMonitor::interval() const {
  double shortest = 1e6;
  if (warning_ > 0) shortest = std::min(shortest, warning_);
  if (shutdown_ > 0) shortest = std::min(shortest, shutdown_);
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(std::clamp(shortest / 4 * 1000, 10.0, 1000.0)));
}

std::string StallMonitor::describe_last(int rank, Coordinator::TimePoint now) const {
  const Coordinator::Activity& last = coordinator_.activity(rank);
  if (last.name.empty()) return "has submitted nothing yet";
  return "last submitted '" + last.name + "' " + text_of_seconds(seconds_between(last.when, now)) +
         " ago";
}

std::string StallMonitor::describe_stall(const Coordinator::Book& book,
                                         const Coordinator::Tally& tally,
                                         Coordinator::TimePoint now) const {
  std::string text = describe(tally.request) + " has waited " +
                     text_of_seconds(seconds_between(tally.since, now)) + " for ";
  std::string separator;
  for (const int rank : coordinator_.missing_ranks(book, tally)) {
    text += separator + "rank " + std::to_string(rank) + " (" + describe_last(rank, now) + ")";
    separator = ", ";
  }
  return text + describe_mutual_wait(book, tally);
}

std::string StallMonitor::describe_mutual_wait(const Coordinator::Book& book,
                                               const Coordinator::Tally& tally) const {
  const auto wait = find_wait(coordinator_, coordinator_.missing_ranks(book, tally),
                              Coordinator::submitters(book, tally));
  if (!wait) return "";
  const bool both_send = tally.request.is_send() && wait->request->is_send();
  return "; " + describe_wait(*wait) + ": " +
         (both_send ? advice_for({*wait}) : std::string(kJoinAtTheEnd));
}

}  // namespace hvdlite
