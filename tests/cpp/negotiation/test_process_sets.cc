// Process sets: the coordinator's decisions about changes, and whole engines that use them.
#include <atomic>
#include <map>
#include <thread>

#include "check.h"
#include "coordinators.h"
#include "cpp/engine/engine_worlds.h"
#include "host/host_backend.h"
#include "negotiation/coordinator.h"
#include "negotiation/process_set.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

Request change(Kind kind, const std::string& name, const std::vector<std::int64_t>& ranks) {
  Request request;
  request.kind = kind;
  request.name = name;
  request.ranks = ranks;
  return request;
}

Request adding(const std::vector<std::int64_t>& ranks, const std::string& name = "#change.0") {
  return change(Kind::kAddProcessSet, name, ranks);
}

Request removing(const std::vector<std::int64_t>& ranks, const std::string& name = "#change.1") {
  return change(Kind::kRemoveProcessSet, name, ranks);
}

// Makes every rank submit the request, and returns the one response.
Response decide(Coordinator& coordinator, int size, const Request& request) {
  for (int rank = 0; rank < size; ++rank) CHECK_OK(coordinator.submit(rank, request, kStart));
  const auto responses = coordinator.take_responses();
  CHECK_EQ(responses.size(), std::size_t{1});
  return responses.at(0);
}

bool says(const Status& status, const std::string& part) {
  return status.message().find(part) != std::string::npos;
}

}  // namespace

TEST(process_sets_give_free_lanes_again_but_no_id) {
  ProcessSets sets(4);
  sets.add(1, {0, 1});
  sets.add(2, {1, 2});
  CHECK_EQ(sets.get(2)->lane, 2);
  const GroupPtr first = sets.get(1);
  sets.remove(1);
  CHECK(sets.get(1) == nullptr);
  CHECK_EQ(first->ranks, (std::vector<int>{0, 1}));
  sets.add(3, {2, 3});
  CHECK_EQ(sets.get(3)->lane, 1);
  CHECK_EQ(describe(*sets.get(3)), "process set [2, 3]");
}

TEST(coordinator_adds_and_removes_process_sets) {
  Coordinator coordinator = make_coordinator(3);
  CHECK_EQ(decide(coordinator, 3, adding({0, 2})).set_id, 1);
  CHECK_EQ(coordinator.group(1).ranks, (std::vector<int>{0, 2}));
  CHECK_STATUS(decide(coordinator, 3, adding({0, 2})).error, StatusCode::kInvalidArgument);
  CHECK_STATUS(decide(coordinator, 3, adding({0, 1, 2})).error, StatusCode::kInvalidArgument);
  for (const std::vector<std::int64_t>& bad :
       std::vector<std::vector<std::int64_t>>{{}, {1, 0}, {1, 1}, {1, 3}, {-1, 1}}) {
    CHECK_STATUS(decide(coordinator, 3, adding(bad)).error, StatusCode::kInvalidArgument);
  }
  CHECK_EQ(decide(coordinator, 3, removing({0, 2})).set_id, 1);
  CHECK_STATUS(decide(coordinator, 3, removing({0, 2})).error, StatusCode::kInvalidArgument);
  CHECK_EQ(decide(coordinator, 3, adding({0, 2})).set_id, 2);
  CHECK_EQ(coordinator.tables().size(), std::size_t{2});
}

TEST(coordinator_names_the_ranks_that_add_different_process_sets) {
  Coordinator coordinator = make_coordinator(2);
  CHECK_OK(coordinator.submit(0, adding({0}), kStart));
  CHECK_OK(coordinator.submit(1, adding({1}), kStart));
  auto error = coordinator.take_responses().at(0).error;
  CHECK_STATUS(error, StatusCode::kMismatch);
  CHECK(says(error, "rank 0 has [0], rank 1 has [1]"));
  CHECK_OK(coordinator.submit(0, adding({0}), kStart));
  Request barrier = adding({});
  barrier.kind = Kind::kBarrier;
  CHECK_OK(coordinator.submit(1, barrier, kStart));
  error = coordinator.take_responses().at(0).error;
  CHECK_STATUS(error, StatusCode::kMismatch);
  CHECK(says(error, "rank 0 has add_process_set, rank 1 has barrier"));
}

TEST(coordinator_holds_as_many_process_sets_as_there_are_lanes) {
  Coordinator coordinator = make_coordinator(12);
  for (std::size_t i = 1; i <= kMaxProcessSets; ++i) {
    std::vector<std::int64_t> ranks;
    for (int bit = 0; bit < 12; ++bit) {
      if ((i >> bit & 1) != 0) ranks.push_back(bit);
    }
    CHECK_OK(decide(coordinator, 12, adding(ranks)).error);
  }
  CHECK(says(decide(coordinator, 12, adding({10, 11})).error, "no more fit"));
}

TEST(coordinator_frees_the_cache_of_a_removed_process_set) {
  Coordinator coordinator = make_coordinator(2, /*cache=*/1);
  for (std::uint32_t set = 1; set < 5; ++set) {
    CHECK_OK(decide(coordinator, 2, adding({0})).error);
    CHECK_OK(coordinator.submit(0, allreduce_of("x", 4, set), kStart));
    CHECK_EQ(coordinator.take_responses().at(0).cache_id, 0u);
    CHECK_OK(decide(coordinator, 2, removing({0})).error);
  }
}

TEST(coordinator_fails_what_waits_in_a_set_for_a_member_that_has_removed_it) {
  Coordinator coordinator = make_coordinator(3);
  CHECK_OK(decide(coordinator, 3, adding({0, 1})).error);
  CHECK_OK(coordinator.submit(1, allreduce_of("x", 4, 1), kStart));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(coordinator.take_responses().empty());
    CHECK_OK(coordinator.submit(rank, removing({0, 1}), kStart));
  }
  const auto responses = coordinator.take_responses();
  CHECK_EQ(responses.size(), std::size_t{2});
  CHECK_STATUS(responses[0].error, StatusCode::kMismatch);
  CHECK(says(responses[0].error, "rank 0 removes process set [0, 1], but allreduce 'x' of rank 1"));
  CHECK_EQ(responses[0].recipients, std::vector<int>{1});
  CHECK_EQ(responses[1].set_id, 1);
  CHECK(coordinator.idle());
}

namespace {

EntryPtr sum_in(std::uint32_t set, const std::string& name, std::vector<float>& values) {
  return in_set(allreduce_entry(name, values), set);
}

// Sets come and go while their members and the world use them.
void come_and_go(const Hosts& hosts, int rounds) {
  const std::vector<std::vector<int>> choices = {{0, 1}, {1, 2, 3}, {2}, {0, 3}, {0, 2, 3}};
  Config config = quick_config();
  config.cache_capacity = 8;
  run_world(
      hosts,
      [&](int rank, Engine& engine) {
        for (int round = 0; round < rounds; ++round) {
          std::vector<std::uint32_t> sets;
          for (int i = 0; i < 3; ++i) sets.push_back(add_set(engine, choices[(round + i) % 5]));
          for (const std::size_t count : {10, 40000}) {
            std::vector<std::vector<float>> values(3, std::vector<float>(count, 1.0f));
            std::map<int, EntryPtr> entries;
            for (int i = 0; i < 3; ++i) {
              const int which = (i + rank) % 3;  // each rank has an order of its own
              const std::vector<int>& members = choices[(round + which) % 5];
              if (std::count(members.begin(), members.end(), rank) == 0) continue;
              entries[which] = sum_in(sets[which], "x", values[which]);
              CHECK_OK(engine.enqueue(entries[which], false));
            }
            for (const auto& [which, entry] : entries) {
              CHECK_OK(finish(engine, entry, round % 2 == 0));
              const std::size_t members = choices[(round + which) % 5].size();
              CHECK_EQ(values[which].back(), static_cast<float>(members));
            }
          }
          std::vector<float> values(1000, 1.0f);
          CHECK_OK(run(engine, allreduce_entry("world", values)));
          CHECK_EQ(values[999], 4.0f);
          for (int i = 0; i < 3; ++i) CHECK_OK(run(engine, removal(sets[(i + round) % 3])));
          CHECK_STATUS(engine.enqueue(sum_in(sets[0], "x", values), false),
                       StatusCode::kInvalidArgument);
        }
      },
      config);
}

}  // namespace

TEST(engine_process_sets_come_and_go_on_one_host) { come_and_go({0, 0, 0, 0}, 40); }
TEST(engine_process_sets_come_and_go_on_two_hosts) { come_and_go({0, 0, 1, 1}, 20); }

TEST(engine_refuses_changes_and_members_that_cannot_be) {
  run_world({0, 0, 0}, [](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {0, 2});
    CHECK_STATUS(run(engine, addition({0, 2})), StatusCode::kInvalidArgument);
    CHECK_STATUS(run(engine, addition({0, 3})), StatusCode::kInvalidArgument);
    CHECK_STATUS(run(engine, addition({rank})), StatusCode::kMismatch);
    CHECK_STATUS(engine.enqueue(removal(0), true), StatusCode::kInvalidArgument);
    CHECK_STATUS(engine.enqueue(removal(7), true), StatusCode::kInvalidArgument);
    std::vector<float> values(4, 1.0f);
    const Status status = run(engine, sum_in(set, "x", values));
    CHECK_STATUS(status, rank == 1 ? StatusCode::kInvalidArgument : StatusCode::kOk);
    if (rank == 1) CHECK(says(status, "rank 1 is not a member of process set [0, 2]"));
  });
  Engine alone(nullptr, std::make_unique<SelfBackend>(), Config());
  CHECK_STATUS(alone.enqueue(addition({0}), true), StatusCode::kInvalidArgument);
}

TEST(engine_reopens_a_process_set_whose_removal_failed) {
  run_world({0, 0, 0}, [](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {0, 1});
    const std::uint32_t other = add_set(engine, {1, 2});
    std::vector<float> values(4, 1.0f);
    CHECK_STATUS(run(engine, removal(rank == 2 ? other : set, "one")), StatusCode::kMismatch);
    if (rank < 2) {
      CHECK_OK(run(engine, sum_in(set, "x", values)));
      CHECK_EQ(values[0], 2.0f);
    }
    CHECK_OK(run(engine, removal(set, "two")));
  });
}

// Rank 0 decides for all process sets, also while it waits in a collective for a slow rank.
TEST(engine_process_sets_do_not_wait_for_a_collective_of_others) {
  std::atomic<bool> others_are_done{false};
  for (const Hosts& hosts : {Hosts{0, 0, 0, 0}, Hosts{0, 1, 1, 0}}) {
    others_are_done = false;
    run_world(hosts, [&](int rank, Engine& engine) {
      const std::uint32_t outer = add_set(engine, {0, 3});
      const std::uint32_t inner = add_set(engine, {1, 2});
      const std::uint32_t last = add_set(engine, {3});
      std::vector<float> values(100000, 1.0f);
      std::vector<float> own(4, 1.0f);
      const auto slow = sum_in(last, "slow", own);
      slow->completion->then([&] { CHECK(soon([&] { return others_are_done.load(); })); });
      const auto outside = sum_in(outer, "x", values);
      if (rank == 3) {
        CHECK_OK(engine.enqueue(outside, false));
        CHECK_OK(engine.enqueue(slow, false));
      }
      if (rank == 1 || rank == 2) {
        std::this_thread::sleep_for(100ms);  // so that rank 0 waits for rank 3
        for (int step = 0; step < 50; ++step) {
          std::vector<float> inside(step % 2 == 0 ? 10 : 50000, 1.0f);
          CHECK_OK(run(engine, sum_in(inner, "x", inside), step % 3 == 0));
          CHECK_EQ(inside.back(), 2.0f);
        }
        if (rank == 1) others_are_done = true;
        return;
      }
      if (rank == 0) {
        std::this_thread::sleep_for(50ms);  // so that rank 3 is busy
        CHECK_OK(engine.enqueue(outside, true));
      }
      CHECK_OK(finish(engine, outside, rank == 0));
      CHECK_EQ(values.back(), 2.0f);
    });
  }
}

TEST(engine_rank_0_stays_until_the_process_sets_of_others_are_done) {
  Config config = quick_config();
  config.shutdown_timeout = 40;
  const auto body = [](int rank, Engine& engine) {
    const std::uint32_t inner = add_set(engine, {1, 2});
    for (int step = 0; rank != 0 && step < 20; ++step) {
      std::this_thread::sleep_for(10ms);
      std::vector<float> values(10, 1.0f);
      CHECK_OK(run(engine, sum_in(inner, "x", values)));
    }
  };
  const auto begun = std::chrono::steady_clock::now();
  run_world({0, 0, 0}, body, config);
  // Rank 0 does not wait for the timeout after the last goodbye.
  CHECK(std::chrono::steady_clock::now() - begun < 15s);
}

// What was agreed while rank 0 was in a collective still ends when the world ends in there.
TEST(engine_fails_what_was_agreed_during_a_collective_that_fails) {
  Config config = quick_config();
  config.collective_timeout = 1;
  std::atomic<bool> failed{false};
  const auto body = [&](int rank, Engine& engine) {
    const std::uint32_t outer = add_set(engine, {0, 2});
    const std::uint32_t inner = add_set(engine, {0, 1});
    const std::uint32_t last = add_set(engine, {2});
    std::vector<float> first(4, 1.0f);
    std::vector<float> second(4, 1.0f);
    if (rank == 2) {
      const auto slow = sum_in(last, "slow", first);
      slow->completion->then([&] { CHECK(soon([&] { return failed.load(); })); });
      const auto never = sum_in(outer, "x", second);
      CHECK_OK(engine.enqueue(never, false));
      CHECK_OK(engine.enqueue(slow, false));
      (void)finish(engine, never);
      return;
    }
    const auto outside = sum_in(outer, "x", first);
    const auto inside = sum_in(inner, "x", second);
    std::this_thread::sleep_for(rank == 0 ? 50ms : 100ms);  // rank 2 is busy; rank 0 waits for it
    if (rank == 0) CHECK_OK(engine.enqueue(outside, false));
    CHECK_OK(engine.enqueue(inside, false));
    CHECK(!finish(engine, inside).ok());
    if (rank == 0) CHECK_STATUS(finish(engine, outside), StatusCode::kTimeout);
    if (rank == 0) failed = true;
  };
  run_world({0, 0, 0}, body, config);
}

// In an elastic job a commit comes between the two, by the members as they were.
TEST(coordinator_of_an_elastic_job_cuts_the_round_where_members_change) {
  const auto forms = [](Coordinator& coordinator) {
    std::string text;
    for (const Response& one : coordinator.take_responses()) {
      text += one.form == Response::Form::kCut ? '|' : 'x';
    }
    return text;
  };
  for (const bool elastic : {false, true}) {
    Coordinator coordinator(2, quiet_config(), {}, elastic);
    coordinator.skip_ids(6);
    const Response added = decide(coordinator, 2, adding({1}));
    CHECK_EQ(added.set_id, 7);
    CHECK_OK(coordinator.submit(1, allreduce_of("x", 1, 7), kStart));
    for (int rank = 0; rank < 2; ++rank) {
      CHECK_OK(coordinator.submit(rank, removing({1}), kStart));
      CHECK_OK(coordinator.submit(rank, allreduce_of("y", 1), kStart));
    }
    CHECK_EQ(forms(coordinator), std::string(elastic ? "x|xx" : "xxx"));
    CHECK_EQ(coordinator.group(7).ranks, std::vector<int>{1});  // one of the answers names it
    CHECK(coordinator.take_responses().empty());
    CHECK_EQ(coordinator.tables().size(), std::size_t{1});
    CHECK_OK(coordinator.submit(0, allreduce_of("z", 1), kStart));
    CHECK_OK(coordinator.submit(1, join_request(), kStart));
    CHECK_OK(coordinator.submit(0, join_request(), kStart));
    CHECK_EQ(forms(coordinator), std::string(elastic ? "|x|x" : "xx"));
  }
}

// The last answers of a set and its removal may come together.
TEST(engine_removes_a_set_right_behind_its_last_collective) {
  for (const Hosts& hosts : std::vector<Hosts>{{0, 0}, {0, 1, 0}}) {
    run_world(hosts, [](int rank, Engine& engine) {
      for (int i = 0; i < 20; ++i) {
        const std::uint32_t set = add_set(engine, {1});
        std::vector<float> values = {1};
        const EntryPtr last = sum_in(set, "last", values);
        if (rank == 1) CHECK_OK(engine.enqueue(last, false));
        CHECK_OK(run(engine, removal(set)));
        if (rank == 1) CHECK_OK(finish(engine, last));
      }
    });
  }
}
