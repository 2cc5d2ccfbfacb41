// Which ranks count as deadlocked, and what they are told. In whole engines a rank has the threads
// that its test starts, and says itself, as Python's bindings do, that they all wait.
#include <memory>
#include <span>

#include "check.h"
#include "coordinators.h"
#include "cpp/engine/engine_worlds.h"
#include "negotiation/deadlock_watch.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr double kGrace = 2;

Request barrier_of(const std::string& name, std::uint32_t set = 0) {
  Request request = allreduce_of(name, 0, set);
  request.kind = Kind::kBarrier;
  request.tensors.clear();
  return request;
}

Request send_of(const std::string& name, int source, int destination) {
  Request request = allreduce_of(name, 4);
  request.kind = Kind::kSend;
  request.ranks = {source, destination};
  return request;
}

// A coordinator whose ranks submit, and say that they wait.
struct Waits {
  explicit Waits(int size, double grace = kGrace) : coordinator(size, config_of(grace)) {}
  static Config config_of(double grace) {
    Config config = quiet_config();
    config.deadlock_grace = grace;
    return config;
  }

  void submit(int rank, const Request& request, Coordinator::TimePoint now = kStart) {
    CHECK_OK(coordinator.submit(rank, request, now));
    ++submitted[rank];
  }
  void report(int rank, const std::vector<Request>& requests, std::uint32_t pending,
              Coordinator::TimePoint now = kStart) {
    Blocked blocked;
    blocked.submitted = submitted[rank];
    blocked.pending = pending;
    for (const Request& request : requests) {
      blocked.keys.push_back(request.key());
      blocked.places.push_back(places[rank]);
    }
    CHECK(coordinator.reported(rank, encode(blocked), now));
  }
  // The rank submits the request, and waits for it.
  void block(int rank, const Request& request, Coordinator::TimePoint now = kStart) {
    submit(rank, request, now);
    report(rank, {request}, 1, now);
  }
  std::map<std::string, Status> failures(Coordinator::TimePoint now) {
    coordinator.tick(now);
    std::map<std::string, Status> failed;
    for (const Response& response : coordinator.take_responses()) {
      if (!response.error.ok()) failed[response.request.name] = response.error;
    }
    return failed;
  }
  bool none(Coordinator::TimePoint now = kStart + 100s) { return failures(now).empty(); }

  Coordinator coordinator;
  std::map<int, std::uint64_t> submitted;  // The key is a rank.
  std::map<int, std::string> places;       // where a rank waits
};

}  // namespace

TEST(deadlock_of_two_ranks_fails_both_operations_after_the_grace) {
  Waits waits(2);
  waits.block(0, barrier_of("x"));
  waits.block(1, allreduce_of("y", 4), kStart + 100ms);
  CHECK(waits.coordinator.deadlock_watch().due() == kStart + 1s);
  CHECK(waits.none(kStart + 1s));
  CHECK(waits.coordinator.deadlock_watch().due() == kStart + 1100ms);
  const auto failed = waits.failures(kStart + 1100ms);
  CHECK_EQ(failed.size(), std::size_t{2});
  for (const auto& [name, error] : failed) CHECK_STATUS(error, StatusCode::kDeadlock);
  const std::string side_x = "rank 0 waits for rank 1 in barrier 'x'";
  const std::string side_y = "rank 1 waits for rank 0 in allreduce 'y'";
  const std::string rest =
      ": call the same operations in the same order on all ranks, and none of them under `if "
      "hvd.rank() == 0:`; if ranks have different numbers of steps, end the loop on every rank "
      "with "
      "hvd.join(), or, with torch.distributed, give all ranks the same number of steps";
  CHECK_EQ(failed.at("x").message(), "deadlock: " + side_x + ", and " + side_y + rest);
  CHECK_EQ(failed.at("y").message(), "deadlock: " + side_y + ", and " + side_x + rest);
  CHECK(waits.coordinator.idle());
  CHECK(!waits.coordinator.deadlock_watch().due());
}

TEST(deadlock_says_where_each_rank_waits) {
  Waits waits(3);
  waits.places = {{0, "train.py:6"}, {1, "train.py:17"}, {2, "/home/me/train.py:17"}};
  waits.block(0, barrier_of("x"));
  waits.block(1, allreduce_of("y", 4));
  waits.block(2, allreduce_of("y", 4));
  CHECK(has(waits.failures(kStart + 1s).at("x").message(),
            "rank 0 waits for rank 1 in barrier 'x' (train.py:6), and rank 1 waits for rank 0 in "
            "allreduce 'y' (train.py:17); also waiting: rank 2 in allreduce 'y' "
            "(/home/me/train.py:17): call"));
}

TEST(deadlock_errors_come_to_all_ranks_at_once_though_some_came_later) {
  Waits waits(4);
  waits.block(1, barrier_of("x"));
  waits.block(2, allreduce_of("y", 4));
  waits.block(0, barrier_of("x"), kStart + 300ms);
  waits.block(3, send_of("s", 0, 3), kStart + 600ms);
  CHECK(waits.none(kStart + 1s));
  CHECK(waits.none(kStart + 1300ms));
  const auto failed = waits.failures(kStart + 1600ms);
  CHECK_EQ(failed.size(), std::size_t{3});
  CHECK(has(failed.at("y").message(), "deadlock: rank 2 waits for rank 0 in allreduce 'y'"));
}

TEST(deadlock_of_transfers_goes_round_and_says_what_to_do) {
  Waits waits(4);
  for (int rank = 0; rank < 3; ++rank) {
    waits.block(rank, send_of("s" + std::to_string(rank), (rank + 1) % 3, rank));
  }
  waits.block(3, send_of("tail", 0, 3));
  const auto failed = waits.failures(kStart + 1s);
  CHECK_EQ(failed.size(), std::size_t{4});
  const std::string text = failed.at("s1").message();
  CHECK(has(text,
            "deadlock: rank 1 waits for rank 2 in send 's1' from rank 2 to rank 1, rank 2 "
            "waits for rank 0 in send 's2' from rank 0 to rank 2, and rank 0 waits for rank "
            "1 in send 's0'"));
  CHECK(has(text, "; also waiting: rank 3 in send 'tail'"));
  CHECK(has(text, "submit both transfers before they wait, with dist.isend()"));
  CHECK(has(failed.at("tail").message(), "deadlock: rank 3 waits for rank 0 in send 'tail'"));
}

TEST(deadlock_report_is_void_once_the_rank_submits_or_is_answered) {
  for (const bool submits : {true, false}) {
    Waits waits(2);
    const Request other = allreduce_of("other", 4);
    waits.submit(0, other);
    waits.submit(0, barrier_of("x"));
    waits.report(0, {barrier_of("x")}, 2);
    waits.block(1, allreduce_of("y", 4));
    if (submits) {
      waits.submit(0, allreduce_of("late", 4), kStart + 500ms);
      waits.submit(1, other, kStart + 500ms);  // answered: two are pending, as before
      waits.report(1, {allreduce_of("y", 4)}, 1, kStart + 500ms);
    } else {
      waits.submit(1, other, kStart + 500ms);
      waits.report(1, {allreduce_of("y", 4)}, 1, kStart + 500ms);
    }
    CHECK(waits.none());
    // The rank reports anew, and the other's report still holds.
    waits.report(0, {barrier_of("x")}, submits ? 2 : 1, kStart + 200s);
    CHECK_EQ(waits.failures(kStart + 201s).size(), std::size_t{2});
  }
}

TEST(deadlock_report_survives_and_is_refused_where_it_is_cut) {
  const Blocked sent{
      9, 7, {"0:x", "0>1>2:" + std::string(kMaxNameBytes, 'n'), ""}, {"a.py:1", "", "b.py:2"}};
  const Bytes body = encode(sent);
  Blocked read;
  CHECK(decode(body, read));
  CHECK(read == sent);
  Waits waits(2);
  for (std::size_t length = 0; length < body.size(); ++length) {
    const auto part = std::span(body).first(length);
    CHECK(!decode(part, read));
    CHECK(!waits.coordinator.reported(1, part, kStart));
  }
  CHECK(!decode(encode({1, 1, {std::string(kMaxKeyBytes + 1, 'n')}, {}}), read));
}

TEST(deadlock_of_a_name_that_is_used_again_is_not_that_of_its_last_use) {
  Waits waits(2);
  waits.submit(0, barrier_of("x"));
  waits.submit(1, barrier_of("x"));
  waits.submit(1, barrier_of("x"));       // the next one, before rank 0 has read its answer
  waits.report(0, {barrier_of("x")}, 1);  // of the first one
  waits.report(1, {barrier_of("x")}, 1);
  CHECK(waits.none());
}

TEST(deadlock_does_not_concern_joins_and_late_gradients) {
  Waits waits(3);
  waits.block(0, join_request());
  waits.block(1, send_of("a", 2, 1));
  waits.block(2, send_of("b", 1, 2));
  auto failed = waits.failures(kStart + 1s);
  CHECK_EQ(failed.size(), std::size_t{2});
  CHECK(failed.contains("a") && failed.contains("b"));

  Waits some(2);
  Request request = allreduce_of("r", 4);
  request.late = LateTerms{"key", 0, 1, 1'000'000'000, 1, true};
  some.block(0, request);
  some.block(1, barrier_of("x"));
  CHECK(some.none());
}

TEST(deadlock_of_a_change_of_process_sets_fails_the_change_for_all_ranks) {
  Waits waits(3);
  Request change = barrier_of("#change");
  change.kind = Kind::kAddProcessSet;
  change.ranks = {0, 1};
  waits.block(0, change);
  waits.block(2, allreduce_of("x", 4));
  const auto failed = waits.failures(kStart + 1s);
  CHECK_EQ(failed.size(), std::size_t{2});
  CHECK(has(failed.at("#change").message(),
            "rank 0 waits for rank 2 in add_process_set, and rank 2 waits for rank 0 in allreduce "
            "'x': every rank changes process sets at the same point"));
  waits.submit(1, change);
  CHECK_STATUS(waits.coordinator.take_responses().at(0).error, StatusCode::kDeadlock);
}

TEST(deadlock_of_a_removal_and_what_waits_in_the_set_fails_both) {
  Waits waits(3);
  waits.coordinator.add_set({1, {0, 1}, 1, 0});
  Request removal = barrier_of("#change");
  removal.kind = Kind::kRemoveProcessSet;
  removal.ranks = {0, 1};
  for (const int rank : {0, 2}) waits.block(rank, removal);
  waits.block(1, allreduce_of("x", 4, 1));
  const auto failed = waits.failures(kStart + 1s);
  CHECK_EQ(failed.size(), std::size_t{2});
  CHECK(has(failed.at("#change").message(),
            "rank 0 waits for rank 1 in remove_process_set, and rank 1 waits for rank 0 in "
            "allreduce 'x'"));
  waits.submit(1, removal);  // a later rank gets the same error
  CHECK_STATUS(waits.coordinator.take_responses().at(0).error, StatusCode::kDeadlock);
}

TEST(deadlock_of_many_ranks_is_told_in_a_short_text) {
  constexpr int kRanks = 64;
  Waits waits(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    waits.block(rank, rank == 40 ? allreduce_of("y", 4) : barrier_of("x"));
  }
  const auto failed = waits.failures(kStart + 1s);
  CHECK(has(failed.at("x").message(), "rank 8 in barrier 'x' and 54 more ranks: call the same"));
  Waits ring(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    ring.block(rank, send_of(std::to_string(rank), (rank + 1) % kRanks, rank));
  }
  const auto circle = ring.failures(kStart + 1s);
  CHECK_EQ(circle.size(), std::size_t{kRanks});
  CHECK(has(circle.at("0").message(),
            "rank 7 to rank 6, rank 7 waits for rank 8 in send '7' from "
            "rank 8 to rank 7, and so on: ranks that send"));
}

TEST(deadlock_is_not_looked_for_without_a_grace) {
  Waits waits(2, /*grace=*/0);
  waits.block(0, barrier_of("x"));
  waits.block(1, allreduce_of("y", 4));
  CHECK(!waits.coordinator.deadlock_watch().due());
  CHECK(waits.none());
}

namespace {

Config impatient_config(double grace = 0.2) {
  Config config = quick_config();
  config.deadlock_grace = grace;
  config.stall_warning = 0;
  return config;
}

EntryPtr barrier_entry(const std::string& name) { return change_entry(Kind::kBarrier, name); }

// Waits without a limit, in the only thread of this rank.
Status block(Engine& engine, const EntryPtr& entry) {
  const auto begun = std::chrono::steady_clock::now();
  while (!engine.wait(*entry, /*blocking=*/true, Deadline::after(10ms))) {
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (waited > 30s) return Status(StatusCode::kTimeout, "the test's own deadline passed");
    if (waited >= engine.blocked_after()) engine.note_blocked({entry});
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

TEST(engine_takes_back_that_its_rank_is_blocked) {
  const auto body = [](int rank, Engine& engine) {
    const EntryPtr first = barrier_entry(rank == 0 ? "a" : "b");
    const EntryPtr second = barrier_entry(rank == 0 ? "b" : "a");
    CHECK_OK(engine.enqueue(first, /*blocking=*/false));
    engine.note_blocked({first});
    std::this_thread::sleep_for(50ms);
    engine.note_blocked({});
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
