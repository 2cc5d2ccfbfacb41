// Threads and what they share: std::mutex with the annotations that Clang's -Wthread-safety checks,
// threads with names, counters. The only file that names a bare std::mutex; everything else uses
// Mutex, MutexLock and Condition.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#ifdef __clang__
#define HVDLITE_ANNOTATE(x) __attribute__((x))
#else
#define HVDLITE_ANNOTATE(x)
#endif
#define HVDLITE_GUARDED_BY(x) HVDLITE_ANNOTATE(guarded_by(x))
#define HVDLITE_REQUIRES(x) HVDLITE_ANNOTATE(requires_capability(x))

namespace hvdlite {

class HVDLITE_ANNOTATE(capability("mutex")) Mutex {
 public:
  void lock() HVDLITE_ANNOTATE(acquire_capability()) { mutex_.lock(); }
  void unlock() HVDLITE_ANNOTATE(release_capability()) { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

class HVDLITE_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) HVDLITE_ANNOTATE(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() HVDLITE_ANNOTATE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable over Mutex. The thread that notifies first changes the awaited flag, under
// the mutex that the waiter holds.
class Condition {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }
  void wait(Mutex& mutex) HVDLITE_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // False when `when` has passed. The wait may end early, as with any condition variable: at the
  // latest after a day, because the library's arithmetic overflows near the end of time.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point when)
      HVDLITE_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const auto latest = std::chrono::steady_clock::now() + std::chrono::hours(24);
    const bool woken =
        condition_.wait_until(lock, std::min(when, latest)) == std::cv_status::no_timeout;
    lock.release();
    return woken || when > latest;
  }

 private:
  std::condition_variable condition_;
};

// A thread with a name, owned by this object. The destructor waits for the end of `body`.
class Thread {
 public:
  // `name` shows in debuggers and top; the system keeps 15 characters.
  Thread(const std::string& name, std::function<void()> body) : thread_(std::move(body)) {
    ::pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }
  ~Thread() { thread_.join(); }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

 private:
  std::thread thread_;
};

// A number that one thread counts up and any thread reads, without a lock. The engine counts an
// operation before it publishes the operation's end; so a thread that sees the end also sees the
// count.
class Counter {
 public:
  Counter() = default;
  Counter(const Counter& other) : value_(other.get()) {}
  Counter& operator=(const Counter& other) { return *this = other.get(); }

  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

  // The operators below are for the counting thread only.
  Counter& operator=(std::uint64_t value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Counter& operator+=(std::uint64_t more) { return *this = get() + more; }
  Counter& operator++() { return *this += 1; }

 private:
  std::atomic<std::uint64_t> value_{0};
};

}  // namespace hvdlite
