// Autotune: the search on made-up costs, its steps and samples, rank 0 alone with a made-up clock,
// and whole worlds.
#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <thread>

#include "check.h"
#include "cpp/negotiation/rounds.h"
#include "engine/autotune.h"
#include "engine_worlds.h"
#include "host/host_backend.h"
#include "support/inproc_world.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr int kTrials = 20;
constexpr std::int64_t kMiB = 1 << 20;

using Speed = std::function<double(const Tunables&)>;

Tunables start() { return tunables_of(Config()); }

std::vector<TuningAxis> axes() {
  return {{&Tunables::fusion_threshold, 256 << 10, 64 * kMiB},
          {&Tunables::shm_chunk, 64 << 10, 4 * kMiB},
          {&Tunables::shm_small, 4 << 10, 4 * kMiB}};
}

// The speed falls by `slope` for each factor of four away from the best value.
double hill(std::int64_t value, std::int64_t best, double slope) {
  const double away =
      std::abs(std::log(static_cast<double>(value) / static_cast<double>(best))) / std::log(4.0);
  return 1.0 / (1.0 + slope * away);
}

struct Outcome {
  Tunables best;
  int samples = 0;
  double gain = 0;
};

// No search takes more samples.
int most_samples(int most_trials) {
  return 2 * (most_trials * (2 * TuningSearch::kTrialWins - 1) + TuningSearch::kFinalWins +
              TuningSearch::kFinalLosses - 1);
}

Outcome search_for(const Speed& speed, double noise, unsigned seed, int most_trials = kTrials) {
  std::mt19937 random(seed);
  std::normal_distribution<double> disturbance(0, noise);
  TuningSearch search(start(), axes(), most_trials);
  Outcome outcome;
  while (search.phase() != TuningSearch::Phase::kDone) {
    search.record(speed(search.to_measure()) * std::exp(disturbance(random)));
    ++outcome.samples;
    if (outcome.samples > most_samples(most_trials)) break;
  }
  CHECK(search.to_measure() == search.best());
  outcome.best = search.best();
  outcome.gain = search.gain();
  return outcome;
}

double two_hills(const Tunables& at) {
  return hill(at.shm_chunk, 4 * kMiB, 0.2) * hill(at.fusion_threshold, 4 * kMiB, 0.3);
}

}  // namespace

TEST(tuning_finds_the_best_of_two_knobs) {
  const Outcome outcome = search_for(two_hills, 0, 1);
  CHECK_EQ(outcome.best.shm_chunk, 4 * kMiB);
  CHECK_EQ(outcome.best.fusion_threshold, 4 * kMiB);
  CHECK_EQ(outcome.best.shm_small, start().shm_small);
  CHECK(std::abs(outcome.gain - (two_hills(outcome.best) / two_hills(start()) - 1)) < 1e-9);
}

TEST(tuning_finds_most_of_what_there_is_in_noise) {
  int good = 0;
  constexpr int kRuns = 200;
  for (unsigned seed = 0; seed < kRuns; ++seed) {
    const Outcome outcome = search_for(two_hills, 0.05, seed);
    good += two_hills(outcome.best) >= 0.8 ? 1 : 0;  // the start has 0.45
    CHECK(two_hills(outcome.best) >= two_hills(start()));
    CHECK(outcome.samples <= most_samples(kTrials));
  }
  CHECK(good >= kRuns * 9 / 10);
}

// Where the defaults are best, chance may make a neighbour look better, but hardly ever to the end.
TEST(tuning_keeps_defaults_that_are_the_best) {
  const auto peak = [](const Tunables& at) {
    return hill(at.shm_chunk, start().shm_chunk, 0.1) *
           hill(at.fusion_threshold, start().fusion_threshold, 0.1) *
           hill(at.shm_small, start().shm_small, 0.1);
  };
  CHECK(search_for(peak, 0, 1).best == start());
  int worse = 0;
  constexpr int kRuns = 500;
  for (unsigned seed = 0; seed < kRuns; ++seed) {
    worse += search_for(peak, 0.1, seed).best == start() ? 0 : 1;
  }
  CHECK(worse <= kRuns / 100);
}

TEST(tuning_changes_nothing_where_nothing_matters) {
  const Outcome outcome = search_for([](const Tunables&) { return 1.0; }, 0, 1);
  CHECK(outcome.best == start());
  CHECK_EQ(outcome.gain, 0.0);
}

TEST(tuning_ends_within_its_bound) {
  // Everything is a win as long as it is new: the longest that a search can take.
  for (const int trials : {0, 1, 7, 20}) {
    std::mt19937 random(3);
    std::uniform_real_distribution<double> any(1, 2);
    const auto noise = [&](const Tunables&) { return any(random); };
    for (int run = 0; run < 50; ++run) {
      CHECK(search_for(noise, 0, 1, trials).samples <= most_samples(trials));
    }
  }
}

TEST(tuning_leaves_alone_what_is_switched_off) {
  Tunables off = start();
  off.fusion_threshold = 0;
  TuningSearch search(off, {{&Tunables::fusion_threshold, 256 << 10, 64 * kMiB}}, kTrials);
  CHECK(search.phase() == TuningSearch::Phase::kDone);
  CHECK(search.best() == off);
}

TEST(tuning_skips_values_beyond_the_plateau) {
  // Steps of 1 MiB: every threshold from there on does the same, so the first candidate is below.
  TuningSearch search(start(), {{&Tunables::fusion_threshold, 256 << 10, kMiB}}, kTrials);
  search.record(1);
  CHECK_EQ(search.to_measure().fusion_threshold, kMiB / 4);
}

constexpr auto kStep = std::chrono::milliseconds(10);

TEST(step_ends_when_a_name_comes_again) {
  StepSampler sampler(3);
  StepSampler::TimePoint now;
  std::optional<Sample> sample;
  for (int step = 0; step < 5; ++step) {
    CHECK(!sample);
    // Two rounds a step, and in one step something that never comes again.
    sample = sampler.add(round_of({"a", "b"}, 100).entries, now);
    if (step < 4) {
      CHECK(!sampler.add(round_of({step == 1 ? "metric" : "c"}, 100).entries, now + kStep / 2));
    }
    now += step == 2 ? 50 * kStep : kStep;
  }
  CHECK(sample.has_value());
  CHECK_EQ(sample->steps, std::size_t{3});
  CHECK_EQ(sample->bytes, 3u * 1200u);
  CHECK_EQ(sample->largest_step, 1200u);
  // The median: the step with a pause in it does not count.
  CHECK(std::abs(sample->rate - 120000) < 1e-3);
}

TEST(step_of_names_used_once_ends_by_size) {
  StepSampler sampler(1);
  const StepSampler::TimePoint now;
  CHECK(!sampler.add(round_of({"#allreduce.0"}, 100).entries, now));
  CHECK(!sampler.add(round_of({"#allreduce.1"}, 200).entries, now));
  CHECK(!sampler.add(round_of({"#allreduce.2"}, 100).entries, now + kStep));
  CHECK(sampler.add(round_of({"#allreduce.3"}, 100).entries, now + 2 * kStep).has_value());
}

TEST(step_ignores_process_sets_and_other_kinds) {
  StepSampler sampler(1);
  StepSampler::TimePoint now;
  for (int i = 0; i < 10; ++i) {
    Round round = round_of({"a", "b"}, 100);
    round.entries[0].entry->request.process_set = 1;
    round.entries[1].entry->request.kind = Kind::kBroadcast;
    CHECK(!sampler.add(round.entries, now += kStep));
  }
}

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
  const auto engines = make_engines(hosts, config, false, [&](Fabric& fabric, auto rank) {
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
