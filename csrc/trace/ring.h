// One event on its way from the thread that saw it to the thread that writes it to the file. A
// plain value.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace hvdlite {

// Nanoseconds of CLOCK_MONOTONIC, which Python calls time.monotonic_ns().
using TraceTime = std::int64_t;
inline TraceTime trace_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The tasks of one group share lanes.
enum class TaskGroup : std::uint8_t { kTensors = 0, kNegotiations = 1 };
inline constexpr std::size_t kTaskGroups = 2;

struct TraceRecord {
  enum class Kind : std::uint8_t { kOpen, kPhase, kMark, kClose, kBegin, kEnd, kSpan, kInstant };

  Kind kind = Kind::kInstant;
  TaskGroup group = TaskGroup::kTensors;
  std::uint32_t text_bytes = 0;  // set by the ring
  TraceTime time = 0;
  TraceTime end = 0;            // kSpan
  std::uint64_t id = 0;         // A task has this id.
  std::int64_t number = -1;     // A batch or a rank has this number; -1: none.
  std::uint64_t bytes = 0;      // 0: none
  const char* label = nullptr;  // a literal: the row, the phase or the kind
};

// A queue of records with a fixed number of cells: any thread pushes, one thread pops.
//
// A *cell* is one cache line. A record takes one cell, and one more for every kTextBytes of its
// text, side by side. Each cell carries a *ticket*, the number of the push that may use it next. So
// a push is one compare-and-swap and copies of lines: no lock, no allocation, no system call. A
// push into a full ring is dropped and counted, and never waits. (Bounded queue after D. Vyukov,
// https://www.1024cores.net/home/lock-free-algorithms/queues/bounded-mpmc-queue, with records of
// several cells.)
class TraceRing {
 public:
  static constexpr std::size_t kTextBytes = 56;  // in one cell

  explicit TraceRing(std::size_t cells);  // a power of two

  // Any thread. False when there is no room: the ring then drops the record and counts it.
  bool push(const TraceRecord& record, std::string_view text);
  // The reading thread only. Gives the oldest record and its text; false when there is none.
  bool pop(TraceRecord& record, std::string& text);
  // Records that were dropped so far. Any thread.
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Cell {
    std::atomic<std::uint64_t> ticket{0};
    std::byte payload[kTextBytes];
  };
  static_assert(sizeof(Cell) == 64 && sizeof(TraceRecord) <= kTextBytes);

  static std::uint64_t cells_for(std::size_t text_bytes) {
    return 1 + (text_bytes + kTextBytes - 1) / kTextBytes;
  }
  Cell& cell(std::uint64_t position) { return cells_[position & (count_ - 1)]; }
  // Takes `count` cells side by side; false when the ring is full.
  bool claim(std::uint64_t count, std::uint64_t& first);

  const std::uint64_t count_;
  std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  alignas(64) std::atomic<std::uint64_t> dropped_{0};
  std::uint64_t head_ = 0;  // only the reading thread uses it
};

}  // namespace hvdlite
