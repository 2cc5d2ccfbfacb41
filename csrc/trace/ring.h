// A queue of records with a fixed number of slots: any thread pushes, one thread pops.
//
// A *slot* is one cache line; a record takes one, and one more for every kTextBytes of its text,
// side by side. Each slot carries a *ticket*: what number of push may use it next. So a push is one
// compare-and-swap and copies of lines: no lock, no allocation, no system call. A push into a full
// ring is dropped and counted, and never waits. (Bounded queue after D. Vyukov,
// https://www.1024cores.net/home/lock-free-algorithms/queues/bounded-mpmc-queue, with records of
// several slots.)
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "trace/record.h"

namespace hvdlite {

class TraceRing {
 public:
  static constexpr std::size_t kTextBytes = 56;  // in one slot

  explicit TraceRing(std::size_t slots);  // a power of two

  // Any thread. False when there is no room: the record is dropped and counted.
  bool push(const TraceRecord& record, std::string_view text);
  // The reading thread only: the oldest record and its text, false when there is none.
  bool pop(TraceRecord& record, std::string& text);
  // Records that were dropped so far. Any thread.
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> ticket{0};
    std::byte payload[kTextBytes];
  };
  static_assert(sizeof(Slot) == 64 && sizeof(TraceRecord) <= kTextBytes);

  static std::uint64_t slots_for(std::size_t text_bytes) {
    return 1 + (text_bytes + kTextBytes - 1) / kTextBytes;
  }
  Slot& slot(std::uint64_t position) { return slots_[position & (count_ - 1)]; }
  // Takes `count` slots side by side; false when the ring is full.
  bool claim(std::uint64_t count, std::uint64_t& first);

  const std::uint64_t count_;
  std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  alignas(64) std::atomic<std::uint64_t> dropped_{0};
  std::uint64_t head_ = 0;  // of the reading thread
};

}  // namespace hvdlite
