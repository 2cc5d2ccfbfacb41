// What ends late gradients, or is refused: ranks that differ, leave, join or die.
#include <barrier>
#include <thread>

#include "backend/self_backend.h"
#include "check.h"
#include "engine/pending_operations.h"
#include "engine_worlds.h"
#include "negotiation/late_gradients/late_results.h"
#include "wire/late_terms.h"

namespace hvdlite::testing::late_gradients_ends {
using namespace std::chrono_literals;

constexpr const char* kKey = "optimizer";

EntryPtr bucket(std::vector<float>& values, const LateTerms& call) {
  EntryPtr entry = allreduce_entry("grad", values, ReduceOp::kAverage);
  entry->request.weighted = true;
  entry->request.terms = std::make_shared<LateTerms>(call);
  return entry;
}

// Gives the entry terms of its own, which may be changed.
LateTerms& change_terms(Entry& entry) {
  auto terms = std::make_shared<LateTerms>(LateTerms::of(entry.request.terms));
  entry.request.terms = terms;
  return *terms;
}

LateTerms call_of(int step, int grace_us = 0) {
  return {kKey, static_cast<std::uint64_t>(step), 1, grace_us, 2, true};
}

Status step_of(Engine& engine, int step, float* value = nullptr, int grace_us = 0) {
  std::vector<float> values(3, value == nullptr ? 1.0F : *value);
  const Status status = run(engine, bucket(values, call_of(step, grace_us)));
  if (value != nullptr) *value = values[0];
  return status;
}

int waiting_results(Engine& engine) {
  return engine.find<LateResults>()->attendance().waiting(kKey);
}

bool waits(Engine& engine, int steps) {
  return soon([&] { return waiting_results(engine) == steps; });
}

TEST(engine_late_gradients_refuses_ranks_that_differ) {
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
      const EntryPtr entry = bucket(values, rank == 0 ? call_of(0) : row.call);
      if (rank == 0) CHECK_OK(engine.enqueue(entry, false));
      std::this_thread::sleep_for(rank == 0 ? 5ms : 15ms);
      met.arrive_and_wait();
      if (rank == 1) CHECK_OK(engine.enqueue(entry, false));
      const Status status = finish(engine, entry);
      CHECK_STATUS(status, StatusCode::kMismatch);
      CHECK(has(status.message(), row.text));
      met.arrive_and_wait();
      CHECK_OK(step_of(engine, 1));
    });
  }
}

TEST(engine_late_gradients_refuses_what_cannot_wait_for_a_late_rank) {
  run_world({0, 0}, [](int, Engine& engine) {
    std::vector<float> values(3);
    const auto refusal = [&](const std::function<void(Entry&)>& change) {
      const EntryPtr entry = bucket(values, call_of(0));
      change(*entry);
      const Status status = engine.enqueue(entry, false);
      CHECK_STATUS(status, StatusCode::kInvalidArgument);
      return status.message();
    };
    CHECK(has(refusal([](Entry& entry) { entry.request.weighted = false; }), "by average"));
    CHECK(has(refusal([](Entry& entry) { change_terms(entry).quorum = 3; }), "from 1 to 2, not 3"));
    CHECK(has(refusal([](Entry& entry) { change_terms(entry).bound = 0; }), "at least one step"));
    CHECK(has(refusal([](Entry& entry) { change_terms(entry).key = ""; }), "1 to 512 bytes"));
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
    CHECK_OK(step_of(engine, 0));
    met.arrive_and_wait();
    if (rank == 0) {
      CHECK_OK(step_of(engine, 1));
    } else {
      CHECK(waits(engine, 1));
      std::vector<float> values(4);
      const Status status = run(engine, bucket(values, call_of(1)));
      CHECK_STATUS(status, StatusCode::kMismatch);
      CHECK(has(status.message(), "rank 1, which is late"));
    }
    met.arrive_and_wait();
  });
}

TEST(engine_late_gradients_counts_joined_ranks_as_absent) {
  std::barrier met(3);
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    const auto join = [&] {
      CHECK_OK(run(engine, change_entry(Kind::kJoin, std::string(kJoinName))));
    };
    for (int round = 0; round < 2; ++round) {
      const int first = 4 * round;
      float value = static_cast<float>(rank);
      CHECK_OK(step_of(engine, first, &value, round));  // a new call, so it waits for all
      CHECK_EQ(value, 1.0F);
      met.arrive_and_wait();
      if (rank == 1) {
        join();  // while the next step is open, or before
      } else {
        if (rank == 2) CHECK(waits(engine, 1));
        value = static_cast<float>(rank) + 5;
        CHECK_OK(step_of(engine, first + 1, &value, round));
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
        CHECK_OK(step_of(engine, 0));
        met.arrive_and_wait();
        if (rank == victim) {
          CHECK(waits(engine, 2));  // the bound: now the others wait
          engine.abort("the test ends it");
          return;
        }
        Status status;
        for (int step = 1; status.ok() && step < 10; ++step) status = step_of(engine, step);
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
    std::thread other([&] { CHECK_OK(step_of(*engines[1], 0)); });
    const Status status = step_of(*engines[0], 0);
    other.join();
    return status;
  }());
  engines[1]->shutdown();
  const Status status = step_of(*engines[0], 1);
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
      for (int step = 0; step < 3; ++step) CHECK_OK(step_of(ahead, step));
      CHECK(waits(behind, 2));
      ahead.shutdown();
    });
    CHECK_OK(step_of(behind, 0));
    other.join();
    for (int step = 1; step < 3; ++step) {
      float value = 5;
      CHECK_OK(step_of(behind, step, &value));
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
  const Status status = engine.enqueue(bucket(values, call_of(0)), false);
  CHECK_STATUS(status, StatusCode::kInvalidArgument);
  CHECK(has(status.message(), "an elastic job"));
}

}  // namespace hvdlite::testing::late_gradients_ends
