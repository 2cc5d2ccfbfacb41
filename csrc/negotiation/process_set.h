// The process sets of this rank's world: 0 is the world itself. The coordinator decides about the
// others, and every rank adds and removes them at the same place in the order of collectives; so
// all ranks give a set the same lane. An id is never used again.
//
// The engine owns it. Any thread may call get(), and a set that it returned stays valid; only the
// runner calls add() and remove().
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "transport/segment.h"
#include "transport/topology.h"

namespace hvdlite {

// Sets besides the world that there can be at once: each has a lane of its own.
inline constexpr std::size_t kMaxProcessSets = kLaneCount - 1;

using GroupPtr = std::shared_ptr<const Group>;

class ProcessSets {
 public:
  // `highest`: of the ids that former worlds of the job have used.
  explicit ProcessSets(int world_size, int highest = 0);
  GroupPtr get(std::uint32_t id) const;  // nullptr: there is not one of this id
  // All but that of all ranks, by ascending id.
  std::vector<GroupPtr> others() const;
  // `ranks` ascend; the coordinator has seen to it that there is a lane.
  void add(int id, std::vector<int> ranks);
  void remove(int id);
  // The highest id that was used so far.
  int highest() const;

 private:
  mutable Mutex mutex_;
  int highest_ HVDLITE_GUARDED_BY(mutex_);
  std::map<std::uint32_t, GroupPtr> groups_ HVDLITE_GUARDED_BY(mutex_);
};

// "process set [0, 2]", for messages.
std::string describe(const Group& group);

}  // namespace hvdlite
