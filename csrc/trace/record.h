// One event on its way from the thread that saw it to the thread that writes it to the file. A
// plain value.
#pragma once

#include <chrono>
#include <cstdint>

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

}  // namespace hvdlite
