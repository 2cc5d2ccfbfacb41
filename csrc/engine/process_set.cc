#include "engine/process_set.h"

#include <algorithm>
#include <numeric>

namespace hvdlite {

ProcessSets::ProcessSets(int world_size) : world_size_(world_size) {
  Group world;
  world.ranks.resize(world_size);
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  groups_.push_back(std::move(world));
}

Result<const Group*> ProcessSets::add(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty() || ranks.front() < 0 || ranks.back() >= world_size_ ||
      std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end()) {
    return Status(StatusCode::kInvalidArgument, "a process set takes different ranks from 0 to " +
                                                    std::to_string(world_size_ - 1) +
                                                    ", at least one");
  }
  MutexLock lock(mutex_);
  if (groups_.size() >= kLaneCount) {
    return Status(StatusCode::kInvalidArgument,
                  "there are " + std::to_string(kLaneCount) + " process sets already, no more fit");
  }
  Group group;
  group.id = static_cast<int>(groups_.size());
  group.ranks = std::move(ranks);
  groups_.push_back(std::move(group));
  return static_cast<const Group*>(&groups_.back());
}

const Group* ProcessSets::get(std::uint32_t id) const {
  MutexLock lock(mutex_);
  return id < groups_.size() ? &groups_[id] : nullptr;
}

}  // namespace hvdlite
