#include "engine/stall_monitor.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/text.h"
#include "engine/entry.h"

namespace hvdlite {
namespace {

constexpr std::size_t kNamesShown = 8;

double seconds_between(Coordinator::TimePoint from, Coordinator::TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

std::string text_of_seconds(double seconds) { return text_of_fixed(seconds, 1) + " s"; }

// Ranks of the world that take part in `tally`, by whether they have submitted it.
std::vector<int> ranks_of(const Coordinator::Book& book, const Coordinator::Tally& tally,
                          bool submitted) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
    if (tally.submitted[i] == submitted) ranks.push_back(book.group.ranks[i]);
  }
  return ranks;
}

int common(const std::vector<int>& a, const std::vector<int>& b) {
  const auto found = std::find_first_of(a.begin(), a.end(), b.begin(), b.end());
  return found != a.end() ? *found : -1;
}

// A change blocks the rank that makes it: why it can never end if a rank that it waits for waits
// for one that makes it.
std::optional<std::string> describe_circle(const std::map<std::uint32_t, Coordinator::Book>& books,
                                           const Coordinator::Tally& change) {
  const std::vector<int> makers = ranks_of(books.at(0), change, true);
  const std::vector<int> others = ranks_of(books.at(0), change, false);
  for (const auto& [id, book] : books) {
    for (const auto& [name, tally] : book.tallies) {
      const int maker = common(makers, ranks_of(book, tally, false));
      const int other = common(others, ranks_of(book, tally, true));
      if (maker < 0 || other < 0) continue;
      return std::string(name_of(change.request.kind)) + ": rank " + std::to_string(maker) +
             " waits in it for rank " + std::to_string(other) + ", which waits for rank " +
             std::to_string(maker) + " in " + std::string(name_of(tally.request.kind)) + " '" +
             name + "'; every rank changes process sets at the same point";
    }
  }
  return std::nullopt;
}

}  // namespace

void StallMonitor::fail_circular_changes(Coordinator::TimePoint now) {
  std::vector<std::pair<std::string, Status>> failures;
  for (const auto& [name, tally] : coordinator_.books().at(0).tallies) {
    if (!tally.request.changes_process_sets()) continue;
    if (seconds_between(tally.since, now) < warning_) continue;
    if (auto text = describe_circle(coordinator_.books(), tally)) {
      failures.emplace_back(name, Status(StatusCode::kMismatch, std::move(*text)));
    }
  }
  for (const auto& [name, error] : failures) coordinator_.fail_change(name, error);
}

std::vector<std::string> StallMonitor::check(Coordinator::TimePoint now) {
  if (warning_ > 0) fail_circular_changes(now);
  std::vector<std::string> warnings;
  std::size_t hidden = 0;
  std::string fatal;
  for (auto& [id, book] : coordinator_.books()) {
    for (auto& [name, tally] : book.tallies) {
      const Coordinator::TimePoint since = coordinator_.idle_since(book, tally);
      if (shutdown_ > 0 && seconds_between(since, now) >= shutdown_ && fatal.empty()) {
        fatal =
            describe_stall(book, tally, now) + "; stall_shutdown is " + text_of_seconds(shutdown_);
      }
      const auto warned = std::max(tally.warned, since);
      if (warning_ <= 0 || seconds_between(warned, now) < warning_) continue;
      tally.warned = now;
      if (warnings.size() < kNamesShown) {
        warnings.push_back(describe_stall(book, tally, now));
      } else {
        ++hidden;
      }
    }
  }
  if (hidden > 0) warnings.push_back("... and " + std::to_string(hidden) + " more tensors wait");
  if (!fatal.empty()) {
    coordinator_.fail_stalled(now - patience_of(shutdown_), fatal);
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

std::string StallMonitor::describe_stall(const Coordinator::Book& book,
                                         const Coordinator::Tally& tally,
                                         Coordinator::TimePoint now) const {
  std::string text = describe(tally.request) + " has waited " +
                     text_of_seconds(seconds_between(tally.since, now)) + " for ";
  std::string separator;
  for (std::size_t i = 0; i < book.group.ranks.size(); ++i) {
    if (tally.submitted[i]) continue;
    const int rank = book.group.ranks[i];
    const Coordinator::Activity& last = coordinator_.activity(rank);
    text += separator + "rank " + std::to_string(rank);
    text += last.name.empty() ? " (has submitted nothing yet)"
                              : " (last submitted '" + last.name + "' " +
                                    text_of_seconds(seconds_between(last.when, now)) + " ago)";
    separator = ", ";
  }
  return text;
}

}  // namespace hvdlite
