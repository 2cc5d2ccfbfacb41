// Whole engines whose ranks join at different times.
#include <cmath>
#include <latch>
#include <numeric>

#include "check.h"
#include "engine_worlds.h"
#include "host/host_backend.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

const std::vector<Hosts> kJoinWorlds = {{0, 0}, {0, 1}, {0, 0, 0}, {0, 0, 1}, {0, 1, 1, 0}};

int join(Engine& engine) {
  const EntryPtr entry = join_entry();
  CHECK_OK(run(engine, entry));
  return entry->completion->last_joined;
}

// The number of steps that a rank has in a round. In each round another rank is the last to join.
int steps_of(int rank, int size, int round) { return 3 * ((rank + round) % size) + 1; }

std::vector<int> active_in(int step, int size, int round) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (step < steps_of(rank, size, round)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

TEST(engine_reduces_over_those_that_have_not_joined) {
  for (const Hosts& hosts : kJoinWorlds) {
    run_world(hosts, [](int rank, Engine& engine) {
      const int size = engine.size();
      for (int round = 0; round < 2 * size; ++round) {
        for (int step = 0; step < steps_of(rank, size, round); ++step) {
          const std::vector<int> active = active_in(step, size, round);
          const auto sum = static_cast<float>(std::accumulate(active.begin(), active.end(), 0));
          const auto count = static_cast<float>(active.size());
          // Large enough for several chunks now and then.
          std::vector<float> mean(step % 3 == 2 ? 300000 : 7, static_cast<float>(rank));
          std::vector<float> most(5, static_cast<float>(rank));
          std::vector<float> weighted(3, static_cast<float>(rank));
          EntryPtr first = allreduce_entry("mean" + std::to_string(step), mean, ReduceOp::kAverage);
          EntryPtr second = allreduce_entry("min", most, ReduceOp::kMin);
          EntryPtr third = allreduce_entry("weighted", weighted, ReduceOp::kAverage);
          third->request.weighted = true;
          third->weight = rank + 1;
          CHECK_OK(engine.enqueue(first, false));
          CHECK_OK(engine.enqueue(second, false));
          CHECK_OK(engine.enqueue(third, false));
          CHECK_OK(finish(engine, first));
          CHECK_OK(finish(engine, second));
          CHECK_OK(finish(engine, third));
          CHECK_EQ(first->completion->members, static_cast<int>(active.size()));
          CHECK_EQ(mean, std::vector<float>(mean.size(), sum / count));
          CHECK_EQ(most, std::vector<float>(5, static_cast<float>(active[0])));
          float weights = 0;
          float total = 0;
          for (const int one : active) {
            weights += static_cast<float>(one + 1);
            total += static_cast<float>(one * (one + 1));
          }
          CHECK(std::abs(weighted[0] - total / weights) < 1e-5);
        }
        CHECK_EQ(join(engine), (2 * size - 1 - round % size) % size);  // who has the most steps
      }
    });
  }
}

TEST(engine_moves_rows_between_those_that_have_not_joined) {
  for (const Hosts& hosts : kJoinWorlds) {
    run_world(hosts, [](int rank, Engine& engine) {
      const int size = engine.size();
      for (int round = 0; round < size; ++round) {
        for (int step = 0; step < steps_of(rank, size, round); ++step) {
          const std::vector<int> active = active_in(step, size, round);
          const auto count = static_cast<std::int64_t>(active.size());
          std::vector<float> expected;
          std::vector<std::int64_t> rows(static_cast<std::size_t>(size));
          for (const int one : active) {
            expected.insert(expected.end(), one + 1, static_cast<float>(one));
            rows[one] = one + 1;
          }
          std::vector<float> values(rank + 1, static_cast<float>(rank));
          EntryPtr gather = rows_entry(Kind::kAllgather, "gather", values);
          CHECK_OK(run(engine, gather));
          CHECK_EQ(gather->completion->first_dimensions, rows);
          CHECK_EQ(output_of(gather), expected);

          // A row to every active rank, then two rows by splits.
          std::vector<std::int64_t> ones(static_cast<std::size_t>(size));
          std::vector<std::int64_t> splits(static_cast<std::size_t>(size));
          std::vector<float> sent;
          std::vector<float> got;
          for (const int one : active) {
            ones[one] = 1;
            splits[one] = 2;
            sent.push_back(static_cast<float>(10 * rank + one));
            got.push_back(static_cast<float>(10 * one + rank));
          }
          EntryPtr swap = rows_entry(Kind::kAlltoall, "swap", sent);
          CHECK_OK(run(engine, swap));
          CHECK_EQ(swap->completion->first_dimensions, ones);
          CHECK_EQ(output_of(swap), got);
          std::vector<float> twice(2 * active.size(), static_cast<float>(rank));
          EntryPtr exchange = rows_entry(Kind::kAlltoall, "exchange", twice);
          exchange->request.splits = splits;
          CHECK_OK(run(engine, exchange));
          CHECK_EQ(exchange->completion->first_dimensions, splits);

          std::vector<float> whole(2 * static_cast<std::size_t>(count) + 1, 1.0F);
          EntryPtr scatter = rows_entry(Kind::kReducescatter, "scatter", whole);
          CHECK_OK(run(engine, scatter));
          const std::int64_t own = 2 + (rank == active[0] ? 1 : 0);
          CHECK_EQ(output_of(scatter), std::vector<float>(own, static_cast<float>(count)));
          scatter = rows_entry(Kind::kReducescatter, "by splits", whole);
          scatter->request.splits = splits;
          scatter->request.splits[active.back()] += 1;
          CHECK_OK(run(engine, scatter));
          const std::int64_t given = 2 + (rank == active.back() ? 1 : 0);
          CHECK_EQ(output_of(scatter), std::vector<float>(given, static_cast<float>(count)));

          std::vector<float> shared(4, static_cast<float>(rank));
          EntryPtr broadcast = allreduce_entry("broadcast", shared);
          broadcast->request.kind = Kind::kBroadcast;
          broadcast->request.root = active.back();
          CHECK_OK(run(engine, broadcast));
          CHECK_EQ(shared, std::vector<float>(4, static_cast<float>(active.back())));
          CHECK_OK(run(engine, change_entry(Kind::kBarrier, "barrier")));
        }
        join(engine);
      }
    });
  }
}

TEST(engine_refuses_what_only_a_joined_rank_could_give_and_goes_on) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    if (rank != 1) {
      std::vector<float> values(4, 1.0F);
      // Until rank 1 has joined, its part would be missed.
      EntryPtr broadcast = allreduce_entry("b", values);
      broadcast->request.kind = Kind::kBroadcast;
      broadcast->request.root = 1;
      Status status = run(engine, broadcast);
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      CHECK_EQ(status.message(),
               "broadcast 'b': its root is rank 1, which has joined and gives nothing any more; "
               "name a root that still takes part");
      EntryPtr swap = rows_entry(Kind::kAlltoall, "s", values);
      swap->request.splits = {rank == 0 ? 2 : 4, rank == 0 ? 2 : 0, 0};
      status = run(engine, swap);
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      CHECK_EQ(status.message(),
               "alltoall 's': rank 0 sends 2 rows to rank 1, which has joined and takes nothing "
               "any more; send it none");
      EntryPtr scatter = rows_entry(Kind::kReducescatter, "r", values);
      scatter->request.splits = {1, 3, 0};
      status = run(engine, scatter);
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      CHECK(has(status.message(), "sends 3 rows to rank 1, which has joined and takes nothing"));
      std::vector<float> odd(3, 1.0F);
      status = run(engine, rows_entry(Kind::kAlltoall, "odd", odd));
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      CHECK(has(status.message(), "in a process set of 3, 1 of which have joined"));
      CHECK_OK(run(engine, allreduce_entry("sum", values)));
      CHECK_EQ(values, std::vector<float>(4, 2.0F));
    }
    join(engine);
    std::vector<float> values(1, 1.0F);
    CHECK_OK(run(engine, allreduce_entry("sum", values)));
    CHECK_EQ(values[0], 3.0F);
  });
}

TEST(engine_refuses_collectives_of_a_rank_that_has_joined) {
  std::latch refused(1);  // The join must not end before rank 0 has tried everything.
  run_world({0, 0}, [&](int rank, Engine& engine) {
    if (rank == 0) {
      const EntryPtr joining = join_entry();
      CHECK_OK(engine.enqueue(joining, false));
      std::vector<float> values(1, 1.0F);
      const Status status = run(engine, allreduce_entry("late", values));
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      CHECK(status.message().find("this rank has called join()") != std::string::npos);
      CHECK_STATUS(run(engine, join_entry()), StatusCode::kInvalidArgument);
      EntryPtr subset = join_entry();
      subset->request.process_set = 1;
      CHECK_STATUS(run(engine, subset), StatusCode::kInvalidArgument);
      refused.count_down();
      CHECK_OK(finish(engine, joining));
    } else {
      refused.wait();
      join(engine);
    }
  });
}

// Sets take over lanes whose members have joined at different times, and missed steps.
TEST(engine_process_sets_come_and_go_between_joins) {
  for (const Hosts& hosts : {Hosts{0, 0, 0, 0}, Hosts{0, 0, 1, 1}}) {
    run_world(hosts, [](int rank, Engine& engine) {
      for (int round = 0; round < 12; ++round) {
        const std::vector<int> members =
            round % 2 == 0 ? std::vector{1, 2, 3} : std::vector{0, 1, 2};
        const std::uint32_t set = add_set(engine, members);
        for (int step = 0; step < steps_of(rank, 4, round); ++step) {
          const std::vector<int> active = active_in(step, 4, round);
          const auto is_member = [&](int one) {
            return std::find(members.begin(), members.end(), one) != members.end();
          };
          std::vector<float> values(9, 1.0F);
          CHECK_OK(run(engine, allreduce_entry("all", values)));
          CHECK_EQ(values, std::vector<float>(9, static_cast<float>(active.size())));
          if (!is_member(rank)) continue;
          std::vector<float> own(9, 1.0F);
          CHECK_OK(run(engine, in_set(allreduce_entry("own", own), set)));
          const auto count = std::count_if(active.begin(), active.end(), is_member);
          CHECK_EQ(own, std::vector<float>(9, static_cast<float>(count)));
        }
        join(engine);
        CHECK_OK(run(engine, removal(set)));
      }
    });
  }
}

TEST(engine_refuses_changes_of_process_sets_while_a_rank_has_joined) {
  run_world({0, 0, 0}, [](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {0, 1});
    std::vector<float> values(3, 1.0F);
    if (rank != 2) {
      const Status added = run(engine, addition({1, 2}));
      CHECK_STATUS(added, StatusCode::kInvalidArgument);
      CHECK(added.message().find("rank 2, which has joined") != std::string::npos);
      CHECK_STATUS(run(engine, removal(set)), StatusCode::kInvalidArgument);
      EntryPtr entry = allreduce_entry("still", values);
      entry->request.process_set = set;
      CHECK_OK(run(engine, entry));
      CHECK_EQ(values[0], 2.0F);
    }
    join(engine);
    (void)add_set(engine, {1, 2});
    CHECK_OK(run(engine, removal(set)));
  });
}

TEST(engine_ends_a_join_when_a_rank_dies_or_leaves) {
  for (int i = 0; i < 6; ++i) {
    const int gone = i / 2;
    const bool cleanly = i % 2 == 0;
    const std::string name = "rank " + std::to_string(gone);
    auto engines = make_engines({0, 0, 1}, quick_config());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Engine& engine = *engines[rank];
        std::vector<float> values(1, 1.0F);
        CHECK_OK(run(engine, allreduce_entry("x", values)));
        if (rank == gone && cleanly) return engine.shutdown();
        if (rank == gone) return engine.abort(name + " raised ValueError");
        const Status status = run(engine, join_entry());
        CHECK_STATUS(status, StatusCode::kRankFailed);
        CHECK_EQ(status.failed_rank(), gone);
        const std::string text = cleanly ? "join() waits for it" : name + " raised ValueError";
        CHECK(status.message().find(text) != std::string::npos);
        engine.shutdown();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(engine_of_one_joins_at_once) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  CHECK_EQ(join(engine), 0);
  std::vector<float> values(1, 1.0F);
  CHECK_OK(run(engine, allreduce_entry("x", values)));
  CHECK_EQ(join(engine), 0);
}
