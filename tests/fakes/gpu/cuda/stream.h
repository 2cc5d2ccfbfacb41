// A stream is a thread with a queue. Any thread calls it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "base/mutex.h"
#include "cuda/cuda_abi.h"

namespace fakegpu {

class Stream {
 public:
  static std::shared_ptr<Stream> start(int device);

  void put(std::function<void()> work);
  void wait_idle();
  // Lets the thread end once the queue is empty. Does not wait.
  void close();
  void hold(bool held);
  void set_capturing(bool capturing);
  bool capturing();
  int device() const { return device_; }

 private:
  explicit Stream(int device) : device_(device) {}
  void run();

  const int device_;
  hvdlite::Mutex mutex_;
  hvdlite::Condition changed_;
  std::deque<std::function<void()>> queue_ HVDLITE_GUARDED_BY(mutex_);
  bool busy_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool held_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool closed_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool capturing_ HVDLITE_GUARDED_BY(mutex_) = false;
};

// The stream that a handle means on `device`; 0, 1 and 2 mean its default stream. nullptr when
// there is no such stream.
std::shared_ptr<Stream> stream_of(CUstream handle, int device);
// Whether the handle means a default stream.
inline bool is_default(CUstream handle) { return reinterpret_cast<std::uintptr_t>(handle) <= 2; }
// Waits until every stream of the device is idle.
void wait_for_device(int device);

}  // namespace fakegpu
