#include "negotiation/stalls.h"

#include <algorithm>
#include <utility>

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

}  // namespace hvdlite
