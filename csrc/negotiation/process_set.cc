#include "negotiation/process_set.h"

#include <algorithm>
#include <bitset>
#include <numeric>
#include <utility>

namespace hvdlite {

ProcessSets::ProcessSets(int world_size, int highest) : highest_(highest) {
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  add(0, std::move(ranks));
}

GroupPtr ProcessSets::get(std::uint32_t id) const {
  MutexLock lock(mutex_);
  const auto found = groups_.find(id);
  return found != groups_.end() ? found->second : nullptr;
}

std::vector<GroupPtr> ProcessSets::others() const {
  MutexLock lock(mutex_);
  std::vector<GroupPtr> others;
  for (const auto& [id, group] : groups_) {
    if (id != 0) others.push_back(group);
  }
  return others;
}

void ProcessSets::add(int id, std::vector<int> ranks) {
  MutexLock lock(mutex_);
  highest_ = std::max(highest_, id);
  std::bitset<kLaneCount> taken;
  for (const auto& [other, group] : groups_) taken.set(static_cast<std::size_t>(group->lane));
  int lane = 0;
  while (taken.test(static_cast<std::size_t>(lane))) ++lane;
  groups_[static_cast<std::uint32_t>(id)] =
      std::make_shared<const Group>(Group{id, std::move(ranks), lane, 0});
}

void ProcessSets::remove(int id) {
  MutexLock lock(mutex_);
  groups_.erase(static_cast<std::uint32_t>(id));
}

int ProcessSets::highest() const {
  MutexLock lock(mutex_);
  return highest_;
}

std::string describe(const Group& group) {
  std::string text = "process set [";
  for (const int rank : group.ranks) {
    text += (rank == group.ranks.front() ? "" : ", ") + std::to_string(rank);
  }
  return text + "]";
}

}  // namespace hvdlite
