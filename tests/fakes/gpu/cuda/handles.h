// Handles that are looked up before they are used, so that a stale handle is an error and not a
// crash. Any thread.
#pragma once

#include <map>
#include <memory>

#include "base/mutex.h"

namespace fakegpu {

template <typename T>
class Handles {
 public:
  void* add(std::shared_ptr<T> object) {
    hvdlite::MutexLock lock(mutex_);
    void* handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }
  // nullptr when the handle is not (or no longer) one of these.
  std::shared_ptr<T> find(void* handle) {
    hvdlite::MutexLock lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> remove(void* handle) {
    hvdlite::MutexLock lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  template <typename Visit>
  void for_each(Visit&& visit) {
    std::map<void*, std::shared_ptr<T>> copy;
    {
      hvdlite::MutexLock lock(mutex_);
      copy = objects_;
    }
    for (const auto& [handle, object] : copy) visit(object);
  }

 private:
  hvdlite::Mutex mutex_;
  std::map<void*, std::shared_ptr<T>> objects_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace fakegpu
