// Engine::live(): what engines say of themselves while they run.
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/live.h"
#include "engine_worlds.h"
#include "host/host_backend.h"

namespace hvdlite::testing::live {
namespace {

using namespace std::chrono_literals;

// Who sleeps, and before which of the gradients of each step.
struct Sleep {
  int rank = -1;
  int gradient = 0;
  std::chrono::milliseconds time = 30ms;
};

constexpr int kGradients = 4;

// Trains: in each step the gradients are submitted one by one or, `together`, when the last of them
// is ready, and waited for at the end.
void train(Engine& engine, const Sleep& sleep, int steps, bool together = false) {
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> values(kGradients, std::vector<float>(10, 1.0f));
    std::vector<EntryPtr> entries;
    for (int i = 0; i < kGradients; ++i) {
      if (engine.rank() == sleep.rank && i == sleep.gradient) {
        std::this_thread::sleep_for(sleep.time);
      }
      entries.push_back(allreduce_entry("gradient" + std::to_string(i), values[i]));
      if (!together) CHECK_OK(engine.enqueue(entries.back(), /*blocking=*/false));
      if (together && i == 0) engine.note_gradient();
    }
    for (const EntryPtr& entry : entries) {
      if (together) CHECK_OK(engine.enqueue(entry, /*blocking=*/false));
    }
    for (const EntryPtr& entry : entries) CHECK_OK(finish(engine, entry));
  }
}

StepClock::Report steps_of(Engine& engine) {
  const Live live = engine.live();
  CHECK(live.steps.has_value());
  return live.steps.value_or(StepClock::Report());
}

bool has_kind(const std::vector<Event>& events, const std::string& kind) {
  return std::any_of(events.begin(), events.end(),
                     [&](const Event& event) { return event.kind == kind; });
}

TEST(live_blames_the_rank_that_sleeps_and_says_in_which_phase) {
  for (const auto& [hosts, together] : {std::pair(Hosts{0, 0}, false), {Hosts{0, 0, 1}, true}}) {
    for (const int gradient : {0, 2}) {
      const Sleep sleep{static_cast<int>(hosts.size()) - 1, gradient, 90ms};
      run_world(hosts, [&, together = together](int rank, Engine& engine) {
        train(engine, sleep, 12, together);
        if (rank != 0) {
          CHECK(!engine.live().steps);
          return;
        }
        const StepClock::Report report = steps_of(engine);
        CHECK_EQ(report.steps, 10U);
        const StepClock::Rank& late = report.ranks[sleep.rank];
        CHECK(late.last >= 9);
        const auto blamed = gradient == 0 ? late.late_between : late.late_backward;
        const auto other = gradient == 0 ? late.late_backward : late.late_between;
        CHECK(blamed > 250ms);
        CHECK(blamed > 3 * other);
        CHECK(report.ranks[0].waiting > 200ms);
        for (const StepClock::Rank& one : report.ranks) {
          const auto sum = one.backward + one.waiting + one.communicating + one.between;
          const double seconds = std::chrono::duration<double>(sum).count();
          CHECK(std::abs(seconds - report.seconds()) < 0.1 * report.seconds());
        }
      });
    }
  }
}

TEST(live_has_steps_in_a_world_of_one) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), quick_config());
  train(engine, {0, 2, 5ms}, 12);
  const StepClock::Report report = steps_of(engine);
  CHECK_EQ(report.steps, 10U);
  CHECK(report.ranks[0].backward >= 50ms);
  CHECK(report.ranks[0].waiting == 0ms);
  CHECK_EQ(report.ranks[0].last, 0U);
}

TEST(live_does_not_count_all_reduces_of_other_process_sets) {
  run_world({0, 0}, [](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {0});
    std::vector<float> values(4);
    for (int i = 0; i < 5 && rank == 0; ++i) {
      EntryPtr entry = allreduce_entry("x", values);
      entry->request.process_set = set;
      CHECK_OK(run(engine, entry));
    }
    if (rank == 0) CHECK_EQ(steps_of(engine).steps, 0U);
    CHECK_OK(run(engine, change_entry(Kind::kBarrier, "end")));
  });
}

TEST(live_tells_of_process_sets_once_and_on_rank_0) {
  run_world({0, 0}, [](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {1});
    CHECK_OK(run(engine, removal(set)));
    const std::vector<Event> events = engine.live().events;
    CHECK_EQ(events.size(), rank == 0 ? std::size_t{2} : std::size_t{0});
    for (const Event& event : events) CHECK_EQ(event.kind, std::string("process set"));
    if (rank == 0) CHECK(has(events[0].text, "added") && has(events[1].text, "removed"));
    CHECK(engine.live().events.empty());
  });
}

TEST(live_tells_what_ended_the_world) {
  run_world({0, 0}, [](int rank, Engine& engine) {
    if (rank == 1) return engine.abort("no room");
    CHECK(ends_soon(engine, 10s));
    const std::vector<Event> events = engine.live().events;
    CHECK_EQ(events.size(), std::size_t{1});
    CHECK_EQ(events[0].kind, std::string("error"));
    CHECK_EQ(events[0].rank, 1);
    CHECK(has(events[0].text, "no room"));
  });
}

TEST(live_tells_nothing_of_a_clean_end) {
  auto engines = make_engines({0, 0}, quick_config());
  std::thread other([&] { engines[1]->shutdown(); });
  engines[0]->shutdown();
  other.join();
  for (const auto& engine : engines) CHECK(engine->live().events.empty());
}

TEST(live_tells_what_stalls_and_forgets_it_when_it_goes_on) {
  Config config = quick_config();
  config.stall_warning = 0.5;
  std::atomic<bool> told{false};
  run_world(
      {0, 0},
      [&told](int rank, Engine& engine) {
        std::vector<float> values(4);
        const EntryPtr entry = allreduce_entry("slow", values);
        if (rank == 1) {
          CHECK(soon([&] { return told.load(); }));
          CHECK_OK(run(engine, entry));
          CHECK_OK(run(engine, change_entry(Kind::kBarrier, "end")));
          return;
        }
        CHECK_OK(engine.enqueue(entry, /*blocking=*/false));
        std::vector<Event> all;
        CHECK(soon([&] {
          const Live live = engine.live();
          all.insert(all.end(), live.events.begin(), live.events.end());
          return !live.stalls.empty();
        }));
        for (const Event& event : all) {
          CHECK_EQ(event.name, std::string("slow"));
          CHECK_EQ(event.rank, 1);
        }
        engine.note("late", "slow", "a note of Python's");
        const Live live = engine.live();
        told = true;
        CHECK(!live.stalls.empty());
        if (!live.stalls.empty()) {
          CHECK_EQ(live.stalls[0].name, std::string("slow"));
          CHECK(live.now - live.stalls[0].since >= 1s);
          CHECK_EQ(live.stalls[0].submitted, std::vector<int>{0});
          CHECK_EQ(live.stalls[0].missing, std::vector<int>{1});
        }
        CHECK(has_kind(live.events, "late"));
        CHECK(has_kind(all, "stall"));
        CHECK_OK(finish(engine, entry));
        CHECK_OK(run(engine, change_entry(Kind::kBarrier, "end")));
        CHECK(soon([&] { return engine.live().stalls.empty(); }));
      },
      config);
}

TEST(live_drops_the_oldest_events) {
  Events events;
  for (std::size_t i = 0; i < Events::kMost + 3; ++i) {
    events.add("late", 1, "n" + std::to_string(i), "");
  }
  const std::vector<Event> taken = events.take();
  CHECK_EQ(taken.size(), Events::kMost);
  CHECK_EQ(taken[0].name, std::string("n3"));
  CHECK(events.take().empty());
}

TEST(live_stamps_of_a_peer_lie_between_the_beginning_and_now) {
  const LiveFigures figures(2, 0, 0);
  const auto now = figures.began + 10s;
  const auto stamp = [&](std::chrono::nanoseconds after) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               (figures.began + after).time_since_epoch())
        .count();
  };
  const Arrival good = figures.arrival({stamp(1s), stamp(2s)}, now);
  CHECK(good.first == figures.began + 1s && good.last == figures.began + 2s);
  for (const Stamps& bad : {Stamps{stamp(-1h), stamp(11s)}, Stamps{INT64_MIN, INT64_MAX}}) {
    const Arrival clamped = figures.arrival(bad, now);
    CHECK(clamped.first == figures.began && clamped.last == now);
  }
  const Arrival backwards = figures.arrival({stamp(5s), stamp(4s)}, now);
  CHECK(backwards.first == figures.began + 5s && backwards.last == backwards.first);
}

}  // namespace
}  // namespace hvdlite::testing::live
