// Whole engines in every collective that gives each rank the same.
#include <fcntl.h>

#include <random>
#include <thread>

#include "check.h"
#include "engine_worlds.h"
#include "host/host_backend.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

Hosts one_host(int size) { return Hosts(static_cast<std::size_t>(size), 0); }

void sum_in_many_steps(const Hosts& hosts, int steps) {
  const int size = static_cast<int>(hosts.size());
  run_world(hosts, [&](int rank, Engine& engine) {
    for (int step = 0; step < steps; ++step) {
      std::vector<float> values(100, static_cast<float>(rank + step));
      CHECK_OK(run(engine, allreduce_entry("x", values), step % 2 == 0));
      CHECK_EQ(values[99], static_cast<float>(size * step + size * (size - 1) / 2));
    }
    if (rank > 0)
      CHECK(engine.counters().cache_hits.get() >= static_cast<std::uint64_t>(steps - 2));
  });
}

}  // namespace

TEST(engine_sums_over_two_ranks) { sum_in_many_steps(one_host(2), 200); }
TEST(engine_sums_over_eight_ranks) { sum_in_many_steps(one_host(8), 50); }
TEST(engine_sums_over_sixty_four_ranks) { sum_in_many_steps(one_host(64), 3); }
TEST(engine_sums_over_two_hosts_of_two) { sum_in_many_steps({0, 0, 1, 1}, 50); }
TEST(engine_sums_over_uneven_hosts) { sum_in_many_steps({0, 1, 1, 2, 1}, 20); }

// Pauses on both sides of the time after which the engine's thread stands by.
TEST(engine_sums_on_after_pauses_of_all_threads) {
  run_world({0, 0, 1}, [](int rank, Engine& engine) {
    const auto sum_with_pauses = [&](const std::string& name, int seed, bool blocking) {
      std::mt19937 random(static_cast<unsigned>(seed + rank));
      for (int step = 0; step < 150; ++step) {
        if (random() % 3 > 0) std::this_thread::sleep_for((random() % 4000) * 1us);
        std::vector<float> values(10, static_cast<float>(rank + step));
        CHECK_OK(run(engine, allreduce_entry(name, values), blocking));
        CHECK_EQ(values[9], static_cast<float>(3 * step + 3));
      }
    };
    std::thread other([&] { sum_with_pauses("other", 10, true); });
    std::thread behind([&] { sum_with_pauses("behind", 20, false); });
    sum_with_pauses("x", 30, true);
    other.join();
    behind.join();
  });
}

TEST(engine_can_be_traced_at_any_time) {
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    std::atomic<bool> over{false};
    std::thread tracer([&] {
      while (!over.load()) {
        CHECK_OK(engine.trace().start(Fd(::open("/dev/null", O_WRONLY)), rank, true));
        std::this_thread::sleep_for(1ms);
        engine.trace().stop();
      }
    });
    for (int step = 0; step < 300; ++step) {
      std::vector<float> values(1000, static_cast<float>(rank + step));
      CHECK_OK(run(engine, allreduce_entry("x", values), step % 2 == 0));
      CHECK_EQ(values[999], static_cast<float>(3 * step + 3));
    }
    over = true;
    tracer.join();
  });
}

TEST(engine_of_one_rank_needs_neither_thread_nor_fabric) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), Config());
  std::vector<float> values = {1, 2};
  auto entry = allreduce_entry("x", values, ReduceOp::kAverage);
  entry->request.postscale = 3;
  // What it makes of its end may submit.
  const auto next = allreduce_entry("next", values);
  entry->completion->then([&] { CHECK_OK(engine.enqueue(next, false)); });
  CHECK_OK(run(engine, entry));
  CHECK_OK(finish(engine, next));
  CHECK_EQ(values[1], 6.0f);
  engine.shutdown();
  CHECK_STATUS(engine.enqueue(allreduce_entry("y", values), false), StatusCode::kShutdown);
}

TEST(engine_accepts_any_order_of_submission) {
  constexpr int kTensors = 100;
  run_world(one_host(3), [](int rank, Engine& engine) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 10; ++step) {
      std::vector<std::vector<float>> values;
      std::vector<int> order(kTensors);
      for (int i = 0; i < kTensors; ++i) {
        order[i] = i;
        values.emplace_back(1 + i * 7 % 50, static_cast<float>(i + rank));
      }
      std::shuffle(order.begin(), order.end(), random);
      std::vector<EntryPtr> entries;
      for (const int i : order) {
        entries.push_back(allreduce_entry("t" + std::to_string(i), values[i]));
        CHECK_OK(engine.enqueue(entries.back(), false));
      }
      for (const EntryPtr& entry : entries) CHECK_OK(finish(engine, entry));
      for (int i = 0; i < kTensors; ++i) CHECK_EQ(values[i].back(), static_cast<float>(3 * i + 3));
    }
  });
}

TEST(engine_weights_an_average_and_ignores_what_weighs_nothing) {
  run_world(one_host(3), [](int rank, Engine& engine) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> values(1000, rank == 2 ? nan : static_cast<float>(rank + 1));
    auto entry = allreduce_entry("x", values, ReduceOp::kAverage);
    entry->request.weighted = true;
    entry->weight = rank == 2 ? 0.0 : rank == 0 ? 3.0 : 1.0;
    CHECK_OK(run(engine, entry));
    CHECK_EQ(values[999], 1.25f);
  });
}

TEST(engine_refuses_a_duplicate_name_at_the_call) {
  run_world(one_host(2), [](int, Engine& engine) {
    std::vector<float> values(4, 1.0f);
    std::vector<float> others(4, 1.0f);
    auto first = allreduce_entry("x", values);
    auto blocker = allreduce_entry("later", others);
    CHECK_OK(engine.enqueue(first, true));
    CHECK_STATUS(engine.enqueue(allreduce_entry("x", others), true), StatusCode::kDuplicateName);
    CHECK_OK(finish(engine, first, true));
    CHECK_OK(run(engine, blocker));
  });
}

TEST(engine_names_the_rank_that_does_not_read_its_answers) {
  Config config = quick_config();
  config.collective_timeout = 0.5;
  auto engines = make_engines(one_host(3), config);
  std::vector<EntryPtr> entries;
  const auto submit = [&](int rank, const EntryPtr& entry) {
    CHECK_OK(engines[rank]->enqueue(entry, false));
    entries.push_back(entry);
  };
  for (int rank = 0; rank < 3; ++rank) submit(rank, addition({2}));
  for (int rank = 0; rank < 3; ++rank) CHECK_OK(finish(*engines[rank], entries[rank]));
  constexpr int kTensors = 2000;  // an answer of some 100 KiB; a ring holds 64
  std::vector<float> value(1);
  std::vector<std::vector<float>> many(3, std::vector<float>(kTensors));
  const auto submit_many = [&](int rank) {
    const EntryPtr entry = allreduce_entry("many", many[rank]);
    entry->request.tensors.clear();
    entry->outputs.clear();
    for (int i = 0; i < kTensors; ++i) {
      const std::string name = "a.name.that.is.sent.back." + std::to_string(i);
      entry->request.tensors.push_back({name, DataType::kFloat32, {1}});
      entry->outputs.push_back(&many[rank][i]);
    }
    entry->inputs.assign(entry->outputs.begin(), entry->outputs.end());
    submit(rank, entry);
  };
  submit_many(2);
  std::atomic<bool> busy{false};
  std::atomic<bool> over{false};
  const auto slow = allreduce_entry("slow", value);
  slow->request.process_set = 1;
  slow->completion->then([&] {
    busy = true;
    CHECK(soon([&] { return over.load(); }));
  });
  submit(2, slow);
  CHECK(soon([&] { return busy.load(); }));
  submit_many(0);
  submit_many(1);
  CHECK(ends_soon(*engines[0], 20s));
  over = true;
  CHECK_STATUS(engines[0]->status(), StatusCode::kTimeout);
  CHECK_EQ(engines[0]->status().failed_rank(), 2);
  CHECK(engines[0]->status().message().find("rank 2 did not read what rank 0 answered") == 0);
  for (const auto& engine : engines) engine->shutdown();
  for (const EntryPtr& entry : entries) CHECK(entry->completion->done());
}

TEST(engine_shutdown_with_operations_in_flight_ends_them_all) {
  run_world(one_host(2), [](int rank, Engine& engine) {
    std::vector<std::vector<float>> values(200, std::vector<float>(100, 1.0f));
    std::vector<EntryPtr> entries;
    for (int i = 0; i < 200; ++i) {
      const auto entry = allreduce_entry("t" + std::to_string(i + 1000 * rank), values[i]);
      // If the other rank has left already, this rank gets the error at the call.
      if (engine.enqueue(entry, false).ok()) entries.push_back(entry);
    }
    engine.shutdown();
    for (const EntryPtr& entry : entries) {
      CHECK(entry->completion->done());
      CHECK(!entry->completion->status().ok());
    }
  });
}
