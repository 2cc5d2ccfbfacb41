// Deaths while gradients are on (fake) GPUs.
#include "cpp/gpu/gpu_engines.h"
#include "elastic_worlds.h"

using namespace hvdlite;
using namespace hvdlite::testing;

namespace {

// A worker's own device; the step's two buckets are reduced in place there.
void step_on_gpus(const Fault& fault) {
  ElasticJob job({0, 0, 0}, {fault}, gpu_config(), gpu_libraries());
  std::map<int, std::vector<float>> results;
  for (const auto& worker : job.workers()) results[worker->number];
  job.run([&](ElasticJob::Worker& worker) {
    Framework gpu(worker.number);
    for (int step = 0; step < 4; ++step) {
      const auto own = static_cast<float>(worker.number * 10 + step);
      const OnDevice first = gpu.tensor(std::vector<float>(3000, own));
      const OnDevice second = gpu.tensor(std::vector<float>(5, own));
      std::vector<EntryPtr> entries = {gpu.entry("first", first, 3000),
                                       gpu.entry("second", second, 5), commit_entry("step")};
      for (const EntryPtr& entry : entries) {
        entry->request.transaction = "step";
        CHECK_OK(worker.engine().enqueue(entry, false));
      }
      for (const EntryPtr& entry : entries) {
        if (!await(worker, entry)) return;
        CHECK_OK(entry->completion->status());
      }
      CHECK(entries[0]->completion->on_device->reached());  // a commit waits for the device
      const std::vector<float> values = gpu.read(first.data(), 3000);
      CHECK_EQ(values, std::vector<float>(3000, values[0]));
      CHECK_EQ(gpu.read(second.data(), 5)[4], values[0]);
      float sum = 0;
      const auto epoch = static_cast<std::size_t>(entries[0]->completion->epoch);
      const MutexLock lock(worker.mutex);
      for (const int member : worker.members[epoch]) sum += static_cast<float>(member * 10 + step);
      CHECK_EQ(values[0], sum);
      results.at(worker.number).push_back(sum);
    }
  });
  CHECK_EQ(job.stuck(), std::string());
  for (const int worker : job.history().back()) {
    CHECK_EQ(results.at(worker), results.at(job.history().back()[0]));
    CHECK_EQ(results.at(worker).size(), std::size_t{4});
  }
}

}  // namespace

TEST(elastic_gpu_step_is_redone_from_kept_inputs_or_handed_out_by_all) {
  for (const Point point : {Point::kBeforeCommit, Point::kCommitByOne, Point::kAfterCommit}) {
    for (int victim = 0; victim < 3; ++victim) {
      step_on_gpus({victim, point, 1, victim == 0 ? 2 : 0, 0});
    }
  }
}

TEST(elastic_gpu_commit_waits_for_the_device) {
  ElasticJob job({0, 0}, {}, gpu_config(), gpu_libraries());
  job.run([](ElasticJob::Worker& worker) {
    Framework gpu(worker.number);
    const OnDevice tensor = gpu.tensor(std::vector<float>(100, 1.0F));
    if (worker.number == 1) hold(gpu.producer, true);
    const EntryPtr entry = gpu.entry("slow", tensor, 100);
    CHECK_OK(worker.engine().enqueue(entry, false));
    if (worker.number == 1) {
      CHECK(!entry->completion->wait_until(Deadline::after(50ms)));
      hold(gpu.producer, false);
    }
    CHECK(await(worker, entry));
    CHECK(entry->completion->on_device->reached());
    CHECK_EQ(gpu.read(tensor.data(), 100)[99], 2.0F);
  });
}

TEST(elastic_gpu_death_while_the_device_works_does_not_hang) {
  ElasticJob job({0, 0}, {}, gpu_config(), gpu_libraries());
  job.run([](ElasticJob::Worker& worker) {
    Framework gpu(worker.number);
    const OnDevice tensor = gpu.tensor(std::vector<float>(100, static_cast<float>(worker.number)));
    if (worker.number == 1) hold(gpu.producer, true);
    const EntryPtr entry = gpu.entry("slow", tensor, 100);
    CHECK_OK(worker.engine().enqueue(entry, false));
    if (worker.number == 1) {
      CHECK(!entry->completion->wait_until(Deadline::after(50ms)));
      std::thread release([&] {
        std::this_thread::sleep_for(100ms);
        hold(gpu.producer, false);
      });
      worker.engine().abort("worker 1 gives up");
      worker.dead = true;
      release.join();
      return;
    }
    CHECK(await(worker, entry));
    CHECK_OK(entry->completion->status());
    CHECK_EQ(entry->completion->epoch, 1);
    CHECK_EQ(gpu.read(tensor.data(), 100)[99], 0.0F);
  });
}
