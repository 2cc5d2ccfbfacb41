#include "trace/event_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>

#include "base/text.h"

namespace hvdlite {
namespace {

using Mark = TraceRecord::Kind;

constexpr TraceTime kBusy = std::numeric_limits<TraceTime>::max();
constexpr std::size_t kFlushBytes = 1 << 20;
constexpr int kFirstLaneThread = 100;  // threads below are rows

int thread_of(std::size_t lane) { return kFirstLaneThread + static_cast<int>(lane); }

// Appends a JSON string. Names are UTF-8 already; a viewer replaces bytes that are not.
void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
}

// Microseconds with three decimals: exact.
void append_microseconds(std::string& out, TraceTime nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03lld", static_cast<long long>(nanoseconds / 1000),
                static_cast<long long>(nanoseconds % 1000));
  out += text;
}

}  // namespace

void EventFile::take(TraceRing& ring) {
  TraceRecord record;
  std::string text;
  while (ring.pop(record, text)) {
    write(record, text);
    if (lines_.size() >= kFlushBytes) flush();
  }
  const std::uint64_t dropped = ring.dropped();
  if (dropped != dropped_) {
    event('i', process_, row("dropped events").thread, latest_);
    name_field(std::to_string(dropped - dropped_) + " events dropped");
    lines_ += ",\"s\":\"t\"";
    end_line();
    end_everything("events were dropped");
    dropped_ = dropped;
  }
  flush();
}

void EventFile::finish() {
  end_everything("still under way when the timeline ended");
  begin_metadata(process_, 0, "hvdlite_end");
  lines_ += "\"events\":" + std::to_string(written_) +
            ",\"dropped\":" + std::to_string(dropped_ - dropped_before_) + "}";
  end_line();
  // The last line has no comma after it, so that the whole file is strict JSON.
  lines_.resize(lines_.size() - 2);
  lines_ += "\n]\n";
  flush();
  file_.reset();
}

void EventFile::write(const TraceRecord& record, const std::string& text) {
  ++written_;
  latest_ = std::max({latest_, record.time, record.end});
  switch (record.kind) {
    case Mark::kOpen:
      return open(record, text);
    case Mark::kPhase:
      return phase(record);
    case Mark::kMark:
      return mark(record);
    case Mark::kClose:
      return close(record, text);
    case Mark::kBegin:
    case Mark::kEnd:
    case Mark::kSpan:
    case Mark::kInstant:
      return on_row(record, text);
  }
}

std::size_t EventFile::free_lane(TaskGroup group, TraceTime since) {
  std::vector<TraceTime>& lanes = lanes_[static_cast<std::size_t>(group)];
  const auto found =
      std::find_if(lanes.begin(), lanes.end(), [&](TraceTime from) { return from <= since; });
  const auto lane = static_cast<std::size_t>(found - lanes.begin());
  if (found != lanes.end()) {
    *found = kBusy;
    return lane;
  }
  const int process = process_of(group);
  if (lanes.empty() && group == TaskGroup::kNegotiations) {
    describe(process, 0, "process", "negotiation (on rank 0)", -1);
  }
  lanes.push_back(kBusy);
  describe(
      process, thread_of(lane), "thread",
      (group == TaskGroup::kTensors ? "tensors " : "waiting for ranks ") + std::to_string(lane + 1),
      thread_of(lane));
  return lane;
}

void EventFile::open(const TraceRecord& record, const std::string& name) {
  close(record, "its end was lost");
  const Task task{free_lane(record.group, record.time), false};
  tasks_[{record.group, record.id}] = task;
  event('B', process_of(record.group), thread_of(task.lane), record.time);
  const std::size_t nul = std::min(name.find('\0'), name.size());
  name_field(std::string_view(name).substr(0, nul));
  arguments(record, std::string_view(name).substr(std::min(nul + 1, name.size())));
  end_line();
}

void EventFile::phase(const TraceRecord& record) {
  const auto found = tasks_.find({record.group, record.id});
  if (found == tasks_.end()) return;
  Task& task = found->second;
  const int process = process_of(record.group);
  if (task.in_phase) {
    event('E', process, thread_of(task.lane), record.time);
    end_line();
  }
  task.in_phase = true;
  event('B', process, thread_of(task.lane), record.time);
  name_field(record.label);
  arguments(record);
  end_line();
}

void EventFile::mark(const TraceRecord& record) {
  const auto found = tasks_.find({record.group, record.id});
  if (found == tasks_.end()) return;
  event('i', process_of(record.group), thread_of(found->second.lane), record.time);
  name_field(std::string(record.label) + " " + std::to_string(record.number));
  lines_ += ",\"s\":\"t\"";
  end_line();
}

void EventFile::close(const TraceRecord& record, std::string_view why) {
  const auto found = tasks_.find({record.group, record.id});
  if (found == tasks_.end()) return;
  const Task task = found->second;
  tasks_.erase(found);
  lanes_[static_cast<std::size_t>(record.group)][task.lane] = record.time;
  const int process = process_of(record.group);
  if (task.in_phase) {
    event('E', process, thread_of(task.lane), record.time);
    end_line();
  }
  event('E', process, thread_of(task.lane), record.time);
  if (!why.empty()) {
    lines_ += ",\"args\":{\"failed\":";
    append_quoted(lines_, why);
    lines_ += '}';
  }
  end_line();
}

EventFile::Row& EventFile::row(const char* name) {
  const auto [at, is_new] = rows_.try_emplace(name);
  if (is_new) {
    at->second.thread = static_cast<int>(rows_.size());
    describe(process_, at->second.thread, "thread", name, at->second.thread);
  }
  return at->second;
}

void EventFile::on_row(const TraceRecord& record, const std::string& name) {
  Row& row = this->row(record.label);
  const auto line = [&](char type) { event(type, process_, row.thread, record.time); };
  if (record.kind == Mark::kEnd) {
    if (row.depth == 0) return;  // it began before the timeline
    --row.depth;
    line('E');
    return end_line();
  }
  if (record.kind == Mark::kSpan) {
    line('X');
    lines_ += ",\"dur\":";
    append_microseconds(lines_, record.end - record.time);
  } else if (record.kind == Mark::kBegin) {
    ++row.depth;
    line('B');
  } else {
    line('i');
    lines_ += ",\"s\":\"t\"";
  }
  name_field(name);
  arguments(record);
  end_line();
}

void EventFile::end_everything(std::string_view why) {
  while (!tasks_.empty()) {
    TraceRecord record{Mark::kClose, tasks_.begin()->first.first};
    record.id = tasks_.begin()->first.second;
    record.time = latest_;
    close(record, why);
  }
  for (auto& [name, row] : rows_) {
    for (; row.depth > 0; --row.depth) {
      event('E', process_, row.thread, latest_);
      end_line();
    }
  }
}

void EventFile::event(char type, int process, int thread, TraceTime time) {
  lines_ += "{\"ts\":";
  append_microseconds(lines_, time);
  lines_ += ",\"ph\":\"";
  lines_ += type;
  lines_ += "\",\"pid\":" + std::to_string(process) + ",\"tid\":" + std::to_string(thread);
}

void EventFile::name_field(std::string_view name) {
  lines_ += ",\"name\":";
  append_quoted(lines_, name);
}

void EventFile::arguments(const TraceRecord& record, std::string_view parts) {
  std::string fields;
  if (record.kind == Mark::kOpen) fields += ",\"kind\":\"" + std::string(record.label) + "\"";
  if (record.number >= 0) {
    fields += record.kind == Mark::kInstant ? ",\"responses\":" : ",\"batch\":";
    fields += std::to_string(record.number);
  }
  if (record.bytes > 0) fields += ",\"bytes\":" + std::to_string(record.bytes);
  if (!parts.empty()) append_quoted(fields += ",\"tensors\":", parts);
  if (!fields.empty()) lines_ += ",\"args\":{" + fields.substr(1) + "}";
}

void EventFile::begin_metadata(int process, int thread, const char* what) {
  lines_ += "{\"ph\":\"M\",\"pid\":" + std::to_string(process) +
            ",\"tid\":" + std::to_string(thread) + ",\"name\":\"" + what + "\",\"args\":{";
}

void EventFile::describe(int process, int thread, const char* what, std::string_view name,
                         int order) {
  begin_metadata(process, thread, (std::string(what) + "_name").c_str());
  lines_ += "\"name\":";
  append_quoted(lines_, name);
  lines_ += '}';
  end_line();
  begin_metadata(process, thread, (std::string(what) + "_sort_index").c_str());
  lines_ += "\"sort_index\":" + std::to_string(order) + "}";
  end_line();
}

void EventFile::flush() {
  std::string_view left = lines_;
  while (!left.empty() && file_.valid()) {
    const ssize_t count = ::write(file_.get(), left.data(), left.size());
    if (count > 0) left.remove_prefix(static_cast<std::size_t>(count));
    if (count > 0 || (count < 0 && errno == EINTR)) continue;
    log(LogLevel::kWarning, process_ - 1,
        system_error("the timeline ends here, because its file cannot be written", errno)
            .message());
    file_.reset();
  }
  lines_.clear();
}

}  // namespace hvdlite
