// Autotune in whole worlds, and on rank 0 alone with a made-up clock.
#include <algorithm>
#include <thread>

#include "check.h"
#include "cpp/negotiation/rounds.h"
#include "engine_worlds.h"
#include "host/host_backend.h"
#include "negotiation/autotune/autotune.h"
#include "testing/inproc_world.h"

using namespace hvdlite;
using namespace hvdlite::testing;

// Rank 0 alone, with a clock that runs as the settings would have it.
TEST(autotune_uses_what_it_found) {
  Config config;
  config.autotune_steps_per_sample = 2;
  Autotune autotune(config, false, 4 << 20);
  StepSampler::TimePoint now;
  Tunables current = tunables_of(config);
  std::optional<NewTunables> wanted;
  for (int step = 0; step < 2000 && !(wanted && wanted->settled); ++step) {
    Round round = round_of({"a"}, 4 << 20);
    if (wanted) round.tunables = current = wanted->tunables;
    wanted = autotune.retune(round, now);
    // Fastest with chunks of 1 MiB.
    now += std::chrono::milliseconds(current.shm_chunk == 1 << 20 ? 10 : 12);
  }
  CHECK(wanted && wanted->settled);
  CHECK_EQ(wanted->tunables.shm_chunk, 1 << 20);
  CHECK_EQ(wanted->tunables.fusion_threshold, config.fusion_threshold);
  for (int step = 0; step < 50; ++step) {
    CHECK(!autotune.retune(round_of({"a"}, 4 << 20), now += std::chrono::milliseconds(10)));
  }
}

namespace {

// A host backend that notes with which settings each all-reduce ran.
class NotingBackend : public HostBackend {
 public:
  NotingBackend(Fabric& fabric, const Config& config, std::vector<Tunables>& notes)
      : HostBackend(fabric, config), current_(tunables_of(config)), notes_(notes) {}

  void tune(const Tunables& tunables) override {
    current_ = tunables;
    HostBackend::tune(tunables);
  }
  Status allreduce(const Allreduce& call, Patience patience) override {
    notes_.push_back(current_);
    return HostBackend::allreduce(call, patience);
  }

 private:
  Tunables current_;
  std::vector<Tunables>& notes_;
};

// Tensors around the thresholds, of the world and of a process set without rank 0; true when exact.
bool train_step(int rank, int size, Engine& engine, std::uint32_t set, int step) {
  std::vector<std::vector<float>> values;
  std::vector<EntryPtr> entries;
  for (const std::size_t count : {100, 3000, 40000, 300000}) {
    values.emplace_back(count, static_cast<float>(rank + step % 100));
  }
  values.emplace_back(5000, static_cast<float>(rank));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool in_set = i + 1 == values.size();
    if (in_set && rank == 0) continue;
    entries.push_back(allreduce_entry("x" + std::to_string(i), values[i]));
    entries.back()->request.process_set = in_set ? set : 0;
    CHECK_OK(engine.enqueue(entries.back(), false));
  }
  for (const EntryPtr& entry : entries) CHECK_OK(finish(engine, entry));
  const int ranks = size * (size - 1) / 2;
  const bool exact = std::all_of(values.begin(), values.end() - 1, [&](const auto& one) {
    const auto sum = static_cast<float>(size * (step % 100) + ranks);
    return one.front() == sum && one.back() == sum;
  });
  return exact && (rank == 0 || values.back()[4999] == static_cast<float>(ranks));
}

// All ranks run the same batches with the same settings, to the end of the search.
void change_together(const Hosts& hosts) {
  const int size = static_cast<int>(hosts.size());
  Config config = quick_config();
  config.autotune = 1;
  config.autotune_steps_per_sample = 1;
  config.autotune_trials = 3;
  std::vector<std::vector<Tunables>> notes(hosts.size());
  const auto engines = make_engines(hosts, config, false, {}, [&](Fabric& fabric, auto rank) {
    return std::make_unique<NotingBackend>(fabric, config, notes[rank]);
  });
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Engine& engine = *engines[rank];
      std::vector<int> others;
      for (int other = 1; other < size; ++other) others.push_back(other);
      const std::uint32_t set = add_set(engine, others);
      int wrong = 0;
      for (int step = 0; step < 100; ++step) wrong += !train_step(rank, size, engine, set, step);
      CHECK_EQ(wrong, 0);
      // What rank 0 asked for last reaches the others before the next collective.
      CHECK_OK(run(engine, change_entry(Kind::kBarrier, "end")));
      engine.shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t changes = 0;
  for (std::size_t i = 1; i < notes[1].size(); ++i) changes += notes[1][i] != notes[1][i - 1];
  CHECK(changes >= 3);
  for (int rank = 2; rank < size; ++rank) CHECK(notes[rank] == notes[1]);
  for (int rank = 1; rank < size; ++rank)
    CHECK(engines[rank]->tunables() == engines[0]->tunables());
}

}  // namespace

TEST(autotune_changes_all_ranks_between_the_same_batches) { change_together({0, 0, 0}); }
TEST(autotune_changes_ranks_of_two_hosts_between_the_same_batches) {
  change_together({0, 0, 1, 1});
}
