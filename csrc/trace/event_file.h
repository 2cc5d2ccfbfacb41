// The way of the timeline's records from the threads that push them to the file of the rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/fd.h"
#include "trace/trace.h"

namespace hvdlite {

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

// Writes the timeline's file of one rank: it takes records from the ring and writes lines of the
// Trace Event format.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the array form,
// which needs no closing bracket, so a file that ends early is readable)
//
// Every line is one event, and a write has whole lines: a crash cuts the file between two lines.
// A process in the file is a rank, and one more process stands for the coordinator's negotiations.
// A row is a thread in the file. A task is three nested async events with an id of its own: its
// kind, by which viewers put the tasks of a process into stacks, its name, and its phase. Process
// ids are rank + 1, because 0 is special to some viewers. Python merges the files of all ranks into
// one, on one clock (hvdlite/timeline). Owned and called by the thread that Trace starts.
class EventFile {
 public:
  // `dropped` is the number of records that the ring had dropped before.
  EventFile(Fd file, int rank, std::uint64_t dropped);

  // Moves all records of the ring to the file.
  void take(TraceRing& ring);
  // Ends the tasks and spans that are still open, and the file.
  void finish();

 private:
  struct Task {
    TaskGroup group;
    std::uint64_t number;
    const char* kind;
    std::string name;
    const char* phase = nullptr;
  };
  using Tasks = std::map<std::pair<TaskGroup, std::uint64_t>, Task>;
  struct Row {
    int thread = 0;
    int depth = 0;  // spans that have begun and not ended
  };

  void write(const TraceRecord& record, const std::string& text);
  void of_task(const TraceRecord& record, const std::string& text);
  void end_task(Tasks::node_type task, TraceTime time, std::string_view why);
  Row& row(const char* name);
  void on_row(const TraceRecord& record, const std::string& name);
  // Ends all that is open, because records are missing, and the ends may be among them.
  void end_everything(std::string_view why);

  // Each appends a line; `rest` are the fields after the name.
  void event(char type, const Row& row, TraceTime time, std::string_view name,
             std::string_view rest = {});
  void event(char type, const Task& task, TraceTime time, std::string_view name,
             std::string_view rest = {});
  void event(char type, int process, int thread, TraceTime time, std::string_view name,
             std::string_view rest);
  void metadata(int process, int thread, std::string_view what, std::string_view fields);
  // Names a "process" or a "thread" and gives its position among the others.
  void describe(int process, int thread, const std::string& what, std::string_view name, int order);
  void flush();

  Fd file_;
  const int process_;
  const std::uint64_t dropped_before_;
  std::uint64_t dropped_;
  std::uint64_t written_ = 0;
  TraceTime latest_ = 0;
  Tasks tasks_;               // those that are open
  std::uint64_t opened_ = 0;  // tasks so far
  std::map<std::string_view, Row> rows_;
  std::string lines_;
};

}  // namespace hvdlite
