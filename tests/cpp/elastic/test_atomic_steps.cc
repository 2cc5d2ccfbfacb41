// Steps of training as transactions, while workers die at every point of a step.
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

constexpr int kSteps = 6;
constexpr std::size_t kBuckets = 3;

// Whole numbers, so that sums are exact in any order.
float gradient(int worker, int step, std::size_t bucket) {
  return static_cast<float>((worker + 1) * 100 + step * 10 + static_cast<int>(bucket));
}

struct StepLog {
  std::vector<float> weights = std::vector<float>(kBuckets);
  std::vector<int> epochs;  // by step: that of its commit
};

// One step of one worker. False: it has died.
bool elastic_step(ElasticJob::Worker& worker, int step, std::size_t elements, StepLog& log) {
  std::vector<std::vector<float>> buckets;
  std::vector<EntryPtr> entries;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    buckets.emplace_back(elements, gradient(worker.number, step, i));
  }
  for (std::size_t i = 0; i < kBuckets; ++i) {
    entries.push_back(allreduce_entry("bucket" + std::to_string(i), buckets[i]));
    entries.back()->request.transaction = "step";
  }
  entries.push_back(commit_entry("step"));
  for (const EntryPtr& entry : entries) {
    const Status status = worker.engine().enqueue(entry, false);
    if (worker.dead) break;
    CHECK_OK(status);
  }
  for (const EntryPtr& entry : entries) {
    if (!await(worker, entry)) return false;
    CHECK_OK(entry->completion->status());
    CHECK_EQ(entry->completion->epoch, entries[0]->completion->epoch);
  }
  for (std::size_t i = 0; i < kBuckets; ++i) {
    CHECK_EQ(buckets[i], std::vector<float>(elements, buckets[i][0]));
    log.weights[i] += buckets[i][0];
  }
  log.epochs.push_back(entries[0]->completion->epoch);
  return true;
}

// All workers that live on have made the same steps in the same epochs, and their weights are what
// one process computes from that log.
void check_logs(const ElasticJob& job, const std::map<int, StepLog>& logs) {
  const std::vector<int>& alive = job.history().back();
  const StepLog& first = logs.at(alive[0]);
  CHECK_EQ(first.epochs.size(), static_cast<std::size_t>(kSteps));
  std::vector<float> replayed(kBuckets);
  for (int step = 0; step < kSteps; ++step) {
    for (std::size_t i = 0; i < kBuckets; ++i) {
      for (const int worker : job.history()[first.epochs[step]]) {
        replayed[i] += gradient(worker, step, i);
      }
    }
  }
  for (const int worker : alive) {
    CHECK_EQ(logs.at(worker).epochs, first.epochs);
    CHECK_EQ(logs.at(worker).weights, replayed);
  }
}

void train(const Hosts& hosts, const std::vector<Fault>& faults, std::size_t elements = 5,
           Config config = quick_config()) {
  ElasticJob job(hosts, faults, std::move(config));
  std::map<int, StepLog> logs;
  for (const auto& worker : job.workers()) logs[worker->number];
  job.run([&](ElasticJob::Worker& worker) {
    for (int step = 0; step < kSteps; ++step) {
      if (!elastic_step(worker, step, elements, logs.at(worker.number))) return;
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  CHECK_EQ(job.history().size(), faults.size() + 1);
  check_logs(job, logs);
}

const std::vector<Hosts> kElasticWorlds = {{0, 0}, {0, 1}, {0, 0, 0}, {0, 1, 1}, {0, 1, 0, 1}};

}  // namespace

TEST(elastic_step_is_redone_by_the_survivors_of_a_death_in_a_batch) {
  for (const Hosts& hosts : kElasticWorlds) {
    for (int victim = 0; victim < static_cast<int>(hosts.size()); ++victim) {
      train(hosts, {{victim, Point::kBeforeBatch, victim}});
    }
  }
}

TEST(elastic_step_is_redone_from_kept_inputs_when_outputs_are_torn) {
  Config config = quick_config();
  config.shm_chunk = config.tcp_chunk = 16 << 10;
  for (const Hosts& hosts : kElasticWorlds) {
    train(hosts, {{1, Point::kInBatch, 2}}, 100000, config);
  }
}

TEST(elastic_step_is_redone_when_nobody_has_completed_its_commit) {
  for (const Hosts& hosts : kElasticWorlds) {
    for (int victim = 0; victim < static_cast<int>(hosts.size()); ++victim) {
      train(hosts, {{victim, Point::kBeforeCommit, 2}});
    }
  }
}

TEST(elastic_step_that_one_rank_has_committed_is_handed_out_by_all) {
  for (const Hosts& hosts : kElasticWorlds) {
    const int size = static_cast<int>(hosts.size());
    for (int victim = 0; victim < size; ++victim) {
      for (int survivor = 0; survivor < size; ++survivor) {
        if (survivor != victim) train(hosts, {{victim, Point::kCommitByOne, 2, survivor}});
      }
    }
  }
}

TEST(elastic_step_that_all_have_committed_stands) {
  for (const Hosts& hosts : kElasticWorlds) {
    train(hosts, {{0, Point::kAfterCommit, 3}});
  }
}

TEST(elastic_job_outlives_several_deaths_down_to_one_rank) {
  train({0, 0, 0, 0}, {{2, Point::kCommitByOne, 0, 3, 0},
                       {0, Point::kInBatch, 1, 0, 1},
                       {3, Point::kBeforeCommit, 1, 0, 2}});
  train({0, 1, 1, 0}, {{0, Point::kBeforeBatch, 0, 0, 0},
                       {1, Point::kCommitByOne, 0, 2, 1},
                       {3, Point::kAfterCommit, 0, 0, 2}});
}

// An allgather is negotiated in full at each step, and arrives behind the commit that is cached.
TEST(elastic_step_may_have_rows_to_gather) {
  ElasticJob job({0, 1, 0}, {{2, Point::kBeforeCommit, 12}});
  job.run([](ElasticJob::Worker& worker) {
    for (int step = 0; step < 25; ++step) {
      std::vector<float> rows(2, 1.0F), values = {1};
      const std::vector<EntryPtr> entries = {allreduce_entry("a", values),
                                             rows_entry(Kind::kAllgather, "rows", rows),
                                             commit_entry("step")};
      for (const EntryPtr& entry : entries) {
        entry->request.transaction = "step";
        CHECK_OK(worker.engine().enqueue(entry, false));
      }
      for (const EntryPtr& entry : entries) {
        if (!await(worker, entry)) return;
        CHECK_OK(entry->completion->status());
      }
      CHECK_EQ(output_of(entries[1]).size(), static_cast<std::size_t>(2 * values[0]));
    }
  });
}
