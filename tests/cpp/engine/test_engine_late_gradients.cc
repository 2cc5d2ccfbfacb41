// Whole engines with late gradients: ranks that sleep are left out, and what they have comes later.
#include <barrier>
#include <cmath>
#include <random>

#include "base/half.h"
#include "check.h"
#include "engine_worlds.h"
#include "negotiation/late_gradients/late_results.h"
#include "wire/late_terms.h"

namespace hvdlite::testing::late_gradients {
using namespace std::chrono_literals;

constexpr const char* kKey = "optimizer";

LateTerms call_of(int step, std::uint32_t quorum = 1, std::uint32_t bound = 4) {
  return {kKey, static_cast<std::uint64_t>(step), quorum, /*grace_us=*/0, bound, /*fold=*/true};
}

EntryPtr bucket(const std::string& name, std::vector<float>& values, LateTerms call) {
  EntryPtr entry = allreduce_entry(name, values, ReduceOp::kAverage);
  entry->request.weighted = true;
  entry->request.terms = std::make_shared<LateTerms>(std::move(call));
  return entry;
}

int waiting_results(Engine& engine) {
  return engine.find<LateResults>()->attendance().waiting(kKey);
}

std::vector<Attendance::Row> attendance(Engine& engine) {
  return engine.find<LateResults>()->attendance().rows(kKey);
}

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
  LateEntry::of(*entry).skips = skips;
  CHECK_OK(run(engine, entry));
  CHECK_EQ(values, std::vector<float>(5, values[0]));
  return {values[0], LateEntry::of(*entry).late};
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

TEST(engine_late_gradients_forgets_late_gradients_by_policy) {
  std::barrier met(2);
  run_world({0, 1}, [&](int rank, Engine& engine) {
    const auto call = [](int step, std::uint32_t quorum) {
      LateTerms made = call_of(step, quorum);
      made.fold = false;
      return made;
    };
    (void)step_of(engine, 1.0F, call(0, 1));
    met.arrive_and_wait();
    if (rank == 1) CHECK(waits(engine, 1));
    CHECK_EQ(step_of(engine, rank == 0 ? 1.0F : 100.0F, call(1, 1)).value, 1.0F);
    met.arrive_and_wait();
    CHECK_EQ(step_of(engine, rank == 0 ? 1.0F : 2.0F, call(2, 2)).value, 1.5F);
    CHECK_EQ(attendance(engine)[1].folded, std::uint64_t{0});
  });
}

// As many steps as the bound may wait; then the others wait. A rank that skips catches up.
TEST(engine_late_gradients_lets_no_rank_be_further_behind_than_the_bound) {
  std::barrier met(2);
  run_world({0, 0}, [&](int rank, Engine& engine) {
    constexpr int kBound = 3;
    (void)step_of(engine, 1.0F, call_of(0, 1, kBound));
    met.arrive_and_wait();
    if (rank == 0) {
      for (int step = 1; step <= kBound; ++step) {
        CHECK_EQ(step_of(engine, static_cast<float>(step), call_of(step, 1, kBound)).value,
                 static_cast<float>(step));
      }
      std::vector<float> values(5, 8.0F);
      const EntryPtr entry = bucket("grad", values, call_of(kBound + 1, 1, kBound));
      CHECK_OK(engine.enqueue(entry, false));
      CHECK(!engine.wait(*entry, false, Deadline::after(50ms)));
      met.arrive_and_wait();
      CHECK_OK(finish(engine, entry));
    } else {
      met.arrive_and_wait();
      CHECK_EQ(waiting_results(engine), kBound);
      for (int step = 1; waiting_results(engine) > 0; ++step) {
        const Outcome outcome = step_of(engine, 77.0F, call_of(step, 1, kBound), 1, true);
        CHECK_EQ(outcome.value, step <= kBound ? static_cast<float>(step) : 8.0F);
        CHECK(outcome.late);
        if (step == kBound) CHECK(waits(engine, 1));
      }
      CHECK_EQ(attendance(engine)[1].skipped, std::uint64_t{kBound + 1});
      CHECK_EQ(attendance(engine)[1].folded, std::uint64_t{0});
    }
    met.arrive_and_wait();
    CHECK_EQ(step_of(engine, static_cast<float>(rank), call_of(5, 2, kBound)).value, 0.5F);
  });
}

TEST(engine_late_gradients_waits_until_grace_has_passed) {
  std::barrier met(2);
  run_world({0, 1}, [&](int rank, Engine& engine) {
    const auto call = [](int step) {
      LateTerms made = call_of(step);
      made.grace_us = 30'000'000;
      return made;
    };
    (void)step_of(engine, 1.0F, call(0));
    met.arrive_and_wait();
    if (rank == 1) std::this_thread::sleep_for(20ms);
    CHECK_EQ(step_of(engine, static_cast<float>(rank), call(1)).value, 0.5F);
  });
}

// Several buckets of several tensors, of every type, with factors.
template <typename T, typename Make, typename Read>
void check_type(DataType dtype, const Make& make, const Read& read) {
  std::barrier met(3);
  run_world({0, 0, 1}, [&](int rank, Engine& engine) {
    // Rank 2 is late in step 1, and in time in step 2.
    for (int step = 0; step < 3; ++step) {
      met.arrive_and_wait();
      if (step == 1 && rank == 2) CHECK(waits(engine, 1));
      std::vector<std::vector<T>> tensors;
      std::vector<EntryPtr> entries;
      for (int i = 0; i < 4; ++i) {
        tensors.emplace_back(i == 3 ? 70000 : 3,
                             make(static_cast<float>(4 * (rank + 1) * (i + 1))));
      }
      for (int number = 0; number < 2; ++number) {
        auto entry = std::make_shared<Entry>();
        entry->request.name = "bucket" + std::to_string(number);
        entry->request.op = ReduceOp::kAverage;
        entry->request.weighted = true;
        entry->request.prescale = 0.5;
        entry->request.postscale = 4;
        entry->request.terms = std::make_shared<LateTerms>(call_of(step, step == 2 ? 3 : 2));
        for (int i = 2 * number; i < 2 * number + 2; ++i) {
          std::vector<T>& values = tensors[static_cast<std::size_t>(i)];
          const auto count = static_cast<std::int64_t>(values.size());
          TensorShape shape{"t" + std::to_string(i), dtype, {count}};
          shape.wire = dtype;
          entry->request.tensors.push_back(shape);
          entry->inputs.push_back(values.data());
          entry->outputs.push_back(values.data());
        }
        CHECK_OK(engine.enqueue(entry, false));
        entries.push_back(entry);
      }
      for (const EntryPtr& entry : entries) {
        CHECK_OK(finish(engine, entry));
        CHECK_EQ(LateEntry::of(*entry).late, step == 1 && rank == 2);
      }
      // Half of the mean of 1, 2 and 3; of 1 and 2; of 1, 2, 3 and 3.
      const float mean = step == 0 ? 2.0F : step == 1 ? 1.5F : 2.25F;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const float expected = 2 * mean * 4 * static_cast<float>(i + 1);
        for (const T& value : tensors[i]) {
          if (std::abs(read(value) - expected) <= 0.01F * expected) continue;
          CHECK_EQ(read(value), expected);
          break;
        }
      }
    }
  });
}

TEST(engine_late_gradients_takes_every_floating_type_and_factors) {
  const auto same = [](auto value) { return value; };
  check_type<float>(DataType::kFloat32, same, same);
  check_type<double>(
      DataType::kFloat64, [](float value) { return double{value}; },
      [](double value) { return static_cast<float>(value); });
  check_type<Float16>(
      DataType::kFloat16, [](float value) { return to_float16(value); },
      [](Float16 value) { return to_float(value); });
  check_type<Bfloat16>(
      DataType::kBfloat16, [](float value) { return to_bfloat16(value); },
      [](Bfloat16 value) { return to_float(value); });
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
        LateEntry::of(*entry).skips = skips;
        entry->weight = skips ? 0 : 1;
        CHECK_OK(engine.enqueue(entry, false));
        entries.push_back(entry);
      }
      for (const EntryPtr& entry : entries) CHECK_OK(finish(engine, entry, random() % 2 == 0));
      for (auto& one : values) results[rank].push_back(std::move(one));
    }
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

}  // namespace hvdlite::testing::late_gradients
