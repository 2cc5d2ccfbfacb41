#include "negotiation/stall_monitor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "base/text.h"
#include "negotiation/coordinator.h"
#include "negotiation/deadlock_watch.h"

namespace hvdlite {

void Stalls::find(Coordinator& coordinator, Coordinator::TimePoint now) {
  using Waiting = std::pair<const PendingTable*, const PendingTensor*>;
  std::vector<Waiting> waiting;
  for (const auto& [id, table] : coordinator.tables()) {
    for (const auto& [key, pending] : table.tensors) {
      if (now - coordinator.idle_since(table, pending) >= kShortest)
        waiting.emplace_back(&table, &pending);
    }
  }
  const std::size_t count = std::min(waiting.size(), kMost);
  std::partial_sort(
      waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(count), waiting.end(),
      [](const Waiting& a, const Waiting& b) { return a.second->since < b.second->since; });
  std::vector<Stall> found;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [table, pending] = waiting[i];
    found.push_back({pending->request.name, pending->since,
                     Coordinator::submitters(*table, *pending),
                     coordinator.missing_ranks(*table, *pending)});
  }
  set(std::move(found));
}

void Stalls::set(std::vector<Stall> found) {
  if (empty_ && found.empty()) return;
  empty_ = found.empty();
  MutexLock lock(mutex_);
  stalls_ = std::move(found);
}

std::vector<Stall> Stalls::get() const {
  MutexLock lock(mutex_);
  return stalls_;
}
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
  for (const auto& [id, table] : coordinator.tables()) {
    for (const auto& [key, pending] : table.tensors) {
      const int rank = common(ranks, Coordinator::submitters(table, pending));
      const int other = common(awaited, coordinator.missing_ranks(table, pending));
      if (rank >= 0 && other >= 0) return Wait{rank, other, &pending.request};
    }
  }
  return std::nullopt;
}

}  // namespace

std::vector<Notice> StallMonitor::check(TimePoint now) {
  std::vector<Notice> warnings;
  std::unordered_map<std::uint64_t, TimePoint> warned_before = std::exchange(warned_, {});
  std::size_t hidden = 0;
  std::string fatal;
  int suspect = -1;
  for (const auto& [id, table] : coordinator_.tables()) {
    for (const auto& [key, pending] : table.tensors) {
      const TimePoint since = coordinator_.idle_since(table, pending);
      if (shutdown_ > 0 && seconds_between(since, now) >= shutdown_ && fatal.empty()) {
        fatal = describe_stall(table, pending, now) + "; the limit is " +
                text_of_seconds(shutdown_) +
                ": set HVDLITE_STALL_SHUTDOWN to wait longer, or to 0 to wait for ever";
        suspect = coordinator_.missing_ranks(table, pending).front();
      }
      const auto before = warned_before.find(pending.number);
      if (before != warned_before.end()) warned_.insert(*before);
      const TimePoint warned = before == warned_before.end() ? pending.since : before->second;
      const double silence = std::max(warning_, seconds_between(since, warned));
      const auto last = std::max(warned, since);
      if (warning_ <= 0 || seconds_between(last, now) < silence) continue;
      warned_[pending.number] = now;
      if (warnings.size() < kNamesShown) {
        const std::vector<int> missing = coordinator_.missing_ranks(table, pending);
        warnings.push_back({"stall", missing.empty() ? -1 : missing.front(), pending.request.name,
                            describe_stall(table, pending, now)});
      } else {
        ++hidden;
      }
    }
  }
  if (hidden > 0) {
    warnings.push_back(
        {"stall", -1, "", "... and " + std::to_string(hidden) + " more tensors wait"});
  }
  if (!fatal.empty()) {
    coordinator_.fail_stalled(now - patience_of(shutdown_), fatal, suspect);
  }
  return warnings;
}

void StallMonitor::tick(TimePoint now, std::vector<Notice>& notices) {
  if (coordinator_.idle() && stalls_ != nullptr) stalls_->clear();
  if (coordinator_.idle() || now < next_check_) return;
  next_check_ = now + interval();
  for (Notice& warning : check(now)) notices.push_back(std::move(warning));
  if (stalls_ != nullptr) stalls_->find(coordinator_, now);
}

std::chrono::milliseconds StallMonitor::interval() const {
  double shortest = 1e6;
  if (warning_ > 0) shortest = std::min(shortest, warning_);
  if (shutdown_ > 0) shortest = std::min(shortest, shutdown_);
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(std::clamp(shortest / 4 * 1000, 10.0, 1000.0)));
}

std::string StallMonitor::describe_stall(const PendingTable& table, const PendingTensor& pending,
                                         Coordinator::TimePoint now) const {
  const std::vector<int> waiting = Coordinator::submitters(table, pending);
  std::string text = waiting.size() == 1 ? "rank " + std::to_string(waiting.front()) + " is"
                                         : std::to_string(waiting.size()) + " ranks are";
  text += " in " + describe_awaited(pending.request);
  const std::vector<int> missing = coordinator_.missing_ranks(table, pending);
  for (const int rank : missing) {
    text += (rank == missing.front() ? "; rank " : ", rank ") + std::to_string(rank) + " (" +
            coordinator_.describe_last(rank, now) + ")";
  }
  text += (missing.size() == 1 ? " has" : " have") + std::string(" not called it for ") +
          text_of_seconds(seconds_between(pending.since, now));
  return text + describe_mutual_wait(table, pending);
}

std::string StallMonitor::describe_mutual_wait(const PendingTable& table,
                                               const PendingTensor& pending) const {
  const auto wait = find_wait(coordinator_, coordinator_.missing_ranks(table, pending),
                              Coordinator::submitters(table, pending));
  if (!wait) return "";
  const bool both_send = pending.request.is_send() && wait->request->is_send();
  const bool changes =
      pending.request.changes_process_sets() || wait->request->changes_process_sets();
  const Wait own{wait->awaited, wait->rank, &pending.request};
  return "; " + describe_wait(*wait) + ": " +
         (both_send || changes ? advice_for({own, *wait}) : std::string(kJoinAtTheEnd));
}

}  // namespace hvdlite
