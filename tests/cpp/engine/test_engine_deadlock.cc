// Whole engines whose ranks wait for each other. A rank here has the threads that its test starts,
// and says itself, as Python's bindings do, that they all wait.
#include "check.h"
#include "engine_worlds.h"
#include "negotiation/deadlock/blocked_report.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

Config impatient_config(double grace = 0.2) {
  Config config = quick_config();
  config.deadlock_grace = grace;
  config.stall_warning = 0;
  return config;
}

BlockedReport& report_of(Engine& engine) { return *engine.find<BlockedReport>(); }

void note(Engine& engine, std::vector<EntryPtr> waits) { report_of(engine).note(std::move(waits)); }

EntryPtr barrier_entry(const std::string& name) { return change_entry(Kind::kBarrier, name); }

// Waits without a limit, in the only thread of this rank.
Status block(Engine& engine, const EntryPtr& entry) {
  const auto begun = std::chrono::steady_clock::now();
  while (!engine.wait(*entry, /*blocking=*/true, Deadline::after(10ms))) {
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (waited > 30s) return Status(StatusCode::kTimeout, "the test's own deadline passed");
    if (waited >= report_of(engine).half_of_grace()) note(engine, {entry});
  }
  return entry->completion->status();
}

Status run_blocked(Engine& engine, const EntryPtr& entry) {
  const Status status = engine.enqueue(entry, /*blocking=*/true);
  return status.ok() ? block(engine, entry) : status;
}

void check_sum(Engine& engine, const std::string& name) {
  std::vector<float> values(3, 1.0F);
  CHECK_OK(run_blocked(engine, allreduce_entry(name, values)));
  CHECK_EQ(values, std::vector<float>(3, static_cast<float>(engine.size())));
}

void check_deadlock(const Status& status, const std::string& side) {
  CHECK_STATUS(status, StatusCode::kDeadlock);
  CHECK(has(status.message(), "deadlock: "));
  CHECK(has(status.message(), side));
}

const std::vector<Hosts> kDeadlockWorlds = {{0, 0}, {0, 1}, {0, 0, 0, 0}, {0, 1, 2}};

}  // namespace

TEST(engine_fails_what_ranks_wait_for_in_different_order) {
  for (const Hosts& hosts : kDeadlockWorlds) {
    const auto body = [](int rank, Engine& engine) {
      check_sum(engine, "before");
      const bool other = rank == 1;
      check_deadlock(run_blocked(engine, barrier_entry(other ? "b" : "a")),
                     "rank 1 waits for rank 0 in barrier 'b'");
      check_deadlock(run_blocked(engine, barrier_entry(other ? "a" : "b")),
                     "rank 0 waits for rank 1 in barrier 'b'");
      check_sum(engine, "after");
    };
    run_world(hosts, body, impatient_config());
  }
}

// Each rank waits for what another thread of the other rank submits later.
TEST(engine_sees_no_deadlock_where_another_thread_submits_late) {
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 1}}) {
    const auto body = [](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        const EntryPtr first = barrier_entry(rank == 0 ? "a" : "b");
        const EntryPtr second = barrier_entry(rank == 0 ? "b" : "a");
        std::thread late([&] {
          std::this_thread::sleep_for(300ms);
          CHECK_OK(engine.enqueue(second, /*blocking=*/false));
        });
        // One thread waits, and says so only once the other one has submitted.
        CHECK_OK(engine.enqueue(first, /*blocking=*/true));
        CHECK_OK(finish(engine, first));
        late.join();
        CHECK_OK(block(engine, second));
      }
    };
    run_world(hosts, body, impatient_config());
  }
}

TEST(engine_takes_back_that_its_rank_is_blocked) {
  const auto body = [](int rank, Engine& engine) {
    const EntryPtr first = barrier_entry(rank == 0 ? "a" : "b");
    const EntryPtr second = barrier_entry(rank == 0 ? "b" : "a");
    CHECK_OK(engine.enqueue(first, /*blocking=*/false));
    note(engine, {first});
    std::this_thread::sleep_for(50ms);
    note(engine, {});
    std::this_thread::sleep_for(1s);
    CHECK_OK(engine.enqueue(second, /*blocking=*/false));
    CHECK_OK(finish(engine, first));
    CHECK_OK(finish(engine, second));
  };
  run_world({0, 0}, body, impatient_config(0.6));
}

// Rank 0 waits for rank 1, which waits for what the end of another operation makes rank 0 submit.
TEST(engine_sees_no_deadlock_where_a_continuation_submits) {
  const auto body = [](int rank, Engine& engine) {
    const EntryPtr slow = barrier_entry("slow");
    const EntryPtr next = barrier_entry("next");
    const EntryPtr last = barrier_entry("last");
    if (rank == 0) {
      slow->completion->then([&] { CHECK_OK(engine.enqueue(next, /*blocking=*/false)); });
      CHECK_OK(engine.enqueue(slow, /*blocking=*/false));
      CHECK_OK(run_blocked(engine, last));
      CHECK_OK(block(engine, next));
      return;
    }
    if (rank == 2) std::this_thread::sleep_for(600ms);
    if (rank == 2) CHECK_OK(engine.enqueue(slow, /*blocking=*/false));
    if (rank == 1) CHECK_OK(engine.enqueue(slow, /*blocking=*/false));
    CHECK_OK(run_blocked(engine, next));
    CHECK_OK(block(engine, slow));
    CHECK_OK(run_blocked(engine, last));
  };
  run_world({0, 0, 0}, body, impatient_config());
}

TEST(engine_sends_nothing_of_waits_that_are_short) {
  const auto body = [](int rank, Engine& engine) {
    for (int step = 0; step < 10; ++step) check_sum(engine, "x");
    const std::uint64_t sent = engine.counters().messages_sent.get();
    for (int step = 0; step < 100; ++step) check_sum(engine, "x");
    // Rank 1 asks, and rank 0 answers.
    CHECK_EQ(engine.counters().messages_sent.get() - sent, std::uint64_t{100});
    (void)rank;
  };
  run_world({0, 0}, body, impatient_config(20));
}
