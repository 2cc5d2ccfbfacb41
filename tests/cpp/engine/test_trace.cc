// The ring that events wait in, and the file that they end in.
#include <fcntl.h>

#include <thread>
#include <vector>

#include "base/text.h"
#include "check.h"
#include "scratch_file.h"
#include "trace/event_file.h"
#include "trace/trace.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

using What = TraceRecord::Kind;

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TraceRecord task(What kind, std::uint64_t id, TraceTime time) {
  TraceRecord record{kind};
  record.id = id;
  record.time = time;
  record.label = "allreduce";
  return record;
}

}  // namespace

TEST(trace_ring_gives_back_what_many_threads_pushed) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  TraceRing ring(256);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&ring, thread] {
      for (int i = 0; i < kEach; ++i) {
        TraceRecord record;
        record.id = static_cast<std::uint64_t>(thread * kEach + i);
        const std::string text(record.id % 200, static_cast<char>('a' + record.id % 26));
        while (!ring.push(record, text)) std::this_thread::yield();
      }
    });
  }
  std::vector<std::uint64_t> next = {0, kEach, 2 * kEach, 3 * kEach};  // by thread, in its order
  TraceRecord record;
  std::string text;
  for (int i = 0; i < kThreads * kEach;) {
    if (!ring.pop(record, text)) {
      std::this_thread::yield();
      continue;
    }
    CHECK_EQ(record.id, next[record.id / kEach]++);
    CHECK_EQ(text, std::string(record.id % 200, static_cast<char>('a' + record.id % 26)));
    ++i;
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(!ring.pop(record, text));
}

TEST(trace_task_is_its_kind_its_name_and_its_phases_under_an_id_of_its_own) {
  const ScratchFile file;
  TraceRing ring(64);
  EventFile events(file.writer(), /*rank=*/2, ring.dropped());
  ring.push(task(What::kOpen, 7, 10), "a");
  TraceRecord phase = task(What::kPhase, 7, 20);
  phase.label = "queue";
  ring.push(phase, "");
  ring.push(task(What::kPhase, 7, 30), "");
  ring.push(task(What::kClose, 7, 40), "it broke");
  ring.push(task(What::kOpen, 7, 50), "b");  // the id may be used again
  ring.push(task(What::kClose, 7, 60), "");
  events.take(ring);
  const std::string text = file.text();
  const auto event = [](const char* at, char type, const char* name, int id) {
    return std::string("{\"ts\":0.0") + at + ",\"ph\":\"" + type +
           "\",\"pid\":3,\"tid\":0,\"name\":\"" + name +
           "\",\"cat\":\"tensors\",\"id2\":{\"local\":\"" + std::to_string(id) + "\"}";
  };
  const std::string failed = ",\"args\":{\"failed\":\"it broke\"}";
  const std::string kind = ",\"args\":{\"kind\":\"allreduce\"}";
  const std::string end = "},\n";
  CHECK_EQ(text, event("10", 'b', "allreduce", 1) + end + event("10", 'b', "a", 1) + kind + end +
                     event("20", 'b', "queue", 1) + end + event("30", 'e', "queue", 1) + end +
                     event("30", 'b', "allreduce", 1) + end + event("40", 'e', "allreduce", 1) +
                     end + event("40", 'e', "a", 1) + failed + end +
                     event("40", 'e', "allreduce", 1) + end + event("50", 'b', "allreduce", 2) +
                     end + event("50", 'b', "b", 2) + kind + end + event("60", 'e', "b", 2) + end +
                     event("60", 'e', "allreduce", 2) + end);
}

TEST(trace_file_says_what_was_dropped_and_ends_what_was_open) {
  const ScratchFile file;
  TraceRing ring(8);
  EventFile events(file.writer(), 0, ring.dropped());
  ring.push(task(What::kOpen, 1, 10), "first");
  while (ring.push(task(What::kPhase, 1, 20), "")) continue;
  ring.push(task(What::kClose, 1, 30), "");
  events.take(ring);
  CHECK_EQ(count(file.text(), "\"2 events dropped\""), 1);
  CHECK_EQ(count(file.text(), "\"ph\":\"b\""), count(file.text(), "\"ph\":\"e\""));
  ring.push(task(What::kPhase, 1, 40), "");  // the task has ended already
  events.take(ring);
  events.finish();
  CHECK_EQ(count(file.text(), "\"dropped\":2}}\n]\n"), 1);
  CHECK_EQ(count(file.text(), "\"ph\":\"b\""), count(file.text(), "\"ph\":\"e\""));
}

TEST(trace_escapes_names) {
  const ScratchFile file;
  TraceRing ring(64);
  EventFile events(file.writer(), 0, 0);
  TraceRecord record = task(What::kOpen, 1, 10);
  ring.push(record, std::string_view("a\"b\\c\n\0d \"e\"", 12));
  events.take(ring);
  CHECK_EQ(count(file.text(), R"("name":"a\"b\\c\u000a")"), 1);
  CHECK_EQ(count(file.text(), R"("tensors":"d \"e\"")"), 1);
}

TEST(trace_is_off_until_started_and_after_it_was_stopped) {
  const ScratchFile first;
  const ScratchFile second;
  Trace trace;
  trace.begin("engine", "before");
  CHECK(!trace.on());
  CHECK_OK(trace.start(first.writer(), 0, /*rounds=*/false));
  CHECK(trace.on());
  CHECK_STATUS(trace.start(second.writer(), 0, false), StatusCode::kInvalidArgument);
  trace.begin("engine", "during");
  trace.round("engine", 1);
  trace.stop();
  trace.stop();
  trace.end("engine");
  CHECK_OK(trace.start(second.writer(), 0, /*rounds=*/true));
  trace.round("engine", 3);
  {
    const TraceSpan span(&trace, "engine", "work");
  }
  {
    const TraceSpan nowhere(nullptr, "engine", "work");
  }
  trace.stop();
  CHECK_EQ(count(first.text(), "before"), 0);
  CHECK_EQ(count(first.text(), "\"name\":\"during\""), 1);
  CHECK_EQ(count(first.text(), "\"ph\":\"E\""), 1);  // what was open ends with the file
  CHECK_EQ(count(first.text(), "round"), 0);
  CHECK_EQ(count(second.text(), "\"responses\":3"), 1);
  CHECK_EQ(count(second.text(), "\"name\":\"work\""), 1);
}

TEST(log_levels_are_known_in_either_case) {
  CHECK(parse_log_level("debug") == LogLevel::kDebug);
  CHECK(parse_log_level("FATAL") == LogLevel::kFatal);
  CHECK(parse_log_level("Error") == LogLevel::kError);
  CHECK(parse_log_level("loud") == LogLevel::kWarning);
}

TEST(trace_goes_quiet_when_its_file_is_full) {
  set_log_level(LogLevel::kError);  // it warns
  Trace trace;
  CHECK_OK(trace.start(Fd(::open("/dev/full", O_WRONLY | O_CLOEXEC)), 0, false));
  trace.begin("engine", "lost");
  trace.stop();
  CHECK(!trace.on());
  set_log_level(LogLevel::kWarning);
}
