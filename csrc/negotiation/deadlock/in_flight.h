// The operations that came through the table of C functions and have not ended. Any thread.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "entry/entry.h"

namespace hvdlite {

class InFlight {
 public:
  // Keeps no entry alive.
  void add(const EntryPtr& entry) {
    MutexLock lock(mutex_);
    entries_.emplace(entry.get(), entry);
  }
  // Once its caller has been told that it has ended.
  void remove(const Entry* entry) {
    MutexLock lock(mutex_);
    entries_.erase(entry);
  }
  std::vector<EntryPtr> list() const {
    std::vector<EntryPtr> entries;
    MutexLock lock(mutex_);
    for (const auto& [key, entry] : entries_) {
      if (EntryPtr alive = entry.lock()) entries.push_back(std::move(alive));
    }
    return entries;
  }

 private:
  mutable Mutex mutex_;
  std::unordered_map<const Entry*, std::weak_ptr<Entry>> entries_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace hvdlite
