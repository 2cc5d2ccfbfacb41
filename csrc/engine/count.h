// A number that the engine's runner counts up and any thread reads. Whoever sees an operation ended
// sees it counted.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvdlite {

class Count {
 public:
  Count() = default;
  Count(const Count& other) : value_(other.get()) {}
  Count& operator=(const Count& other) { return *this = other.get(); }

  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

  // Runner only.
  Count& operator=(std::uint64_t value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Count& operator+=(std::uint64_t more) { return *this = get() + more; }
  Count& operator++() { return *this += 1; }

 private:
  std::atomic<std::uint64_t> value_{0};
};

}  // namespace hvdlite
