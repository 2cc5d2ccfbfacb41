// What a search for faster settings has found goes on into the next epochs.
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

bool step_once(ElasticJob::Worker& worker) {
  std::vector<float> values(300000, 1.0F);
  const EntryPtr entry = allreduce_entry("x", values);
  entry->request.transaction = "step";
  const EntryPtr commit = commit_entry("step");
  CHECK_OK(worker.engine().enqueue(entry, false));
  CHECK_OK(worker.engine().enqueue(commit, false));
  if (!await(worker, entry) || !await(worker, commit)) return false;
  CHECK_OK(entry->completion->status());
  const auto epoch = static_cast<std::size_t>(entry->completion->epoch);
  const MutexLock lock(worker.mutex);
  CHECK_EQ(values[299999], static_cast<float>(worker.members[epoch].size()));
  return true;
}

// The kinds of the events of an engine.
std::vector<std::string> kinds_of(Engine& engine) {
  std::vector<std::string> kinds;
  for (const Event& event : engine.live().events) kinds.push_back(event.kind);
  return kinds;
}

// The epochs that this worker has seen begin.
std::size_t epochs_of(ElasticJob::Worker& worker) {
  const MutexLock lock(worker.mutex);
  return worker.engines.size();
}

}  // namespace

// Rank 0 dies, who has searched; then all but one.
TEST(elastic_settings_that_were_found_hold_in_later_epochs_without_a_search) {
  Config config = quick_config();
  config.autotune = 1;
  config.autotune_steps_per_sample = 1;
  config.autotune_warmup_samples = 0;
  config.autotune_trials = 2;
  ElasticJob job({0, 0, 0}, {{1, Point::kBeforeCommit, 10, 0, 1}}, config);
  job.run([](ElasticJob::Worker& worker) {
    if (worker.number == 0) {
      // How many steps the search takes depends on how fast they are.
      while (!worker.engine().settled().has_value()) {
        if (!step_once(worker)) return;
      }
      CHECK(step_once(worker));  // after it, the others have heard of the settings
      worker.dead = true;
      return;
    }
    int last_steps = 0;
    while (last_steps < 20) {
      if (!step_once(worker)) return;
      if (epochs_of(worker) == 3) ++last_steps;
    }
  });
  CHECK_EQ(job.history().size(), std::size_t{3});
  const ElasticJob::Worker& last = *job.workers()[2];
  const std::optional<Tunables> found = last.engines[0]->settled();
  CHECK(found.has_value());
  CHECK(last.engines[0]->tunables() == *found);
  CHECK(last.engines[1]->tunables() == *found);
  CHECK(last.engines[1]->settled() == found);
  CHECK(last.engines[2]->settled() == found);
  CHECK(job.workers()[1]->engines[1]->tunables() == *found);
  CHECK(last.pending->settled() == found);
  // Who was rank 1 saw rank 0 die, and was rank 0 itself then.
  Engine& before = *job.workers()[1]->engines[0];
  Engine& after = *job.workers()[1]->engines[1];
  CHECK_EQ(kinds_of(before), std::vector<std::string>{"error"});
  const std::vector<std::string> told = kinds_of(after);
  CHECK(told.size() >= 2 && told[0] == "world" && told[1] == "tuned");
}
