// A stream is a thread with a queue. An event holds how often it was recorded, and which of these
// records a stream has reached. Any thread calls both.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "cuda/cuda_abi.h"

namespace fakegpu {

// The time until which the host may wait for the device (FAKE_CUDA_TIMEOUT_MS), and the end of the
// process, with a message, when that has passed: a test must not hang.
std::chrono::steady_clock::time_point host_patience();
[[noreturn]] void die_waiting(const std::string& what);

class Stream {
 public:
  // `index` counts the streams of the process from 1 in order of creation; 0 is a default stream.
  static std::shared_ptr<Stream> start(int device, int index);

  void put(std::function<void()> work);
  bool idle();
  void wait_idle();
  // Lets the thread end once the queue is empty. Does not wait.
  void close();
  void hold(bool held);
  void delay(std::chrono::microseconds time);
  void set_capturing(bool capturing);
  bool capturing();
  int device() const { return device_; }

 private:
  Stream(int device, std::chrono::microseconds delay) : device_(device), delay_(delay) {}
  void run();

  const int device_;
  hvdlite::Mutex mutex_;
  hvdlite::Condition changed_;
  std::deque<std::function<void()>> queue_ HVDLITE_GUARDED_BY(mutex_);
  bool busy_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool held_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool closed_ HVDLITE_GUARDED_BY(mutex_) = false;
  bool capturing_ HVDLITE_GUARDED_BY(mutex_) = false;
  std::chrono::microseconds delay_ HVDLITE_GUARDED_BY(mutex_);
};

// The stream that a handle means on `device`; 0, 1 and 2 mean its default stream. nullptr when
// there is no such stream.
std::shared_ptr<Stream> stream_of(CUstream handle, int device);
// Whether the handle means a default stream.
inline bool is_default(CUstream handle) { return reinterpret_cast<std::uintptr_t>(handle) <= 2; }
// Waits until every stream of the device is idle.
void wait_for_device(int device);

class Event {
 public:
  Event(int device, bool timed) : device(device), timed(timed) {}
  // Counts one more record, and returns its number, for reached().
  std::uint64_t record();
  std::uint64_t recorded();
  void reached(std::uint64_t record);
  bool done();
  // The wait of a stream: for this record.
  void wait_for(std::uint64_t record);
  // The wait of the host: for the latest record.
  void wait_on_host();
  std::chrono::steady_clock::time_point when();

  const int device;
  const bool timed;

 private:
  hvdlite::Mutex mutex_;
  hvdlite::Condition changed_;
  std::uint64_t recorded_ HVDLITE_GUARDED_BY(mutex_) = 0;
  std::uint64_t reached_ HVDLITE_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point when_ HVDLITE_GUARDED_BY(mutex_);
};

}  // namespace fakegpu
