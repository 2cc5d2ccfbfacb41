// Deaths while gradients are on (fake) GPUs.
#include <array>
#include <atomic>

#include "cpp/gpu/gpu_engines.h"
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

struct Death {
  int victim;
  int step;
};

constexpr std::size_t kTensors = 12;  // more than the spares of a pool of results

// A step in which the victim dies between the submission of its tensors and its part of the
// reduction, which its device is kept from. False: this worker has died.
bool step_with_death(ElasticJob::Worker& worker, Framework& gpu, int step, const Death& death) {
  const bool dies = worker.number == death.victim && step == death.step;
  std::vector<OnDevice> tensors;
  std::vector<EntryPtr> entries;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const auto own = static_cast<float>(worker.number * 100 + step * 10 + static_cast<int>(i));
    tensors.push_back(gpu.tensor(std::vector<float>(700, own)));
  }
  if (dies) hold(gpu.producer, true);
  for (std::size_t i = 0; i < kTensors; ++i) {
    entries.push_back(gpu.entry("t" + std::to_string(i), tensors[i], 700));
  }
  entries.push_back(commit_entry("step"));
  for (const EntryPtr& entry : entries) {
    entry->request.transaction = "step";
    CHECK_OK(worker.engine().enqueue(entry, false));
  }
  if (dies) {
    CHECK(!entries[0]->completion->wait_until(Deadline::after(30ms)));
    worker.engine().abort("worker " + std::to_string(worker.number) + " gives up");
    worker.dead = true;
    hold(gpu.producer, false);
    return false;
  }
  for (const EntryPtr& entry : entries) {
    if (!await(worker, entry)) return false;
    CHECK_OK(entry->completion->status());
    CHECK_EQ(entry->completion->epoch, entries[0]->completion->epoch);
  }
  const MutexLock lock(worker.mutex);
  const auto& members = worker.members[static_cast<std::size_t>(entries[0]->completion->epoch)];
  // A commit waits for the device. A world of one rank has no commits.
  if (members.size() > 1) CHECK(entries[0]->completion->on_device->reached());
  for (std::size_t i = 0; i < kTensors; ++i) {
    float sum = 0;
    for (const int one : members) {
      sum += static_cast<float>(one * 100 + step * 10 + static_cast<int>(i));
    }
    CHECK_EQ(gpu.read(tensors[i].data(), 700), std::vector<float>(700, sum));
  }
  return true;
}

// The victim dies at a point of a commit.
void step_on_gpus(const Fault& fault) {
  ElasticJob job({0, 0, 0}, {fault}, gpu_config(), gpu_libraries());
  std::array<std::atomic<int>, 3> steps{};  // by worker
  job.run([&](ElasticJob::Worker& worker) {
    Framework gpu(worker.number);
    for (int step = 0; step < 4; ++step) {
      if (!step_with_death(worker, gpu, step, {-1, -1})) return;
      ++steps[worker.number];
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  for (const int worker : job.history().back()) CHECK_EQ(steps[worker], 4);
}

void lose_ranks(const Hosts& hosts, const std::vector<Death>& deaths) {
  const FakeCounters before = gpu_counters();
  {
    ElasticJob job(hosts, {}, gpu_config(), gpu_libraries());
    job.run([&](ElasticJob::Worker& worker) {
      Framework gpu(worker.number);
      for (int step = 0; step < 6; ++step) {
        Death now{-1, -1};
        for (const Death& death : deaths) now = death.step == step ? death : now;
        if (!step_with_death(worker, gpu, step, now)) return;
      }
    });
    CHECK_EQ(job.stuck(), std::string());
    CHECK_EQ(job.history().size(), deaths.size() + 1);
  }
  const FakeCounters after = gpu_counters();
  CHECK_EQ(after.live_communicators, before.live_communicators);
  CHECK_EQ(after.live_allocations, before.live_allocations);
  CHECK_EQ(after.live_events, before.live_events);
  // Worlds take over the streams of earlier ones: one for each worker, and for its framework.
  const auto most = static_cast<std::int64_t>(2 * hosts.size());
  CHECK(after.live_streams <= before.live_streams + most);
  CHECK(after.live_contexts <= before.live_contexts + most);
  CHECK_EQ(after.live_registrations, before.live_registrations);
  CHECK_EQ(after.live_reduce_ops, before.live_reduce_ops);
  CHECK_EQ(after.registration_faults, before.registration_faults);
}

}  // namespace

TEST(elastic_gpu_step_is_redone_from_kept_inputs_or_handed_out_by_all) {
  for (const Point point : {Point::kBeforeCommit, Point::kCommitByOne, Point::kAfterCommit}) {
    for (int victim = 0; victim < 3; ++victim) {
      step_on_gpus({victim, point, 1, victim == 0 ? 2 : 0, 0});
    }
  }
}

// Also in the first batch, with which the communicator is made.
TEST(elastic_gpu_planes_that_lose_a_rank_in_a_batch_go_on_in_new_communicators) {
  for (const char* silent : {"0", "1"}) {
    set_gpu_option("FAKE_NCCL_SILENT_PEERS", silent);
    for (int victim = 0; victim < 3; ++victim) {
      lose_ranks({0, 0, 0}, {{victim, 0}});
      lose_ranks({0, 1, 0}, {{victim, 3}});
    }
    lose_ranks({0, 0, 0, 0}, {{2, 1}, {0, 3}, {3, 4}});
    set_gpu_option("FAKE_NCCL_SILENT_PEERS", nullptr);
  }
}

// A rank that dies before it is in the communicator keeps the others waiting in NCCL's init.
TEST(elastic_gpu_planes_that_lose_a_rank_in_init_go_on_in_new_communicators) {
  for (int victim = 0; victim < 3; ++victim) {
    set_gpu_option("FAKE_FAIL_ncclCommInitRank", "2@1", victim);
    const FakeCounters before = gpu_counters();
    {
      ElasticJob job({0, 0, 0}, {}, gpu_config(), gpu_libraries());
      job.run([&](ElasticJob::Worker& worker) {
        Framework gpu(worker.number);
        const OnDevice tensor = gpu.tensor(std::vector<float>(100, 1.0F));
        const EntryPtr entry = gpu.entry("x", tensor, 100);
        CHECK_OK(worker.engine().enqueue(entry, false));
        if (worker.number == victim) {
          CHECK(soon([&] { return !worker.engine().status().ok(); }));
          worker.engine().abort("worker " + std::to_string(victim) + " has no communicator");
          worker.dead = true;
          return;
        }
        CHECK(await(worker, entry));
        CHECK_OK(entry->completion->status());
        CHECK_EQ(entry->completion->epoch, 1);
        CHECK_EQ(gpu.read(tensor.data(), 100)[99], 2.0F);
      });
    }
    set_gpu_option("FAKE_FAIL_ncclCommInitRank", nullptr, victim);
    CHECK_EQ(gpu_counters().live_communicators, before.live_communicators);
    CHECK_EQ(gpu_counters().live_allocations, before.live_allocations);
  }
}

// The kept inputs of a step use the memory of those of the step before. What is allocated in each
// step are the tensors of the test itself.
TEST(elastic_gpu_steps_keep_inputs_in_the_memory_of_earlier_ones) {
  ElasticJob job({0, 0}, {}, gpu_config(), gpu_libraries());
  constexpr int kWarm = 3;
  constexpr int kMeasured = 5;
  Meeting meetings[2] = {Meeting(2), Meeting(2)};
  std::int64_t allocations[2] = {};
  job.run([&](ElasticJob::Worker& worker) {
    Framework gpu(worker.number);
    for (int step = 0; step < kWarm + kMeasured; ++step) {
      if (step == kWarm) {
        meetings[0].arrive();
        if (worker.number == 0) allocations[0] = gpu_counters().allocations;
        meetings[1].arrive();
      }
      CHECK(step_with_death(worker, gpu, step, {-1, -1}));
    }
  });
  allocations[1] = gpu_counters().allocations;
  const auto own = static_cast<std::int64_t>(2 * kMeasured * kTensors);
  CHECK_EQ(allocations[1] - allocations[0], own);
}
