// A ring of bytes between one writer and one reader, over memory that both can see: shared between
// processes, or plain memory between threads. Neither side ever waits in these calls.
//
// Words: `head` counts the bytes ever written, `tail` those ever read; both only grow. The counters
// are sequentially consistent because sleepers depend on them (waiter.h).
// Errors: kInternal when the peer has broken the counters (head - tail is beyond the capacity). The
// ring never touches memory outside its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace hvdlite {

class ByteRing {
 public:
  // The bytes of memory that a ring of this capacity takes. The memory must begin at a multiple of
  // 64 bytes, and be zeroed.
  static constexpr std::size_t footprint(std::size_t capacity) {
    return sizeof(Counters) + capacity;
  }
  // `memory` (borrowed) outlives the ring.
  ByteRing(std::byte* memory, std::size_t capacity)
      : counters_(reinterpret_cast<Counters*>(memory)),
        data_(memory + sizeof(Counters)),
        capacity_(capacity) {}

  std::size_t capacity() const { return capacity_; }
  // Writer only. Returns the number of bytes that fitted.
  Result<std::size_t> write(std::span<const std::byte> bytes);
  // Reader only. Returns the number of bytes that it read; `was_full` is set when the writer may be
  // waiting for room.
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
