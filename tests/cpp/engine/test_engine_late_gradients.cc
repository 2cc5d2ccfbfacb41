// Whole engines with late gradients: ranks that sleep are left out, and what they have comes later;
// and what ends it, or is refused: ranks that differ, leave or die.
#include <barrier>
#include <cmath>
#include <random>
#include <thread>

#include "check.h"
#include "cpp/host/backend_worlds.h"
#include "engine/late_results.h"
#include "engine/pending_operations.h"
#include "engine_worlds.h"
#include "host/host_backend.h"

namespace hvdlite::testing::late_gradients {
using namespace std::chrono_literals;

constexpr const char* kKey = "optimizer";

LateTerms call_of(int step, std::uint32_t quorum = 1, std::uint32_t bound = 4) {
  return {kKey, static_cast<std::uint64_t>(step), quorum, /*grace_us=*/0, bound, /*fold=*/true};
}

EntryPtr bucket(const std::string& name, std::vector<float>& values, LateTerms call) {
  EntryPtr entry = allreduce_entry(name, values, ReduceOp::kAverage);
  entry->request.weighted = true;
  entry->request.late = std::move(call);
  return entry;
}

int waiting_results(Engine& engine) { return engine.attendance().waiting(kKey); }

std::vector<Attendance::Row> attendance(Engine& engine) { return engine.attendance().rows(kKey); }

bool waits(Engine& engine, int steps) {
  return soon([&] { return waiting_results(engine) == steps; });
}

// A step of one bucket of floats: what this rank gets for `own`, and whether it was late.
struct Outcome {
  float value = 0;
  bool late = false;
};
Outcome step_of(Engine& engine, float own, const LateTerms& call, double weight = 1,
                bool skips = false) {
  std::vector<float> values(5, own);
  const EntryPtr entry = bucket("grad", values, call);
  entry->weight = skips ? 0 : weight;
  entry->skips = skips;
  CHECK_OK(run(engine, entry));
  CHECK_EQ(values, std::vector<float>(5, values[0]));
  return {values[0], entry->late};
}

// Where a step's call is another one than that of the step before, it waits for all.
const std::vector<Hosts> kPairs = {{0, 0}, {0, 1}};

TEST(engine_late_gradients_goes_on_without_a_late_rank_and_folds_its_gradient) {
  for (const Hosts& hosts : kPairs) {
    for (const int sleeper : {0, 1}) {
      std::barrier met(2);
      run_world(hosts, [&](int rank, Engine& engine) {
        const bool sleeps = rank == sleeper;
        Outcome outcome = step_of(engine, sleeps ? 3.0F : 1.0F, call_of(0));
        CHECK_EQ(outcome.value, 2.0F);  // the first step waits for all
        CHECK(!outcome.late);
        met.arrive_and_wait();
        if (sleeps) CHECK(waits(engine, 1));
        outcome = step_of(engine, sleeps ? 6.0F : 2.0F, call_of(1));
        CHECK_EQ(outcome.value, 2.0F);
        CHECK_EQ(outcome.late, sleeps);
        CHECK_EQ(waiting_results(engine), 0);
        met.arrive_and_wait();
        if (sleeps) CHECK(waits(engine, 1));
        outcome = step_of(engine, sleeps ? 9.0F : 3.0F, call_of(2));
        CHECK_EQ(outcome.value, (3.0F + 6.0F) / 2);  // its gradient of the step before
        CHECK_EQ(outcome.late, sleeps);
        met.arrive_and_wait();
        // Both are there: its gradient of the step before comes besides that of this one.
        outcome = step_of(engine, sleeps ? 12.0F : 4.0F, call_of(3, /*quorum=*/2));
        CHECK_EQ(outcome.value, (4.0F + 9.0F + 12.0F) / 3);
        CHECK(!outcome.late);
        CHECK_EQ(attendance(engine)[sleeper].late, std::uint64_t{2});
        CHECK_EQ(attendance(engine)[1 - sleeper].late, std::uint64_t{0});
        CHECK_EQ(attendance(engine)[sleeper].folded, std::uint64_t{sleeps ? 2U : 0U});
        CHECK_EQ(attendance(engine)[sleeper].oldest, std::uint64_t{sleeps ? 1U : 0U});
      });
    }
  }
}

TEST(engine_late_gradients_counts_weights_of_what_comes_late) {
  std::barrier met(2);
  run_world({0, 0}, [&](int rank, Engine& engine) {
    const double weight = rank == 0 ? 1 : 3;
    CHECK_EQ(step_of(engine, static_cast<float>(rank), call_of(0), weight).value, 0.75F);
    met.arrive_and_wait();
    if (rank == 1) CHECK(waits(engine, 1));
    CHECK_EQ(step_of(engine, 8.0F * static_cast<float>(rank), call_of(1), weight).value, 0.0F);
    met.arrive_and_wait();
    // 3 * 8 late, 1 * 4 and 5 * 2 now.
    const float own = rank == 0 ? 4.0F : 2.0F;
    const double now = rank == 0 ? 1 : 5;
    const Outcome outcome = step_of(engine, own, call_of(2, /*quorum=*/2), now);
    CHECK(std::abs(outcome.value - (24.0F + 4.0F + 10.0F) / 9) < 1e-5);
  });
}

TEST(engine_late_gradients_waits_until_grace_has_passed) {
  std::barrier met(2);
  run_world({0, 1}, [&](int rank, Engine& engine) {
    const auto value_of_step = [&](int step, std::int64_t grace_us) {
      LateTerms call = call_of(step);
      call.grace_us = grace_us;
      return step_of(engine, static_cast<float>(rank), call).value;
    };
    CHECK_EQ(value_of_step(0, 30'000'000), 0.5F);  // the first step of a call waits for all
    met.arrive_and_wait();
    if (rank == 1) std::this_thread::sleep_for(20ms);
    CHECK_EQ(value_of_step(1, 30'000'000), 0.5F);
    CHECK_EQ(value_of_step(2, 20'000), 0.5F);
    met.arrive_and_wait();
    if (rank == 1) CHECK(waits(engine, 1));
    CHECK_EQ(value_of_step(3, 20'000), 0.0F);
  });
}

// Several buckets of several tensors, of every type, with factors.
void check_type(DataType dtype) {
  std::barrier met(3);
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    // Rank 2 is late in step 1, and in time in step 2.
    for (int step = 0; step < 3; ++step) {
      met.arrive_and_wait();
      if (step == 1 && rank == 2) CHECK(waits(engine, 1));
      std::vector<std::vector<std::byte>> tensors;
      std::vector<EntryPtr> entries;
      for (int i = 0; i < 4; ++i) {
        const std::size_t count = i == 3 ? 70000 : 3;
        tensors.push_back(
            make_tensor(dtype, count, [&](auto) { return 4 * (rank + 1) * (i + 1); }));
        if (i % 2 == 0) {
          std::vector<float> unused(1);
          entries.push_back(
              bucket("bucket" + std::to_string(i), unused, call_of(step, step == 2 ? 3 : 2)));
          entries.back()->request.prescale = 0.5;
          entries.back()->request.postscale = 4;
          entries.back()->request.tensors.clear();
          entries.back()->inputs.clear();
          entries.back()->outputs.clear();
        }
        TensorShape shape{"t" + std::to_string(i), dtype, {static_cast<std::int64_t>(count)}};
        shape.wire = dtype;
        entries.back()->request.tensors.push_back(shape);
        entries.back()->inputs.push_back(tensors.back().data());
        entries.back()->outputs.push_back(tensors.back().data());
        if (i % 2 == 1) CHECK_OK(engine.enqueue(entries.back(), false));
      }
      for (const EntryPtr& entry : entries) {
        CHECK_OK(finish(engine, entry));
        CHECK_EQ(entry->late, step == 1 && rank == 2);
      }
      // Half of the mean of 1, 2 and 3; of 1 and 2; of 1, 2, 3 and 3.
      const double mean = step == 0 ? 2 : step == 1 ? 1.5 : 2.25;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const double expected = 2 * mean * 4 * static_cast<double>(i + 1);
        const std::size_t bytes = size_of(dtype);
        bool right = true;
        for (std::size_t at = 0; at < tensors[i].size(); at += bytes) {
          const double value = load(dtype, tensors[i].data() + at);
          right = right && std::abs(value - expected) <= 0.01 * expected;
        }
        CHECK(right);
      }
    }
  });
}

TEST(engine_late_gradients_takes_every_floating_type_and_factors) {
  for (const DataType dtype :
       {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16}) {
    check_type(dtype);
  }
}

// Ranks that sleep now and then. Each gradient is an element of its own.
void run_at_random(const Hosts& hosts, unsigned seed) {
  constexpr int kSteps = 25;
  constexpr int kBuckets = 3;
  const int size = static_cast<int>(hosts.size());
  using Steps = std::vector<std::vector<double>>;  // by step and bucket
  std::vector<Steps> results(hosts.size());
  std::vector<std::vector<bool>> gave(hosts.size());
  run_world(hosts, [&](int rank, Engine& engine) {
    std::mt19937 random(seed + static_cast<unsigned>(rank));
    for (int step = 0; step < kSteps; ++step) {
      const bool skips = waiting_results(engine) > 0 && random() % 2 == 0;
      gave[rank].push_back(!skips);
      if (!skips && random() % 4 == 0) std::this_thread::sleep_for(1ms * (random() % 6));
      Steps values(kBuckets, std::vector<double>(static_cast<std::size_t>(size * kSteps)));
      std::vector<EntryPtr> entries;
      for (int i = 0; i < kBuckets; ++i) {
        if (!skips && random() % 16 == 0) std::this_thread::sleep_for(1ms);
        std::vector<double>& own = values[static_cast<std::size_t>(i)];
        own[static_cast<std::size_t>(rank * kSteps + step)] = 1;
        std::vector<float> unused(1);
        EntryPtr entry = bucket("b" + std::to_string(i), unused, call_of(step, 1, 2));
        TensorShape shape{"t", DataType::kFloat64, {static_cast<std::int64_t>(own.size())}};
        shape.wire = DataType::kFloat64;
        entry->request.tensors = {shape};
        entry->inputs = {own.data()};
        entry->outputs = {own.data()};
        entry->skips = skips;
        entry->weight = skips ? 0 : 1;
        CHECK_OK(engine.enqueue(entry, false));
        entries.push_back(entry);
      }
      for (const EntryPtr& entry : entries) CHECK_OK(finish(engine, entry, random() % 2 == 0));
      for (auto& one : values) results[rank].push_back(std::move(one));
    }
    const auto skipped = std::count(gave[rank].begin(), gave[rank].end(), false);
    CHECK_EQ(attendance(engine)[rank].skipped, static_cast<std::uint64_t>(skipped));
  });
  for (const Steps& others : results) CHECK(others == results[0]);
  for (int bucket_number = 0; bucket_number < kBuckets; ++bucket_number) {
    for (int rank = 0; rank < size; ++rank) {
      for (int step = 0; step < kSteps; ++step) {
        int counted = 0;
        for (int at = bucket_number; at < kSteps * kBuckets; at += kBuckets) {
          const auto& sum = results[0][static_cast<std::size_t>(at)];
          counted += sum[static_cast<std::size_t>(rank * kSteps + step)] > 0 ? 1 : 0;
        }
        const bool late_in_the_end = step + 3 >= kSteps && counted == 0;
        if (!late_in_the_end) CHECK_EQ(counted, gave[rank][step] ? 1 : 0);
      }
    }
  }
}

TEST(engine_late_gradients_counts_each_gradient_once_under_random_sleeps) {
  for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 0, 0}, Hosts{0, 1, 1}, Hosts{0, 1, 0, 1}}) {
    for (unsigned seed = 0; seed < 3; ++seed) run_at_random(hosts, 100 * seed);
  }
}

TEST(engine_late_gradients_of_a_process_set_is_its_own) {
  std::barrier met(3);
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    const std::uint32_t set = add_set(engine, {1, 2});
    for (int step = 0; step < 3; ++step) {
      met.arrive_and_wait();
      if (rank == 0) continue;
      if (step == 1 && rank == 2) CHECK(waits(engine, 1));
      std::vector<float> values(4, static_cast<float>(rank));
      const EntryPtr entry = bucket("grad", values, call_of(step, step == 2 ? 2 : 1));
      entry->request.process_set = set;
      CHECK_OK(run(engine, entry));
      const float expected = step == 0 ? 1.5F : step == 1 ? 1.0F : 5.0F / 3;
      CHECK(std::abs(values[0] - expected) < 1e-6);
    }
    met.arrive_and_wait();
    CHECK_OK(run(engine, removal(set)));
  });
}

// A step in which others may be two steps behind.
Status status_of(Engine& engine, int step, float* value = nullptr, int grace_us = 0) {
  std::vector<float> values(3, value == nullptr ? 1.0F : *value);
  LateTerms call = call_of(step, 1, 2);
  call.grace_us = grace_us;
  const Status status = run(engine, bucket("grad", values, call));
  if (value != nullptr) *value = values[0];
  return status;
}

TEST(engine_late_gradients_refuses_ranks_that_differ) {
  const LateTerms kCall = {kKey, 0, 1, 0, 2, true};
  struct Row {
    LateTerms call;
    std::string text;
  };
  const std::vector<Row> rows = {
      {{kKey, 0, 2, 0, 2, true}, "quorum of late gradients: rank 0 has 1, rank 1 has 2"},
      {{kKey, 0, 1, 0, 3, true}, "bound of late gradients: rank 0 has 2, rank 1 has 3"},
      {{kKey, 0, 1, 7, 2, true}, "grace of late gradients: rank 0 has 0 us, rank 1 has 7 us"},
      {{kKey, 0, 1, 0, 2, false}, "policy of late gradients: rank 0 has fold, rank 1 has drop"},
      {{"other", 0, 1, 0, 2, true},
       "key of late gradients: rank 0 has 'optimizer', rank 1 has 'other'"},
      {{kKey, 5, 1, 0, 2, true}, "step of late gradients: rank 0 has 0, rank 1 has 5"},
  };
  for (const Row& row : rows) {
    std::barrier met(2);
    run_world({0, 0}, [&](int rank, Engine& engine) {
      std::vector<float> values(3);
      const EntryPtr entry = bucket("grad", values, rank == 0 ? kCall : row.call);
      if (rank == 0) CHECK_OK(engine.enqueue(entry, false));
      std::this_thread::sleep_for(rank == 0 ? 5ms : 15ms);
      met.arrive_and_wait();
      if (rank == 1) CHECK_OK(engine.enqueue(entry, false));
      const Status status = finish(engine, entry);
      CHECK_STATUS(status, StatusCode::kMismatch);
      CHECK(has(status.message(), row.text));
      met.arrive_and_wait();
      CHECK_OK(status_of(engine, 1));
    });
  }
}

TEST(engine_late_gradients_refuses_what_cannot_wait_for_a_late_rank) {
  run_world({0, 0}, [](int, Engine& engine) {
    std::vector<float> values(3);
    const auto refusal = [&](const std::function<void(Entry&)>& change) {
      const EntryPtr entry = bucket("grad", values, call_of(0));
      change(*entry);
      const Status status = engine.enqueue(entry, false);
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      return status.message();
    };
    CHECK(has(refusal([](Entry& entry) { entry.request.weighted = false; }), "by average"));
    CHECK(has(refusal([](Entry& entry) { entry.request.late->quorum = 3; }), "from 1 to 2, not 3"));
    CHECK(has(refusal([](Entry& entry) { entry.request.late->bound = 0; }), "at least one step"));
    CHECK(has(refusal([](Entry& entry) { entry.request.late->key = ""; }), "1 to 512 bytes"));
    CHECK(has(refusal([](Entry& entry) {
                entry.request.tensors[0].dtype = entry.request.tensors[0].wire =
                    DataType::kComplex64;
              }),
              "real floating-point"));
    CHECK(has(refusal([](Entry& entry) {
                entry.request.tensors[0].device = DeviceType::kGpu;
                entry.gpu.emplace();
              }),
              "host memory"));
  });
}

// A late rank that changes what it submits gets the error; the others have gone on.
TEST(engine_late_gradients_refuses_a_late_rank_that_submits_something_else) {
  std::barrier met(2);
  run_world({0, 1}, [&](int rank, Engine& engine) {
    CHECK_OK(status_of(engine, 0));
    met.arrive_and_wait();
    if (rank == 0) {
      CHECK_OK(status_of(engine, 1));
    } else {
      CHECK(waits(engine, 1));
      std::vector<float> values(4);
      const Status status = run(engine, bucket("grad", values, call_of(1)));
      CHECK_STATUS(status, StatusCode::kMismatch);
      CHECK(has(status.message(), "rank 1, which is late"));
    }
    met.arrive_and_wait();
  });
}

TEST(engine_late_gradients_counts_joined_ranks_as_absent) {
  std::barrier met(3);
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    const auto join = [&] { CHECK_OK(run(engine, join_entry())); };
    for (int round = 0; round < 2; ++round) {
      const int first = 4 * round;
      float value = static_cast<float>(rank);
      CHECK_OK(status_of(engine, first, &value, round));  // a new call, so it waits for all
      CHECK_EQ(value, 1.0F);
      met.arrive_and_wait();
      if (rank == 1) {
        join();  // while the next step is open, or before
      } else {
        if (rank == 2) CHECK(waits(engine, 1));
        value = static_cast<float>(rank) + 5;
        CHECK_OK(status_of(engine, first + 1, &value, round));
        CHECK_EQ(value, 5.0F);
        join();
      }
      CHECK_EQ(waiting_results(engine), 0);
      met.arrive_and_wait();
    }
  });
}

// Nothing hangs and nothing is left when a rank dies, or all leave, while results wait.
TEST(engine_late_gradients_ends_with_the_world) {
  for (const int victim : {0, 1, 2}) {
    auto engines = make_engines({0, 0, 1}, quick_config());
    std::vector<std::thread> threads;
    std::barrier met(3);
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Engine& engine = *engines[static_cast<std::size_t>(rank)];
        CHECK_OK(status_of(engine, 0));
        met.arrive_and_wait();
        if (rank == victim) {
          CHECK(waits(engine, 2));  // the bound: now the others wait
          engine.abort("the test ends it");
          return;
        }
        Status status;
        for (int step = 1; status.ok() && step < 10; ++step) status = status_of(engine, step);
        CHECK_STATUS(status, StatusCode::kRankFailed);
        CHECK(has(status.message(), "the test ends it"));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(engine_late_gradients_tells_that_a_late_rank_has_left) {
  auto engines = make_engines({0, 1}, quick_config());
  CHECK_OK([&] {
    std::thread other([&] { CHECK_OK(status_of(*engines[1], 0)); });
    const Status status = status_of(*engines[0], 0);
    other.join();
    return status;
  }());
  engines[1]->shutdown();
  const Status status = status_of(*engines[0], 1);
  CHECK_STATUS(status, StatusCode::kRankFailed);
  CHECK(has(status.message(), "rank 1 left after"));
}

// What waits for a late rank needs nobody else.
TEST(engine_late_gradients_gives_results_after_the_others_have_left) {
  for (const int late : {0, 1}) {
    auto engines = make_engines({0, 1}, quick_config());
    Engine& ahead = *engines[static_cast<std::size_t>(1 - late)];
    Engine& behind = *engines[static_cast<std::size_t>(late)];
    std::thread other([&] {
      for (int step = 0; step < 3; ++step) CHECK_OK(status_of(ahead, step));
      CHECK(waits(behind, 2));
      ahead.shutdown();
    });
    CHECK_OK(status_of(behind, 0));
    other.join();
    for (int step = 1; step < 3; ++step) {
      float value = 5;
      CHECK_OK(status_of(behind, step, &value));
      CHECK_EQ(value, 1.0F);
    }
    CHECK_EQ(waiting_results(behind), 0);
  }
}

TEST(engine_late_gradients_is_refused_in_elastic_jobs) {
  Engine engine(nullptr, std::make_unique<SelfBackend>(), quick_config(),
                GpuLibraries::search(Config(), {}), std::make_unique<Trace>(),
                Engine::Elastic{{}, std::make_shared<PendingOperations>()});
  std::vector<float> values(3);
  const Status status = engine.enqueue(bucket("grad", values, call_of(0)), false);
  CHECK_STATUS(status, StatusCode::kInvalidArgument);
  CHECK(has(status.message(), "an elastic job"));
}

}  // namespace hvdlite::testing::late_gradients
