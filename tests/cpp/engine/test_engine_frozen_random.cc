// Random programs, each run with and without frozen schedules: all results have the same bits.
//
// A program is a row of phases. In each of them the ranks repeat a step with some of the tensors,
// one by one or all in flight, in an order that may differ by rank; between two phases something
// else may come: a new tensor, a mismatch, a gather, a barrier, a process set, a join, a rank that
// is late.
#include <algorithm>
#include <random>

#include "engine_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;
using namespace std::chrono_literals;

namespace {

constexpr int kTensors = 9;

enum class BetweenPhases {
  kNothing,
  kNew,
  kMismatch,
  kGather,
  kBarrier,
  kSet,
  kJoin,
  kLate,
  kCount
};

struct ProgramPhase {
  std::vector<int> tensors;
  int steps = 1;
  bool one_by_one = false;
  bool shuffled = false;
  BetweenPhases between = BetweenPhases::kNothing;
  int rank = 0;  // whom it concerns
};

struct RandomProgram {
  Hosts hosts;
  std::vector<ProgramPhase> phases;
};

RandomProgram make_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](int count) { return static_cast<int>(random() % unsigned(count)); };
  RandomProgram program;
  const int size = 2 + pick(3);
  for (int rank = 0; rank < size; ++rank) program.hosts.push_back(rank == 0 ? 0 : pick(2));
  for (int left = 3 + pick(5); left > 0; --left) {
    ProgramPhase phase;
    for (int i = 0; i < kTensors; ++i) {
      if (pick(3) > 0) phase.tensors.push_back(i);
    }
    // Often the same step as before, so that schedules of it freeze again and again.
    if (!program.phases.empty() && pick(2) == 0) phase.tensors = program.phases[0].tensors;
    phase.steps = 1 + pick(12);
    phase.one_by_one = pick(3) == 0;
    phase.shuffled = !phase.one_by_one && pick(2) == 0;
    phase.between = static_cast<BetweenPhases>(pick(static_cast<int>(BetweenPhases::kCount)));
    phase.rank = pick(size);
    program.phases.push_back(std::move(phase));
  }
  return program;
}

// One rank on its way through the program.
class ProgramWalker {
 public:
  ProgramWalker(Engine& engine, const RandomProgram& program, unsigned seed)
      : engine_(engine),
        program_(program),
        rank_(engine.rank()),
        order_(seed * 7919 + unsigned(rank_)),
        numbers_(seed * 104729 + unsigned(rank_)) {}

  std::vector<float> walk() {
    for (std::size_t i = 0; i < program_.phases.size(); ++i) {
      const ProgramPhase& phase = program_.phases[i];
      for (int step = 0; step < phase.steps; ++step) take_step(phase);
      do_between(phase, std::to_string(i));
    }
    return std::move(results_);
  }

 private:
  std::vector<float> fresh(std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = float(numbers_() % 1000) / 7.0F;
    return values;
  }
  void keep(const std::vector<float>& values) {
    results_.insert(results_.end(), values.begin(), values.end());
  }
  EntryPtr reduction(const std::string& name, std::vector<float>& values) {
    return allreduce_entry(name, values);
  }

  void take_step(const ProgramPhase& phase) {
    std::vector<int> order = phase.tensors;
    std::map<int, std::vector<float>> values;
    std::map<int, EntryPtr> entries;
    for (const int i : order) values[i] = fresh(std::size_t(3 + 200 * i));
    if (phase.shuffled) std::shuffle(order.begin(), order.end(), order_);
    for (const int i : order) {
      entries[i] = reduction("t" + std::to_string(i), values[i]);
      CHECK_OK(engine_.enqueue(entries[i], phase.one_by_one));
      if (phase.one_by_one) CHECK_OK(finish(engine_, entries[i], /*blocking=*/true));
    }
    for (const auto& [i, entry] : entries) CHECK_OK(finish(engine_, entry));
    for (const auto& [i, own] : values) keep(own);
  }

  void do_between(const ProgramPhase& phase, const std::string& number) {
    switch (phase.between) {
      case BetweenPhases::kNew: {
        std::vector<float> values = fresh(5);
        CHECK_OK(run(engine_, reduction("new" + number, values)));
        return keep(values);
      }
      case BetweenPhases::kMismatch: {
        std::vector<float> values(rank_ == phase.rank ? 4U : 3U);
        CHECK_STATUS(run(engine_, reduction("t0", values)), StatusCode::kMismatch);
        return;
      }
      case BetweenPhases::kGather: {
        std::vector<float> values = fresh(std::size_t(1 + rank_));
        const EntryPtr entry = rows_entry(Kind::kAllgather, "rows", values);
        CHECK_OK(run(engine_, entry));
        return keep(output_of(entry));
      }
      case BetweenPhases::kBarrier:
        CHECK_OK(run(engine_, change_entry(Kind::kBarrier, "barrier")));
        return;
      case BetweenPhases::kSet:
        return use_set(phase.rank, number);
      case BetweenPhases::kJoin:
        return join(phase.rank);
      case BetweenPhases::kLate:
        if (rank_ == phase.rank) std::this_thread::sleep_for(15ms);
        return;
      case BetweenPhases::kNothing:
      case BetweenPhases::kCount:
        return;
    }
  }

  void use_set(int first, const std::string& number) {
    const int size = engine_.size();
    std::vector<int> ranks = {first};
    if (size > 2) ranks.push_back((first + 1) % size);
    std::sort(ranks.begin(), ranks.end());
    const EntryPtr entry = addition(ranks, "add" + number);
    CHECK_OK(run(engine_, entry));
    const auto set = static_cast<std::uint32_t>(entry->completion->set_id);
    if (std::count(ranks.begin(), ranks.end(), rank_) > 0) {
      std::vector<float> values = fresh(6);
      EntryPtr part = reduction("t1", values);
      part->request.process_set = set;
      CHECK_OK(run(engine_, part));
      keep(values);
    }
    CHECK_OK(run(engine_, removal(set, "remove" + number)));
  }

  // One rank has fewer steps than the others.
  void join(int first) {
    for (int step = 0; step < (rank_ == first ? 0 : 2); ++step) {
      std::vector<float> values = fresh(7);
      CHECK_OK(run(engine_, reduction("t2 of some", values)));
      keep(values);
    }
    const EntryPtr entry = change_entry(Kind::kJoin, std::string(kJoinName));
    CHECK_OK(run(engine_, entry));
    CHECK(entry->completion->last_joined >= 0);
  }

  Engine& engine_;
  const RandomProgram& program_;
  const int rank_;
  std::mt19937 order_;
  std::mt19937 numbers_;
  std::vector<float> results_;
};

struct ProgramOutcome {
  std::vector<std::vector<float>> results;  // by rank
  std::uint64_t frozen_rounds = 0;
  std::uint64_t thaws = 0;
};

ProgramOutcome run_program(const RandomProgram& program, unsigned seed, std::int64_t freeze) {
  Config config = quick_config();
  config.freeze = freeze;
  if (seed % 3 == 0) config.spin_us = 0;
  ProgramOutcome outcome;
  outcome.results.resize(program.hosts.size());
  run_world(
      program.hosts,
      [&](int rank, Engine& engine) {
        outcome.results[std::size_t(rank)] = ProgramWalker(engine, program, seed).walk();
        if (rank > 0) return;
        outcome.frozen_rounds = engine.counters().frozen_rounds.get();
        outcome.thaws = engine.counters().thaws.get();
      },
      config);
  return outcome;
}

}  // namespace

TEST(frozen_schedules_change_no_bit_of_random_programs) {
  std::uint64_t frozen = 0;
  std::uint64_t thaws = 0;
  for (unsigned seed = 1; seed <= 30; ++seed) {
    const RandomProgram program = make_program(seed);
    const ProgramOutcome without = run_program(program, seed, 0);
    const ProgramOutcome with = run_program(program, seed, 1 + seed % 2);
    CHECK_EQ(without.frozen_rounds, std::uint64_t{0});
    for (std::size_t rank = 0; rank < program.hosts.size(); ++rank) {
      const std::vector<float>& a = with.results[rank];
      const std::vector<float>& b = without.results[rank];
      CHECK_EQ(a.size(), b.size());
      CHECK(a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    }
    frozen += with.frozen_rounds;
    thaws += with.thaws;
  }
  CHECK(frozen > 150);
  CHECK(thaws > 30);
}
