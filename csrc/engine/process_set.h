// The process sets of this rank's world: 0 is the world itself. Ids are given in the order of
// add(), which every rank calls alike, so that they agree. Any thread; sets are never changed, only
// added, and a pointer that get() returned stays valid.
#pragma once

#include <deque>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/segment.h"
#include "transport/topology.h"

namespace hvdlite {

class ProcessSets {
 public:
  explicit ProcessSets(int world_size);
  // `ranks` in any order; kInvalidArgument for duplicates, ranks outside the world, an empty set,
  // or more than kLaneCount sets.
  Result<const Group*> add(std::vector<int> ranks);
  const Group* get(std::uint32_t id) const;  // nullptr: no such set

 private:
  const int world_size_;
  mutable Mutex mutex_;
  std::deque<Group> groups_ HVDLITE_GUARDED_BY(mutex_);  // by id
};

}  // namespace hvdlite
