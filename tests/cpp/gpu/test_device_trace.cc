// The spans of a GPU in the timeline, on fake GPUs: they show when the device worked, not when the
// runner gave it the work.
#include <cstdlib>
#include <cstring>

#include "cpp/engine/scratch_file.h"
#include "gpu_engines.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr TraceTime kMillisecond = 1'000'000;
constexpr TraceTime kHeld = 300 * kMillisecond;
// How late the fake's threads may be on a busy machine.
constexpr TraceTime kLate = 150 * kMillisecond;

struct Measured {
  TraceTime begin;
  TraceTime end;
};

// The one complete span of this name; the spans of the host have a begin and an end event.
bool find_span(const std::string& text, const std::string& name, Measured& found) {
  const auto field = [&](const char* key, std::size_t from) {
    return static_cast<TraceTime>(
        std::strtod(text.c_str() + text.find(key, from) + std::strlen(key), nullptr) * 1e3);
  };
  for (auto line = text.find("{\"ts\":"); line != std::string::npos;
       line = text.find("{\"ts\":", line + 1)) {
    const std::string event = text.substr(line, text.find('\n', line) - line);
    if (event.find("\"ph\":\"X\"") == std::string::npos) continue;
    if (event.find("\"name\":\"" + name + "\"") == std::string::npos) continue;
    found.begin = field("\"ts\":", line);
    found.end = found.begin + field("\"dur\":", line);
    return true;
  }
  return false;
}

Measured wait_for_span(const ScratchFile& file, const std::string& name) {
  Measured found{};
  CHECK(soon([&] { return find_span(file.text(), name, found); }));
  return found;
}

}  // namespace

TEST(device_trace_shows_when_the_device_worked) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    const ScratchFile file;
    const OnDevice tensor = gpu.tensor({1.0F});
    CHECK_OK(gpu.run(engine, gpu.entry("warm", tensor, 1)));
    CHECK_OK(engine.trace().start(file.writer(), rank, false));
    const std::int64_t syncs = gpu_counters(rank).host_syncs;
    hold(gpu.producer, true);
    const EntryPtr entry = gpu.entry("held", tensor, 1);
    const TraceTime submitted = trace_now();
    CHECK_OK(gpu.run(engine, entry));
    std::this_thread::sleep_for(std::chrono::nanoseconds(kHeld));
    hold(gpu.producer, false);
    const Measured span = wait_for_span(file, "allreduce held");
    CHECK_EQ(gpu_counters(rank).host_syncs, syncs);
    CHECK(span.begin > submitted + kHeld - kLate);
    CHECK(span.begin <= span.end);
    CHECK(span.end < trace_now());
    const std::string row = "\"args\":{\"name\":\"GPU " + std::to_string(rank) + "\"";
    CHECK(file.text().find(row) != std::string::npos);
    engine.trace().stop();
  });
}

TEST(device_trace_that_is_off_measures_nothing) {
  GpuWorld{}.run([](int rank, Engine& engine, Framework& gpu) {
    const OnDevice tensor = gpu.tensor({1.0F});
    CHECK_OK(gpu.run(engine, gpu.entry("before", tensor, 1)));
    const ScratchFile file;
    CHECK_OK(engine.trace().start(file.writer(), rank, false));
    CHECK_OK(gpu.run(engine, gpu.entry("during", tensor, 1)));
    (void)wait_for_span(file, "allreduce during");
    engine.trace().stop();
    const std::int64_t records = gpu_counters(rank).event_records;
    CHECK_OK(gpu.run(engine, gpu.entry("after", tensor, 1)));
    // Where the tensor is ready, and the end of the batch.
    CHECK_EQ(gpu_counters(rank).event_records - records, 2);
    Measured none{};
    CHECK(!find_span(file.text(), "allreduce before", none));
    CHECK(!find_span(file.text(), "allreduce after", none));
  });
}
