// The file of one rank: records in, lines of the Trace Event format out.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (its array form,
// which needs no closing bracket, so a file that ends early is readable)
//
// Every line is one event, and lines are written whole: what a crash leaves is cut between lines.
// A process in the file is a rank, and one more is the coordinator's negotiations; a thread is a
// row, or a lane that holds one task at a time. Process ids are rank + 1, because 0 is special to
// some viewers. Thread: the one that writes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "os/fd.h"
#include "trace/ring.h"

namespace hvdlite {

class EventFile {
 public:
  static constexpr int kNegotiationProcess = 1'000'000;

  // `dropped`: how many records the ring had dropped before.
  EventFile(Fd file, int rank, std::uint64_t dropped)
      : file_(std::move(file)), process_(rank + 1), dropped_before_(dropped), dropped_(dropped) {}

  // Empties the ring into the file.
  void take(TraceRing& ring);
  // Ends what is still open, and the file.
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
  // Records are missing: nothing that is open now can be trusted to end.
  void end_everything(std::string_view why);

  std::size_t free_lane(TaskGroup group, TraceTime since);
  Row& row(const char* name);
  int process_of(TaskGroup group) const {
    return group == TaskGroup::kTensors ? process_ : kNegotiationProcess;
  }

  // Lines.
  void event(char type, int process, int thread, TraceTime time);  // begins one; end_line() ends it
  void name_field(std::string_view name);
  void arguments(const TraceRecord& record, std::string_view parts = {});
  void begin_metadata(int process, int thread, const char* what);
  // Names a "process" or a "thread" and says where it stands.
  void describe(int process, int thread, const char* what, std::string_view name, int order);
  void end_line() { lines_ += "},\n"; }
  void flush();

  Fd file_;
  const int process_;
  const std::uint64_t dropped_before_;
  std::uint64_t dropped_;
  std::uint64_t written_ = 0;
  TraceTime latest_ = 0;
  std::map<std::pair<TaskGroup, std::uint64_t>, Task> tasks_;  // open ones
  std::vector<TraceTime> lanes_[kTaskGroups];                  // free from; kBusy while taken
  std::map<std::string_view, Row> rows_;
  std::string lines_;
};

}  // namespace hvdlite
