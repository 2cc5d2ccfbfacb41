#include "engine/live.h"

#include <utility>

namespace hvdlite {

void Events::add(std::string kind, int rank, std::string name, std::string text) {
  Event event{std::chrono::steady_clock::now(), std::move(kind), rank, std::move(name),
              std::move(text)};
  MutexLock lock(mutex_);
  if (events_.size() == kMost) {
    events_.pop_front();
    ++dropped_;
  }
  events_.push_back(std::move(event));
}

std::vector<Event> Events::take() {
  MutexLock lock(mutex_);
  std::vector<Event> taken(std::make_move_iterator(events_.begin()),
                           std::make_move_iterator(events_.end()));
  events_.clear();
  return taken;
}

std::uint64_t Events::dropped() const {
  MutexLock lock(mutex_);
  return dropped_;
}

}  // namespace hvdlite
