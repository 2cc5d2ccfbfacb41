// A ring of bytes between one writer and one reader, over memory that both can see: shared between
// processes, or plain memory between threads. Neither side ever waits here.
//
// Words: `head` counts the bytes ever written, `tail` those ever read; both only grow. The counters
// are sequentially consistent because sleepers depend on them (waiter.h). A peer that breaks them
// (head - tail beyond the capacity) makes the ring invalid: nothing outside it is ever touched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace hvdlite {

class ByteRing {
 public:
  // Bytes of memory that a ring of this capacity takes; the memory starts zeroed, 64-byte aligned.
  static constexpr std::size_t footprint(std::size_t capacity) {
    return sizeof(Counters) + capacity;
  }
  // `memory` (borrowed) outlives the ring.
  ByteRing(std::byte* memory, std::size_t capacity)
      : counters_(reinterpret_cast<Counters*>(memory)),
        data_(memory + sizeof(Counters)),
        capacity_(capacity) {}

  // Writer only. How many bytes fitted.
  Result<std::size_t> write(std::span<const std::byte> bytes);
  // Reader only. How many bytes there were; `was_full` says that the writer may wait for room.
  Result<std::size_t> read(std::span<std::byte> bytes, bool& was_full);

 private:
  struct alignas(64) Counter {
    std::atomic<std::uint64_t> value;
  };
  struct Counters {
    Counter head;
    Counter tail;
  };
  Result<std::uint64_t> used(std::uint64_t head, std::uint64_t tail) const;

  Counters* counters_;
  std::byte* data_;
  std::size_t capacity_;
};

}  // namespace hvdlite
