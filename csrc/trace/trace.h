// The timeline of one rank: any thread tells events, and a thread of its own writes them to a file.
// The engine tells them at the few sites that engine/timeline.h names, and data planes add the
// parts of a batch. The engine owns its Trace; data planes borrow it.
//
// Words: a *task* is something that is under way beside others, such as a tensor. It is opened,
// goes through *phases* one after the other, may get *marks*, and is closed. A *row* has a name,
// and holds spans that nest: the work of one thread or one device. Labels and names of rows are
// string literals; other text is copied.
//
// Cost: while the trace is off, a call is one relaxed load. While it is on, a call is one clock
// read and a push into a ring that was allocated before (event_file.h): no lock, no allocation, no
// system call. An event that does not fit into the ring is dropped, and the file says how many
// were. Threads: any thread tells events, and any thread calls start() and stop(). Errors: when the
// file cannot be written any more, the writing ends with a logged warning. Nothing else changes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"

namespace hvdlite {

// Nanoseconds of CLOCK_MONOTONIC, which Python calls time.monotonic_ns().
using TraceTime = std::int64_t;
inline TraceTime trace_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What a task belongs to: a rank's tensors in flight, or what rank 0 waits for.
enum class TaskGroup : std::uint8_t { kTensors = 0, kNegotiations = 1 };

// One event on its way from the thread that saw it to the thread that writes it to the file. A
// plain value.
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

class TraceRing;

class Trace {
 public:
  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Begins to write events of the Trace Event format, one a line, to `file`. The caller has written
  // the opening bracket and the description of the process before. `rank` numbers the processes in
  // the file. With `rounds`, round() is drawn. kInvalidArgument when the trace is on already.
  Status start(Fd file, int rank, bool rounds);
  // Writes the events that are left and the closing bracket. Does nothing when the trace is off.
  void stop();
  bool on() const { return ring_in_use_.load(std::memory_order_relaxed) != nullptr; }

  // Tasks. `id` names one of the tasks of its group that are open now; an event with any other id
  // is ignored. `since` may lie in the past; `kind` and `bytes` describe the task. `name` may hold,
  // behind a NUL, the names of the task's parts.
  void open(TaskGroup group, std::uint64_t id, std::string_view name, TraceTime since,
            const char* kind, std::uint64_t bytes = 0);
  void phase(TaskGroup group, std::uint64_t id, const char* label, TraceTime since,
             std::int64_t number = -1);
  void mark(TaskGroup group, std::uint64_t id, const char* label, std::int64_t number = -1);
  // `why` is the error that the task ended with, or "".
  void close(TaskGroup group, std::uint64_t id, std::string_view why = {});

  // Rows. The spans of a row end in the reverse order of their beginnings.
  void begin(const char* row, std::string_view name, std::int64_t number = -1,
             std::uint64_t bytes = 0);
  void end(const char* row);
  // A span that was measured elsewhere and lies in the past, on the clock of trace_now(). Any
  // thread may add spans to the row of a device, in any order.
  void span(const char* row, std::string_view name, TraceTime begin, TraceTime end,
            std::uint64_t bytes = 0);
  // The beginning of a round; drawn when start() was told so.
  void round(const char* row, std::int64_t responses);

 private:
  void push(const TraceRecord& record, std::string_view text = {});
  void write_down(TraceRing& ring, Fd file, int rank);  // the thread's body

  std::atomic<TraceRing*> ring_in_use_{nullptr};  // It is null while the trace is off.
  std::atomic<bool> rounds_{false};

  Mutex session_mutex_;  // start() and stop() hold it, so that they run one after the other
  std::unique_ptr<TraceRing> ring_ HVDLITE_GUARDED_BY(session_mutex_);  // made once, kept
  std::unique_ptr<Thread> thread_ HVDLITE_GUARDED_BY(session_mutex_);

  Mutex mutex_;
  Condition stopping_changed_;
  bool stopping_ HVDLITE_GUARDED_BY(mutex_) = false;
};

// A span from here to the end of the scope, on a row. Costs one load where the trace is off or
// null.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, const char* row, const char* name)
      : trace_(trace != nullptr && trace->on() ? trace : nullptr),
        row_(row),
        name_(name),
        begin_(trace_ != nullptr ? trace_now() : 0) {}
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->span(row_, name_, begin_, trace_now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* const trace_;
  const char* const row_;
  const char* const name_;
  const TraceTime begin_;
};

}  // namespace hvdlite
