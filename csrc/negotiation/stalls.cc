#include "negotiation/stalls.h"

#include <algorithm>
#include <utility>

namespace hvdlite {

void Stalls::find(Coordinator& coordinator, Coordinator::TimePoint now) {
  using Waiting = std::pair<const Coordinator::Book*, const Coordinator::Tally*>;
  std::vector<Waiting> waiting;
  for (const auto& [id, book] : coordinator.books()) {
    for (const auto& [key, tally] : book.tallies) {
      if (now - coordinator.idle_since(book, tally) >= kShortest)
        waiting.emplace_back(&book, &tally);
    }
  }
  const std::size_t count = std::min(waiting.size(), kMost);
  std::partial_sort(
      waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(count), waiting.end(),
      [](const Waiting& a, const Waiting& b) { return a.second->since < b.second->since; });
  std::vector<Stall> found;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [book, tally] = waiting[i];
    found.push_back({tally->request.name, tally->since, Coordinator::submitters(*book, *tally),
                     coordinator.missing_ranks(*book, *tally)});
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
