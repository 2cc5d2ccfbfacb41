#include "trace/trace.h"

#include "trace/event_file.h"

namespace hvdlite {
namespace {

using What = TraceRecord::Kind;

constexpr std::size_t kCells = std::size_t{1} << 17;  // 8 MiB
// The time whose events a killed process can lose. To fill the ring within that time takes six
// million records a second.
constexpr auto kWriteInterval = std::chrono::milliseconds(20);
constexpr std::size_t kLongestWhy = 300;

}  // namespace

Trace::Trace() = default;
Trace::~Trace() { stop(); }

Status Trace::start(Fd file, int rank, bool rounds) {
  MutexLock session(session_mutex_);
  if (thread_ != nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  "a timeline is being written already; call stop_timeline() first");
  }
  if (ring_ == nullptr) ring_ = std::make_unique<TraceRing>(kCells);
  TraceRecord leftover;  // Its thread was amid an event when the last timeline ended.
  std::string text;
  while (ring_->pop(leftover, text)) continue;
  {
    MutexLock lock(mutex_);
    stopping_ = false;
  }
  rounds_.store(rounds, std::memory_order_relaxed);
  TraceRing* const ring = ring_.get();
  thread_ = std::make_unique<Thread>("hvdlite-trace", [this, ring, rank, fd = file.release()] {
    write_down(*ring, Fd(fd), rank);
  });
  ring_in_use_.store(ring, std::memory_order_release);
  return Status();
}

void Trace::stop() {
  MutexLock session(session_mutex_);
  if (thread_ == nullptr) return;
  ring_in_use_.store(nullptr, std::memory_order_relaxed);
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    stopping_changed_.notify_one();
  }
  thread_.reset();  // joins
}

void Trace::write_down(TraceRing& ring, Fd fd, int rank) {
  EventFile file(std::move(fd), rank, ring.dropped());
  bool last = false;
  while (!last) {
    {
      MutexLock lock(mutex_);
      if (!stopping_) {
        stopping_changed_.wait_until(mutex_, std::chrono::steady_clock::now() + kWriteInterval);
      }
      last = stopping_;
    }
    file.take(ring);
  }
  file.finish();
}

void Trace::push(const TraceRecord& record, std::string_view text) {
  TraceRing* const ring = ring_in_use_.load(std::memory_order_acquire);
  if (ring != nullptr) (void)ring->push(record, text);
}

void Trace::open(TaskGroup group, std::uint64_t id, std::string_view name, TraceTime since,
                 const char* kind, std::uint64_t bytes) {
  if (!on()) return;
  push(
      {.kind = What::kOpen, .group = group, .time = since, .id = id, .bytes = bytes, .label = kind},
      name);
}

void Trace::phase(TaskGroup group, std::uint64_t id, const char* label, TraceTime since,
                  std::int64_t number) {
  if (!on()) return;
  push({.kind = What::kPhase,
        .group = group,
        .time = since,
        .id = id,
        .number = number,
        .label = label});
}

void Trace::mark(TaskGroup group, std::uint64_t id, const char* label, std::int64_t number) {
  if (!on()) return;
  push({.kind = What::kMark,
        .group = group,
        .time = trace_now(),
        .id = id,
        .number = number,
        .label = label});
}

void Trace::close(TaskGroup group, std::uint64_t id, std::string_view why) {
  if (!on()) return;
  push({.kind = What::kClose, .group = group, .time = trace_now(), .id = id},
       why.substr(0, kLongestWhy));
}

void Trace::begin(const char* row, std::string_view name, std::int64_t number,
                  std::uint64_t bytes) {
  if (!on()) return;
  push({.kind = What::kBegin, .time = trace_now(), .number = number, .bytes = bytes, .label = row},
       name);
}

void Trace::end(const char* row) {
  if (on()) push({.kind = What::kEnd, .time = trace_now(), .label = row});
}

void Trace::span(const char* row, std::string_view name, TraceTime begin, TraceTime end,
                 std::uint64_t bytes) {
  if (!on()) return;
  push({.kind = What::kSpan, .time = begin, .end = end, .bytes = bytes, .label = row}, name);
}

void Trace::round(const char* row, std::int64_t responses) {
  if (!on() || !rounds_.load(std::memory_order_relaxed)) return;
  push({.kind = What::kInstant, .time = trace_now(), .number = responses, .label = row}, "round");
}

}  // namespace hvdlite
