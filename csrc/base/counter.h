// A number that one thread counts up and any thread reads, without a lock. The engine counts an
// operation before it publishes the operation's end; so a thread that sees the end also sees the
// count.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvdlite {

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
