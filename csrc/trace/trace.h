// Where the time of this rank goes: events from any thread, written to a file in the background.
//
// Words: a *task* is something that is under way beside others, such as a tensor. It is opened,
// goes through *phases* one after the other, may get *marks*, and is closed; the file shows it on
// the first free lane of its group. A *row* has a name, and holds spans that nest: what one thread
// or one device does. Labels and names of rows are string literals; other text is copied.
//
// Cost: while off, a call is one relaxed load. While on, it is one clock read and a push into a
// ring that was allocated before (ring.h): no lock, no allocation, no system call. What does not
// fit into the ring is dropped, and the file says how much.
// Threads: events from any thread; start() and stop() from any thread, one after the other.
// Errors: a file that cannot be written any more ends the writing with a logged warning, and
// nothing else.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>

#include "base/mutex.h"
#include "base/status.h"
#include "base/thread.h"
#include "os/fd.h"
#include "trace/ring.h"

namespace hvdlite {

class Trace {
 public:
  Trace() = default;
  ~Trace() { stop(); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Begins to write events of the Trace Event format, one a line, to `file`, of which the opening
  // bracket and whatever describes the process are written already. `rank` numbers the processes
  // in it. `rounds`: whether round() is drawn. kInvalidArgument when already on.
  Status start(Fd file, int rank, bool rounds);
  // Writes what is left, and the closing bracket. Does nothing when off.
  void stop();
  bool on() const { return ring_in_use_.load(std::memory_order_relaxed) != nullptr; }

  // Tasks. `id` names one among those of its group that are open now; events of others are ignored.
  // `since` may lie in the past; `kind` and `bytes` describe it. Behind a NUL, `name` may go on
  // with the names of its parts.
  void open(TaskGroup group, std::uint64_t id, std::string_view name, TraceTime since,
            const char* kind, std::uint64_t bytes = 0);
  void phase(TaskGroup group, std::uint64_t id, const char* label, TraceTime since,
             std::int64_t number = -1);
  void mark(TaskGroup group, std::uint64_t id, const char* label, std::int64_t number = -1);
  // `why`: the error that it ended with, or "".
  void close(TaskGroup group, std::uint64_t id, std::string_view why = {});

  // Rows. What begins on a row ends on it, last begun first.
  void begin(const char* row, std::string_view name, std::int64_t number = -1,
             std::uint64_t bytes = 0);
  void end(const char* row);
  // A span that was measured elsewhere and lies in the past, on the clock of trace_now(). The spans
  // of one row nest: a device's row may be given its spans by any thread, in any order.
  void span(const char* row, std::string_view name, TraceTime begin, TraceTime end,
            std::uint64_t bytes = 0);
  // The beginning of a round; drawn where start() asked for it.
  void round(const char* row, std::int64_t responses);

 private:
  void push(const TraceRecord& record, std::string_view text = {});
  void write_down(TraceRing& ring, Fd file, int rank);  // the thread's body

  std::atomic<TraceRing*> ring_in_use_{nullptr};  // null: off
  std::atomic<bool> rounds_{false};

  Mutex session_mutex_;  // held over start() and stop()
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
