#include "engine/stall_monitor.h"

#include <algorithm>
#include <cstdio>

#include "engine/entry.h"

namespace hvdlite {
namespace {

constexpr std::size_t kNamesShown = 8;

double seconds_between(Coordinator::TimePoint from, Coordinator::TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

std::string text_of_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

}  // namespace

std::vector<std::string> StallMonitor::check(Coordinator::TimePoint now) {
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
    const auto limit = std::chrono::duration<double>(shutdown_);
    coordinator_.fail_stalled(
        now - std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit), fatal);
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
