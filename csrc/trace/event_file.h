// Writes the timeline's file of one rank: it takes records from the ring and writes lines of the
// Trace Event format.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the array form,
// which needs no closing bracket, so a file that ends early is readable)
//
// Every line is one event, and a write has whole lines: a crash cuts the file between two lines.
// A process in the file is a rank, and one more process stands for the coordinator's negotiations.
// A thread in the file is a row, or a lane that holds one task at a time. Process ids are rank + 1,
// because 0 is special to some viewers. Python merges the files of all ranks into one, on one clock
// (hvdlite/timeline). Owned and called by the thread that Trace starts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "trace/ring.h"

namespace hvdlite {

class EventFile {
 public:
  static constexpr int kNegotiationProcess = 1'000'000;

  // `dropped` is the number of records that the ring had dropped before.
  EventFile(Fd file, int rank, std::uint64_t dropped)
      : file_(std::move(file)), process_(rank + 1), dropped_before_(dropped), dropped_(dropped) {}

  // Moves all records of the ring to the file.
  void take(TraceRing& ring);
  // Ends the tasks and spans that are still open, and the file.
  void finish();

 private:
  struct Task {
    std::size_t lane = 0;
    bool in_phase = false;
  };
  struct Row {
    int thread = 0;
    int depth = 0;  // spans that have begun and not ended
  };

  void write(const TraceRecord& record, const std::string& text);
  void open(const TraceRecord& record, const std::string& name);
  void phase(const TraceRecord& record);
  void mark(const TraceRecord& record);
  void close(const TraceRecord& record, std::string_view why);
  void on_row(const TraceRecord& record, const std::string& name);
  // Ends all that is open, because records are missing, and the ends may be among them.
  void end_everything(std::string_view why);

  std::size_t free_lane(TaskGroup group, TraceTime since);
  Row& row(const char* name);
  int process_of(TaskGroup group) const {
    return group == TaskGroup::kTensors ? process_ : kNegotiationProcess;
  }

  // These append to `lines_`.
  void event(char type, int process, int thread, TraceTime time);  // a line, until end_line()
  void name_field(std::string_view name);
  void arguments(const TraceRecord& record, std::string_view parts = {});
  void begin_metadata(int process, int thread, const char* what);
  // Names a "process" or a "thread" and gives its position among the others.
  void describe(int process, int thread, const char* what, std::string_view name, int order);
  void end_line() { lines_ += "},\n"; }
  void flush();

  Fd file_;
  const int process_;
  const std::uint64_t dropped_before_;
  std::uint64_t dropped_;
  std::uint64_t written_ = 0;
  TraceTime latest_ = 0;
  std::map<std::pair<TaskGroup, std::uint64_t>, Task> tasks_;  // those that are open
  std::vector<TraceTime> lanes_[kTaskGroups];  // the time from which a lane is free; kBusy: taken
  std::map<std::string_view, Row> rows_;
  std::string lines_;
};

}  // namespace hvdlite
