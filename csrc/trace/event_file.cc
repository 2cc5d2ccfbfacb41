#include "trace/event_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/text.h"

namespace hvdlite {
namespace {

using Mark = TraceRecord::Kind;

constexpr int kNegotiationProcess = 1'000'000;
constexpr std::size_t kFlushBytes = 1 << 20;

constexpr const char* kInstantOfThread = ",\"s\":\"t\"";

// A JSON string. Names are UTF-8 already; a viewer replaces bytes that are not.
std::string quoted(std::string_view text) {
  std::string out = "\"";
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
  return out + '"';
}

// Exact, with three decimals.
std::string in_microseconds(TraceTime nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03lld", static_cast<long long>(nanoseconds / 1000),
                static_cast<long long>(nanoseconds % 1000));
  return text;
}

// The arguments of an event, as its last field; "" if there are none. `parts`: the names of a
// task's parts.
std::string arguments(const TraceRecord& record, std::string_view parts = {}) {
  std::string fields;
  if (record.number >= 0) {
    fields += record.kind == Mark::kInstant ? ",\"responses\":" : ",\"batch\":";
    fields += std::to_string(record.number);
  }
  if (record.kind == Mark::kOpen) fields += ",\"kind\":" + quoted(record.label);
  if (record.bytes > 0) fields += ",\"bytes\":" + std::to_string(record.bytes);
  if (!parts.empty()) fields += ",\"tensors\":" + quoted(parts);
  return fields.empty() ? "" : ",\"args\":{" + fields.substr(1) + "}";
}

}  // namespace

TraceRing::TraceRing(std::size_t cells) : count_(cells), cells_(std::make_unique<Cell[]>(cells)) {
  for (std::uint64_t i = 0; i < count_; ++i) {
    cells_[i].ticket.store(i, std::memory_order_relaxed);
  }
}

bool TraceRing::claim(std::uint64_t count, std::uint64_t& first) {
  first = tail_.load(std::memory_order_relaxed);
  while (true) {
    // Cells are freed in order: when the last one is free, all are.
    const std::uint64_t last = first + count - 1;
    const std::uint64_t ticket = cell(last).ticket.load(std::memory_order_acquire);
    if (ticket < last) return false;
    if (ticket > last) {
      first = tail_.load(std::memory_order_relaxed);
    } else if (tail_.compare_exchange_weak(first, first + count, std::memory_order_relaxed)) {
      return true;
    }
  }
}

bool TraceRing::push(const TraceRecord& record, std::string_view text) {
  std::uint64_t first = 0;
  if (!claim(cells_for(text.size()), first)) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  TraceRecord stored = record;
  stored.text_bytes = static_cast<std::uint32_t>(text.size());
  std::memcpy(cell(first).payload, &stored, sizeof stored);
  for (std::uint64_t at = first + 1; !text.empty(); ++at) {
    const std::size_t bytes = std::min(text.size(), kTextBytes);
    std::memcpy(cell(at).payload, text.data(), bytes);
    text.remove_prefix(bytes);
  }
  cell(first).ticket.store(first + 1, std::memory_order_release);
  return true;
}

bool TraceRing::pop(TraceRecord& record, std::string& text) {
  if (cell(head_).ticket.load(std::memory_order_acquire) != head_ + 1) return false;
  std::memcpy(&record, cell(head_).payload, sizeof record);
  text.clear();
  const std::uint64_t end = head_ + cells_for(record.text_bytes);
  for (std::uint64_t at = head_ + 1; at < end; ++at) {
    const std::size_t bytes = std::min<std::size_t>(record.text_bytes - text.size(), kTextBytes);
    text.append(reinterpret_cast<const char*>(cell(at).payload), bytes);
  }
  for (; head_ < end; ++head_) cell(head_).ticket.store(head_ + count_, std::memory_order_release);
  return true;
}

EventFile::EventFile(Fd file, int rank, std::uint64_t dropped)
    : file_(std::move(file)), process_(rank + 1), dropped_before_(dropped), dropped_(dropped) {
  if (rank == 0) describe(kNegotiationProcess, 0, "process", "negotiation (on rank 0)", -1);
}

void EventFile::take(TraceRing& ring) {
  TraceRecord record;
  std::string text;
  while (ring.pop(record, text)) {
    write(record, text);
    if (lines_.size() >= kFlushBytes) flush();
  }
  const std::uint64_t dropped = ring.dropped();
  if (dropped != dropped_) {
    event('i', row("dropped events"), latest_,
          std::to_string(dropped - dropped_) + " events dropped", kInstantOfThread);
    end_everything("events were dropped");
    dropped_ = dropped;
  }
  flush();
}

void EventFile::finish() {
  end_everything("still under way when the timeline ended");
  metadata(process_, 0, "hvdlite_end",
           "\"events\":" + std::to_string(written_) +
               ",\"dropped\":" + std::to_string(dropped_ - dropped_before_));
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
    case Mark::kPhase:
    case Mark::kMark:
    case Mark::kClose:
      return of_task(record, text);
    case Mark::kBegin:
    case Mark::kEnd:
    case Mark::kSpan:
    case Mark::kInstant:
      return on_row(record, text);
  }
}

void EventFile::of_task(const TraceRecord& record, const std::string& text) {
  const std::pair key{record.group, record.id};
  if (record.kind == Mark::kOpen) {
    end_task(tasks_.extract(key), record.time, "its end was lost");
    const std::size_t nul = std::min(text.find('\0'), text.size());
    const Task begun{record.group, ++opened_, record.label, text.substr(0, nul)};
    const Task& task = tasks_.insert_or_assign(key, begun).first->second;
    event('b', task, record.time, task.kind);
    event('b', task, record.time, task.name,
          arguments(record, std::string_view(text).substr(std::min(nul + 1, text.size()))));
    return;
  }
  const auto found = tasks_.find(key);
  if (found == tasks_.end()) return;
  Task& task = found->second;
  if (record.kind == Mark::kClose) return end_task(tasks_.extract(found), record.time, text);
  if (record.kind == Mark::kMark) {
    const std::string name = record.label + (" " + std::to_string(record.number));
    return event('n', task, record.time, name);
  }
  if (task.phase != nullptr) event('e', task, record.time, task.phase);
  task.phase = record.label;
  event('b', task, record.time, task.phase, arguments(record));
}

void EventFile::end_task(Tasks::node_type node, TraceTime time, std::string_view why) {
  if (node.empty()) return;
  const Task& task = node.mapped();
  if (task.phase != nullptr) event('e', task, time, task.phase);
  event('e', task, time, task.name,
        why.empty() ? "" : ",\"args\":{\"failed\":" + quoted(why) + "}");
  event('e', task, time, task.kind);
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
  if (record.kind == Mark::kEnd) {
    if (row.depth == 0) return;  // it began before the timeline
    --row.depth;
    event('E', row, record.time, "");
  } else if (record.kind == Mark::kBegin) {
    ++row.depth;
    event('B', row, record.time, name, arguments(record));
  } else if (record.kind == Mark::kSpan) {
    event('X', row, record.time, name,
          ",\"dur\":" + in_microseconds(record.end - record.time) + arguments(record));
  } else {
    event('i', row, record.time, name, kInstantOfThread + arguments(record));
  }
}

void EventFile::end_everything(std::string_view why) {
  while (!tasks_.empty()) end_task(tasks_.extract(tasks_.begin()), latest_, why);
  for (auto& [name, row] : rows_) {
    for (; row.depth > 0; --row.depth) event('E', row, latest_, "");
  }
}

void EventFile::event(char type, const Row& row, TraceTime time, std::string_view name,
                      std::string_view rest) {
  event(type, process_, row.thread, time, name, rest);
}

void EventFile::event(char type, const Task& task, TraceTime time, std::string_view name,
                      std::string_view rest) {
  const bool tensor = task.group == TaskGroup::kTensors;
  std::string fields = std::string(tensor ? ",\"cat\":\"tensors\"" : ",\"cat\":\"negotiations\"") +
                       ",\"id2\":{\"local\":\"" + std::to_string(task.number) + "\"}";
  event(type, tensor ? process_ : kNegotiationProcess, 0, time, name, fields.append(rest));
}

void EventFile::event(char type, int process, int thread, TraceTime time, std::string_view name,
                      std::string_view rest) {
  lines_ += "{\"ts\":" + in_microseconds(time) + ",\"ph\":\"" + type +
            "\",\"pid\":" + std::to_string(process) + ",\"tid\":" + std::to_string(thread);
  if (!name.empty()) lines_ += ",\"name\":" + quoted(name);
  lines_.append(rest).append("},\n");
}

void EventFile::metadata(int process, int thread, std::string_view what, std::string_view fields) {
  lines_ += "{\"ph\":\"M\",\"pid\":" + std::to_string(process) +
            ",\"tid\":" + std::to_string(thread) + ",\"name\":\"";
  lines_.append(what).append("\",\"args\":{").append(fields).append("}},\n");
}

void EventFile::describe(int process, int thread, const std::string& what, std::string_view name,
                         int order) {
  metadata(process, thread, what + "_name", "\"name\":" + quoted(name));
  metadata(process, thread, what + "_sort_index", "\"sort_index\":" + std::to_string(order));
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
