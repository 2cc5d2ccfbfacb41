// Engines whose schedule is frozen: nothing is said while nothing changes, whatever changes is seen
// before it does harm, and results have the same bits as without.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>

#include "engine_worlds.h"
#include "send_entries.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

const std::vector<Hosts> kWorlds = {{0, 0}, {0, 1}, {0, 0, 0}, {0, 0, 1}, {0, 1, 1, 0}, {0, 1, 2}};

Config frozen_config(std::int64_t steps = 2) {
  Config config = quick_config();
  config.freeze = steps;
  return config;
}

// One step of so many tensors, all in flight at once; every result is looked at.
void run_step(Engine& engine, int tensors, const std::string& prefix = "grad") {
  std::vector<std::vector<float>> values;
  std::vector<EntryPtr> entries;
  for (int i = 0; i < tensors; ++i) {
    values.emplace_back(8 + static_cast<std::size_t>(i), static_cast<float>(engine.rank() + i));
  }
  for (int i = 0; i < tensors; ++i) {
    entries.push_back(
        allreduce_entry(prefix + std::to_string(i), values[static_cast<std::size_t>(i)]));
    CHECK_OK(engine.enqueue(entries.back(), /*blocking=*/false));
  }
  const int ranks = engine.size();
  for (int i = 0; i < tensors; ++i) {
    CHECK_OK(finish(engine, entries[static_cast<std::size_t>(i)]));
    const float sum = static_cast<float>(ranks * (ranks - 1) / 2 + i * ranks);
    CHECK_EQ(values[static_cast<std::size_t>(i)].back(), sum);
  }
}

// Steps until the schedule is frozen.
void freeze(Engine& engine, int tensors) {
  for (int step = 0; step < 50; ++step) run_step(engine, tensors);
}

}  // namespace

TEST(frozen_schedule_sends_no_message) {
  for (const Hosts& hosts : kWorlds) {
    run_world(
        hosts,
        [](int, Engine& engine) {
          freeze(engine, 5);
          const Counters before = engine.counters();
          CHECK(before.frozen_rounds.get() > 0);
          for (int step = 0; step < 50; ++step) run_step(engine, 5);
          const Counters after = engine.counters();
          CHECK_EQ(after.messages_sent.get(), before.messages_sent.get());
          CHECK_EQ(after.full_requests.get(), before.full_requests.get());
          CHECK_EQ(after.thaws.get(), before.thaws.get());
          CHECK_EQ(after.tensors.get() - before.tensors.get(), std::uint64_t{250});
          // So that nobody leaves before all have counted.
          run_step(engine, 5);
        },
        frozen_config());
  }
}

TEST(frozen_schedule_thaws_for_a_new_tensor_and_freezes_again) {
  for (const Hosts& hosts : kWorlds) {
    run_world(
        hosts,
        [](int rank, Engine& engine) {
          freeze(engine, 3);
          if (rank == 1) std::this_thread::sleep_for(20ms);
          run_step(engine, 1, "new");
          CHECK_EQ(engine.counters().thaws.get(), std::uint64_t{1});
          freeze(engine, 3);
          const Counters before = engine.counters();
          run_step(engine, 3);
          CHECK_EQ(engine.counters().messages_sent.get(), before.messages_sent.get());
          run_step(engine, 3);
        },
        frozen_config());
  }
}

TEST(frozen_schedule_ends_in_the_usual_mismatch) {
  for (const Hosts& hosts : kWorlds) {
    run_world(
        hosts,
        [](int rank, Engine& engine) {
          freeze(engine, 3);
          std::vector<float> values(rank == 1 ? 7U : 8U);
          const Status status = run(engine, allreduce_entry("grad0", values));
          CHECK_STATUS(status, StatusCode::kMismatch);
          CHECK(has(status.message(), "grad0") && has(status.message(), "rank 1"));
          run_step(engine, 3);
        },
        frozen_config());
  }
}

TEST(frozen_schedule_gives_way_to_join) {
  for (const Hosts& hosts : kWorlds) {
    run_world(
        hosts,
        [](int rank, Engine& engine) {
          freeze(engine, 2);
          // Rank 1 ends its loop earlier than the others.
          std::vector<float> values(4, 1);
          for (int step = 0; step < (rank == 1 ? 0 : 5); ++step) {
            std::fill(values.begin(), values.end(), 1.0F);
            CHECK_OK(run(engine, allreduce_entry("tail", values)));
            CHECK_EQ(values[0], static_cast<float>(engine.size() - 1));
          }
          auto join = change_entry(Kind::kJoin, std::string(kJoinName));
          CHECK_OK(run(engine, join));
          freeze(engine, 2);
          const std::uint64_t sent = engine.counters().messages_sent.get();
          run_step(engine, 2);
          CHECK_EQ(engine.counters().messages_sent.get(), sent);
          run_step(engine, 2);
        },
        frozen_config());
  }
}

TEST(frozen_schedule_gives_way_to_process_sets_and_sends) {
  run_world(
      {0, 1, 0},
      [](int rank, Engine& engine) {
        freeze(engine, 2);
        const std::uint32_t set = add_set(engine, {0, 2});
        freeze(engine, 2);
        std::vector<float> values(4, 1);
        if (rank != 1) {
          EntryPtr entry = allreduce_entry("in set", values);
          entry->request.process_set = set;
          CHECK_OK(run(engine, entry));
          CHECK_EQ(values[0], 2.0F);
        }
        run_step(engine, 2);
        CHECK_OK(run(engine, removal(set)));
        freeze(engine, 2);
        CHECK(engine.counters().thaws.get() >= 2);
      },
      frozen_config());
}

// A part of a frozen step alone, as in an evaluation between epochs.
TEST(frozen_schedule_thaws_where_a_part_of_it_comes_alone) {
  for (const Hosts& hosts : kWorlds) {
    run_world(
        hosts,
        [](int, Engine& engine) {
          freeze(engine, 4);
          for (int step = 0; step < 3; ++step) {
            std::vector<float> values(11, 1);
            CHECK_OK(run(engine, allreduce_entry("grad3", values)));
            CHECK_EQ(values[0], static_cast<float>(engine.size()));
          }
          freeze(engine, 4);
        },
        frozen_config());
  }
}

// Rank 0 has submitted all of the step when its first round begins, and that round takes long.
TEST(frozen_schedule_stays_while_a_long_round_runs) {
  run_world(
      {0, 0},
      [](int rank, Engine& engine) {
        freeze(engine, 2);
        const Counters before = engine.counters();
        for (int step = 0; step < 5; ++step) {
          std::vector<float> a(8, 1);
          std::vector<float> b(9, 1);
          const EntryPtr first = allreduce_entry("grad0", a);
          const EntryPtr second = allreduce_entry("grad1", b);
          if (rank == 0) first->completion->then([] { std::this_thread::sleep_for(50ms); });
          if (rank == 1) std::this_thread::sleep_for(5ms);
          CHECK_OK(engine.enqueue(first, /*blocking=*/false));
          if (rank == 1) std::this_thread::sleep_for(5ms);
          CHECK_OK(engine.enqueue(second, /*blocking=*/false));
          CHECK_OK(finish(engine, first));
          CHECK_OK(finish(engine, second));
          CHECK_EQ(b[8], 2.0F);
        }
        const Counters after = engine.counters();
        CHECK(after.frozen_rounds.get() > before.frozen_rounds.get() + 5);
        CHECK_EQ(after.thaws.get(), before.thaws.get());
        run_step(engine, 2);  // so that nobody leaves before all have counted
      },
      frozen_config());
}

TEST(frozen_schedule_knows_that_a_rank_has_left) {
  for (const Hosts& hosts : kWorlds) {
    auto engines = make_engines(hosts, frozen_config());
    std::vector<std::thread> threads;
    for (auto& engine : engines) {
      threads.emplace_back([&hosts, &engine = *engine] {
        freeze(engine, 2);
        if (engine.rank() + 1 == static_cast<int>(hosts.size())) return engine.shutdown();
        std::vector<float> values(8);
        const Status status = run(engine, allreduce_entry("grad0", values));
        CHECK_STATUS(status, StatusCode::kRankFailed);
        CHECK_EQ(status.failed_rank(), static_cast<int>(hosts.size()) - 1);
        CHECK(has(status.message(), "grad0") && has(status.message(), "left after"));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(frozen_schedule_knows_that_a_rank_has_died) {
  for (const Hosts& hosts : kWorlds) {
    auto engines = make_engines(hosts, frozen_config());
    std::vector<std::thread> threads;
    for (auto& engine : engines) {
      threads.emplace_back([&engine = *engine] {
        freeze(engine, 2);
        if (engine.rank() == 1) return engine.abort("the test ends rank 1");
        std::vector<float> values(8);
        const Status status = run(engine, allreduce_entry("grad0", values));
        CHECK_STATUS(status, StatusCode::kRankFailed);
        CHECK(has(status.message(), "the test ends rank 1"));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(frozen_schedule_lets_deadlocks_be_proven) {
  Config config = frozen_config();
  config.deadlock_grace = 0.2;
  run_world(
      {0, 0},
      [](int rank, Engine& engine) {
        freeze(engine, 2);
        std::vector<float> values(8 + static_cast<std::size_t>(rank));
        const EntryPtr entry = allreduce_entry("grad" + std::to_string(rank), values);
        CHECK_OK(engine.enqueue(entry, /*blocking=*/false));
        std::this_thread::sleep_for(100ms);
        engine.note_blocked({entry});
        CHECK_STATUS(finish(engine, entry), StatusCode::kDeadlock);
      },
      config);
}

TEST(frozen_schedule_thaws_before_a_stall_is_told) {
  Config config = frozen_config();
  config.stall_shutdown = 0.4;
  config.stall_warning = 0.2;
  run_world(
      {0, 0, 1},
      [](int rank, Engine& engine) {
        freeze(engine, 2);
        if (rank == 2) return std::this_thread::sleep_for(900ms);
        std::vector<float> values(8);
        const Status status = run(engine, allreduce_entry("grad0", values));
        CHECK_STATUS(status, StatusCode::kStalled);
        CHECK(has(status.message(), "grad0"));
      },
      config);
}

// The engine of rank `busy` is busy in a callback, so that it cannot even vote to thaw, until every
// other rank has said for whom it waits: `told`, by rank; "": this one submits nothing before that.
void check_silent_engine(const Hosts& hosts, int busy, const std::vector<std::string>& told) {
  Config config = frozen_config();
  config.stall_warning = 0.3;
  const auto waiting = std::count_if(told.begin(), told.end(), [](auto& one) { return one != ""; });
  std::atomic<int> seen{0};
  const auto all_have_seen = [&] { return seen.load() == waiting; };
  const auto body = [&](int rank, Engine& engine) {
    freeze(engine, 2);
    std::vector<float> last(8, 1);
    const EntryPtr entry = allreduce_entry("grad0", last);
    if (rank == busy) entry->completion->then([&] { CHECK(soon(all_have_seen)); });
    CHECK_OK(run(engine, entry));
    const std::string& text = told[static_cast<std::size_t>(rank)];
    if (text.empty()) CHECK(soon(all_have_seen));
    std::vector<float> values(4, 1);
    const EntryPtr next = allreduce_entry("new", values);
    CHECK_OK(engine.enqueue(next, /*blocking=*/false));
    if (!text.empty()) {
      const auto is_told = [&](const Event& one) {
        return one.kind == "stall" && one.name == "new" &&
               has(one.text,
                   "allreduce 'new' waits for " + text + ", whose engine does not answer");
      };
      CHECK(soon([&] {
        const std::vector<Event> events = engine.live().events;
        return std::any_of(events.begin(), events.end(), is_told);
      }));
      // The live view has it from rank 0.
      CHECK(rank > 0 || soon([&] {
              const std::vector<Stall> stalls = engine.live().stalls;
              return stalls.size() == 1 && stalls[0].name == "new" &&
                     std::count(stalls[0].missing.begin(), stalls[0].missing.end(), busy) == 1 &&
                     stalls[0].submitted[0] == 0;
            }));
      ++seen;
    }
    CHECK_OK(finish(engine, next));
    CHECK_EQ(values[0], static_cast<float>(engine.size()));
    if (rank == 0) CHECK(soon([&] { return engine.live().stalls.empty(); }));
  };
  run_world(hosts, body, config);
}

TEST(frozen_schedule_tells_of_an_engine_that_does_not_answer) {
  std::vector<std::thread> worlds;
  const auto check = [&](const Hosts& hosts, int busy, const std::vector<std::string>& told) {
    worlds.emplace_back([=] { check_silent_engine(hosts, busy, told); });
  };
  check({0, 0}, 1, {"rank 1", ""});
  check({0, 0, 0, 0}, 2, {"rank 2", "rank 2", "", "rank 2"});
  check({0, 0, 1, 1}, 3, {"one of ranks 2, 3", "one of ranks 2, 3", "rank 3", ""});
  check({0, 1, 1}, 2, {"one of ranks 1, 2", "rank 2", ""});
  // Rank 2 has not heard from rank 0 that rank 1 wants to negotiate, so it is not to blame.
  check({0, 0, 0}, 0, {"", "rank 0", ""});
  for (std::thread& world : worlds) world.join();
}
